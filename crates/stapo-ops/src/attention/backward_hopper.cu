// Packed sequences, backward, as in backward.cu but with Hopper's matrix instruction; HEAD_DIM is 64 or 128. Two groups of
// four warps, each with 64 rows of the block's 128; steps of 64.

#define ROWS 128
#define STEP 64
#define THREADS 256

// Grid: (query heads, pieces of 128 tokens). Shared: queries and d_out [128], keys and values [2][64].
KERNEL __launch_bounds__(THREADS, 1)
attention_backward_queries_hopper_bf16(const bf16* qkv, const bf16* d_out, const u32* offsets, const float* lse,
                                       const float* pull, bf16* d_qkv, int sequences, int query, int kv) {
    bf16 *tile_q = aligned_memory(), *tile_d = tile_q + ROWS * DIM, *keys = tile_d + ROWS * DIM;
    bf16* values = keys + 2 * STEP * DIM;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, 1, ROWS, blockIdx.y, &piece)) return;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int head = blockIdx.x, kv_head = head / (query / kv), lane = threadIdx.x % 32;
    int group = threadIdx.x / 128, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    size_t first = start + piece.first;
    const bf16* k = qkv + start * width + (query + kv_head) * HEAD_DIM;
    const bf16* v = k + kv * HEAD_DIM;
    int n_rows = min(ROWS, piece.rows - piece.first), n_keys = piece.first + n_rows;
    int n_steps = (n_keys + STEP - 1) / STEP;
    auto load_step = [&](int step) {
        int from = step * STEP, n = min(STEP, n_keys - from), at = step % 2 * STEP * DIM;
        load_swizzled<STEP, THREADS>(keys + at, n, Strided{k + (size_t)from * width, width});
        load_swizzled<STEP, THREADS>(values + at, n, Strided{v + (size_t)from * width, width});
        cp_async_commit();
    };
    load_swizzled<ROWS, THREADS>(tile_q, n_rows, Strided{qkv + first * width + head * HEAD_DIM, width});
    load_swizzled<ROWS, THREADS>(tile_d, n_rows, Strided{d_out + (first * query + head) * HEAD_DIM, (size_t)query * HEAD_DIM});
    load_step(0);

    float scale = rsqrtf((float)HEAD_DIM), factor = scale * LOG2_E, shift[2], drag[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        size_t at = (first + row + h * 8) * query + head;
        bool is_there = row + h * 8 < n_rows;
        shift[h] = is_there ? lse[at] * LOG2_E : 0.0f;
        drag[h] = is_there ? pull[at] : 0.0f;
    }
    float d_q[DIM / 8][4];
    clear(d_q);
    for (int step = 0; step < n_steps; ++step) {
        const bf16 *tile_k = keys + step % 2 * STEP * DIM, *tile_v = values + step % 2 * STEP * DIM;
        cp_async_wait<0>();
        fence_async_proxy_shared();
        __syncthreads();
        if (step + 1 < n_steps) load_step(step + 1);
        int top_row = piece.first + group * 64;
        // Keys that none of this group's queries sees.
        if (step * STEP > top_row + 63) continue;
        float s[STEP / 8][4], d[STEP / 8][4];
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < DIM; c += 16)
            multiply_rows(s, k_major_operand<ROWS>(tile_q, group * 64, c), k_major_operand<STEP>(tile_k, 0, c), c > 0);
        wgmma_commit();
#pragma unroll
        for (int c = 0; c < DIM; c += 16)
            multiply_rows(d, k_major_operand<ROWS>(tile_d, group * 64, c), k_major_operand<STEP>(tile_v, 0, c), c > 0);
        wgmma_commit();
        wgmma_wait<1>();
        fence_registers(s);
        bool hides = step * STEP + STEP > top_row;
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int key = step * STEP + j * 8 + lane % 4 * 2 + i % 2;
                float p = exp2_fast(fmaf(s[j][i], factor, -shift[i / 2]));
                s[j][i] = hides && key > piece.first + row + i / 2 * 8 ? 0.0f : p;
            }
        wgmma_wait<0>();
        fence_registers(d);
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) d[j][i] = s[j][i] * (d[j][i] - drag[i / 2]);
        u32 a[STEP / 16][4];
        pack_operands(a, d);
        fence_registers(d_q);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c) multiply_columns(d_q, a[c], mn_major_operand<STEP>(tile_k, c * 16), true);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(d_q);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (row + h * 8 < n_rows)
            store_row(d_qkv + (first + row + h * 8) * width + head * HEAD_DIM, d_q, h, scale);
}

// Grid: (kv heads, pieces of 128 tokens). Queries come head by head, in order.
// Shared: keys and values [128], queries and d_out [2][64], their lse and pull [2][64].
KERNEL __launch_bounds__(THREADS, 1)
attention_backward_keys_hopper_bf16(const bf16* qkv, const bf16* d_out, const u32* offsets, const float* lse,
                                    const float* pull, bf16* d_qkv, int sequences, int query, int kv) {
    bf16 *tile_k = aligned_memory(), *tile_v = tile_k + ROWS * DIM, *queries = tile_v + ROWS * DIM;
    bf16* d_outs = queries + 2 * STEP * DIM;
    float *shifts = (float*)(d_outs + 2 * STEP * DIM), *drags = shifts + 2 * STEP;
    WorkTile piece;
    if (!find_work_tile(offsets, sequences, 1, ROWS, blockIdx.y, &piece)) return;
    // The first keys are seen by most queries: they go first.
    piece.first = (piece.rows - 1) / ROWS * ROWS - piece.first;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, start = offsets[piece.sequence];
    int kv_head = blockIdx.x, heads = query / kv, lane = threadIdx.x % 32;
    int group = threadIdx.x / 128, row = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    size_t first = start + piece.first;
    int n_rows = min(ROWS, piece.rows - piece.first);
    int n_tiles = (piece.rows - piece.first + STEP - 1) / STEP, n_steps = n_tiles * heads;
    auto load_step = [&](int step) {
        int head = kv_head * heads + step / n_tiles, from = piece.first + step % n_tiles * STEP;
        int n = min(STEP, piece.rows - from), at = step % 2 * STEP;
        const bf16* q = qkv + (start + from) * width + head * HEAD_DIM;
        const bf16* d = d_out + ((start + from) * query + head) * HEAD_DIM;
        load_swizzled<STEP, THREADS>(queries + at * DIM, n, Strided{q, width});
        load_swizzled<STEP, THREADS>(d_outs + at * DIM, n, Strided{d, (size_t)query * HEAD_DIM});
        if (threadIdx.x < STEP) {
            int r = threadIdx.x;
            size_t place = (start + from + r) * query + head;
            // A query that is not there gives weight 0.
            shifts[at + r] = r < n ? lse[place] * LOG2_E : __int_as_float(0x7f800000);
            drags[at + r] = r < n ? pull[place] : 0.0f;
        }
        cp_async_commit();
    };
    const bf16* k = qkv + first * width + (query + kv_head) * HEAD_DIM;
    load_swizzled<ROWS, THREADS>(tile_k, n_rows, Strided{k, width});
    load_swizzled<ROWS, THREADS>(tile_v, n_rows, Strided{k + kv * HEAD_DIM, width});
    load_step(0);

    float scale = rsqrtf((float)HEAD_DIM), factor = scale * LOG2_E;
    float d_k[DIM / 8][4], d_v[DIM / 8][4];
    clear(d_k);
    clear(d_v);
    for (int step = 0; step < n_steps; ++step) {
        int at = step % 2 * STEP, from = piece.first + step % n_tiles * STEP;
        const bf16 *tile_q = queries + at * DIM, *tile_d = d_outs + at * DIM;
        cp_async_wait<0>();
        fence_async_proxy_shared();
        __syncthreads();
        if (step + 1 < n_steps) load_step(step + 1);
        int key = piece.first + group * 64;
        // Queries that see none of this group's keys.
        if (from + STEP <= key) continue;
        float s[STEP / 8][4], d[STEP / 8][4];
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < DIM; c += 16)
            multiply_rows(s, k_major_operand<ROWS>(tile_k, group * 64, c), k_major_operand<STEP>(tile_q, 0, c), c > 0);
        wgmma_commit();
#pragma unroll
        for (int c = 0; c < DIM; c += 16)
            multiply_rows(d, k_major_operand<ROWS>(tile_v, group * 64, c), k_major_operand<STEP>(tile_d, 0, c), c > 0);
        wgmma_commit();
        wgmma_wait<1>();
        fence_registers(s);
        bool hides = from < key + 64;
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j) {
            float2 shift = *(const float2*)(shifts + at + j * 8 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int column = from + j * 8 + lane % 4 * 2 + i % 2;
                float p = exp2_fast(fmaf(s[j][i], factor, i % 2 ? -shift.y : -shift.x));
                s[j][i] = hides && piece.first + row + i / 2 * 8 > column ? 0.0f : p;
            }
        }
        u32 a[STEP / 16][4], e[STEP / 16][4];
        pack_operands(a, s);
        fence_registers(d_v);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c) multiply_columns(d_v, a[c], mn_major_operand<STEP>(tile_d, c * 16), true);
        wgmma_commit();
        wgmma_wait<1>();
        fence_registers(d);
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j) {
            float2 drag = *(const float2*)(drags + at + j * 8 + lane % 4 * 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) d[j][i] = s[j][i] * (d[j][i] - (i % 2 ? drag.y : drag.x));
        }
        pack_operands(e, d);
        fence_registers(d_k);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c) multiply_columns(d_k, e[c], mn_major_operand<STEP>(tile_q, c * 16), true);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(d_v);
        fence_registers(d_k);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row + h * 8 >= n_rows) continue;
        bf16* to = d_qkv + (first + row + h * 8) * width + (query + kv_head) * HEAD_DIM;
        store_row(to, d_k, h, scale);
        store_row(to + kv * HEAD_DIM, d_v, h, 1.0f);
    }
}
