// Packed sequences, forward (after Dao, 2023): a block has 128 queries of one head, a warp 32 of them.
// A row's result is a function of its query and the keys before it: keys come in steps of KEYS by position, hidden
// keys have weight 0 and change nothing. paged.cu does the same steps in the same order.

#define ROWS 128
#define THREADS 128

// Grid: (query heads, pieces of 128 tokens). Shared: queries [128], keys and values [2][64].
KERNEL __launch_bounds__(THREADS, 2)
attention_forward_bf16(const bf16* qkv, const u32* offsets, bf16* out, float* lse, int sequences, int query, int kv) {
    extern __shared__ uint4 memory[];
    bf16 *queries = (bf16*)memory, *keys = queries + ROWS * STRIDE, *values = keys + 2 * KEYS * STRIDE;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, 1, ROWS, blockIdx.y, &piece)) return;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int head = blockIdx.x, kv_head = head / (query / kv), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bf16* q = qkv + (start + piece.first) * width + head * HEAD_DIM;
    const bf16* k = qkv + start * width + (query + kv_head) * HEAD_DIM;
    const bf16* v = k + kv * HEAD_DIM;
    int n_rows = min(ROWS, piece.rows - piece.first), n_keys = piece.first + n_rows;
    int n_steps = (n_keys + KEYS - 1) / KEYS;

    auto load_step = [&](int step) {
        int first = step * KEYS, n = min(KEYS, n_keys - first), at = step % 2 * KEYS * STRIDE;
        load_rows<KEYS, THREADS>(keys + at, n, Strided{k + (size_t)first * width, width});
        cp_async_commit();
        load_rows<KEYS, THREADS>(values + at, n, Strided{v + (size_t)first * width, width});
        cp_async_commit();
    };
    load_rows<ROWS, THREADS>(queries, n_rows, Strided{q, width});
    load_step(0);

    float o[2][DIM / 8][4], top[2][2], sum[2][2];
    float factor = rsqrtf((float)HEAD_DIM) * LOG2_E;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        top[m][0] = top[m][1] = MINUS_INFINITY;
        sum[m][0] = sum[m][1] = 0.0f;
#pragma unroll
        for (int j = 0; j < DIM / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) o[m][j][i] = 0.0f;
    }
    for (int step = 0; step < n_steps; ++step) {
        const bf16 *tile_k = keys + step % 2 * KEYS * STRIDE, *tile_v = values + step % 2 * KEYS * STRIDE;
        cp_async_wait<1>();
        __syncthreads();
        float s[2][KEYS / 8][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][j][i] = 0.0f;
#pragma unroll
        for (int c = 0; c < DIM; c += 16) {
            u32 a[2][4];
            load_a(a[0], queries, STRIDE, warp * 32, c);
            load_a(a[1], queries, STRIDE, warp * 32 + 16, c);
#pragma unroll
            for (int j = 0; j < KEYS / 8; j += 2) {
                u32 b[4];
                load_b_rows(b, tile_k, j * 8, c);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma(s[m][j], a[m], b);
                    mma(s[m][j + 1], a[m], b + 2);
                }
            }
        }
        // Hidden keys: those after the query, and those past the sequence, which is the same.
        if (step * KEYS + KEYS > piece.first + warp * 32) {
#pragma unroll
            for (int m = 0; m < 2; ++m)
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int row = piece.first + warp * 32 + m * 16 + lane / 4 + i / 2 * 8;
                        int key = step * KEYS + j * 8 + lane % 4 * 2 + i % 2;
                        if (key > row) s[m][j][i] = MINUS_INFINITY;
                    }
        }
        u32 p[2][KEYS / 16][4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float scale[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float now = top[m][h];
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j) now = fmaxf(now, fmaxf(s[m][j][2 * h], s[m][j][2 * h + 1]));
                now = quad_max(now);
                scale[h] = exp2_fast((top[m][h] - now) * factor);
                top[m][h] = now;
                float shift = now * factor, parts[4];
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                    for (int i = 2 * h; i < 2 * h + 2; ++i) s[m][j][i] = exp2_fast(fmaf(s[m][j][i], factor, -shift));
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    parts[w] = sum_of_four(s[m][2 * w][2 * h], s[m][2 * w][2 * h + 1], s[m][2 * w + 1][2 * h],
                                           s[m][2 * w + 1][2 * h + 1]);
                sum[m][h] = fmaf(sum[m][h], scale[h], sum_of_four(parts[0], parts[1], parts[2], parts[3]));
            }
#pragma unroll
            for (int j = 0; j < DIM / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[m][j][i] *= scale[i / 2];
#pragma unroll
            for (int c = 0; c < KEYS / 16; ++c) {
                p[m][c][0] = pack(s[m][2 * c][0], s[m][2 * c][1]);
                p[m][c][1] = pack(s[m][2 * c][2], s[m][2 * c][3]);
                p[m][c][2] = pack(s[m][2 * c + 1][0], s[m][2 * c + 1][1]);
                p[m][c][3] = pack(s[m][2 * c + 1][2], s[m][2 * c + 1][3]);
            }
        }
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < n_steps) load_step(step + 1);
#pragma unroll
        for (int c = 0; c < KEYS / 16; ++c)
#pragma unroll
            for (int j = 0; j < DIM / 8; j += 2) {
                u32 b[4];
                load_b_columns(b, tile_v, c * 16, j * 8);
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    mma(o[m][j], p[m][c], b);
                    mma(o[m][j + 1], p[m][c], b + 2);
                }
            }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = quad_sum(sum[m][h]), inv = 1.0f / total;
            int row = warp * 32 + m * 16 + lane / 4 + h * 8;
            if (row >= n_rows) continue;
            size_t token = start + piece.first + row;
            if (lane % 4 == 0) lse[token * query + head] = log_sum(top[m][h], total, factor);
            bf16* to = out + (token * query + head) * HEAD_DIM;
#pragma unroll
            for (int j = 0; j < DIM / 8; ++j) {
                int column = j * 8 + lane % 4 * 2;
                if (column < HEAD_DIM)
                    *(u32*)(to + column) = pack(o[m][j][2 * h] * inv, o[m][j][2 * h + 1] * inv);
            }
        }
}
