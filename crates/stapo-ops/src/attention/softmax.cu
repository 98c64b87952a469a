// The online softmax of FlashAttention (Dao, 2023), for the two rows whose results a lane holds. A row's result is a
// function of its query and the keys before it: keys come in steps of KEYS by position, in which hidden keys have
// weight 0 and change nothing, and every sum has one order, whatever kernel takes the steps. Every SPLIT keys the sums
// begin anew, and the results of the splits are combined in their order: so several blocks can share a long sequence
// (FlashDecoding) and give the bits of one.

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The order of a row's sum: four keys of a lane within 16, then the four sixteens of a step, then the four lanes of a
// quad.
__device__ __forceinline__ float sum_of_four(float a, float b, float c, float d) { return (a + b) + (c + d); }

// The logarithm of a row's sum of exponentials; `factor` is the scale of the scores times log2(e).
__device__ __forceinline__ float log_sum_exp(float top, float sum, float factor) {
    return (top * factor + log2f(sum)) * LN_2;
}

__device__ __forceinline__ float score_factor() { return rsqrtf((float)HEAD_DIM) * LOG2_E; }

// How the result of a split is added to that of the splits before it: both shrink to the larger of their largest
// scores. Every kernel combines by this struct.
struct Combine {
    float top, before, next;

    __device__ __forceinline__ Combine(float top_before, float top_next, float factor)
        : top(fmaxf(top_before, top_next)),
          before(exp2_fast((top_before - top) * factor)),
          next(exp2_fast((top_next - top) * factor)) {}
    // Of sums of exponentials and of outputs.
    __device__ __forceinline__ float operator()(float x_before, float x_next) const {
        return fmaf(x_before, before, x_next * next);
    }
};

// What a lane keeps of its two rows: the largest score so far, its part of the sum of exponentials relative to that
// score, and its part of the output (N fragments of 8 columns), not yet divided by the sum.
template <int N> struct RowStateOf {
    float top[2], sum[2], o[N][4];
};
typedef RowStateOf<DIM / 8> RowState;

template <int N> __device__ __forceinline__ void clear(RowStateOf<N>& rows) {
    rows.top[0] = rows.top[1] = MINUS_INFINITY;
    rows.sum[0] = rows.sum[1] = 0.0f;
    clear(rows.o);
}

// The combined result of earlier splits. It is needed once a split: `volatile` keeps it in local memory, so that it
// takes no registers from the loop over the keys.
template <int N> struct SavedRows {
    volatile float top[2], sum[2], o[N][4];
};

template <int N> __device__ __forceinline__ void save_rows(SavedRows<N>& to, const RowStateOf<N>& rows) {
#pragma unroll
    for (int h = 0; h < 2; ++h) to.top[h] = rows.top[h], to.sum[h] = rows.sum[h];
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) to.o[j][i] = rows.o[j][i];
}

// Ends the split that begins with key `first_key`: the lanes' parts of the sum are added up, and the rows become the
// result of this split and those before it. A row that sees no key of this split keeps what was before.
template <int N>
__device__ __forceinline__ void end_split(RowStateOf<N>& rows, const SavedRows<N>& before, int first_key,
                                          const int (&last_key)[2], float factor) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        rows.sum[h] = quad_sum(rows.sum[h]);
        if (first_key == 0) continue;
        Combine combine(before.top[h], rows.top[h], factor);
        bool sees = first_key <= last_key[h];
        rows.top[h] = sees ? combine.top : before.top[h];
        rows.sum[h] = sees ? combine(before.sum[h], rows.sum[h]) : before.sum[h];
#pragma unroll
        for (int j = 0; j < N; ++j) {
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) {
                float o = before.o[j][i];
                rows.o[j][i] = sees ? combine(o, rows.o[j][i]) : o;
            }
        }
    }
}

// Before step `step`: where a split begins, ends the split before it and begins anew.
template <int N>
__device__ __forceinline__ void begin_step(int step, RowStateOf<N>& rows, SavedRows<N>& saved,
                                           const int (&last_key)[2], float factor) {
    if (step == 0 || step % SPLIT_STEPS > 0) return;
    end_split(rows, saved, (step - SPLIT_STEPS) * KEYS, last_key, factor);
    save_rows(saved, rows);
    clear(rows);
}

// After the last step.
template <int N>
__device__ __forceinline__ void end_steps(int n_steps, RowStateOf<N>& rows, const SavedRows<N>& saved,
                                          const int (&last_key)[2], float factor) {
    end_split(rows, saved, (n_steps - 1) / SPLIT_STEPS * SPLIT, last_key, factor);
}

// Hides the keys after the last key that a row sees. Keys past the end of the sequence are among them.
template <int N>
__device__ __forceinline__ void mask_hidden_keys(float (&s)[N][4], int first_key, const int (&last_key)[2]) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (first_key + fragment_column(j, i) > last_key[i / 2]) s[j][i] = MINUS_INFINITY;
}

// Turns a step's scores into weights relative to the largest score so far; `scale` is what the output so far shrinks
// by.
__device__ __forceinline__ void softmax_weights(float (&s)[KEYS / 8][4], RowState& rows, float factor,
                                                float (&scale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = rows.top[h], parts[4];
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) top = fmaxf(top, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
        top = quad_max(top);
        scale[h] = exp2_fast((rows.top[h] - top) * factor);
        rows.top[h] = top;
        float shift = top * factor;
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) s[j][i] = exp2_fast(fmaf(s[j][i], factor, -shift));
#pragma unroll
        for (int w = 0; w < 4; ++w)
            parts[w] = sum_of_four(s[2 * w][2 * h], s[2 * w][2 * h + 1], s[2 * w + 1][2 * h], s[2 * w + 1][2 * h + 1]);
        rows.sum[h] = fmaf(rows.sum[h], scale[h], sum_of_four(parts[0], parts[1], parts[2], parts[3]));
    }
}

// Shrinks the output.
__device__ __forceinline__ void rescale(RowState& rows, const float (&scale)[2]) {
#pragma unroll
    for (int j = 0; j < DIM / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.o[j][i] *= scale[i / 2];
}

__device__ __forceinline__ void online_softmax_step(float (&s)[KEYS / 8][4], RowState& rows, float factor) {
    float scale[2];
    softmax_weights(s, rows, factor, scale);
    rescale(rows, scale);
}

// Writes the outputs and the log-sum-exp of the rows of a packed tile; `row` is the first of the lane's two rows.
__device__ __forceinline__ void store_rows(const QueryTile& t, const RowState& rows, int row, int query, float factor,
                                           bf16* out, float* lse) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row + h * 8 >= t.n_rows) continue;
        size_t at = (t.token + row + h * 8) * query + t.head;
        if (threadIdx.x % 4 == 0) lse[at] = log_sum_exp(rows.top[h], rows.sum[h], factor);
        store_row(out + at * HEAD_DIM, rows.o, h, 1.0f / rows.sum[h]);
    }
}
