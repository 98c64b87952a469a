// The online softmax of FlashAttention (Dao, 2023), for the two rows whose results a lane holds. A row's result is a
// function of its query and the keys before it: keys come in steps of KEYS by position, in which hidden keys have
// weight 0 and change nothing, and every sum has one order, whatever kernel takes the steps. Weights are relative to a
// reference, the largest score of the first step; it rises to the largest score of a later step only where that exceeds
// it by a factor of 2^RISE, so that outputs seldom shrink. Every SPLIT keys the sums
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
__device__ __forceinline__ float log_sum_exp(float reference, float sum, float factor) {
    return (reference * factor + log2f(sum)) * LN_2;
}

__device__ __forceinline__ float score_factor() { return rsqrtf((float)HEAD_DIM) * LOG2_E; }

// How the result of a split is added to that of the splits before it: both shrink to the larger of their references.
// Every kernel combines by this struct.
struct Combine {
    float reference, before, next;

    __device__ __forceinline__ Combine(float reference_before, float reference_next, float factor)
        : reference(fmaxf(reference_before, reference_next)),
          before(exp2_fast((reference_before - reference) * factor)),
          next(exp2_fast((reference_next - reference) * factor)) {}
    // Of sums of exponentials and of outputs.
    __device__ __forceinline__ float operator()(float x_before, float x_next) const {
        return fmaf(x_before, before, x_next * next);
    }
};

// What a lane keeps of its two rows: the reference, its part of the sum of exponentials relative to the reference, and
// its part of the output (N fragments of 8 columns), not yet divided by the sum.
template <int N> struct RowStateOf {
    float reference[2], sum[2], o[N][4];
};
typedef RowStateOf<DIM / 8> RowState;

template <int N> __device__ __forceinline__ void clear(RowStateOf<N>& rows) {
    rows.reference[0] = rows.reference[1] = MINUS_INFINITY;
    rows.sum[0] = rows.sum[1] = 0.0f;
    clear(rows.o);
}

// The combined result of earlier splits. It is needed once a split and lies in local memory, so that it takes no
// registers from the loop over the keys: inline assembly keeps the compiler from holding it in registers. A kernel with
// registers to spare (LONG_SEQUENCES) holds it there.
template <int N> struct SavedRows {
    float4 rows, o[N];
};

#ifdef LONG_SEQUENCES
__device__ __forceinline__ void put_saved(float4* to, float a, float b, float c, float d) {
    *to = make_float4(a, b, c, d);
}
__device__ __forceinline__ float4 get_saved(const float4* from) { return *from; }
#else
__device__ __forceinline__ void put_saved(float4* to, float a, float b, float c, float d) {
    asm volatile("st.local.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_local(to)), "f"(a), "f"(b), "f"(c),
                 "f"(d)
                 : "memory");
}
__device__ __forceinline__ float4 get_saved(const float4* from) {
    float4 x;
    asm volatile("ld.local.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(__cvta_generic_to_local(from))
                 : "memory");
    return x;
}
#endif

template <int N> __device__ __forceinline__ void save_rows(SavedRows<N>& to, const RowStateOf<N>& rows) {
    put_saved(&to.rows, rows.reference[0], rows.reference[1], rows.sum[0], rows.sum[1]);
#pragma unroll
    for (int j = 0; j < N; ++j) put_saved(to.o + j, rows.o[j][0], rows.o[j][1], rows.o[j][2], rows.o[j][3]);
}

// Adds the result of earlier splits to that of a split whose sums are added up over the lanes. A row that sees no key
// of this split keeps what was before.
template <int N>
__device__ __forceinline__ void combine_splits(RowStateOf<N>& rows, const SavedRows<N>& before, bool sees_0,
                                               bool sees_1, float factor) {
    float4 old = get_saved(&before.rows);
    Combine combine[2] = {Combine(old.x, rows.reference[0], factor), Combine(old.y, rows.reference[1], factor)};
    rows.reference[0] = sees_0 ? combine[0].reference : old.x;
    rows.reference[1] = sees_1 ? combine[1].reference : old.y;
    rows.sum[0] = sees_0 ? combine[0](old.z, rows.sum[0]) : old.z;
    rows.sum[1] = sees_1 ? combine[1](old.w, rows.sum[1]) : old.w;
#pragma unroll
    for (int j = 0; j < N; ++j) {
        float4 o = get_saved(before.o + j);
        rows.o[j][0] = sees_0 ? combine[0](o.x, rows.o[j][0]) : o.x;
        rows.o[j][1] = sees_0 ? combine[0](o.y, rows.o[j][1]) : o.y;
        rows.o[j][2] = sees_1 ? combine[1](o.z, rows.o[j][2]) : o.z;
        rows.o[j][3] = sees_1 ? combine[1](o.w, rows.o[j][3]) : o.w;
    }
}

// Ends the split that begins with key `first_key`: the lanes' parts of the sum are added up, and the rows become the
// result of this split and those before it. A row that sees no key of this split keeps what was before.
template <int N>
__device__ __forceinline__ void end_split(RowStateOf<N>& rows, const SavedRows<N>& before, int first_key,
                                          const int (&last_key)[2], float factor) {
    rows.sum[0] = quad_sum(rows.sum[0]), rows.sum[1] = quad_sum(rows.sum[1]);
    if (first_key > 0)
        combine_splits(rows, before, first_key <= last_key[0], first_key <= last_key[1], factor);
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

// How far a score may exceed the reference of its row before the reference rises, in powers of 2.
#define RISE 8.0f

__device__ __forceinline__ bool exceeds(float score, float reference, float factor) {
    return score > reference + RISE / factor;
}

// The reference after a step whose largest score is `top`. Returns what sums and outputs so far shrink by.
__device__ __forceinline__ float rise_to(float top, float& reference, float factor) {
    bool rises = exceeds(top, reference, factor);
    float scale = rises ? exp2_fast((reference - top) * factor) : 1.0f;
    reference = rises ? top : reference;
    return scale;
}

// What the exponents of a step are less. A row that has seen no key yet, as in front of its window, has no reference.
__device__ __forceinline__ float shift_of(float reference, float factor) {
#ifdef SCORE_RULE
    return reference == MINUS_INFINITY ? 0.0f : reference * factor;
#else
    return reference * factor;
#endif
}

// The largest of a lane's scores from fragment `first` on in row `h`, of one step.
template <int N> __device__ __forceinline__ float largest(const float (&s)[N][4], int first, int h) {
    float m[KEYS / 8];
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) m[j] = fmaxf(s[first + j][2 * h], s[first + j][2 * h + 1]);
#pragma unroll
    for (int n = KEYS / 16; n > 0; n /= 2)
#pragma unroll
        for (int j = 0; j < n; ++j) m[j] = fmaxf(m[j], m[j + n]);
    return m[0];
}

// A lane's part of the sum of a step's weights, from fragment `first` on in row `h`.
template <int N> __device__ __forceinline__ float sum_of_step(const float (&p)[N][4], int first, int h) {
    float parts[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        int j = first + 2 * w;
        parts[w] = sum_of_four(p[j][2 * h], p[j][2 * h + 1], p[j + 1][2 * h], p[j + 1][2 * h + 1]);
    }
    return sum_of_four(parts[0], parts[1], parts[2], parts[3]);
}

// Turns a step's scores into weights relative to the references; `scale` is what the output so far shrinks by.
__device__ __forceinline__ void softmax_weights(float (&s)[KEYS / 8][4], RowState& rows, float factor,
                                                float (&scale)[2]) {
    float top[2] = {largest(s, 0, 0), largest(s, 0, 1)};
    scale[0] = scale[1] = 1.0f;
    bool rises = exceeds(top[0], rows.reference[0], factor) || exceeds(top[1], rows.reference[1], factor);
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = rise_to(quad_max(top[h]), rows.reference[h], factor);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float shift = shift_of(rows.reference[h], factor);
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) s[j][i] = exp2_fast(fmaf(s[j][i], factor, -shift));
        rows.sum[h] = fmaf(rows.sum[h], scale[h], sum_of_step(s, 0, h));
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
