// Packed sequences, backward, without atomics: one kernel gives the gradients of the queries, one those of keys and
// values. Both compute the weights p = exp(scale score - lse) anew, then d_score = p (d_out v^T - delta). Every sum has
// one order.

// s = a b^T and d = e f^T for M fragments of 16 rows from `row` on.
template <int M, int N>
__device__ __forceinline__ void multiply_rows(float (&s)[M][N][4], float (&d)[M][N][4], const bf16* a, const bf16* e,
                                              int row, const bf16* b, const bf16* f) {
#pragma unroll
    for (int m = 0; m < M; ++m) clear(s[m]), clear(d[m]);
#pragma unroll
    for (int c = 0; c < DIM; c += 16) {
        u32 left_s[M][4], left_d[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
            load_a(left_s[m], a, STRIDE, row + m * 16, c);
            load_a(left_d[m], e, STRIDE, row + m * 16, c);
        }
#pragma unroll
        for (int j = 0; j < N; j += 2) {
            u32 right_s[4], right_d[4];
            load_b_rows(right_s, b, j * 8, c);
            load_b_rows(right_d, f, j * 8, c);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                mma(s[m][j], left_s[m], right_s);
                mma(s[m][j + 1], left_s[m], right_s + 2);
                mma(d[m][j], left_d[m], right_d);
                mma(d[m][j + 1], left_d[m], right_d + 2);
            }
        }
    }
}

// Fragments of 16 queries that a warp has: of heads wider than 128 one, so that the gradients fit into its registers.
#define FRAGMENTS (DIM > 128 ? 1 : 2)
#define Q_ROWS (64 * FRAGMENTS)
#define Q_THREADS 128
#define Q_STEP 32

// d_q += d_score k.
__device__ __forceinline__ void add_query_gradient(float (&d_q)[FRAGMENTS][DIM / 8][4],
                                                   const float (&d)[FRAGMENTS][Q_STEP / 8][4], const bf16* keys) {
    u32 a[FRAGMENTS][Q_STEP / 16][4];
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) pack_operands(a[m], d[m]);
#pragma unroll
    for (int c = 0; c < Q_STEP / 16; ++c)
#pragma unroll
        for (int j = 0; j < DIM / 8; j += 2) {
            u32 b[4];
            load_b_columns(b, keys, c * 16, j * 8);
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) {
                mma(d_q[m][j], a[m][c], b);
                mma(d_q[m][j + 1], a[m][c], b + 2);
            }
        }
}

// Grid: (query heads, tiles of Q_ROWS tokens). Shared: queries and d_out [Q_ROWS], keys and values [2][32].
KERNEL __launch_bounds__(Q_THREADS, 2)
attention_backward_queries_bf16(const bf16* qkv, const bf16* d_out, const __grid_constant__ Packing packing,
                                const float* lse, const float* delta, bf16* d_qkv RULE_PARAMETER) {
    RULE_CONSTANT
    extern __shared__ uint4 memory[];
    bf16 *queries = (bf16*)memory, *d_outs = queries + Q_ROWS * STRIDE;
    QueryTile t;
    if (!find_query_tile<Q_ROWS>(qkv, packing, &t)) return;
    int query = packing.query;
    KeyStream<PaddedTile, Q_STEP, Q_THREADS> stream(t, d_outs + Q_ROWS * STRIDE);
    const bf16* d_rows = d_out + (t.token * query + t.head) * HEAD_DIM;
    PaddedTile::load<Q_ROWS, Q_THREADS>(queries, t.n_rows, t.queries());
    PaddedTile::load<Q_ROWS, Q_THREADS>(d_outs, t.n_rows, QueryRows{d_rows, (size_t)query * HEAD_DIM, t.lead});
    int first_step = rule.first_key(t.first) / Q_STEP;
    stream.load(first_step);

    int warp_row = threadIdx.x / 32 * (16 * FRAGMENTS);
    RowNumbers numbers[FRAGMENTS];
    float d_q[FRAGMENTS][DIM / 8][4];
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
        numbers[m] = load_row_numbers(t, warp_row + m * 16 + fragment_row(0), lse, delta, query);
        clear(d_q[m]);
    }
    for (int step = first_step; step < stream.n_steps; ++step) {
        float s[FRAGMENTS][Q_STEP / 8][4], d[FRAGMENTS][Q_STEP / 8][4];
        stream.wait(step);
        multiply_rows(s, d, queries, d_outs, warp_row, stream.keys_of(step), stream.values_of(step));
        bool hides_keys = step * Q_STEP + Q_STEP > t.first + warp_row;
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m)
            query_score_gradient(s[m], d[m], numbers[m], step * Q_STEP, t.first + warp_row + m * 16, hides_keys, rule);
        add_query_gradient(d_q, d, stream.keys_of(step));
    }
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
        store_query_rows(t, d_qkv, warp_row + m * 16 + fragment_row(0), d_q[m], rule.gradient_scale());
}

// Of heads wider than 128 a tile has 64 keys, so that it fits into shared memory, and one block has the gradients of its keys,
// another those of its values, so that they fit into registers.
#define K_PARTS (DIM > 128 ? 2 : 1)
#define K_ROWS (128 / K_PARTS)
#define K_THREADS (2 * K_ROWS)
#define K_STEP 64

// Of 16 keys from position `key` on and a step's queries from `first_query` on, the products s become weights and d
// becomes d_score.
__device__ __forceinline__ void key_score_gradient(float (&s)[K_STEP / 8][4], float (&d)[K_STEP / 8][4],
                                                   const float* lse_log2, const float* deltas, int key,
                                                   int first_query, const ScoreRule& rule) {
    float factor = rule.factor();
    bool hides_keys = first_query < key + 16;
#pragma unroll
    for (int j = 0; j < K_STEP / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = fragment_column(j, i);
            float score = rule.cap(s[j][i]);
            float p = exp2_fast(fmaf(score, factor, -lse_log2[column]));
            if (hides_keys && key + fragment_row(i) > first_query + column) p = 0.0f;
#ifdef SCORE_RULE
            if (rule.hides(key + fragment_row(i), first_query + column)) p = 0.0f;
            s[j][i] = p;
            d[j][i] = p * rule.slope(score) * (d[j][i] - deltas[column]);
#else
            s[j][i] = p;
            d[j][i] = p * (d[j][i] - deltas[column]);
#endif
        }
}

// sums += p b, with p transposed: a row for each key.
__device__ __forceinline__ void add_key_gradient(float (&sums)[DIM / 8][4], const float (&p)[K_STEP / 8][4],
                                                 const bf16* b) {
    u32 left[K_STEP / 16][4];
    pack_operands(left, p);
#pragma unroll
    for (int c = 0; c < K_STEP / 16; ++c)
#pragma unroll
        for (int j = 0; j < DIM / 8; j += 2) {
            u32 right[4];
            load_b_columns(right, b, c * 16, j * 8);
            mma(sums[j], left[c], right);
            mma(sums[j + 1], left[c], right + 2);
        }
}

// d_v += p d_out and d_k += d_score q, with p and d_score transposed: a row for each key.
__device__ __forceinline__ void add_key_gradients(float (&d_k)[DIM / 8][4], float (&d_v)[DIM / 8][4],
                                                  const float (&p)[K_STEP / 8][4], const float (&d)[K_STEP / 8][4],
                                                  const bf16* queries, const bf16* d_outs) {
    u32 left_v[K_STEP / 16][4], left_k[K_STEP / 16][4];
    pack_operands(left_v, p);
    pack_operands(left_k, d);
#pragma unroll
    for (int c = 0; c < K_STEP / 16; ++c)
#pragma unroll
        for (int j = 0; j < DIM / 8; j += 2) {
            u32 right_v[4], right_k[4];
            load_b_columns(right_v, d_outs, c * 16, j * 8);
            load_b_columns(right_k, queries, c * 16, j * 8);
            mma(d_v[j], left_v[c], right_v);
            mma(d_v[j + 1], left_v[c], right_v + 2);
            mma(d_k[j], left_k[c], right_k);
            mma(d_k[j + 1], left_k[c], right_k + 2);
        }
}

// Grid: (K_PARTS * kv heads, tiles of K_ROWS tokens). A warp has 16 keys; queries come head by head, in order.
// Shared: keys and values [K_ROWS], queries and d_out [2][64], their log-sum-exp and delta [2][64].
KERNEL __launch_bounds__(K_THREADS, 1)
attention_backward_keys_bf16(const bf16* qkv, const bf16* d_out, const __grid_constant__ Packing packing,
                             const float* lse, const float* delta, bf16* d_keys RULE_PARAMETER) {
    RULE_CONSTANT
    extern __shared__ uint4 memory[];
    bf16 *keys = (bf16*)memory, *values = keys + K_ROWS * STRIDE;
    KeyTile t;
    WorkTile work;
    int kv = packing.kv, part = blockIdx.x % K_PARTS;
    if (!find_key_tile<K_ROWS>(packing, blockIdx.y, &t, &work)) return;
    t.kv_head = blockIdx.x / K_PARTS;
    int end = rule.end_of_queries(t.first + t.n_keys - 1, t.rows);
    QueryStream<PaddedTile, K_STEP, K_THREADS> stream(qkv, d_out, lse, delta, t, packing.query, kv, end);
    stream.use(values + K_ROWS * STRIDE);
    const bf16* k = packing.keys + t.token * t.width + t.kv_head * HEAD_DIM;
    PaddedTile::load<K_ROWS, K_THREADS>(keys, t.n_keys, Strided{k, t.width});
    PaddedTile::load<K_ROWS, K_THREADS>(values, t.n_keys, Strided{k + kv * HEAD_DIM, t.width});
    if (stream.n_steps > 0) stream.load(0);

    int warp_row = threadIdx.x / 32 * 16, key = t.first + warp_row;
#if HEAD_DIM > 128
    float sums[DIM / 8][4];
    clear(sums);
#else
    float d_k[DIM / 8][4], d_v[DIM / 8][4];
    clear(d_k);
    clear(d_v);
#endif
    for (int step = 0; step < stream.n_steps; ++step) {
        stream.wait(step);
        // No query of this step sees a key of this warp.
        if (stream.first_of(step) + K_STEP <= key) continue;
        const bf16 *queries = stream.queries_of(step), *d_outs = stream.d_outs_of(step);
        float s[1][K_STEP / 8][4], d[1][K_STEP / 8][4];
        multiply_rows(s, d, keys, values, warp_row, queries, d_outs);
        key_score_gradient(s[0], d[0], stream.lse_log2_of(step), stream.deltas_of(step), key, stream.first_of(step),
                           rule);
#if HEAD_DIM > 128
        if (part == 0)
            add_key_gradient(sums, d[0], queries);
        else
            add_key_gradient(sums, s[0], d_outs);
#else
        add_key_gradients(d_k, d_v, s[0], d[0], queries, d_outs);
#endif
    }
    int row = warp_row + fragment_row(0), head = t.kv_head;
#if HEAD_DIM > 128
    store_key_part(t, d_keys, row, head + part * kv, sums, part == 0 ? rule.gradient_scale() : 1.0f);
#else
    store_key_part(t, d_keys, row, head, d_k, rule.gradient_scale());
    store_key_part(t, d_keys, row, head + kv, d_v, 1.0f);
#endif
}
