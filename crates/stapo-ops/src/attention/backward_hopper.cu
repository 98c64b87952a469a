// Packed sequences, backward, as in backward.cu but with Hopper's matrix instruction. A block has two warpgroups, each
// with 64 of the block's 128 rows; steps of 64 rows.

#define ROWS 128
#define STEP 64
#define THREADS 256

// Scores become weights; hidden keys get weight 0. `position` is that of the lane's first row.
__device__ __forceinline__ void weights_of_queries(float (&s)[STEP / 8][4], const RowNumbers& numbers, int first_key,
                                                   int position, bool hides_keys) {
    float factor = score_factor();
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float p = exp2_fast(fmaf(s[j][i], factor, -numbers.lse_log2[i / 2]));
            s[j][i] = hides_keys && first_key + fragment_column(j, i) > position + i / 2 * 8 ? 0.0f : p;
        }
}

// Grid: (query heads, tiles of 128 tokens). Shared: queries and d_out [128], keys and values [2][64].
KERNEL __launch_bounds__(THREADS, 1)
    attention_backward_queries_hopper_bf16(const bf16* qkv, const bf16* d_out, const u32* offsets, const float* lse,
                                           const float* delta, bf16* d_qkv, int sequences, int query, int kv) {
    bf16 *queries = aligned_memory(), *d_outs = queries + ROWS * DIM;
    QueryTile t;
    if (!find_query_tile<ROWS>(qkv, offsets, sequences, query, kv, &t)) return;
    KeyStream<SwizzledTile, STEP, THREADS> stream(t, d_outs + ROWS * DIM);
    const bf16* d_rows = d_out + (t.token * query + t.head) * HEAD_DIM;
    SwizzledTile::load<ROWS, THREADS>(queries, t.n_rows, Strided{t.q, t.width});
    SwizzledTile::load<ROWS, THREADS>(d_outs, t.n_rows, Strided{d_rows, (size_t)query * HEAD_DIM});
    stream.load(0);

    int group_row = threadIdx.x / 128 * 64, row = group_row + warpgroup_row();
    RowNumbers numbers = load_row_numbers(t, row, lse, delta, query);
    float d_q[DIM / 8][4];
    clear(d_q);
    for (int step = 0; step < stream.n_steps; ++step) {
        stream.wait(step);
        // None of this warpgroup's queries sees a key of this step.
        if (step * STEP > t.first + group_row + 63) continue;
        float s[STEP / 8][4], d[STEP / 8][4];
        wgmma_fence();
        start_rows_product<ROWS>(s, queries, group_row, stream.keys_of(step));
        start_rows_product<ROWS>(d, d_outs, group_row, stream.values_of(step));
        wgmma_wait<1>();
        fence_registers(s);
        weights_of_queries(s, numbers, step * STEP, t.first + row, step * STEP + STEP > t.first + group_row);
        wgmma_wait<0>();
        fence_registers(d);
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) d[j][i] = s[j][i] * (d[j][i] - numbers.delta[i / 2]);
        u32 a[STEP / 16][4];
        pack_operands(a, d);
        start_columns_product(d_q, a, stream.keys_of(step));
        wgmma_wait<0>();
        fence_registers(d_q);
    }
    store_query_rows(t, d_qkv, row, d_q);
}

// Scores become weights; keys hidden from a query get weight 0. `key` is the position of the lane's first key.
__device__ __forceinline__ void weights_of_keys(float (&s)[STEP / 8][4], const float* lse_log2, int first_query,
                                                int key, bool hides_keys) {
    float factor = score_factor();
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j) {
        float2 shift = *(const float2*)(lse_log2 + fragment_column(j, 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float p = exp2_fast(fmaf(s[j][i], factor, i % 2 ? -shift.y : -shift.x));
            s[j][i] = hides_keys && key + i / 2 * 8 > first_query + fragment_column(j, i) ? 0.0f : p;
        }
    }
}

// d becomes d_score, from the weights p.
__device__ __forceinline__ void key_score_gradient(float (&d)[STEP / 8][4], const float (&p)[STEP / 8][4],
                                                   const float* deltas) {
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j) {
        float2 delta = *(const float2*)(deltas + fragment_column(j, 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) d[j][i] = p[j][i] * (d[j][i] - (i % 2 ? delta.y : delta.x));
    }
}

// Grid: (kv heads, tiles of 128 tokens). Queries come head by head, in order.
// Shared: keys and values [128], queries and d_out [2][64], their log-sum-exp and delta [2][64].
KERNEL __launch_bounds__(THREADS, 1)
    attention_backward_keys_hopper_bf16(const bf16* qkv, const bf16* d_out, const u32* offsets, const float* lse,
                                        const float* delta, bf16* d_qkv, int sequences, int query, int kv) {
    bf16 *keys = aligned_memory(), *values = keys + ROWS * DIM;
    KeyTile t;
    if (!find_key_tile<ROWS>(offsets, sequences, query, kv, &t)) return;
    QueryStream<SwizzledTile, STEP, THREADS> stream(qkv, d_out, lse, delta, t, query, kv);
    stream.use(values + ROWS * DIM);
    const bf16* k = qkv + t.token * t.width + (query + t.kv_head) * HEAD_DIM;
    SwizzledTile::load<ROWS, THREADS>(keys, t.n_keys, Strided{k, t.width});
    SwizzledTile::load<ROWS, THREADS>(values, t.n_keys, Strided{k + kv * HEAD_DIM, t.width});
    stream.load(0);

    int group_row = threadIdx.x / 128 * 64, row = group_row + warpgroup_row(), key = t.first + group_row;
    float d_k[DIM / 8][4], d_v[DIM / 8][4];
    clear(d_k);
    clear(d_v);
    for (int step = 0; step < stream.n_steps; ++step) {
        int first_query = stream.first_of(step);
        stream.wait(step);
        // No query of this step sees a key of this warpgroup.
        if (first_query + STEP <= key) continue;
        const bf16 *queries = stream.queries_of(step), *d_outs = stream.d_outs_of(step);
        float s[STEP / 8][4], d[STEP / 8][4];
        u32 p[STEP / 16][4], d_scores[STEP / 16][4];
        wgmma_fence();
        start_rows_product<ROWS>(s, keys, group_row, queries);
        start_rows_product<ROWS>(d, values, group_row, d_outs);
        wgmma_wait<1>();
        fence_registers(s);
        weights_of_keys(s, stream.lse_log2_of(step), first_query, t.first + row, first_query < key + 64);
        pack_operands(p, s);
        start_columns_product(d_v, p, d_outs);
        wgmma_wait<1>();
        fence_registers(d);
        key_score_gradient(d, s, stream.deltas_of(step));
        pack_operands(d_scores, d);
        start_columns_product(d_k, d_scores, queries);
        wgmma_wait<0>();
        fence_registers(d_v);
        fence_registers(d_k);
    }
    store_key_rows(t, d_qkv, row, query, kv, d_k, d_v);
}
