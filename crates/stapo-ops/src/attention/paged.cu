// Attention over a paged cache: decode and chunked prefill, the same bits as forward.cu.

#define THREADS 128
#define ROWS 16
// Elements from one row of weights to the next.
#define WEIGHTS (KEYS + 8)

// Grid: tokens. Writes the keys and values of this call's tokens into the cache, keys and values [blocks, kv heads,
// block_size, HEAD_DIM].
KERNEL attention_store_bf16(const bf16* qkv, const u32* slots, bf16* keys, bf16* values, int query, int kv,
                            int block_size, u32 n_slots) {
    u32 slot = slots[blockIdx.x];
    if (slot >= n_slots) __trap();
    // Sixteen bytes at a time where heads are whole multiples of them.
    constexpr int AT_ONCE = HEAD_DIM % 8 == 0 ? 8 : 1;
    struct alignas(2 * AT_ONCE) Chunk {
        bf16 elements[AT_ONCE];
    };
    const bf16* row = qkv + ((size_t)blockIdx.x * (query + 2 * kv) + query) * HEAD_DIM;
    size_t first = (size_t)(slot / block_size) * kv * block_size + slot % block_size;
    for (int i = threadIdx.x * AT_ONCE; i < kv * HEAD_DIM; i += blockDim.x * AT_ONCE) {
        size_t at = (first + (size_t)(i / HEAD_DIM) * block_size) * HEAD_DIM + i % HEAD_DIM;
        *(Chunk*)(keys + at) = *(const Chunk*)(row + i);
        *(Chunk*)(values + at) = *(const Chunk*)(row + kv * HEAD_DIM + i);
    }
}

// The four warps of a block share each step: warp w scores the keys 16w.. and multiplies the weights of all 64 keys
// with its own columns of the values, so that every sum keeps the order of forward.cu. This is what the warps exchange.
struct Exchange {
    // Each warp's largest score of a row, and its lanes' sums of a row's weights.
    float tops[4][ROWS], parts[4][ROWS][4];
    alignas(16) bf16 weights[ROWS * WEIGHTS];
};

// A warp's columns of the output: fragments of 16 columns, warp + 4 j the number of fragment j.
#define FRAGMENTS ((DIM / 16 + 3) / 4)

// As RowState in softmax.cu, with the output columns of one warp.
typedef RowStateOf<2 * FRAGMENTS> WarpState;

// s = q k^T for the 16 queries and the warp's 16 keys.
__device__ __forceinline__ void multiply_qk(float (&s)[2][4], const bf16* queries, const bf16* keys, int warp) {
#pragma unroll
    for (int c = 0; c < DIM; c += 16) {
        u32 a[4], b[4];
        load_a(a, queries, STRIDE, 0, c);
        load_b_rows(b, keys, warp * 16, c);
        mma(s[0], a, b);
        mma(s[1], a, b + 2);
    }
}

__device__ __forceinline__ void share_tops(const float (&s)[2][4], Exchange& shared, int warp) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float top = quad_max(fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1])));
        if (threadIdx.x % 4 == 0) shared.tops[warp][fragment_row(2 * h)] = top;
    }
}

// Turns the warp's scores into weights relative to the references and shares them; `scale` is what the sums and outputs
// so far shrink by.
__device__ __forceinline__ void share_weights(float (&s)[2][4], WarpState& rows, Exchange& shared, int warp,
                                              float factor, float (&scale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = fragment_row(2 * h);
        const float (&tops)[4][ROWS] = shared.tops;
        float top = fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
        scale[h] = rise_to(top, rows.reference[h], factor);
        float shift = shift_of(rows.reference[h], factor);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) s[j][i] = exp2_fast(fmaf(s[j][i], factor, -shift));
            *(u32*)(shared.weights + row * WEIGHTS + warp * 16 + fragment_column(j, 0)) =
                pack(s[j][2 * h], s[j][2 * h + 1]);
        }
        shared.parts[warp][row][threadIdx.x % 4] =
            sum_of_four(s[0][2 * h], s[0][2 * h + 1], s[1][2 * h], s[1][2 * h + 1]);
    }
}

__device__ __forceinline__ void add_sums(WarpState& rows, const Exchange& shared, const float (&scale)[2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = fragment_row(2 * h), part = threadIdx.x % 4;
        const float (&parts)[4][ROWS][4] = shared.parts;
        rows.sum[h] =
            fmaf(rows.sum[h], scale[h],
                 sum_of_four(parts[0][row][part], parts[1][row][part], parts[2][row][part], parts[3][row][part]));
    }
}

// o = o scale + p v for the warp's columns of v.
__device__ __forceinline__ void multiply_pv(WarpState& rows, const bf16* weights, const bf16* values, int warp,
                                            const float (&scale)[2]) {
#pragma unroll
    for (int j = 0; j < FRAGMENTS; ++j) {
        int column = (warp + 4 * j) * 16;
        if (column >= DIM) continue;
        float *first = rows.o[2 * j], *second = rows.o[2 * j + 1];
#pragma unroll
        for (int i = 0; i < 4; ++i) first[i] *= scale[i / 2], second[i] *= scale[i / 2];
#pragma unroll
        for (int c = 0; c < KEYS; c += 16) {
            u32 a[4], b[4];
            load_a(a, weights, WEIGHTS, 0, c);
            load_b_columns(b, values, c, column);
            mma(first, a, b);
            mma(second, a, b + 2);
        }
    }
}

__device__ __forceinline__ void store_rows(const PagedTile& t, const WarpState& rows, int warp, int pitch, bf16* out,
                                           const ScoreRule& rule) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float inv = EndedRow(rows.reference[h], rows.sum[h], t.head(fragment_row(2 * h)), rule).scale();
        if (fragment_row(2 * h) >= t.n_rows) continue;
        bf16* to = t.out_row(out, pitch, fragment_row(2 * h));
#pragma unroll
        for (int j = 0; j < FRAGMENTS; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int column = (warp + 4 * j) * 16 + fragment_column(e, 0);
                const float (&o)[4] = rows.o[2 * j + e];
                if (column < HEAD_DIM) *(u32*)(to + column) = pack(o[2 * h] * inv, o[2 * h + 1] * inv);
            }
    }
}

// Grid: (kv heads, tiles of 16 rows); a row is a token and one of its group's query heads. Shared: queries [16], keys
// and values [64].
KERNEL __launch_bounds__(THREADS)
attention_paged_bf16(const bf16* qkv, const bf16* keys, const bf16* values, const u32* offsets, const u32* contexts,
                     const u32* tables, bf16* out, const __grid_constant__ PagedShape shape RULE_PARAMETER) {
    RULE_CONSTANT
    extern __shared__ uint4 memory[];
    __shared__ u32 table[TABLE];
    __shared__ Exchange shared;
    bf16* queries = (bf16*)memory;
    int warp = threadIdx.x / 32;
    PagedTile t;
    if (!find_paged_tile<ROWS>(offsets, contexts, tables, shape.sequences, shape.table_width, shape.query, shape.kv, &t))
        return;
    PagedFeed<PaddedTile, THREADS> feed(t, queries + ROWS * STRIDE, keys, values, shape.block_shift, shape.kv);
    feed.stage_table(table);
    PaddedTile::load<ROWS, THREADS>(queries, t.n_rows, t.queries(qkv));
    int first_step = rule.first_key(t.last_key(0)) / KEYS;
    feed.begin(first_step);

    float factor = rule.factor();
    int last_key[2] = {t.last_key(fragment_row(0)), t.last_key(fragment_row(2))};
    WarpState rows;
    SavedRows<2 * FRAGMENTS> saved;
    clear(rows);
    for (int step = first_step; step < feed.n_steps; ++step) {
        float s[2][4] = {}, scale[2];
        begin_step(step, first_step, rows, saved, last_key, rule);
        feed.wait_keys();
        multiply_qk(s, queries, feed.keys_of(step), warp);
        apply_rule(s, step * KEYS + warp * 16, last_key, rule);
        mask_hidden_keys(s, step * KEYS + warp * 16, last_key);
        share_tops(s, shared, warp);
        // The feed's barriers are those of the exchange too.
        feed.keys_are_read(step);
        share_weights(s, rows, shared, warp, factor, scale);
        feed.wait_values(step);
        add_sums(rows, shared, scale);
        multiply_pv(rows, shared.weights, feed.values_of(step), warp, scale);
        feed.values_are_read(step);
    }
    end_steps(feed.n_steps, first_step, rows, saved, last_key, rule);
    store_rows(t, rows, warp, shape.out_pitch, out, rule);
}
