// Products of few rows (a small M): y = x W^T, x [n, depth] with n at most 64, W [outputs, depth]. A block computes a
// few columns of y over the whole depth in steps of 16: the chain of sums of the products with more rows, rounded as
// they are, and so the same bits. A block has so few columns that every multiprocessor has a block. A multiprocessor's
// time goes into reading x, which passes through every multiprocessor, and not into reading weights. Weights do not
// depend on the kernel in front (programmatic dependent launch): their copies start before that kernel has ended.
// Stages and shared memory: see small_m.rs.

#define ROWS 64
#define STEP 128
#define CONSUMERS 128
#define THREADS (CONSUMERS + 64)

// d (+)= a b^T, a [64, 16] in registers, b [N, 16] a K-major operand in shared memory.
template <int N> __device__ __forceinline__ void wgmma_tile(float (&d)[N / 8][4], const u32* a, u64 b, bool adds);
#define OPERANDS "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds)
template <> __device__ __forceinline__ void wgmma_tile<16>(float (&d)[2][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %13, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1)
        : OPERANDS);
}
template <> __device__ __forceinline__ void wgmma_tile<32>(float (&d)[4][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3)
        : OPERANDS);
}
template <> __device__ __forceinline__ void wgmma_tile<48>(float (&d)[6][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %29, 0; "
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5)
        : OPERANDS);
}
template <> __device__ __forceinline__ void wgmma_tile<64>(float (&d)[8][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7)
        : OPERANDS);
}

// Which part of the product a block computes: columns from `first` on, `depth` columns of x and W from `from` on. Matrix m's
// rows are those of W from m * apart on, its columns those from m * further on; all columns of W lie `shift` further on than
// those of x. What the last step has beyond the end of x and W is 0.
struct Share {
    int first, from, depth, apart, further, shift;

    __device__ __forceinline__ int n_steps() const { return (depth + STEP - 1) / STEP; }
};

// The loop of the thread that copies weights.
template <int N, int MATRICES, class Weights>
__device__ __forceinline__ void produce_weights(const Weights& ring, const TensorMap& map, const Share& share) {
    for (int step = 0; step < share.n_steps(); ++step) {
        u64* full = ring.begin_fill(step);
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int c = 0; c < STEP; c += 64)
                tma_load_tile(ring.tile(step) + m * N * STEP + c * N, map,
                              share.from + share.shift + m * share.further + step * STEP + c,
                              share.first + m * share.apart, full);
    }
}

// The loop of the thread that copies x, for some of the steps. Only the `n` rows that are there
// are copied, rounded up to the 8 of a swizzle; what the others hold reaches no result that is kept.
template <class Inputs>
__device__ __forceinline__ void produce_inputs(const Inputs& ring, const TensorMap& map, const Share& share, int n,
                                               int first_step, int end) {
    for (int step = first_step; step < end; ++step) {
        u64* full = ring.begin_fill(step, (n + 7) / 8 * 8 * STEP);
#pragma unroll
        for (int c = 0; c < STEP; c += 64)
            tma_load_tile(ring.tile(step) + c * ROWS, map, share.from + step * STEP + c, 0, full);
    }
}

// x in a ring of tiles. A thread loads its operands of a step, and lets the tile go when the step is multiplied.
template <class Inputs> struct RingRows {
    Inputs ring;
    int row;
    u32 of_row;

    __device__ __forceinline__ RingRows(const Inputs& ring)
        : ring(ring), row(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16), of_row(shared_address(ring.tiles + row * 64)) {}
    __device__ __forceinline__ void load(u32 (&a)[STEP / 16][4], int step) const {
        ring.wait_full(step);
        u32 tile = of_row + 2 * Inputs::offset(step), half = threadIdx.x % 32 / 16;
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c)
            ldmatrix_at(a[c], tile + c / 4 * ROWS * 128 + ((c % 4 * 2 + half) ^ row % 8) * 16);
    }
    __device__ __forceinline__ void release(int step) const {
        if (threadIdx.x % 32 == 0) ring.arrive_empty(step);
    }
};

// The consumers' loop. The operands of x for a step are loaded from shared memory while the step before it is multiplied.
template <int N, int MATRICES, class Rows, class Weights>
__device__ __forceinline__ void consume(float (&d)[MATRICES][N / 8][4], const Rows& rows, const Weights& weights,
                                        int n_steps) {
    u32 a[2][STEP / 16][4];
    u64 tiles = k_major_operand<N>(weights.tiles, 0, 0);
    auto multiply = [&](u32(&now)[STEP / 16][4], u32(&next)[STEP / 16][4], int step) {
        if (step >= n_steps) return;
        weights.wait_full(step);
        u64 w = advance(tiles, uniform(2 * Weights::offset(step)));
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                wgmma_tile<N>(d[m], now[c], advance(w, 2 * m * N * STEP + column_bytes<N>(c * 16)), step + c > 0);
        wgmma_commit();
        rows.release(step);
        wgmma_wait<1>();
        if (step > 0 && threadIdx.x % 32 == 0) weights.arrive_empty(step - 1);
        if (step + 1 < n_steps) rows.load(next, step + 1);
    };
    rows.load(a[0], 0);
    for (int step = 0; step < n_steps; step += 2) multiply(a[0], a[1], step), multiply(a[1], a[0], step + 1);
    wgmma_wait<0>();
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) fence_registers(d[m]);
}

// When x may be read: all of it after the end of the kernel in front of this one. The thread that copies x calls `wait`, copies
// the first `n_ready` steps, and calls `wait_for_rest` before the others and `leave_counts` at the end.
struct AfterPrevious {
    __device__ __forceinline__ void wait() const { wait_for_previous_kernel(); }
    __device__ __forceinline__ int n_ready(const Share& share) const { return share.n_steps(); }
    __device__ __forceinline__ void wait_for_rest() const {}
    __device__ __forceinline__ void leave_counts() const {}
    __device__ __forceinline__ void before_stores() const {}
};

// Shared memory: X_STAGES of x [64, STEP], W_STAGES of MATRICES x W [N, STEP], mbarriers. `finish` gets each thread's results and
// the row and column of the first of them.
template <int N, int MATRICES, int X_STAGES, int W_STAGES, class Finish, class Order = AfterPrevious>
__device__ __forceinline__ void small_m_product(const TensorMap& map_x, const TensorMap& map_w, const Share& share,
                                                int n, Finish finish, Order order = Order()) {
    constexpr int X_SIZE = ROWS * STEP, W_SIZE = MATRICES * N * STEP;
    bf16 *tiles_x = aligned_memory(), *tiles_w = tiles_x + X_STAGES * X_SIZE;
    u64* barriers = (u64*)(tiles_w + W_STAGES * W_SIZE);
    Ring<X_STAGES, X_SIZE> inputs = {tiles_x, barriers, barriers + X_STAGES};
    Ring<W_STAGES, W_SIZE> weights = {tiles_w, barriers + 2 * X_STAGES, barriers + 2 * X_STAGES + W_STAGES};
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(map_x), prefetch_tensor_map(map_w);
        inputs.init(), weights.init(), mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x == CONSUMERS) {
        produce_weights<N, MATRICES>(weights, map_w, share);
    } else if (threadIdx.x == CONSUMERS + 32) {
        order.wait();
        produce_inputs(inputs, map_x, share, n, 0, order.n_ready(share));
        if (order.n_ready(share) < share.n_steps()) order.wait_for_rest();
        produce_inputs(inputs, map_x, share, n, order.n_ready(share), share.n_steps());
        order.leave_counts();
    } else if (warp < 4) {
        float d[MATRICES][N / 8][4];
        consume<N, MATRICES>(d, RingRows<decltype(inputs)>(inputs), weights, share.n_steps());
        order.before_stores();
        finish(d, warp * 16 + lane / 4, share.first + lane % 4 * 2);
    }
}

// Stores a thread's results, the first of them at (row, column) of y [n, outputs].
template <int N>
__device__ __forceinline__ void store_product(const float (&d)[N / 8][4], bf16* y, int n, int outputs, int row,
                                              int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            if (row < n && column + j * 8 < outputs)
                *(u32*)(y + (size_t)row * outputs + column + j * 8) = pack(d[j][2 * half], d[j][2 * half + 1]);
}

// The same in f32, for a part of a split-K product.
template <int N>
__device__ __forceinline__ void store_part(const float (&d)[N / 8][4], float* part, int n, int outputs, int row,
                                           int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            if (row < n && column + j * 8 < outputs)
                *(float2*)(part + (size_t)row * outputs + column + j * 8) = make_float2(d[j][2 * half], d[j][2 * half + 1]);
}

// The gated product of gate and up, d[0] and d[1], to out [n, width] with rows `pitch` apart.
template <int N, bool GELU = false>
__device__ __forceinline__ void store_swiglu(const float (&d)[2][N / 8][4], bf16* out, int pitch, int n, int width,
                                             int row, int column) {
#pragma unroll
    for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            float y[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float g = widen(round_to<bf16>(d[0][j][2 * half + i])), u = widen(round_to<bf16>(d[1][j][2 * half + i]));
                y[i] = activate<GELU>(g) * u;
            }
            if (row < n && column + j * 8 < width)
                *(u32*)(out + (size_t)row * pitch + column + j * 8) = pack(y[0], y[1]);
        }
}

template <int N, int X_STAGES, int W_STAGES>
__device__ __forceinline__ void product(const TensorMap& x, const TensorMap& w, bf16* y, int n, int outputs,
                                        int depth) {
    auto finish = [&](const float (&d)[1][N / 8][4], int row, int column) {
        store_product<N>(d[0], y, n, outputs, row, column);
    };
    small_m_product<N, 1, X_STAGES, W_STAGES>(x, w, Share{(int)blockIdx.x * N, 0, depth}, n, finish);
}

// Other sources take the functions above without the kernels.
#ifndef WITHOUT_SMALL_M_KERNELS

#define PRODUCT(N, X_STAGES, W_STAGES)                                                                                 \
    KERNEL __launch_bounds__(THREADS, 1)                                                                               \
        product_small_m_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* y, int n,  \
                            int outputs, int depth) {                                                                  \
        product<N, X_STAGES, W_STAGES>(x, w, y, n, outputs, depth);                                                    \
    }
PRODUCT(16, 5, 8)
PRODUCT(32, 5, 6)
PRODUCT(48, 4, 5)
PRODUCT(64, 4, 4)

// Split-K (see cuda.rs): parts [gridDim.y, n, outputs], the partial sum of each part of the depth.
KERNEL __launch_bounds__(THREADS, 1)
product_small_m_split_k(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, float* parts,
                        int n, int outputs, int depth) {
    int split = depth / gridDim.y;
    auto finish = [&](const float (&d)[1][8][4], int row, int column) {
        store_part<64>(d[0], parts + (size_t)blockIdx.y * n * outputs, n, outputs, row, column);
    };
    small_m_product<64, 1, 4, 4>(x, w, Share{(int)blockIdx.x * 64, (int)blockIdx.y * split, split}, n, finish);
}

// The products with gate and up and their gated product in one kernel: out = silu(g) u, or gelu(g) u, with g and u the two halves
// of x W^T.
#define GATED_PRODUCT(NAME, GELU)                                                                                      \
    KERNEL __launch_bounds__(THREADS, 1)                                                                               \
        NAME##_small_m_48(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, int n,  \
                          int width, int depth) {                                                                      \
        auto finish = [&](const float (&d)[2][6][4], int row, int column) {                                            \
            store_swiglu<48, GELU>(d, out, width, n, width, row, column);                                              \
        };                                                                                                             \
        small_m_product<48, 2, 3, 4>(x, w, Share{(int)blockIdx.x * 48, 0, depth, width}, n, finish);                   \
    }
GATED_PRODUCT(swiglu, false)
GATED_PRODUCT(geglu, true)

#endif
