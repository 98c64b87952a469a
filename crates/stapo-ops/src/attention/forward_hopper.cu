// Packed and paged attention with Hopper's matrix instruction; HEAD_DIM is 64 or 128. Both kernels take the same steps of
// 64 keys by absolute position with the same instructions, in which a row of the result depends on its own row alone: so
// both give the same bits, whatever rows are beside it.

// Turns 64 scores of each row into weights relative to the largest so far; `scale` is what earlier sums shrink by.
__device__ __forceinline__ void online_softmax_step(float (&s)[KEYS / 8][4], float (&top)[2], float (&sum)[2], float (&scale)[2],
                                      float factor) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float now = top[h], parts[4];
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j) now = fmaxf(now, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
        now = quad_max(now);
        scale[h] = exp2_fast((top[h] - now) * factor);
        top[h] = now;
        float shift = now * factor;
#pragma unroll
        for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
            for (int i = 2 * h; i < 2 * h + 2; ++i) s[j][i] = exp2_fast(fmaf(s[j][i], factor, -shift));
#pragma unroll
        for (int w = 0; w < 4; ++w)
            parts[w] = sum_of_four(s[2 * w][2 * h], s[2 * w][2 * h + 1], s[2 * w + 1][2 * h], s[2 * w + 1][2 * h + 1]);
        sum[h] = fmaf(sum[h], scale[h], sum_of_four(parts[0], parts[1], parts[2], parts[3]));
    }
}

__device__ __forceinline__ void rescale(float (&o)[DIM / 8][4], const float (&scale)[2]) {
#pragma unroll
    for (int j = 0; j < DIM / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) o[j][i] *= scale[i / 2];
}

#define ROWS 128
#define THREADS 256

// Grid: (query heads, pieces of 128 tokens); four warps have 64 queries. Shared: queries [128], keys and values [2][64].
KERNEL __launch_bounds__(THREADS, 2)
attention_forward_hopper_bf16(const bf16* qkv, const u32* offsets, bf16* out, float* lse, int sequences, int query,
                              int kv) {
    bf16 *queries = aligned_memory(), *keys = queries + ROWS * DIM, *values = keys + 2 * KEYS * DIM;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, 1, ROWS, blockIdx.y, &piece)) return;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int head = blockIdx.x, kv_head = head / (query / kv), lane = threadIdx.x % 32;
    int group = threadIdx.x / 128, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const bf16* q = qkv + (start + piece.first) * width + head * HEAD_DIM;
    const bf16* k = qkv + start * width + (query + kv_head) * HEAD_DIM;
    const bf16* v = k + kv * HEAD_DIM;
    int n_rows = min(ROWS, piece.rows - piece.first), n_keys = piece.first + n_rows;
    int n_steps = (n_keys + KEYS - 1) / KEYS;
    auto load_step = [&](int step) {
        int first = step * KEYS, n = min(KEYS, n_keys - first), at = step % 2 * KEYS * DIM;
        load_swizzled<KEYS, THREADS>(keys + at, n, Strided{k + (size_t)first * width, width});
        cp_async_commit();
        load_swizzled<KEYS, THREADS>(values + at, n, Strided{v + (size_t)first * width, width});
        cp_async_commit();
    };
    load_swizzled<ROWS, THREADS>(queries, n_rows, Strided{q, width});
    load_step(0);

    float o[DIM / 8][4], top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};
    float factor = rsqrtf((float)HEAD_DIM) * LOG2_E;
    clear(o);
    for (int step = 0; step < n_steps; ++step) {
        const bf16 *tile_k = keys + step % 2 * KEYS * DIM, *tile_v = values + step % 2 * KEYS * DIM;
        cp_async_wait<1>();
        fence_async_proxy_shared();
        __syncthreads();
        float s[KEYS / 8][4], scale[2];
        u32 p[KEYS / 16][4];
        // Keys that none of this group's queries sees change nothing.
        bool is_seen = step * KEYS <= piece.first + group * 64 + 63;
        if (is_seen) {
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < DIM; c += 16)
                multiply_rows(s, k_major_operand<ROWS>(queries, group * 64, c), k_major_operand<KEYS>(tile_k, 0, c), c > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_registers(s);
            if (step * KEYS + KEYS > piece.first + group * 64) {
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (step * KEYS + j * 8 + lane % 4 * 2 + i % 2 > piece.first + row + i / 2 * 8)
                            s[j][i] = MINUS_INFINITY;
            }
            online_softmax_step(s, top, sum, scale, factor);
            pack_operands(p, s);
            rescale(o, scale);
        }
        cp_async_wait<0>();
        fence_async_proxy_shared();
        __syncthreads();
        if (step + 1 < n_steps) load_step(step + 1);
        if (is_seen) {
            fence_registers(o);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < KEYS / 16; ++c) multiply_columns(o, p[c], mn_major_operand<KEYS>(tile_v, c * 16), true);
            wgmma_commit();
            wgmma_wait<0>();
            fence_registers(o);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float total = quad_sum(sum[h]);
        if (row + h * 8 >= n_rows) continue;
        size_t token = start + piece.first + row + h * 8;
        if (lane % 4 == 0) lse[token * query + head] = log_sum(top[h], total, factor);
        store_row(out + (token * query + head) * HEAD_DIM, o, h, 1.0f / total);
    }
}

// Entries of a sequence's table that are kept at hand.
#define TABLE 512
#define PAGED_ROWS 64
#define PAGED_THREADS 128

// Grid: (kv heads, pieces of 64 rows); a row is a token and one of its group's query heads. Cache: keys and values
// [blocks, kv heads, block_size, HEAD_DIM]. Shared: queries, keys, values [64]; the next copy starts when the last reader
// is done.
KERNEL __launch_bounds__(PAGED_THREADS)
attention_paged_hopper_bf16(const bf16* qkv, const bf16* keys, const bf16* values, const u32* offsets,
                            const u32* contexts, const u32* tables, bf16* out, int sequences, int table_width,
                            int query, int kv, int block_shift) {
    bf16 *queries = aligned_memory(), *tile_k = queries + PAGED_ROWS * DIM, *tile_v = tile_k + KEYS * DIM;
    __shared__ u32 near_blocks[TABLE];
    int heads = query / kv, kv_head = blockIdx.x, lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, heads, PAGED_ROWS, blockIdx.y, &piece)) return;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int position = (int)contexts[piece.sequence] - piece.rows / heads;
    const u32* table = tables + (size_t)piece.sequence * table_width;
    int n_rows = min(PAGED_ROWS, piece.rows - piece.first);
    int n_keys = position + (piece.first + n_rows - 1) / heads + 1, n_steps = (n_keys + KEYS - 1) / KEYS;
    int n_blocks = ((n_keys - 1) >> block_shift) + 1;
    bool is_near = n_blocks <= TABLE;
    const u32* blocks = is_near ? near_blocks : table;
    for (int i = threadIdx.x; is_near && i < n_blocks; i += PAGED_THREADS) near_blocks[i] = table[i];
    __syncthreads();
    // Starts the copy of a step's keys or values; past the last step, of nothing.
    auto load_step = [&](int step, bf16* tile, const bf16* from) {
        int first = step * KEYS, n = min(KEYS, n_keys - first);
        if (n > 0) load_swizzled<KEYS, PAGED_THREADS>(tile, n, Pages{from, blocks, first, block_shift, kv, kv_head});
        cp_async_commit();
    };
    load_swizzled<PAGED_ROWS, PAGED_THREADS>(queries, n_rows, [&](int r) {
        int at = piece.first + r;
        return qkv + (start + at / heads) * width + (kv_head * heads + at % heads) * HEAD_DIM;
    });
    load_step(0, tile_k, keys);
    load_step(0, tile_v, values);

    float o[DIM / 8][4], top[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {0.0f, 0.0f};
    float factor = rsqrtf((float)HEAD_DIM) * LOG2_E;
    int last_key[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) last_key[h] = position + (piece.first + row + h * 8) / heads;
    clear(o);
    for (int step = 0; step < n_steps; ++step) {
        cp_async_wait<1>();
        fence_async_proxy_shared();
        __syncthreads();
        float s[KEYS / 8][4], scale[2];
        u32 p[KEYS / 16][4];
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < DIM; c += 16)
            multiply_rows(s, k_major_operand<PAGED_ROWS>(queries, 0, c), k_major_operand<KEYS>(tile_k, 0, c), c > 0);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(s);
        __syncthreads();
        load_step(step + 1, tile_k, keys);
        if (step * KEYS + KEYS > n_keys - (n_rows - 1) / heads - 1) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (step * KEYS + j * 8 + lane % 4 * 2 + i % 2 > last_key[i / 2]) s[j][i] = MINUS_INFINITY;
        }
        online_softmax_step(s, top, sum, scale, factor);
        pack_operands(p, s);
        rescale(o, scale);
        cp_async_wait<1>();
        fence_async_proxy_shared();
        __syncthreads();
        fence_registers(o);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < KEYS / 16; ++c) multiply_columns(o, p[c], mn_major_operand<KEYS>(tile_v, c * 16), true);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(o);
        __syncthreads();
        load_step(step + 1, tile_v, values);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float total = quad_sum(sum[h]);
        if (row + h * 8 >= n_rows) continue;
        int at = piece.first + row + h * 8;
        store_row(out + ((start + at / heads) * query + kv_head * heads + at % heads) * HEAD_DIM, o, h, 1.0f / total);
    }
}
