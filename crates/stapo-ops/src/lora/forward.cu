// The terms of adapters: hidden = s x A^T, and y += hidden B^T. The same kernels add d_x += d_hidden A in backward.

__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// Two numbers in the shared memory of another block of the cluster.
__device__ __forceinline__ float2 load_of_block(const float* at, int block) {
    u32 address;
    float2 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(block));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

// hidden [n, pitch] = s x A^T. A cluster of PARTS blocks computes 64 rows and N columns, each block a part of the depth
// (`split` long), and each then adds up the parts of a quarter of the rows. Grid: (PARTS x tiles of rows, tiles of
// columns). Shared: STAGES of x [64, STEP] and A [N, STEP], then the part [64, N + 8] in their place; mbarriers.
template <int N, int STAGES>
__device__ __forceinline__ void project(const TensorMap& map_x, const TensorMap& map_a, bf16* hidden, int n, int pitch,
                                        int depth, int split, float scale) {
    constexpr int SIZE = (ROWS + N) * STEP, WIDTH = N + 8;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * SIZE);
    Ring<STAGES, SIZE> ring = {tiles, barriers, barriers + STAGES};
    int part = blockIdx.x % PARTS, first = blockIdx.x / PARTS * ROWS, column = blockIdx.y * N;
    int from = part * split, n_steps = (max(0, min(depth, from + split) - from) + STEP - 1) / STEP;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    launch_dependents();
    __syncthreads();
    wait_for_previous_kernel();
    float d[N / 8][4] = {};
    if (threadIdx.x == CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) {
            u64* full = ring.begin_fill(step);
            tma_load_tile(ring.tile(step), map_x, from + step * STEP, first, full);
            tma_load_tile(ring.tile(step) + ROWS * STEP, map_a, from + step * STEP, column, full);
        }
    } else if (threadIdx.x < CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) {
            ring.wait_full(step);
            const bf16* x = ring.tile(step);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < STEP; c += 16)
                wgmma_shared<0, 0>(d, k_major_operand<ROWS>(x, 0, c), k_major_operand<N>(x + ROWS * STEP, 0, c),
                                   step + c > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_registers(d);
            if (threadIdx.x % 32 == 0) ring.arrive_empty(step);
        }
    }
    __syncthreads();
    float* partial = (float*)tiles;
    if (threadIdx.x < CONSUMERS) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
                *(float2*)(partial + (result_row() + half * 8) * WIDTH + result_column() + j * 8) =
                    make_float2(d[j][2 * half], d[j][2 * half + 1]);
    }
    cluster_barrier();
    for (int i = threadIdx.x; i < ROWS / PARTS * N / 2; i += THREADS) {
        int row = part * (ROWS / PARTS) + i / (N / 2), at = i % (N / 2) * 2;
        float2 sum = load_of_block(partial + row * WIDTH + at, 0);
#pragma unroll
        for (int p = 1; p < PARTS; ++p) {
            float2 next = load_of_block(partial + row * WIDTH + at, p);
            sum.x += next.x, sum.y += next.y;
        }
        if (first + row < n && column + at < pitch)
            *(u32*)(hidden + (size_t)(first + row) * pitch + column + at) = pack(sum.x * scale, sum.y * scale);
    }
    // No block ends while another reads its shared memory.
    cluster_barrier();
}

#define PROJECT(N, STAGES)                                                                                             \
    KERNEL __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS)                                                    \
        lora_project_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap a, bf16* hidden,       \
                         int n, int pitch, int depth, int split, float scale) {                                        \
        project<N, STAGES>(x, a, hidden, n, pitch, depth, split, scale);                                               \
    }
PROJECT(16, 8)
PROJECT(32, 8)
PROJECT(64, 5)
PROJECT(96, 4)

// Rounds a depth up to whole tiles.
__device__ __forceinline__ int whole_tiles(int depth) { return (depth + 63) / 64 * 64; }

// d = left right over `depth`. left [64, depth] lies in parts of 64 columns; right is N rows from `row` on of [rows,
// depth] in such parts (ROWS_RIGHT rows) or, with MN_MAJOR, [depth, N].
template <int N, int ROWS_RIGHT, int MN_MAJOR>
__device__ __forceinline__ void term(float (&d)[N / 8][4], const bf16* left, const bf16* right, int row, int depth) {
    int padded = whole_tiles(depth);
    wgmma_fence();
    for (int k = 0; k < depth; k += 16) {
        u64 b = MN_MAJOR ? descriptor(right + k * 64, padded * 128, 1024) : k_major_operand<ROWS_RIGHT>(right, row, k);
        wgmma_shared<0, MN_MAJOR>(d, k_major_operand<ROWS>(left, 0, k), b, k > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(d);
}

// Two neighbouring sums of a split-K product's partial sums, `apart` from each other, in bf16.
__device__ __forceinline__ u32 sum_of_partials(const float* partials, size_t apart) {
    float2 sum = *(const float2*)partials;
#pragma unroll
    for (int p = 1; p < PARTS; ++p) {
        float2 part = *(const float2*)(partials + p * apart);
        sum.x += part.x, sum.y += part.y;
    }
    return pack(sum.x, sum.y);
}

// What becomes of a term.
enum class To {
    // y = round(y + term).
    Y,
    // y = round(round(sum of partials [PARTS, n, outputs] of a split-K product) + term).
    SumOfPartials,
    // terms [n, outputs] = term, in f32.
    Terms,
};

// Adds the terms of 128 columns of one module, for `at_once` tiles of 64 rows one after another; the next tile is loaded
// meanwhile. Each warpgroup has 64 of the columns. Grid: (tiles of columns of all modules, groups of tiles of rows).
// UPDATERS threads. Shared: the factor [128, depth], 2 x (hidden [64, depth], y [64, 128]), depths rounded up to 64;
// mbarriers.
template <int MN_MAJOR, To TO>
__device__ __forceinline__ void expand(const Maps& map_y, const TensorMap& map_hidden, const Maps& map_factor,
                                       float* numbers, const Modules& m, int depth, int n, int at_once) {
    Place place = find_place(m, 128);
    const TensorMap& to = map_y.of[place.module];
    const TensorMap& factors = map_factor.of[place.module];
    int padded = whole_tiles(depth), first = blockIdx.y * at_once, group = threadIdx.x / 128;
    int n_tiles = min(at_once, (n + ROWS - 1) / ROWS - first), size = ROWS * padded + 2 * TILE;
    bf16 *factor = aligned_memory(), *stages = factor + 128 * padded;
    u64* full = (u64*)(stages + 2 * size);
    int outputs = m.outputs[place.module], column = place.column + group * 64 + result_column();
    auto load = [&](int i) {
        bf16* stage = stages + i % 2 * size;
        u64* barrier = full + i % 2;
        int row = (first + i) * ROWS, more = i == 0 ? 128 * padded : 0;
        mbarrier_arrive_expect_bytes(barrier, 2 * (ROWS * padded + (TO == To::Y ? 2 * TILE : 0) + more));
        for (int c = 0; c < padded && i == 0; c += 64) {
            if (MN_MAJOR) {
                tma_load_tile(factor + c * 64, factors, place.column, c, barrier);
                tma_load_tile(factor + padded * 64 + c * 64, factors, place.column + 64, c, barrier);
            } else {
                tma_load_tile(factor + c * 128, factors, c, place.column, barrier);
            }
        }
        for (int c = 0; c < padded; c += 64)
            tma_load_tile(stage + c * ROWS, map_hidden, m.hidden[place.module] + c, row, barrier);
        if (TO != To::Y) return;
        tma_load_tile(stage + ROWS * padded, to, place.column, row, barrier);
        tma_load_tile(stage + ROWS * padded + TILE, to, place.column + 64, row, barrier);
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
        bf16 *left = stages + i % 2 * size, *y = left + ROWS * padded;
        mbarrier_wait(full + i % 2, i / 2 % 2);
        float d[8][4];
        term<64, 128, MN_MAJOR>(d, left, factor + (MN_MAJOR ? group * padded * 64 : 0), group * 64, depth);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int row = result_row() + half * 8;
            size_t of = (size_t)((first + i) * ROWS + row) * outputs + column;
            bool is_row = (first + i) * ROWS + row < n;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                u32* at = pair_at(y, row, group * 64 + result_column() + j * 8);
                bool is_there = is_row && column + j * 8 < outputs;
                if (TO == To::Terms) {
                    if (is_there) *(float2*)(numbers + of + j * 8) = make_float2(d[j][2 * half], d[j][2 * half + 1]);
                    continue;
                }
                u32 pair = TO == To::Y ? *at : is_there ? sum_of_partials(numbers + of + j * 8, (size_t)n * outputs) : 0u;
                *at = pack(low_half(pair) + d[j][2 * half], high_half(pair) + d[j][2 * half + 1]);
            }
        }
        if (TO != To::Terms) fence_async_proxy_shared();
        __syncthreads();
        if (threadIdx.x == 0) {
            if (TO != To::Terms) {
                tma_store_tile(to, place.column, (first + i) * ROWS, y);
                if (place.column + 64 < outputs) tma_store_tile(to, place.column + 64, (first + i) * ROWS, y + TILE);
                tma_store_commit();
                tma_store_wait();
            }
            if (i + 2 < n_tiles) load(i + 2);
        }
    }
}

#define EXPAND(NAME, TO)                                                                                               \
    KERNEL __launch_bounds__(UPDATERS)                                                                                 \
        NAME(const __grid_constant__ Maps y, const __grid_constant__ TensorMap hidden, const __grid_constant__ Maps b, \
             float* numbers, const __grid_constant__ Modules modules, int depth, int n, int at_once) {                 \
        expand<0, TO>(y, hidden, b, numbers, modules, depth, n, at_once);                                              \
    }
EXPAND(lora_expand, To::Y)
EXPAND(lora_expand_partials, To::SumOfPartials)
EXPAND(lora_expand_terms, To::Terms)

// d_x += d_hidden A: one module, whose outputs are the inputs of the layer.
KERNEL __launch_bounds__(UPDATERS)
lora_backward_input(const __grid_constant__ Maps d_x, const __grid_constant__ TensorMap d_hidden,
                    const __grid_constant__ Maps a, float* numbers, const __grid_constant__ Modules modules, int depth,
                    int n, int at_once) {
    expand<1, To::Y>(d_x, d_hidden, a, numbers, modules, depth, n, at_once);
}

// The terms of gate and up, and their SwiGLU: gate and up += term, out = silu(gate) up. As expand, with 64 columns of
// both modules a block; gate and up are written back where `keeps`. Shared: two factors [64, depth], 2 x (two hidden [64,
// depth], gate, up and out [64, 64]); mbarriers.
KERNEL __launch_bounds__(UPDATERS)
lora_expand_swiglu(const __grid_constant__ Maps y, const __grid_constant__ TensorMap hidden,
                   const __grid_constant__ Maps b, const __grid_constant__ TensorMap out,
                   const __grid_constant__ Modules m, int n, int at_once, int keeps) {
    int padded = whole_tiles(m.rank), first = blockIdx.y * at_once, column = blockIdx.x * 64;
    int n_tiles = min(at_once, (n + ROWS - 1) / ROWS - first), size = 2 * ROWS * padded + 3 * TILE;
    bf16 *factors = aligned_memory(), *stages = factors + 2 * 64 * padded;
    u64* full = (u64*)(stages + 2 * size);
    int group = threadIdx.x / 128;
    auto load = [&](int i) {
        bf16* stage = stages + i % 2 * size;
        u64* barrier = full + i % 2;
        int row = (first + i) * ROWS;
        mbarrier_arrive_expect_bytes(barrier, 2 * (2 * ROWS * padded + 2 * TILE + (i == 0 ? 2 * 64 * padded : 0)));
        for (int module = 0; module < 2; ++module) {
            for (int c = 0; c < padded; c += 64) {
                bf16* left = stage + (module * padded + c) * ROWS;
                if (i == 0) tma_load_tile(factors + (module * padded + c) * 64, b.of[module], c, column, barrier);
                tma_load_tile(left, hidden, m.hidden[module] + c, row, barrier);
            }
            tma_load_tile(stage + 2 * ROWS * padded + module * TILE, y.of[module], column, row, barrier);
        }
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
        bf16 *left = stages + i % 2 * size, *gate = left + 2 * ROWS * padded, *up = gate + TILE, *to = up + TILE;
        mbarrier_wait(full + i % 2, i / 2 % 2);
        float g[4][4], u[4][4];
        term<32, 64, 0>(g, left, factors, group * 32, m.rank);
        term<32, 64, 0>(u, left + ROWS * padded, factors + 64 * padded, group * 32, m.rank);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                int row = result_row() + half * 8, at = group * 32 + result_column() + j * 8;
                u32 *gates = pair_at(gate, row, at), *ups = pair_at(up, row, at);
                u32 both_g = pack(low_half(*gates) + g[j][2 * half], high_half(*gates) + g[j][2 * half + 1]);
                u32 both_u = pack(low_half(*ups) + u[j][2 * half], high_half(*ups) + u[j][2 * half + 1]);
                float low = low_half(both_g), high = high_half(both_g);
                if (keeps) *gates = both_g, *ups = both_u;
                *pair_at(to, row, at) =
                    pack(low * sigmoid(low) * low_half(both_u), high * sigmoid(high) * high_half(both_u));
            }
        fence_async_proxy_shared();
        __syncthreads();
        if (threadIdx.x == 0) {
            int row = (first + i) * ROWS;
            if (keeps) tma_store_tile(y.of[0], column, row, gate), tma_store_tile(y.of[1], column, row, up);
            tma_store_tile(out, column, row, to);
            tma_store_commit();
            tma_store_wait();
            if (i + 2 < n_tiles) load(i + 2);
        }
    }
}
