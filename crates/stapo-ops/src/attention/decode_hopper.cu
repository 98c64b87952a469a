// Decode: one token of each sequence over a paged cache, with Hopper's matrix instruction; HEAD_DIM is 64 or 128. Steps of
// 64 keys by absolute position as in forward_hopper.cu, the products turned round (keys and columns of values are the 64
// rows of the instruction, queries its 8 columns), each element the same chain: the same bits, with an eighth of the
// work. Sequences that begin with the same blocks are taken together: those are read once.

#define CONSUMERS 128
#define THREADS (CONSUMERS + 32)
#define QUERIES 8
#define TILE (KEYS * DIM)

// Barriers of the block: among those who multiply, and from them to the one who fetches.
__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
template <int ID> __device__ __forceinline__ void named_barrier_arrive() { asm volatile("bar.arrive %0, 160;" ::"n"(ID) : "memory"); }
template <int ID> __device__ __forceinline__ void named_barrier_wait() { asm volatile("bar.sync %0, 160;" ::"n"(ID) : "memory"); }
#define COUNTED 2
#define STORED 3

// d (+)= a b: a by rows of shared memory (TURNED: by columns), b by rows (its transpose is multiplied).
template <int TURNED> __device__ __forceinline__ void multiply_few(float (&d)[1][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, 0; }"
        : FOUR(d, 0)
        : "l"(a), "l"(b), "r"((int)adds), "n"(TURNED));
}

// 64 keys of one member of a group.
struct Step {
    int member, tile;
};

// Grid: (kv heads, groups). groups [n, 3]: first sequence, how many, and how many steps of 64 keys they have in common.
// Where there are positions, `raw` is what the product gave: queries and keys are normed (if there are weights) and turned
// here as rope.cu does it. The tokens' keys and values are stored. Cache: keys and values [blocks, kv heads, 2^shift,
// HEAD_DIM], in the maps by rows of one head. Shared: three tiles of 64 keys or values, queries [8], weights [8, 64].
KERNEL __launch_bounds__(THREADS, 4)
attention_decode_hopper_bf16(const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v, bf16* keys, bf16* values,
                             const bf16* raw, const u32* positions, const float* cos, const float* sin,
                             const bf16* q_norm, const bf16* k_norm, float eps, const u32* slots, const u32* contexts,
                             const u32* tables, const u32* groups, bf16* out, int table_width, int query, int kv,
                             int shift) {
    bf16 *tiles = aligned_memory(), *queries = tiles + 3 * TILE, *weights = queries + QUERIES * DIM;
    __shared__ float scores[QUERIES][KEYS + 8], scales[QUERIES];
    __shared__ int n_keys_of[QUERIES];
    __shared__ u64 full[3], empty[3];
    launch_dependents();
    int heads = query / kv, kv_head = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first = groups[3 * blockIdx.y], count = groups[3 * blockIdx.y + 1], common = groups[3 * blockIdx.y + 2];
    int mask = (1 << shift) - 1, n_rows = count * heads;
    if (count == 0) return;
    auto next_of = [&](Step s) {
        ++s.tile;
        while (s.member < count && s.tile * KEYS >= n_keys_of[s.member]) ++s.member, s.tile = common;
        return s;
    };

    Step now = {0, 0};
    if (warp == CONSUMERS / 32) {
        // Fetches tiles as soon as there is room: keys, values, keys, .., number n into place n % 3.
        int at_once = min(KEYS, 1 << shift);
        u32 blocks[4] = {};
        auto look_up = [&](Step s) {
            int at = s.tile * KEYS >> shift;
            const u32* table = tables + (size_t)(first + s.member) * table_width;
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (s.member < count && at + e < table_width && (e == 0 || e << shift < KEYS)) blocks[e] = table[at + e];
        };
        auto load = [&](int n, Step s) {
            if (n >= 3) mbarrier_wait(empty + n % 3, (n / 3 - 1) % 2);
            if (lane > 0) return;
            int n_blocks = min(KEYS / at_once, (n_keys_of[s.member] - s.tile * KEYS + at_once - 1) / at_once);
            mbarrier_arrive_expect_bytes(full + n % 3, n_blocks * at_once * HEAD_DIM * 2);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (e < n_blocks)
#pragma unroll
                    for (int part = 0; part < PARTS; ++part)
                        tma_load_tile(tiles + n % 3 * TILE + part * KEYS * 64 + e * at_once * 64, n % 2 ? map_v : map_k, part * 64,
                                  ((blocks[e] * kv + kv_head) << shift) + (s.tile * KEYS & mask), full + n % 3);
        };
        look_up(now);
        named_barrier_wait<COUNTED>();
        bool are_stored = false;
        for (int n = 0; now.member < count; n += 2) {
            // Older keys wait neither for this token's nor for the kernel before this one.
            bool is_new = (now.tile + 1) * KEYS >= n_keys_of[now.member];
            if (is_new && !are_stored) named_barrier_wait<STORED>(), are_stored = true;
            load(n, now);
            load(n + 1, now);
            __syncwarp();
            now = next_of(now);
            look_up(now);
        }
        return;
    }
    if (threadIdx.x == 0) {
        for (int b = 0; b < 3; ++b) mbarrier_init(full + b, 1), mbarrier_init(empty + b, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    if (threadIdx.x < count) n_keys_of[threadIdx.x] = contexts[first + threadIdx.x];
    named_barrier_arrive<COUNTED>();
    if (threadIdx.x < QUERIES * KEYS / 8) *(uint4*)(weights + threadIdx.x * 8) = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < QUERIES) scales[threadIdx.x] = 1.0f;
    for (int i = warp; i < count * (heads + 2); i += CONSUMERS / 32) {
        constexpr int half = HEAD_DIM / 2;
        int member = i / (heads + 2), part = i - member * (heads + 2), row = member * heads + part;
        bool is_query = part < heads, is_value = part > heads;
        int head = is_query ? kv_head * heads + part : is_value ? query + kv + kv_head : query + kv_head;
        u32 slot = slots[first + member];
        Rotation rotation = {};
        Head weight = {};
        if (positions && !is_value) {
            size_t place = (size_t)positions[first + member] * half;
            rotation = load_rotation(cos + place, sin + place, half);
        }
        if (q_norm && !is_value) weight = load_head(is_query ? q_norm : k_norm, half);
        wait_for_previous_kernel();
        Head h = load_head(raw + ((size_t)(first + member) * (query + 2 * kv) + head) * HEAD_DIM, half);
        if (positions && !is_value) norm_and_rotate(h, q_norm, weight, eps, rotation);
        if (is_query) {
            auto at = [&](int c) {
                return (u32*)(queries + c / 64 * QUERIES * 64 + row * 64 + (c % 64 / 8 ^ row % 8) * 8 + c % 8);
            };
            int column = lane * 2;
            if (column < half) *at(column) = pack(h.low[0], h.low[1]), *at(column + half) = pack(h.high[0], h.high[1]);
        } else {
            size_t to = (((size_t)(slot >> shift) * kv + kv_head) << shift) + (slot & mask);
            store_head((is_value ? values : keys) + to * HEAD_DIM, half, h);
        }
    }
    fence_async_proxy();
    named_barrier_arrive<STORED>();
    sync_consumers();

    // A warp weighs two rows, 16 lanes each; a lane has four keys of its row.
    int row = warp * 2 + lane / 16, piece = lane % 16 / 4, member = row / heads;
    float top = MINUS_INFINITY, sum = 0.0f, factor = rsqrtf((float)HEAD_DIM) * LOG2_E;
    float o[PARTS][1][4];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) clear(o[part]);
    for (int n = 0; now.member < count; n += 2) {
        int n_keys = n_keys_of[now.member] - now.tile * KEYS;
        const bf16* tile_k = tiles + n % 3 * TILE;
        bf16* tile_v = tiles + (n + 1) % 3 * TILE;
        mbarrier_wait(full + n % 3, n / 3 % 2);
        float s[1][4];
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < DIM; c += 16)
            multiply_few<0>(s, k_major_operand<KEYS>(tile_k, 0, c), k_major_operand<QUERIES>(queries, 0, c), c > 0);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(s);
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[lane % 4 * 2 + i % 2][warp * 16 + lane / 4 + i / 2 * 8] = s[0][i];
        if (lane == 0) mbarrier_arrive(empty + n % 3);
        sync_consumers();
        if (warp * 2 < n_rows) {
            // As weigh in forward_hopper.cu, the same sums by other lanes; rows that do not see these keys stay as they are.
            bool sees = row < n_rows && (now.tile < common || member == now.member);
            float p[4], scale = 1.0f, larger = top;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int key = piece * 16 + lane % 4 * 2 + i / 2 * 8 + i % 2;
                p[i] = key < n_keys ? scores[row][key] : MINUS_INFINITY;
                larger = fmaxf(larger, p[i]);
            }
#pragma unroll
            for (int step = 1; step < 16; step *= 2) larger = fmaxf(larger, __shfl_xor_sync(0xffffffffu, larger, step));
            float shift_by = larger * factor;
#pragma unroll
            for (int i = 0; i < 4; ++i) p[i] = exp2_fast(fmaf(p[i], factor, -shift_by));
            float part = sum_of_four(p[0], p[1], p[2], p[3]);
            part += __shfl_xor_sync(0xffffffffu, part, 4);
            part += __shfl_xor_sync(0xffffffffu, part, 8);
            if (sees) {
                scale = exp2_fast((top - larger) * factor);
                top = larger;
                sum = fmaf(sum, scale, part);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i)
                *(u32*)(weights + row * 64 + (piece * 2 + i ^ row) * 8 + lane % 4 * 2) = sees ? pack(p[2 * i], p[2 * i + 1]) : 0;
            if (lane % 16 == 0) scales[row] = scale;
        }
        mbarrier_wait(full + (n + 1) % 3, (n + 1) / 3 % 2);
        // What lies behind the last key may be anything, and nothing times it must be nothing.
        for (int i = threadIdx.x; i < (KEYS - n_keys) * DIM / 8; i += CONSUMERS)
            *(uint4*)(tile_v + i / 8 % PARTS * KEYS * 64 + (n_keys + i / 8 / PARTS) * 64 + i % 8 * 8) = make_uint4(0, 0, 0, 0);
        fence_async_proxy_shared();
        sync_consumers();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
#pragma unroll
            for (int i = 0; i < 4; ++i) o[part][0][i] *= scales[lane % 4 * 2 + i % 2];
            fence_registers(o[part]);
        }
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
#pragma unroll
            for (int c = 0; c < KEYS; c += 16)
                multiply_few<1>(o[part], mn_major_operand<KEYS>(tile_v + part * KEYS * 64, c), k_major_operand<QUERIES>(weights, 0, c), true);
        wgmma_commit();
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < PARTS; ++part) fence_registers(o[part]);
        if (lane == 0) mbarrier_arrive(empty + (n + 1) % 3);
        now = next_of(now);
    }
    float total = quad_sum(sum);
    sync_consumers();
    if (lane % 16 == 0) scales[row] = 1.0f / total;
    sync_consumers();
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int r = lane % 4 * 2 + i % 2, column = part * 64 + warp * 16 + lane / 4 + i / 2 * 8;
            if (r < n_rows)
                out[((size_t)(first + r / heads) * query + kv_head * heads + r % heads) * HEAD_DIM + column] =
                    round_to<bf16>(o[part][0][i] * scales[r]);
        }
}
