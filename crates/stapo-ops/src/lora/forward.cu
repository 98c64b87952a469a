// hidden = s x A^T.

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

// The sum of what the blocks of a cluster have in `partial` [rows, columns + 2], to (first, column) of hidden; each block has a
// quarter of the rows.
__device__ __forceinline__ void add_up(const float* partial, const Projected& to, int first, int rows, int column,
                                       int columns) {
    int pairs = columns / 2;
    cluster_barrier();
    for (int i = threadIdx.x; i < rows / PARTS * pairs; i += blockDim.x) {
        int row = blockIdx.x % PARTS * (rows / PARTS) + i / pairs, at = i % pairs * 2;
        float2 sum = sum_of_parts<PARTS>(partial + row * (columns + 2) + at);
        if (first + row < to.n && column + at < to.pitch)
            *(u32*)(to.hidden + (size_t)(first + row) * to.of + column + at) = pack(sum.x * to.scale, sum.y * to.scale);
    }
    bool is_last = blockIdx.y + 1 == gridDim.y && blockIdx.x % PARTS == 0;
    if (is_last)
        clear_columns(to.hidden, to.of, first, min(first + rows, to.n), column + columns, to.pitch, blockDim.x);
}

// hidden = s x A^T of few rows. A cluster of PARTS blocks computes 64 rows and N columns, each block a part of the depth
// (`split` long), and each then adds up the parts of a quarter of the rows. Grid: (PARTS x tiles of rows, tiles of columns).
// Shared: STAGES of x [64, STEP] and A [N, STEP], then the part [64, N + 2] in their place; mbarriers. A does not depend on
// the kernel in front: its first tiles are fetched while that still runs.
template <int N, int STAGES>
__device__ __forceinline__ void project_ring(const TensorMap& map_x, const TensorMap& map_a, const Projected& to,
                                             int depth, int split, const Signals& signals) {
    constexpr int SIZE = (ROWS + N) * STEP;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * SIZE);
    Ring<STAGES, SIZE> ring = {tiles, barriers, barriers + STAGES};
    int first = blockIdx.x / PARTS * ROWS, column = blockIdx.y * N, from = blockIdx.x % PARTS * split;
    int n_steps = steps_between(from, min(depth, from + split));
    auto fetch_factor = [&](int step) {
        tma_load_tile(ring.tile(step) + ROWS * STEP, map_a, from + step * STEP, column, ring.begin_fill(step));
    };
    launch_dependents();
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(map_x), prefetch_tensor_map(map_a);
        ring.init(), mbarrier_init_fence();
        for (int step = 0; step < min(n_steps, STAGES); ++step) fetch_factor(step);
    }
    __syncthreads();
    float d[N / 8][4] = {};
    if (threadIdx.x == CONSUMERS) {
        signals.wait_for_x();
        for (int step = 0; step < n_steps; ++step) {
            if (step >= STAGES) fetch_factor(step);
            tma_load_tile(ring.tile(step), map_x, from + step * STEP, first, ring.full + step % STAGES);
        }
    } else if (threadIdx.x < CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) project_step<N>(d, ring, step, step > 0);
    }
    __syncthreads();
    float* partial = (float*)tiles;
    if (threadIdx.x < CONSUMERS) put_part<N>(d, partial, 0);
    wait_for_previous_kernel();
    add_up(partial, to, first, ROWS, column, N);
    signals.tell_hidden();
    // No block ends while another reads its shared memory.
    cluster_barrier();
}

#define PROJECT_RING(NAME, N, STAGES)                                                                                  \
    KERNEL __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS)                                                    \
        lora_project_ring_##NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap a,             \
                                 const __grid_constant__ Projected to, int depth, int split,                           \
                                 const __grid_constant__ Signals signals) {                                            \
        project_ring<N, STAGES>(x, a, to, depth, split, signals);                                                      \
    }
PROJECT_RING(few, 16, 4)
PROJECT_RING(16, 16, 8)
PROJECT_RING(64, 64, 5)

// d = A x^T over tiles of STEP columns: 64 rows of A from `row` on of tiles with `columns` rows, and N rows of x. `wait` is called
// before a tile is read.
template <int N, class Wait>
__device__ __forceinline__ void multiply_part(float (&d)[N / 8][4], const bf16* a, int columns, int row, const bf16* x,
                                              int n_tiles, Wait wait) {
    u64 of_a = k_major_operand<ROWS>(a, row, 0), of_x = k_major_operand<N>(x, 0, 0);
    for (int t = 0; t < n_tiles; ++t) {
        wait(t);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP; c += 16)
            wgmma_shared<0, 0>(d, advance(of_a, uniform(2 * t * columns * STEP) + 2 * c),
                               advance(of_x, uniform(2 * t * N * STEP) + 2 * c), t + c > 0);
        wgmma_commit();
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    fence_registers(d);
    if (n_tiles > 0) return;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) d[j][i] = 0.0f;
}

// Gives a warpgroup's results of multiply_part, of the rows of A from `row` on, to the blocks that add them up: block q of the
// cluster has `parts` [PARTS, N / PARTS, columns] of the rows from q N / PARTS on. All blocks must have started.
template <int N>
__device__ __forceinline__ void give_part(const float (&d)[N / 8][4], float* parts, int columns, int row) {
    row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int r = j * 8 + result_column() + i % 2, c = row + i / 2 * 8;
            float* to = parts + (blockIdx.x % PARTS * (N / PARTS) + r % (N / PARTS)) * columns + c;
            if (c < columns) store_to_block(to, r / (N / PARTS), d[j][i]);
        }
}

// Adds up the parts that the blocks of the cluster have given to this one, to (first, column) of hidden.
template <int N>
__device__ __forceinline__ void add_parts(const float* parts, const Projected& to, int first, int column, int columns) {
    int pairs = columns / 2, begin = first + blockIdx.x % PARTS * (N / PARTS);
    cluster_barrier();
    for (int i = threadIdx.x; i < N / PARTS * pairs; i += blockDim.x) {
        int row = i / pairs, at = i % pairs * 2;
        float2 sum = *(const float2*)(parts + row * columns + at);
#pragma unroll
        for (int p = 1; p < PARTS; ++p) {
            float2 next = *(const float2*)(parts + (p * (N / PARTS) + row) * columns + at);
            sum.x += next.x, sum.y += next.y;
        }
        if (begin + row < to.n && column + at < to.pitch)
            *(u32*)(to.hidden + (size_t)(begin + row) * to.of + column + at) = pack(sum.x * to.scale, sum.y * to.scale);
    }
    if (blockIdx.y + 1 == gridDim.y)
        clear_columns(to.hidden, to.of, begin, min(begin + N / PARTS, to.n), column + columns, to.pitch, blockDim.x);
}

// hidden = s x A^T of few rows. A cluster of PARTS blocks computes N rows and `columns` columns (at most 64), each block a part of
// the depth (`split` long), and each then adds up the parts of a quarter of the rows. The instruction's rows are those of A.
// All tiles are fetched at once, those of A, which do not depend on the kernel in front, while that still runs. Grid:
// (PARTS x tiles of rows, tiles of columns). Shared: tiles of A [columns, STEP] and of x [N, STEP]; the parts that this block adds up; an
// mbarrier for each tile.
template <int N>
__device__ __forceinline__ void project_at_once(const TensorMap& map_x, const TensorMap& map_a, const Projected& to,
                                                int depth, int split, int columns, const Signals& signals) {
    int first = blockIdx.x / PARTS * N, column = blockIdx.y * columns, from = blockIdx.x % PARTS * split;
    int n_tiles = steps_between(from, min(depth, from + split)), most = (split + STEP - 1) / STEP;
    bf16 *a = aligned_memory(), *x = a + most * columns * STEP;
    float* parts = (float*)(x + most * N * STEP);
    u64* full = (u64*)(parts + N * columns);
    launch_dependents();
    cluster_arrive();
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(map_x), prefetch_tensor_map(map_a);
        for (int t = 0; t < n_tiles; ++t) mbarrier_init(full + t, 1);
        mbarrier_init_fence();
        for (int t = 0; t < n_tiles; ++t) {
            mbarrier_arrive_expect_bytes(full + t, 2 * (columns + N) * STEP);
            tma_load_tile(a + t * columns * STEP, map_a, from + t * STEP, column, full + t);
        }
    }
    __syncthreads();
    if (threadIdx.x == CONSUMERS) {
        signals.wait_for_x();
        for (int t = 0; t < n_tiles; ++t) tma_load_tile(x + t * N * STEP, map_x, from + t * STEP, first, full + t);
    }
    // All blocks of the cluster have started.
    cluster_wait();
    if (threadIdx.x < CONSUMERS) {
        float d[N / 8][4];
        multiply_part<N>(d, a, columns, 0, x, n_tiles, [&](int t) { mbarrier_wait(full + t, 0); });
        give_part<N>(d, parts, columns, 0);
    }
    wait_for_previous_kernel();
    add_parts<N>(parts, to, first, column, columns);
    signals.tell_hidden();
}

#define PROJECT_AT_ONCE(N)                                                                                             \
    KERNEL __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS)                                                    \
        lora_project_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap a,                     \
                         const __grid_constant__ Projected to, int depth, int split, int columns,                      \
                         const __grid_constant__ Signals signals) {                                                    \
        project_at_once<N>(x, a, to, depth, split, columns, signals);                                                  \
    }
PROJECT_AT_ONCE(8)
PROJECT_AT_ONCE(16)
PROJECT_AT_ONCE(24)
PROJECT_AT_ONCE(32)

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
        clear_columns(to.hidden, to.of, first, min(first + ROWS, to.n), column + N, to.pitch, CONSUMERS);
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
