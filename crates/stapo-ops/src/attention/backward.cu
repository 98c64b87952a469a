// Packed sequences, backward, without atomics: one kernel gives the gradients of the queries, one those of keys and
// values; both compute the weights anew from lse. Every sum has one order.

template <int M, int N> __device__ __forceinline__ void clear(float (&x)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[m][n][i] = 0.0f;
}

// Rows of f32 results as bf16, times `scale`.
template <int N>
__device__ __forceinline__ void store_row(bf16* to, const float (&x)[N][4], int half, float scale) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
        int column = j * 8 + threadIdx.x % 4 * 2;
        if (column < HEAD_DIM) *(u32*)(to + column) = pack(x[j][2 * half] * scale, x[j][2 * half + 1] * scale);
    }
}

#define Q_ROWS 128
#define Q_KEYS 32

// Grid: (query heads, pieces of 128 tokens). Shared: queries and d_out [128], keys and values [2][32].
KERNEL __launch_bounds__(128, 2)
attention_backward_queries_bf16(const bf16* qkv, const bf16* d_out, const u32* offsets, const float* lse,
                                const float* pull, bf16* d_qkv, int sequences, int query, int kv) {
    extern __shared__ uint4 memory[];
    bf16 *tile_q = (bf16*)memory, *tile_d = tile_q + Q_ROWS * STRIDE, *keys = tile_d + Q_ROWS * STRIDE;
    bf16* values = keys + 2 * Q_KEYS * STRIDE;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, 1, Q_ROWS, blockIdx.y, &piece)) return;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int head = blockIdx.x, kv_head = head / (query / kv), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    size_t first = start + piece.first;
    const bf16* k = qkv + start * width + (query + kv_head) * HEAD_DIM;
    const bf16* v = k + kv * HEAD_DIM;
    int n_rows = min(Q_ROWS, piece.rows - piece.first), n_keys = piece.first + n_rows;
    int n_steps = (n_keys + Q_KEYS - 1) / Q_KEYS;
    auto load_step = [&](int step) {
        int from = step * Q_KEYS, n = min(Q_KEYS, n_keys - from), at = step % 2 * Q_KEYS * STRIDE;
        load_rows<Q_KEYS, 128>(keys + at, n, Strided{k + (size_t)from * width, width});
        load_rows<Q_KEYS, 128>(values + at, n, Strided{v + (size_t)from * width, width});
        cp_async_commit();
    };
    load_rows<Q_ROWS, 128>(tile_q, n_rows, Strided{qkv + first * width + head * HEAD_DIM, width});
    load_rows<Q_ROWS, 128>(tile_d, n_rows, Strided{d_out + (first * query + head) * HEAD_DIM, (size_t)query * HEAD_DIM});
    load_step(0);

    float scale = rsqrtf((float)HEAD_DIM), factor = scale * LOG2_E, shift[2][2], drag[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int row = warp * 32 + m * 16 + lane / 4 + h * 8;
            size_t at = (first + row) * query + head;
            shift[m][h] = row < n_rows ? lse[at] * LOG2_E : 0.0f;
            drag[m][h] = row < n_rows ? pull[at] : 0.0f;
        }
    float d_q[2][DIM / 8][4];
    clear(d_q);
    for (int step = 0; step < n_steps; ++step) {
        const bf16 *tile_k = keys + step % 2 * Q_KEYS * STRIDE, *tile_v = values + step % 2 * Q_KEYS * STRIDE;
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < n_steps) load_step(step + 1);
        float s[2][Q_KEYS / 8][4], d[2][Q_KEYS / 8][4];
        clear(s);
        clear(d);
#pragma unroll
        for (int c = 0; c < DIM; c += 16) {
            u32 a[2][4], e[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                load_a(a[m], tile_q, STRIDE, warp * 32 + m * 16, c);
                load_a(e[m], tile_d, STRIDE, warp * 32 + m * 16, c);
            }
#pragma unroll
            for (int j = 0; j < Q_KEYS / 8; j += 2) {
                u32 b[4], f[4];
                load_b_rows(b, tile_k, j * 8, c);
                load_b_rows(f, tile_v, j * 8, c);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma(s[m][j], a[m], b);
                    mma(s[m][j + 1], a[m], b + 2);
                    mma(d[m][j], e[m], f);
                    mma(d[m][j + 1], e[m], f + 2);
                }
            }
        }
        bool hides = step * Q_KEYS + Q_KEYS > piece.first + warp * 32;
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int j = 0; j < Q_KEYS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int row = piece.first + warp * 32 + m * 16 + lane / 4 + i / 2 * 8;
                    int key = step * Q_KEYS + j * 8 + lane % 4 * 2 + i % 2;
                    float p = exp2_fast(fmaf(s[m][j][i], factor, -shift[m][i / 2]));
                    if (hides && key > row) p = 0.0f;
                    d[m][j][i] = p * (d[m][j][i] - drag[m][i / 2]);
                }
#pragma unroll
        for (int c = 0; c < Q_KEYS / 16; ++c) {
            u32 a[2][4];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                a[m][0] = pack(d[m][2 * c][0], d[m][2 * c][1]);
                a[m][1] = pack(d[m][2 * c][2], d[m][2 * c][3]);
                a[m][2] = pack(d[m][2 * c + 1][0], d[m][2 * c + 1][1]);
                a[m][3] = pack(d[m][2 * c + 1][2], d[m][2 * c + 1][3]);
            }
#pragma unroll
            for (int j = 0; j < DIM / 8; j += 2) {
                u32 b[4];
                load_b_columns(b, tile_k, c * 16, j * 8);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma(d_q[m][j], a[m], b);
                    mma(d_q[m][j + 1], a[m], b + 2);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int row = warp * 32 + m * 16 + lane / 4 + h * 8;
            if (row < n_rows) store_row(d_qkv + (first + row) * width + head * HEAD_DIM, d_q[m], h, scale);
        }
}

#define K_ROWS 128
#define K_QUERIES 64

// Grid: (kv heads, pieces of 128 tokens). A warp has 16 keys; queries come head by head, in order.
// Shared: keys and values [128], queries and d_out [2][64], their lse and pull [2][64].
KERNEL __launch_bounds__(256, 1)
attention_backward_keys_bf16(const bf16* qkv, const bf16* d_out, const u32* offsets, const float* lse,
                             const float* pull, bf16* d_qkv, int sequences, int query, int kv) {
    extern __shared__ uint4 memory[];
    bf16 *tile_k = (bf16*)memory, *tile_v = tile_k + K_ROWS * STRIDE, *queries = tile_v + K_ROWS * STRIDE;
    bf16* d_outs = queries + 2 * K_QUERIES * STRIDE;
    float *shifts = (float*)(d_outs + 2 * K_QUERIES * STRIDE), *drags = shifts + 2 * K_QUERIES;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, 1, K_ROWS, blockIdx.y, &piece)) return;
    // The first keys are seen by most queries: they go first.
    piece.first = (piece.rows - 1) / K_ROWS * K_ROWS - piece.first;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int kv_head = blockIdx.x, group = query / kv, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    size_t first = start + piece.first;
    int n_rows = min(K_ROWS, piece.rows - piece.first);
    int n_tiles = (piece.rows - piece.first + K_QUERIES - 1) / K_QUERIES, n_steps = n_tiles * group;
    auto load_step = [&](int step) {
        int head = kv_head * group + step / n_tiles, from = piece.first + step % n_tiles * K_QUERIES;
        int n = min(K_QUERIES, piece.rows - from), at = step % 2 * K_QUERIES;
        const bf16* q = qkv + (start + from) * width + head * HEAD_DIM;
        const bf16* d = d_out + ((start + from) * query + head) * HEAD_DIM;
        load_rows<K_QUERIES, 256>(queries + at * STRIDE, n, Strided{q, width});
        load_rows<K_QUERIES, 256>(d_outs + at * STRIDE, n, Strided{d, (size_t)query * HEAD_DIM});
        if (threadIdx.x < K_QUERIES) {
            int r = threadIdx.x;
            size_t place = (start + from + r) * query + head;
            // A query that is not there gives weight 0.
            shifts[at + r] = r < n ? lse[place] * LOG2_E : __int_as_float(0x7f800000);
            drags[at + r] = r < n ? pull[place] : 0.0f;
        }
        cp_async_commit();
    };
    const bf16* k = qkv + first * width + (query + kv_head) * HEAD_DIM;
    load_rows<K_ROWS, 256>(tile_k, n_rows, Strided{k, width});
    load_rows<K_ROWS, 256>(tile_v, n_rows, Strided{k + kv * HEAD_DIM, width});
    load_step(0);

    float scale = rsqrtf((float)HEAD_DIM), factor = scale * LOG2_E;
    float d_k[1][DIM / 8][4], d_v[1][DIM / 8][4];
    clear(d_k);
    clear(d_v);
    for (int step = 0; step < n_steps; ++step) {
        int at = step % 2 * K_QUERIES;
        const bf16 *tile_q = queries + at * STRIDE, *tile_d = d_outs + at * STRIDE;
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < n_steps) load_step(step + 1);
        int key = piece.first + warp * 16, from = piece.first + step % n_tiles * K_QUERIES;
        if (from + K_QUERIES <= key) continue;
        float s[1][K_QUERIES / 8][4], d[1][K_QUERIES / 8][4];
        clear(s);
        clear(d);
#pragma unroll
        for (int c = 0; c < DIM; c += 16) {
            u32 a[4], e[4];
            load_a(a, tile_k, STRIDE, warp * 16, c);
            load_a(e, tile_v, STRIDE, warp * 16, c);
#pragma unroll
            for (int j = 0; j < K_QUERIES / 8; j += 2) {
                u32 b[4], f[4];
                load_b_rows(b, tile_q, j * 8, c);
                load_b_rows(f, tile_d, j * 8, c);
                mma(s[0][j], a, b);
                mma(s[0][j + 1], a, b + 2);
                mma(d[0][j], e, f);
                mma(d[0][j + 1], e, f + 2);
            }
        }
        bool hides = from < key + 16;
#pragma unroll
        for (int j = 0; j < K_QUERIES / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int column = j * 8 + lane % 4 * 2 + i % 2;
                float p = exp2_fast(fmaf(s[0][j][i], factor, -shifts[at + column]));
                if (hides && key + lane / 4 + i / 2 * 8 > from + column) p = 0.0f;
                s[0][j][i] = p;
                d[0][j][i] = p * (d[0][j][i] - drags[at + column]);
            }
#pragma unroll
        for (int c = 0; c < K_QUERIES / 16; ++c) {
            u32 a[4], e[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int j = 2 * c + i / 2, h = i % 2 * 2;
                a[i] = pack(s[0][j][h], s[0][j][h + 1]);
                e[i] = pack(d[0][j][h], d[0][j][h + 1]);
            }
#pragma unroll
            for (int j = 0; j < DIM / 8; j += 2) {
                u32 b[4], f[4];
                load_b_columns(b, tile_d, c * 16, j * 8);
                load_b_columns(f, tile_q, c * 16, j * 8);
                mma(d_v[0][j], a, b);
                mma(d_v[0][j + 1], a, b + 2);
                mma(d_k[0][j], e, f);
                mma(d_k[0][j + 1], e, f + 2);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = warp * 16 + lane / 4 + h * 8;
        if (row >= n_rows) continue;
        bf16* to = d_qkv + (first + row) * width + (query + kv_head) * HEAD_DIM;
        store_row(to, d_k[0], h, scale);
        store_row(to + kv * HEAD_DIM, d_v[0], h, 1.0f);
    }
}
