// hidden = s x A^T.

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

// hidden [n, pitch] = s x A^T, with rows `of` elements apart. A cluster of PARTS blocks computes 64 rows and N columns, each block a part of the depth
// (`split` long), and each then adds up the parts of a quarter of the rows. Grid: (PARTS x tiles of rows, tiles of
// columns). Shared: STAGES of x [64, STEP] and A [N, STEP], then the part [64, N + 8] in their place; mbarriers.
template <int N, int STAGES>
__device__ __forceinline__ void project(const TensorMap& map_x, const TensorMap& map_a, bf16* hidden, int of, int n,
                                        int pitch, int depth, int split, float scale) {
    constexpr int SIZE = (ROWS + N) * STEP, WIDTH = N + 8;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + STAGES * SIZE);
    Ring<STAGES, SIZE> ring = {tiles, barriers, barriers + STAGES};
    int part = blockIdx.x % PARTS, first = blockIdx.x / PARTS * ROWS, column = blockIdx.y * N;
    int from = part * split, n_steps = (max(0, min(depth, from + split) - from) + STEP - 1) / STEP;
    if (threadIdx.x == CONSUMERS) ring.init(), mbarrier_init_fence();
    __syncthreads();
    wait_for_previous_kernel();
    // Only now: the products of few rows that follow read x before this kernel has ended (lora/small_m.cu).
    launch_dependents();
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
            *(u32*)(hidden + (size_t)(first + row) * of + column + at) = pack(sum.x * scale, sum.y * scale);
    }
    // No block ends while another reads its shared memory.
    cluster_barrier();
}

#define PROJECT(N, STAGES)                                                                                             \
    KERNEL __cluster_dims__(PARTS, 1, 1) __launch_bounds__(THREADS)                                                    \
        lora_project_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap a, bf16* hidden,       \
                         int of, int n, int pitch, int depth, int split, float scale) {                                \
        project<N, STAGES>(x, a, hidden, of, n, pitch, depth, split, scale);                                           \
    }
PROJECT(16, 4)
PROJECT(32, 8)
PROJECT(64, 5)
PROJECT(96, 4)
