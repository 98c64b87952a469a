// Attention over a paged cache: decode and chunked prefill, the same bits as forward.cu.
// Cache: keys and values [blocks, kv heads, block_size, HEAD_DIM].

#define THREADS 128
#define ROWS 16
// Entries of a sequence's table that are kept at hand.
#define TABLE 512

// Grid: tokens. Writes the keys and values of this call's tokens.
KERNEL attention_store_bf16(const bf16* qkv, const u32* slots, bf16* keys, bf16* values, int query, int kv,
                            int block_size, u32 n_slots) {
    u32 slot = slots[blockIdx.x];
    if (slot >= n_slots) __trap();
    const bf16* row = qkv + ((size_t)blockIdx.x * (query + 2 * kv) + query) * HEAD_DIM;
    for (int i = threadIdx.x; i < kv * HEAD_DIM; i += blockDim.x) {
        int head = i / HEAD_DIM, column = i % HEAD_DIM;
        size_t at = (((size_t)(slot / block_size) * kv + head) * block_size + slot % block_size) * HEAD_DIM + column;
        keys[at] = row[i];
        values[at] = row[kv * HEAD_DIM + i];
    }
}

// Grid: (kv heads, pieces of 16 rows); a row is a token and one of its group's query heads. The four warps share each
// step: warp w scores keys 16w.. and then weighs its columns of the values, so every sum keeps the order of forward.cu.
KERNEL __launch_bounds__(THREADS)
attention_paged_bf16(const bf16* qkv, const bf16* keys, const bf16* values, const u32* offsets, const u32* contexts,
                     const u32* tables, bf16* out, int sequences, int table_width, int query, int kv, int block_shift) {
    extern __shared__ uint4 memory[];
    bf16 *queries = (bf16*)memory, *tile_k = queries + ROWS * STRIDE, *tile_v = tile_k + KEYS * STRIDE;
    __shared__ u32 near_blocks[TABLE];
    __shared__ float tops[4][ROWS], parts[4][ROWS][4];
    __shared__ alignas(16) bf16 weights[ROWS * (KEYS + 8)];
    int group = query / kv, kv_head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, group, ROWS, blockIdx.y, &piece)) return;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int context = contexts[piece.sequence], position = context - piece.rows / group;
    const u32* table = tables + (size_t)piece.sequence * table_width;
    int n_rows = min(ROWS, piece.rows - piece.first);
    int n_keys = position + (piece.first + n_rows - 1) / group + 1, n_steps = (n_keys + KEYS - 1) / KEYS;

    int n_blocks = ((n_keys - 1) >> block_shift) + 1;
    bool is_near = n_blocks <= TABLE;
    const u32* blocks = is_near ? near_blocks : table;
    for (int i = threadIdx.x; is_near && i < n_blocks; i += THREADS) near_blocks[i] = table[i];
    __syncthreads();
    // Starts the copy of a step's keys or values; past the last step, of nothing.
    auto load_step = [&](int step, bf16* tile, const bf16* from) {
        int first = step * KEYS, n = min(KEYS, n_keys - first);
        if (n > 0) load_rows<KEYS, THREADS>(tile, n, Pages{from, blocks, first, block_shift, kv, kv_head});
        cp_async_commit();
    };
    load_rows<ROWS, THREADS>(queries, n_rows, [&](int r) {
        int row = piece.first + r;
        return qkv + (start + row / group) * width + (kv_head * group + row % group) * HEAD_DIM;
    });
    load_step(0, tile_k, keys);
    load_step(0, tile_v, values);

    constexpr int PAIRS = (DIM / 16 + 3) / 4;
    float o[PAIRS][2][4], top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};
    float factor = rsqrtf((float)HEAD_DIM) * LOG2_E;
#pragma unroll
    for (int j = 0; j < PAIRS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[j][0][i] = o[j][1][i] = 0.0f;
    for (int step = 0; step < n_steps; ++step) {
        cp_async_wait<1>();
        __syncthreads();
        float s[2][4] = {};
#pragma unroll
        for (int c = 0; c < DIM; c += 16) {
            u32 a[4], b[4];
            load_a(a, queries, STRIDE, 0, c);
            load_b_rows(b, tile_k, warp * 16, c);
            mma(s[0], a, b);
            mma(s[1], a, b + 2);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int row = position + (piece.first + lane / 4 + i / 2 * 8) / group;
                int key = step * KEYS + warp * 16 + j * 8 + lane % 4 * 2 + i % 2;
                if (key > row) s[j][i] = MINUS_INFINITY;
            }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float now = quad_max(fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1])));
            if (lane % 4 == 0) tops[warp][lane / 4 + h * 8] = now;
        }
        __syncthreads();
        load_step(step + 1, tile_k, keys);
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int row = lane / 4 + h * 8;
            float now = fmaxf(top[h], fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row])));
            scale[h] = exp2_fast((top[h] - now) * factor);
            top[h] = now;
            float shift = now * factor;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
#pragma unroll
                for (int i = 2 * h; i < 2 * h + 2; ++i) s[j][i] = exp2_fast(fmaf(s[j][i], factor, -shift));
                *(u32*)(weights + row * (KEYS + 8) + warp * 16 + j * 8 + lane % 4 * 2) =
                    pack(s[j][2 * h], s[j][2 * h + 1]);
            }
            parts[warp][row][lane % 4] =
                sum_of_four(s[0][2 * h], s[0][2 * h + 1], s[1][2 * h], s[1][2 * h + 1]);
        }
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int row = lane / 4 + h * 8, part = lane % 4;
            sum[h] = fmaf(sum[h], scale[h],
                          sum_of_four(parts[0][row][part], parts[1][row][part], parts[2][row][part], parts[3][row][part]));
        }
#pragma unroll
        for (int j = 0; j < PAIRS; ++j) {
            int column = (warp + 4 * j) * 16;
            if (column >= DIM) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) o[j][0][i] *= scale[i / 2], o[j][1][i] *= scale[i / 2];
#pragma unroll
            for (int c = 0; c < KEYS; c += 16) {
                u32 a[4], b[4];
                load_a(a, weights, KEYS + 8, 0, c);
                load_b_columns(b, tile_v, c, column);
                mma(o[j][0], a, b);
                mma(o[j][1], a, b + 2);
            }
        }
        __syncthreads();
        load_step(step + 1, tile_v, values);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float inv = 1.0f / quad_sum(sum[h]);
        int row = piece.first + lane / 4 + h * 8;
        if (lane / 4 + h * 8 >= n_rows) continue;
        bf16* to = out + ((start + row / group) * query + kv_head * group + row % group) * HEAD_DIM;
#pragma unroll
        for (int j = 0; j < PAIRS; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                int column = (warp + 4 * j) * 16 + e * 8 + lane % 4 * 2;
                if (column < HEAD_DIM) *(u32*)(to + column) = pack(o[j][e][2 * h] * inv, o[j][e][2 * h + 1] * inv);
            }
    }
}
