// Decode: one token of each sequence over a paged cache, with Hopper's matrix instruction; HEAD_DIM is 64 or 128. Steps of
// 64 keys by absolute position as in forward_hopper.cu, the products turned round (keys and columns of values are the 64
// rows of the instruction, queries its 16 columns), each element the same chain: the same bits, with a quarter of the
// work. Sequences that begin with the same blocks are taken together: those are read once.

#define THREADS 128
#define QUERIES 16

// d (+)= a b: a by rows of shared memory (TURNED: by columns), b by rows (its transpose is multiplied).
template <int TURNED> __device__ __forceinline__ void multiply_few(float (&d)[2][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
        : "l"(a), "l"(b), "r"((int)adds), "n"(TURNED));
}

// 64 keys of one member of a group.
struct Step {
    int member, tile;
};

// Grid: (kv heads, groups). groups [n, 3]: first sequence, how many, and how many steps of 64 keys they have in common.
// First stores the tokens' keys and values. Cache: keys and values
// [blocks, kv heads, 2^shift, HEAD_DIM]. Shared: queries [16], keys, values [64], weights [16, 64].
KERNEL __launch_bounds__(THREADS, 5)
attention_decode_hopper_bf16(const bf16* qkv, const u32* slots, bf16* keys, bf16* values, const u32* contexts,
                             const u32* tables, const u32* groups, bf16* out, int table_width, int query, int kv,
                             int shift) {
    bf16 *queries = aligned_memory(), *tile_k = queries + QUERIES * DIM, *tile_v = tile_k + KEYS * DIM;
    bf16* weights = tile_v + KEYS * DIM;
    __shared__ float scores[QUERIES][KEYS + 8], scales[QUERIES];
    __shared__ int n_keys_of[QUERIES];
    int heads = query / kv, kv_head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first = groups[3 * blockIdx.y], count = groups[3 * blockIdx.y + 1], common = groups[3 * blockIdx.y + 2];
    int mask = (1 << shift) - 1;
    if (count == 0) return;
    int n_rows = count * heads;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM;

    for (int i = threadIdx.x; i < count * 2 * (HEAD_DIM / 8); i += THREADS) {
        int member = i / (2 * (HEAD_DIM / 8)), is_value = i / (HEAD_DIM / 8) % 2, column = i % (HEAD_DIM / 8) * 8;
        u32 slot = slots[first + member];
        size_t row = (((size_t)(slot >> shift) * kv + kv_head) << shift) + (slot & mask);
        const bf16* from = qkv + (first + member) * width + (query + is_value * kv + kv_head) * HEAD_DIM;
        *(uint4*)((is_value ? values : keys) + row * HEAD_DIM + column) = *(const uint4*)(from + column);
    }
    if (threadIdx.x < count) n_keys_of[threadIdx.x] = contexts[first + threadIdx.x];
    load_swizzled<QUERIES, THREADS>(queries, n_rows, [&](int r) {
        return qkv + (first + r / heads) * width + (kv_head * heads + r % heads) * HEAD_DIM;
    });
    __syncthreads();

    auto next_of = [&](Step s) {
        ++s.tile;
        while (s.member < count && s.tile * KEYS >= n_keys_of[s.member]) ++s.member, s.tile = common;
        return s;
    };
    // The blocks that hold a step's keys: at most four.
    auto look_up = [&](Step s, u32 (&blocks)[4]) {
        if (s.member >= count) return;
        const u32* table = tables + (size_t)(first + s.member) * table_width + (s.tile * KEYS >> shift);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (s.tile * KEYS + (e << shift) < n_keys_of[s.member] && (e == 0 || e << shift < KEYS)) blocks[e] = table[e];
    };
    auto load_step = [&](Step s, const u32 (&blocks)[4], bf16* tile, const bf16* from) {
        if (s.member < count) {
            int base = s.tile * KEYS & mask;
            load_swizzled<KEYS, THREADS>(tile, n_keys_of[s.member] - s.tile * KEYS, [&](int r) {
                int at = base + r, e = at >> shift;
                u32 block = e == 0 ? blocks[0] : e == 1 ? blocks[1] : e == 2 ? blocks[2] : blocks[3];
                return from + ((((size_t)block * kv + kv_head) << shift) + (at & mask)) * HEAD_DIM;
            });
        }
        commit();
    };
    Step now = {0, 0}, next = next_of(now);
    u32 blocks[4] = {};
    look_up(now, blocks);
    load_step(now, blocks, tile_k, keys);
    load_step(now, blocks, tile_v, values);
    look_up(next, blocks);

    // Of the row that this lane of the first two warps weighs.
    int row = warp * 8 + lane / 4;
    float top = MINUS_INFINITY, sum = 0.0f, factor = rsqrtf((float)HEAD_DIM) * LOG2_E;
    float o[PARTS][2][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) clear(o[part]);
    while (now.member < count) {
        wait<1>();
        publish();
        __syncthreads();
        float s[2][4];
        group_begin();
#pragma unroll
        for (int c = 0; c < DIM; c += 16)
            multiply_few<0>(s, by_rows<KEYS>(tile_k, 0, c), by_rows<QUERIES>(queries, 0, c), c > 0);
        group_end();
        group_wait<0>();
        settle(s);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                scores[n * 8 + lane % 4 * 2 + i % 2][warp * 16 + lane / 4 + i / 2 * 8] = s[n][i];
        __syncthreads();
        load_step(next, blocks, tile_k, keys);
        if (warp < QUERIES / 8) {
            // As weigh in forward_hopper.cu, of one row; those that do not see these keys stay as they are.
            bool sees = row < n_rows && (now.tile < common || row / heads == now.member);
            int n_keys = n_keys_of[now.member] - now.tile * KEYS;
            float p[KEYS / 8][2], scale = 1.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int key = j * 8 + lane % 4 * 2 + i;
                    p[j][i] = key < n_keys ? scores[row][key] : MINUS_INFINITY;
                }
            float larger = top;
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j) larger = fmaxf(larger, fmaxf(p[j][0], p[j][1]));
            larger = quad_max(larger);
            if (sees) {
                scale = exp2_fast((top - larger) * factor);
                top = larger;
                float shift_by = larger * factor, parts[4];
#pragma unroll
                for (int j = 0; j < KEYS / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 2; ++i) p[j][i] = exp2_fast(fmaf(p[j][i], factor, -shift_by));
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    parts[w] = sum_of_four(p[2 * w][0], p[2 * w][1], p[2 * w + 1][0], p[2 * w + 1][1]);
                sum = fmaf(sum, scale, sum_of_four(parts[0], parts[1], parts[2], parts[3]));
            }
#pragma unroll
            for (int j = 0; j < KEYS / 8; ++j)
                *(u32*)(weights + row * 64 + (j ^ row % 8) * 8 + lane % 4 * 2) = sees ? pack(p[j][0], p[j][1]) : 0;
            if (lane % 4 == 0) scales[row] = scale;
        }
        wait<1>();
        publish();
        __syncthreads();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) o[part][n][i] *= scales[n * 8 + lane % 4 * 2 + i % 2];
            settle(o[part]);
        }
        group_begin();
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int c = 0; c < KEYS; c += 16)
                multiply_few<1>(o[part], by_columns<KEYS>(tile_v + part * KEYS * 64, c), by_rows<QUERIES>(weights, 0, c), true);
        group_end();
        group_wait<0>();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) settle(o[part]);
        __syncthreads();
        load_step(next, blocks, tile_v, values);
        now = next, next = next_of(next);
        look_up(next, blocks);
    }
    if (warp < QUERIES / 8) {
        float total = quad_sum(sum);
        if (lane % 4 == 0) scales[row] = 1.0f / total;
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int r = n * 8 + lane % 4 * 2 + i % 2, column = part * 64 + warp * 16 + lane / 4 + i / 2 * 8;
                if (r < n_rows)
                    out[((size_t)(first + r / heads) * query + kv_head * heads + r % heads) * HEAD_DIM + column] =
                        narrow<bf16>(o[part][n][i] * scales[r]);
            }
}
