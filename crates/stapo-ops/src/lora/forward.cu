// hidden = s x A^T.

__device__ __forceinline__ int steps_between(int from, int end) { return (max(0, end - from) + STEP - 1) / STEP; }

// A step of a chain: d (+)= x A^T, of x [64, STEP] and A [N, STEP] in the ring.
template <int N, class Tiles>
__device__ __forceinline__ void project_step(float (&d)[N / 8][4], const Tiles& ring, int step, bool adds) {
    ring.wait_full(step);
    const bf16* x = ring.tile(step);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < STEP; c += 16)
        wgmma_shared<0, 0>(d, k_major_operand<ROWS>(x, 0, c), k_major_operand<N>(x + ROWS * STEP, 0, c), adds || c > 0);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(d);
    if (threadIdx.x % 32 == 0) ring.arrive_empty(step);
}

// Where x A^T goes: hidden [n, pitch], with rows `of` elements apart, times `scale`. Columns behind the last tile are cleared.
struct Projected {
    bf16* hidden;
    int of, n, pitch;
    float scale;
};

// The sum of what the blocks of a cluster have in `partial` [rows, N + 2], to (first, column) of hidden; each block has a
// quarter of the rows.
template <int N>
__device__ __forceinline__ void add_up(const float* partial, const Projected& to, int first, int rows, int column) {
    cluster_barrier();
    for (int i = threadIdx.x; i < rows / PARTS * N / 2; i += blockDim.x) {
        int row = blockIdx.x % PARTS * (rows / PARTS) + i / (N / 2), at = i % (N / 2) * 2;
        float2 sum = sum_of_parts<PARTS>(partial + row * (N + 2) + at);
        if (first + row < to.n && column + at < to.pitch)
            *(u32*)(to.hidden + (size_t)(first + row) * to.of + column + at) = pack(sum.x * to.scale, sum.y * to.scale);
    }
    bool is_last = blockIdx.y + 1 == gridDim.y && blockIdx.x % PARTS == 0;
    if (is_last) clear_columns(to.hidden, to.of, first, to.n, column + N, to.pitch, blockDim.x);
    // No block ends while another reads its shared memory.
    cluster_barrier();
}

// hidden = s x A^T of few rows. A cluster of PARTS blocks computes 64 rows and N columns, each block a part of the depth
// (`split` long), and each then adds up the parts of a quarter of the rows. Grid: (PARTS x tiles of rows, tiles of columns).
// Shared: STAGES of x [64, STEP] and A [N, STEP], then the part [64, N + 2] in their place; mbarriers.
//
// `signal`, where it is not 0, becomes 1 when x is complete: the product that follows may start while the kernel in front of
// this one still runs (lora/small_m.cu).
template <int N, int STAGES>
__device__ __forceinline__ void project(const TensorMap& map_x, const TensorMap& map_a, const Projected& to, int depth,
                                        int split, u32* signal) {
    constexpr int SIZE = (ROWS + N) * STEP;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * SIZE);
    Ring<STAGES, SIZE> ring = {tiles, barriers, barriers + STAGES};
    int first = blockIdx.x / PARTS * ROWS, column = blockIdx.y * N, from = blockIdx.x % PARTS * split;
    int n_steps = steps_between(from, min(depth, from + split));
    launch_dependents();
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(map_x), prefetch_tensor_map(map_a);
        ring.init(), mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (signal && threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0)
        asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(signal) : "memory");
    float d[N / 8][4] = {};
    if (threadIdx.x == CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) {
            u64* full = ring.begin_fill(step);
            tma_load_tile(ring.tile(step), map_x, from + step * STEP, first, full);
            tma_load_tile(ring.tile(step) + ROWS * STEP, map_a, from + step * STEP, column, full);
        }
    } else if (threadIdx.x < CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) project_step<N>(d, ring, step, step > 0);
    }
    __syncthreads();
    float* partial = (float*)tiles;
    if (threadIdx.x < CONSUMERS) put_part<N>(d, partial, 0);
    add_up<N>(partial, to, first, ROWS, column);
}

#define PROJECT(NAME, N, STAGES)                                                                                       \
    KERNEL __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS)                                                    \
        lora_project_##NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap a,                     \
                         const __grid_constant__ Projected to, int depth, int split, u32* signal) {                    \
        project<N, STAGES>(x, a, to, depth, split, signal);                                                            \
    }
PROJECT(few, 16, 4)
PROJECT(16, 16, 8)
PROJECT(64, 64, 5)

// The same of so many rows that they fill the GPU: a block computes 64 rows and N columns, part after part of the depth.
// Grid: (tiles of rows, tiles of columns). Shared: STAGES of x [64, STEP] and A [N, STEP]; mbarriers.
template <int N, int STAGES>
__device__ __forceinline__ void project_rows(const TensorMap& map_x, const TensorMap& map_a, const Projected& to,
                                             int depth, int split) {
    constexpr int SIZE = (ROWS + N) * STEP;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * SIZE);
    Ring<STAGES, SIZE> ring = {tiles, barriers, barriers + STAGES};
    int first = blockIdx.x * ROWS, column = blockIdx.y * N;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    launch_dependents();
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x == CONSUMERS) {
        for (int step = 0; step < steps_between(0, depth); ++step) {
            u64* full = ring.begin_fill(step);
            tma_load_tile(ring.tile(step), map_x, step * STEP, first, full);
            tma_load_tile(ring.tile(step) + ROWS * STEP, map_a, step * STEP, column, full);
        }
    }
    if (threadIdx.x >= CONSUMERS) return;
    float sum[N / 8][4];
    for (int part = 0, step = 0; part < PARTS; ++part) {
        float d[N / 8][4] = {};
        int end = steps_between(0, min(depth, (part + 1) * split));
        for (int begin = step; step < end; ++step) project_step<N>(d, ring, step, step > begin);
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[j][i] = part == 0 ? d[j][i] : sum[j][i] + d[j][i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            int row = first + result_row() + half * 8, at = column + result_column() + j * 8;
            if (row < to.n && at < to.pitch)
                *(u32*)(to.hidden + (size_t)row * to.of + at) =
                    pack(sum[j][2 * half] * to.scale, sum[j][2 * half + 1] * to.scale);
        }
    if (blockIdx.y + 1 == gridDim.y)
        clear_columns(to.hidden, to.of, first, to.n, column + N, to.pitch, CONSUMERS);
}

#define PROJECT_ROWS(N, STAGES)                                                                                        \
    KERNEL __launch_bounds__(THREADS)                                                                                  \
        lora_project_rows_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap a,                \
                              const __grid_constant__ Projected to, int depth, int split) {                            \
        project_rows<N, STAGES>(x, a, to, depth, split);                                                               \
    }
PROJECT_ROWS(32, 8)
PROJECT_ROWS(64, 6)
PROJECT_ROWS(96, 5)
