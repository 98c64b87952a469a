// The gradients of hidden and of both factors.

// d_hidden = s d_y B, 64 rows and N columns of one module a block. Grid: (tiles of rows, modules x tiles of columns).
// Shared: STAGES of d_y [64, 64] and B [64, 64]; mbarriers.
template <int N, int STAGES>
__device__ __forceinline__ void backward_hidden(const Maps& d_y, const Maps& b, bf16* d_hidden, const Modules& m, int n,
                                                float scale) {
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * 2 * TILE);
    Ring<STAGES, 2 * TILE> ring = {tiles, barriers, barriers + STAGES};
    int module = blockIdx.y % m.n, column = blockIdx.y / m.n * 64, first = blockIdx.x * ROWS;
    int n_steps = (m.outputs[module] + STEP - 1) / STEP;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    __syncthreads();
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
    // The last module also sets the columns that fill hidden up.
    int end = module + 1 == m.n ? m.pitch : m.hidden[module] + m.rank;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int row = first + result_row() + half * 8;
                int at = m.hidden[module] + column + result_column() + j * 8 + i;
                if (row < n && at < end)
                    d_hidden[(size_t)row * m.pitch + at] = round_to<bf16>(d[j][2 * half + i] * scale);
            }
}

#define BACKWARD_HIDDEN(N, STAGES)                                                                                     \
    KERNEL __launch_bounds__(THREADS)                                                                                  \
        lora_backward_hidden_##N(const __grid_constant__ Maps d_y, const __grid_constant__ Maps b, bf16* d_hidden,     \
                                 const __grid_constant__ Modules modules, int n, float scale) {                        \
        backward_hidden<N, STAGES>(d_y, b, d_hidden, modules, n, scale);                                               \
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
    int n_chunks = (m.rank + N - 1) / N, split = blockIdx.y / n_chunks, chunk = blockIdx.y % n_chunks * N;
    int from = split * per_split, n_steps = (min(n, from + per_split) - from + STEP - 1) / STEP;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    __syncthreads();
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
    float* part = parts + (size_t)split * m.rank * of;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int output = place.column + tile * 64 + result_row() + i / 2 * 8;
                int rank = chunk + result_column() + j * 8 + i % 2;
                if (output >= m.outputs[place.module] || rank >= m.rank) continue;
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

// to [n] (+)= the sum of parts [splits, stride], n numbers from the start of each, in order.
KERNEL lora_sum_parts(const float* parts, float* to, int n, int splits, u64 stride, int adds) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float sum = parts[i];
    for (int s = 1; s < splits; ++s) sum += parts[s * stride + i];
    to[i] = adds ? to[i] + sum : sum;
}
