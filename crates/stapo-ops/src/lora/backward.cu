// The gradients of hidden, of both factors and of the input.

// d_hidden = s d_y B, with rows `of` elements apart; 64 rows and N columns of one module a block. Grid: (tiles of rows, modules x tiles of columns).
// Shared: STAGES of d_y [64, 64] and B [64, 64]; mbarriers.
template <int N, int STAGES>
__device__ __forceinline__ void backward_hidden(const Maps& d_y, const Maps& b, bf16* d_hidden, int of,
                                                const Modules& m, int n, float scale) {
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * 2 * TILE);
    Ring<STAGES, 2 * TILE> ring = {tiles, barriers, barriers + STAGES};
    int module = blockIdx.y % m.n, column = blockIdx.y / m.n * 64, first = blockIdx.x * ROWS;
    int n_steps = (m.outputs[module] + STEP - 1) / STEP;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    launch_dependents();
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x == CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) {
            u64* full = ring.begin_fill(step);
            tma_load_tile(ring.tile(step), d_y.of[module], step * STEP, first, full);
            tma_load_tile(ring.tile(step) + TILE, b.of[module], column, step * STEP, full);
        }
    }
    if (threadIdx.x >= CONSUMERS) return;
    float d[N / 8][4];
    for (int step = 0; step < n_steps; ++step) {
        ring.wait_full(step);
        const bf16* y = ring.tile(step);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP; c += 16)
            wgmma_shared<0, 1>(d, k_major_operand<ROWS>(y, 0, c), mn_major_operand<64>(y + TILE, c), step + c > 0);
        wgmma_commit();
        wgmma_wait<0>();
        fence_registers(d);
        if (threadIdx.x % 32 == 0) ring.arrive_empty(step);
    }
    // Columns between the ranks of two modules, and behind the last, become 0 as rows of the factor are.
    int end = module + 1 == m.n ? m.pitch : m.hidden[module] + m.apart;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int row = first + result_row() + half * 8;
                int at = m.hidden[module] + column + result_column() + j * 8 + i;
                if (row < n && at < end)
                    d_hidden[(size_t)row * of + at] = round_to<bf16>(d[j][2 * half + i] * scale);
            }
    if (blockIdx.y + 1 == gridDim.y)
        clear_columns(d_hidden, of, first, n, m.hidden[module] + column + N, m.pitch, CONSUMERS);
}

#define BACKWARD_HIDDEN(N, STAGES)                                                                                     \
    KERNEL __launch_bounds__(THREADS)                                                                                  \
        lora_backward_hidden_##N(const __grid_constant__ Maps d_y, const __grid_constant__ Maps b, bf16* d_hidden,     \
                                 int of, const __grid_constant__ Modules modules, int n, float scale) {                \
        backward_hidden<N, STAGES>(d_y, b, d_hidden, of, modules, n, scale);                                           \
    }
BACKWARD_HIDDEN(16, 6)
BACKWARD_HIDDEN(32, 6)
BACKWARD_HIDDEN(64, 6)

// Blocks that share the tokens of a factor's gradient; they form a cluster.
#define SPLITS 8

// Where the gradients of the factors of a linear layer go: the second factors' [outputs, rank] by module, the first ones'
// [n rank, inputs]. `adds`: whether they are added to what is there.
struct Gradients {
    float *b[MODULES], *a;
    int adds_b[MODULES], adds_a;
};

__device__ __forceinline__ void put(float* to, float x, bool adds) { *to = adds ? *to + x : x; }

// y^T hidden: 128 columns of y and N of hidden a cluster, `per_split` tokens a block; each block then adds up the parts of 16 of
// the columns in the order of the tokens. `index` counts tiles of columns of y x tiles of columns of hidden. For the first
// factors (OF_A) y is x, hidden is d_hidden, and all are one module. Shared: STAGES of y [64, 128] and hidden [64, N] in parts
// of 64 columns, then the part [128, N + 2] in their place; mbarriers.
template <int N, bool OF_A>
__device__ __forceinline__ void backward_factor(const Maps& map_y, const TensorMap& map_hidden, const Modules& m,
                                                const Gradients& to, int index, int n, int per_split) {
    constexpr int STAGES = 3, SIZE = (2 + (N + 63) / 64) * TILE, WIDTH = N + 2, EACH = 128 / SPLITS;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * SIZE);
    Ring<STAGES, SIZE> ring = {tiles, barriers, barriers + STAGES};
    int n_chunks = (m.columns + N - 1) / N, chunk = index % n_chunks * N, split = blockIdx.x;
    Place place = find_place(m, 128, index / n_chunks);
    int from = split * per_split, n_steps = (max(0, min(n, from + per_split) - from) + STEP - 1) / STEP;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    launch_dependents();
    __syncthreads();
    wait_for_previous_kernel();
    float d[2][N / 8][4] = {};
    if (threadIdx.x == CONSUMERS) {
        const TensorMap& y = map_y.of[place.module];
        for (int step = 0; step < n_steps; ++step) {
            u64* full = ring.begin_fill(step);
            bf16* tile = ring.tile(step);
            tma_load_tile(tile, y, place.column, from + step * STEP, full);
            tma_load_tile(tile + TILE, y, place.column + 64, from + step * STEP, full);
#pragma unroll
            for (int c = 0; c < N; c += 64)
                tma_load_tile(tile + 2 * TILE + c * 64, map_hidden, m.hidden[place.module] + chunk + c,
                              from + step * STEP, full);
        }
    } else if (threadIdx.x < CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) {
            ring.wait_full(step);
            const bf16* y = ring.tile(step);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < STEP; c += 16)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    wgmma_shared<1, 1>(d[half], mn_major_operand<64>(y + half * TILE, c),
                                       mn_major_operand<64>(y + 2 * TILE, c), step + c > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_registers(d[0]), fence_registers(d[1]);
            if (threadIdx.x % 32 == 0) ring.arrive_empty(step);
        }
    }
    __syncthreads();
    float* partial = (float*)tiles;
    if (threadIdx.x < CONSUMERS) put_part<N>(d[0], partial, 0), put_part<N>(d[1], partial, 64);
    cluster_barrier();
    for (int i = threadIdx.x; i < EACH * N / 2; i += THREADS) {
        int column = split * EACH + (OF_A ? i % EACH : i / (N / 2)), at = OF_A ? i / EACH * 2 : i % (N / 2) * 2;
        float2 sum = sum_of_parts<SPLITS>(partial + column * WIDTH + at);
        int output = place.column + column;
        if (output >= m.outputs[place.module]) continue;
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            int hidden = chunk + at + k, rank = OF_A ? hidden % m.apart : hidden;
            if (rank >= m.rank || hidden >= m.columns) continue;
            float x = k ? sum.y : sum.x;
            if (OF_A) {
                put(to.a + (size_t)(hidden / m.apart * m.rank + rank) * m.outputs[0] + output, x, to.adds_a);
            } else {
                put(to.b[place.module] + (size_t)output * m.rank + rank, x, to.adds_b[place.module]);
            }
        }
    }
    cluster_barrier();
}

// The gradients of second factors, `n_of_b` clusters, and of first factors. Grid: (SPLITS, clusters).
#define BACKWARD_FACTORS(B, A)                                                                                         \
    KERNEL __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS)                                                   \
        lora_backward_factors_##B##_##A(const __grid_constant__ Maps d_y, const __grid_constant__ TensorMap hidden,    \
                                        const __grid_constant__ Modules of_b, const __grid_constant__ Maps x,          \
                                        const __grid_constant__ TensorMap d_hidden,                                    \
                                        const __grid_constant__ Modules of_a, const __grid_constant__ Gradients to,    \
                                        int n_of_b, int n, int per_split) {                                            \
        int cluster = blockIdx.y;                                                                                      \
        if (cluster < n_of_b) {                                                                                        \
            backward_factor<B, false>(d_y, hidden, of_b, to, cluster, n, per_split);                                   \
        } else {                                                                                                       \
            backward_factor<A, true>(x, d_hidden, of_a, to, cluster - n_of_b, n, per_split);                           \
        }                                                                                                              \
    }
BACKWARD_FACTORS(32, 32)
BACKWARD_FACTORS(32, 64)
BACKWARD_FACTORS(32, 96)
BACKWARD_FACTORS(64, 64)
BACKWARD_FACTORS(64, 96)

// Rounds a depth up to whole tiles.
__device__ __forceinline__ int whole_tiles(int depth) { return (depth + 63) / 64 * 64; }

// d = left right over `depth`. left [64, depth] lies in parts of 64 columns; right is [depth, N], MN-major.
template <int N>
__device__ __forceinline__ void term(float (&d)[N][4], const bf16* left, const bf16* right, int depth) {
    int padded = whole_tiles(depth);
    wgmma_fence();
    for (int k = 0; k < depth; k += 16)
        wgmma_shared<0, 1>(d, k_major_operand<ROWS>(left, 0, k), descriptor(right + k * 64, padded * 128, 1024), k > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(d);
}

// d_x += d_hidden A: 128 columns of d_x, for `at_once` tiles of 64 rows one after another; the next tile is loaded meanwhile.
// Each warpgroup has 64 of the columns. Grid: (tiles of columns, groups of tiles of rows). UPDATERS threads. Shared: A [depth,
// 128], 2 x (d_hidden [64, depth], d_x [64, 128]), depths rounded up to 64; mbarriers.
KERNEL __launch_bounds__(UPDATERS)
lora_backward_input(const __grid_constant__ TensorMap d_x, const __grid_constant__ TensorMap d_hidden,
                    const __grid_constant__ TensorMap a, int width, int depth, int n, int at_once) {
    int padded = whole_tiles(depth), column = blockIdx.x * 128, first = blockIdx.y * at_once, group = threadIdx.x / 128;
    int n_tiles = min(at_once, (n + ROWS - 1) / ROWS - first), size = ROWS * padded + 2 * TILE;
    bf16 *factor = aligned_memory(), *stages = factor + 128 * padded;
    u64* full = (u64*)(stages + 2 * size);
    auto load = [&](int i) {
        bf16* stage = stages + i % 2 * size;
        u64* barrier = full + i % 2;
        int row = (first + i) * ROWS, more = i == 0 ? 128 * padded : 0;
        mbarrier_arrive_expect_bytes(barrier, 2 * (ROWS * padded + 2 * TILE + more));
        for (int c = 0; c < padded; c += 64) {
            if (i == 0) tma_load_tile(factor + c * 64, a, column, c, barrier);
            if (i == 0) tma_load_tile(factor + (padded + c) * 64, a, column + 64, c, barrier);
            tma_load_tile(stage + c * ROWS, d_hidden, c, row, barrier);
        }
        tma_load_tile(stage + ROWS * padded, d_x, column, row, barrier);
        tma_load_tile(stage + ROWS * padded + TILE, d_x, column + 64, row, barrier);
    };
    launch_dependents();
    wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1), mbarrier_init(full + 1, 1);
        mbarrier_init_fence();
        load(0);
        if (n_tiles > 1) load(1);
    }
    __syncthreads();
    for (int i = 0; i < n_tiles; ++i) {
        bf16 *left = stages + i % 2 * size, *to = left + ROWS * padded;
        mbarrier_wait(full + i % 2, i / 2 % 2);
        float d[8][4];
        term(d, left, factor + group * padded * 64, depth);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                u32* at = pair_at(to, result_row() + half * 8, group * 64 + result_column() + j * 8);
                *at = pack(low_half(*at) + d[j][2 * half], high_half(*at) + d[j][2 * half + 1]);
            }
        fence_async_proxy_shared();
        __syncthreads();
        if (threadIdx.x == 0) {
            int row = (first + i) * ROWS;
            tma_store_tile(d_x, column, row, to);
            if (column + 64 < width) tma_store_tile(d_x, column + 64, row, to + TILE);
            tma_store_commit();
            tma_store_wait();
            if (i + 2 < n_tiles) load(i + 2);
        }
    }
}
