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

// A part of y^T hidden: 128 columns of y and N of hidden a block, over `per_split` tokens. Grid: (tiles of columns of y,
// splits x tiles of columns of hidden). For the second factor parts [splits, outputs, rank]; for the first (OF_A: y is x,
// hidden is d_hidden, one module) parts [splits, rank, outputs]. Shared: STAGES of y [64, 128] and hidden [64, N] in parts
// of 64 columns; mbarriers.
template <int N, int STAGES, bool OF_A>
__device__ __forceinline__ void backward_factor(const Maps& map_y, const TensorMap& map_hidden, float* parts,
                                                const Modules& m, int n, int per_split, int of) {
    constexpr int SIZE = (2 + (N + 63) / 64) * TILE;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * SIZE);
    Ring<STAGES, SIZE> ring = {tiles, barriers, barriers + STAGES};
    Place place = find_place(m, 128);
    int n_chunks = (m.columns + N - 1) / N, split = blockIdx.y / n_chunks, chunk = blockIdx.y % n_chunks * N;
    int from = split * per_split, n_steps = (min(n, from + per_split) - from + STEP - 1) / STEP;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    launch_dependents();
    __syncthreads();
    wait_for_previous_kernel();
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
    }
    if (threadIdx.x >= CONSUMERS) return;
    float d[2][N / 8][4];
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
    // Rows of the first factors of all modules, or of one module's rank.
    int n_ranks = OF_A ? m.columns / m.apart * m.rank : m.rank;
    float* part = parts + (size_t)split * n_ranks * of;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int output = place.column + tile * 64 + result_row() + i / 2 * 8;
                int at = chunk + result_column() + j * 8 + i % 2, rank = OF_A ? at % m.apart : at;
                if (output >= m.outputs[place.module] || rank >= m.rank || at >= m.columns) continue;
                rank += OF_A ? at / m.apart * m.rank : 0;
                output += m.start[place.module];
                part[OF_A ? (size_t)rank * of + output : (size_t)output * m.rank + rank] = d[tile][j][i];
            }
}

#define BACKWARD_FACTOR(NAME, N, STAGES, OF_A)                                                                         \
    KERNEL __launch_bounds__(THREADS)                                                                                  \
        lora_backward_##NAME##_##N(const __grid_constant__ Maps y, const __grid_constant__ TensorMap hidden,           \
                                   float* parts, const __grid_constant__ Modules modules, int n, int per_split,        \
                                   int of) {                                                                           \
        backward_factor<N, STAGES, OF_A>(y, hidden, parts, modules, n, per_split, of);                                 \
    }
BACKWARD_FACTOR(a, 16, 4, true)
BACKWARD_FACTOR(a, 32, 4, true)
BACKWARD_FACTOR(a, 64, 4, true)
BACKWARD_FACTOR(a, 96, 3, true)
BACKWARD_FACTOR(b, 16, 4, false)
BACKWARD_FACTOR(b, 32, 4, false)
BACKWARD_FACTOR(b, 64, 4, false)

// The gradient of a factor: to [n] (+)= the sum of parts [splits, stride], n numbers from the start of each, in order.
struct Sum {
    const float* parts;
    float* to;
    u64 stride;
    int n, splits, adds;
};
// Of the factors of a linear layer: the second ones and the first.
struct Sums {
    Sum of[MODULES + 1];
};

// Grid: (blocks of the longest, factors).
KERNEL lora_sum_parts(const __grid_constant__ Sums sums) {
    const Sum& sum = sums.of[blockIdx.y];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    launch_dependents();
    wait_for_previous_kernel();
    if (i >= sum.n) return;
    float total = sum.parts[i];
#pragma unroll 8
    for (int s = 1; s < sum.splits; ++s) total += sum.parts[s * sum.stride + i];
    sum.to[i] = sum.adds ? sum.to[i] + total : total;
}

// Rounds a depth up to whole tiles.
__device__ __forceinline__ int whole_tiles(int depth) { return (depth + 63) / 64 * 64; }

// d = left right over `depth`. left [64, depth] lies in parts of 64 columns; right is [depth, 64], MN-major.
__device__ __forceinline__ void term(float (&d)[8][4], const bf16* left, const bf16* right, int depth) {
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

// d_activated += d_hidden A, rounded but not stored, and from it the gradients of gate and up (see swiglu.cu). A block takes
// 128 columns and `at_once` tiles of 64 rows one after another; each warpgroup has 64 of the columns. UPDATERS threads.
// Grid: (tiles of columns, groups of tiles of rows). Shared: A [depth, 128], d_hidden [64, depth], depth rounded up to 64;
// d_activated, gate and up [64, 128], of which the last two become their gradients; an mbarrier.
KERNEL __launch_bounds__(UPDATERS)
lora_backward_swiglu(const __grid_constant__ TensorMap d_activated, const __grid_constant__ TensorMap d_hidden,
                     const __grid_constant__ TensorMap a, const __grid_constant__ Maps gate_up,
                     const __grid_constant__ Maps d_gate_up, int width, int depth, int n, int at_once) {
    int padded = whole_tiles(depth), first = blockIdx.y * at_once, column = blockIdx.x * 128, group = threadIdx.x / 128;
    int n_tiles = min(at_once, (n + ROWS - 1) / ROWS - first);
    bf16 *factor = aligned_memory(), *left = factor + 128 * padded, *d_out = left + ROWS * padded;
    bf16 *gate = d_out + 2 * TILE, *up = gate + 2 * TILE;
    u64* full = (u64*)(up + 2 * TILE);
    auto load = [&](int i) {
        int row = (first + i) * ROWS;
        mbarrier_arrive_expect_bytes(full, 2 * (ROWS * padded + 6 * TILE + (i == 0 ? 128 * padded : 0)));
        for (int c = 0; c < padded; c += 64) {
            if (i == 0) tma_load_tile(factor + c * 64, a, column, c, full);
            if (i == 0) tma_load_tile(factor + (padded + c) * 64, a, column + 64, c, full);
            tma_load_tile(left + c * ROWS, d_hidden, c, row, full);
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            tma_load_tile(d_out + part * TILE, d_activated, column + part * 64, row, full);
            tma_load_tile(gate + part * TILE, gate_up.of[0], column + part * 64, row, full);
            tma_load_tile(up + part * TILE, gate_up.of[1], column + part * 64, row, full);
        }
    };
    launch_dependents();
    wait_for_previous_kernel();
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_fence();
        load(0);
    }
    __syncthreads();
    for (int i = 0; i < n_tiles; ++i) {
        mbarrier_wait(full, i % 2);
        float d[8][4];
        term(d, left, factor + group * padded * 64, depth);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                int row = result_row() + half * 8, at = group * 64 + result_column() + j * 8;
                u32 *gates = pair_at(gate, row, at), *ups = pair_at(up, row, at), both = *pair_at(d_out, row, at);
                both = pack(low_half(both) + d[j][2 * half], high_half(both) + d[j][2 * half + 1]);
                float d_gate[2], d_up[2];
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    float g = k ? high_half(*gates) : low_half(*gates), u = k ? high_half(*ups) : low_half(*ups);
                    float of_out = k ? high_half(both) : low_half(both), s = sigmoid(g), silu = g * s;
                    d_gate[k] = of_out * u * fmaf(silu, 1.0f - s, s);
                    d_up[k] = of_out * silu;
                }
                *gates = pack(d_gate[0], d_gate[1]);
                *ups = pack(d_up[0], d_up[1]);
            }
        fence_async_proxy_shared();
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int part = 0; part < 2 && column + part * 64 < width; ++part) {
                tma_store_tile(d_gate_up.of[0], column + part * 64, (first + i) * ROWS, gate + part * TILE);
                tma_store_tile(d_gate_up.of[1], column + part * 64, (first + i) * ROWS, up + part * TILE);
            }
            tma_store_commit();
            tma_store_wait();
            if (i + 1 < n_tiles) load(i + 1);
        }
    }
}
