// Few rows through a matrix: y = x W^T, x [n, depth] with n at most 64, W [outputs, depth]. A block makes a few columns of
// y over the whole depth in steps of 16: the chain of the products with more rows, rounded as they are, and the same bits.
// So few columns that all multiprocessors have some. What a block waits for is not memory but its own intake: x passes
// through every multiprocessor. Weights do not depend on the kernel before: they are asked for before it has ended.
// Stages and shared memory: see narrow.rs.

#define ROWS 64
#define STEP 128
#define CONSUMERS 128
#define THREADS (CONSUMERS + 64)

// d (+)= a b, a [64, 16] in registers, b by rows of shared memory.
template <int N> __device__ __forceinline__ void multiply_tile(float (&d)[N / 8][4], const u32* a, u64 b, bool adds);
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds)
template <> __device__ __forceinline__ void multiply_tile<16>(float (&d)[2][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %13, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1) : OPERANDS);
}
template <> __device__ __forceinline__ void multiply_tile<32>(float (&d)[4][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3) : OPERANDS);
}
template <> __device__ __forceinline__ void multiply_tile<48>(float (&d)[6][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %29, 0; "
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5) : OPERANDS);
}
template <> __device__ __forceinline__ void multiply_tile<64>(float (&d)[8][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7) : OPERANDS);
}

// Shared memory: X_STAGES of x [64, STEP], W_STAGES of MATRICES x W [N, STEP], barriers. Matrix m's rows are those from
// m * apart on; `from` is where the depth begins. `finish` gets each thread's results.
template <int N, int MATRICES, int X_STAGES, int W_STAGES, class Finish>
__device__ __forceinline__ void small_m_product(const TensorMap& map_x, const TensorMap& map_w, int first, int from, int depth, int apart,
                                               Finish finish) {
    constexpr int X_STAGE = ROWS * STEP, W_STAGE = MATRICES * N * STEP;
    bf16 *tiles_x = aligned_memory(), *tiles_w = tiles_x + X_STAGES * X_STAGE;
    u64* full_x = (u64*)(tiles_w + W_STAGES * W_STAGE);
    u64 *empty_x = full_x + X_STAGES, *full_w = empty_x + X_STAGES, *empty_w = full_w + W_STAGES;
    int n_steps = depth / STEP, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(map_x), prefetch_tensor_map(map_w);
        for (int s = 0; s < X_STAGES; ++s) mbarrier_init(full_x + s, 1), mbarrier_init(empty_x + s, 4);
        for (int s = 0; s < W_STAGES; ++s) mbarrier_init(full_w + s, 1), mbarrier_init(empty_w + s, 4);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == CONSUMERS) {
        for (int step = 0; step < n_steps; ++step) {
            int s = step % W_STAGES;
            if (step >= W_STAGES) mbarrier_wait(empty_w + s, (step / W_STAGES - 1) % 2);
            mbarrier_arrive_expect_bytes(full_w + s, 2 * W_STAGE);
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                for (int c = 0; c < STEP; c += 64)
                    tma_load_tile(tiles_w + s * W_STAGE + m * N * STEP + c * N, map_w, from + step * STEP + c, first + m * apart,
                              full_w + s);
        }
    } else if (threadIdx.x == CONSUMERS + 32) {
        wait_for_previous_kernel();
        for (int step = 0; step < n_steps; ++step) {
            int s = step % X_STAGES;
            if (step >= X_STAGES) mbarrier_wait(empty_x + s, (step / X_STAGES - 1) % 2);
            mbarrier_arrive_expect_bytes(full_x + s, 2 * X_STAGE);
#pragma unroll
            for (int c = 0; c < STEP; c += 64)
                tma_load_tile(tiles_x + s * X_STAGE + c * ROWS, map_x, from + step * STEP + c, 0, full_x + s);
        }
    } else if (warp < 4) {
        float d[MATRICES][N / 8][4];
        u32 a[2][STEP / 16][4];
        int row = warp * 16 + lane % 16;
        u32 of_row = shared_address(tiles_x + row * 64);
        auto load = [&](u32 (&a)[STEP / 16][4], int step) {
            mbarrier_wait(full_x + step % X_STAGES, step / X_STAGES % 2);
            u32 tile = of_row + step % X_STAGES * X_STAGE * 2;
#pragma unroll
            for (int c = 0; c < STEP / 16; ++c)
                ldmatrix_at(a[c], tile + c / 4 * ROWS * 128 + ((c % 4 * 2 + lane / 16) ^ row % 8) * 16);
        };
        auto multiply = [&](u32 (&now)[STEP / 16][4], u32 (&next)[STEP / 16][4], int step) {
            if (step >= n_steps) return;
            mbarrier_wait(full_w + step % W_STAGES, step / W_STAGES % 2);
            const bf16* w = tiles_w + step % W_STAGES * W_STAGE;
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < STEP / 16; ++c)
#pragma unroll
                for (int m = 0; m < MATRICES; ++m)
                    multiply_tile<N>(d[m], now[c], k_major_operand<N>(w + m * N * STEP, 0, c * 16), step + c > 0);
            wgmma_commit();
            if (lane == 0) mbarrier_arrive(empty_x + step % X_STAGES);
            wgmma_wait<1>();
            if (step > 0 && lane == 0) mbarrier_arrive(empty_w + (step - 1) % W_STAGES);
            if (step + 1 < n_steps) load(next, step + 1);
        };
        load(a[0], 0);
        for (int step = 0; step < n_steps; step += 2) multiply(a[0], a[1], step), multiply(a[1], a[0], step + 1);
        wgmma_wait<0>();
#pragma unroll
        for (int m = 0; m < MATRICES; ++m) fence_registers(d[m]);
        finish(d, warp * 16 + lane / 4, first + lane % 4 * 2);
    }
}

template <int N, int X_STAGES, int W_STAGES>
__device__ __forceinline__ void product(const TensorMap& x, const TensorMap& w, bf16* y, int n, int outputs, int depth) {
    auto finish = [&](const float (&d)[1][N / 8][4], int row, int column) {
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
                if (row < n && column + j * 8 < outputs)
                    *(u32*)(y + (size_t)row * outputs + column + j * 8) = pack(d[0][j][2 * half], d[0][j][2 * half + 1]);
    };
    small_m_product<N, 1, X_STAGES, W_STAGES>(x, w, blockIdx.x * N, 0, depth, 0, finish);
}

#define PRODUCT(N, X_STAGES, W_STAGES)                                                                                 \
    KERNEL __launch_bounds__(THREADS, 1) product_small_m_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, \
                                                            bf16* y, int n, int outputs, int depth) {                  \
        product<N, X_STAGES, W_STAGES>(x, w, y, n, outputs, depth);                                                    \
    }
PRODUCT(16, 5, 8)
PRODUCT(32, 5, 6)
PRODUCT(48, 4, 5)

// The chains of a deep product (see cuda.rs), each by itself: parts [gridDim.y, n, outputs].
KERNEL __launch_bounds__(THREADS, 1)
product_small_m_split_k(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, float* parts, int n, int outputs,
                    int depth) {
    int of_chain = depth / gridDim.y;
    auto finish = [&](const float (&d)[1][8][4], int row, int column) {
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (row < n && column + j * 8 < outputs)
                    *(float2*)(parts + ((size_t)blockIdx.y * n + row) * outputs + column + j * 8) =
                        make_float2(d[0][j][2 * half], d[0][j][2 * half + 1]);
    };
    small_m_product<64, 1, 4, 4>(x, w, blockIdx.x * 64, blockIdx.y * of_chain, of_chain, 0, finish);
}

// Gate and up and their joining at once: out = silu(g) u with g and u the two halves of x W^T.
KERNEL __launch_bounds__(THREADS, 1)
swiglu_small_m_48(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, int n, int width, int depth) {
    auto finish = [&](const float (&d)[2][6][4], int row, int column) {
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < 6; ++j) {
                float y[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float g = widen(round_to<bf16>(d[0][j][2 * half + i])), u = widen(round_to<bf16>(d[1][j][2 * half + i]));
                    y[i] = g * sigmoid(g) * u;
                }
                if (row < n && column + j * 8 < width) *(u32*)(out + (size_t)row * width + column + j * 8) = pack(y[0], y[1]);
            }
    };
    small_m_product<48, 2, 3, 4>(x, w, blockIdx.x * 48, 0, depth, width, finish);
}
