// Products of few rows: y = x W^T with x [n, k], n at most 64, W [outputs, k], y [n, outputs]. Bound by the bytes of W, so
// everything here is about having many of them on the way. A block makes 64 GROUPS outputs, one warpgroup each 64, over
// the whole depth in steps of 16: the chain of the products with more rows, and the same bits.

#define STEP 64
#define BYTES_AT_HAND (200 << 10)

template <class Out, int GROUPS>
__device__ __forceinline__ void narrow_product(const bf16* w, const bf16* x, Out* y, int n, int outputs, int depth) {
    constexpr int THREADS = 128 * GROUPS, WIDTH = 64 * GROUPS, STAGE = (WIDTH + 64) * STEP;
    constexpr int STAGES = BYTES_AT_HAND / (2 * STAGE);
    bf16* memory = aligned_memory();
    int group = threadIdx.x / 128, lane = threadIdx.x % 32, first = blockIdx.x * WIDTH, n_steps = depth / STEP;
    auto load_step = [&](int step) {
        bf16* tile = memory + step % STAGES * STAGE;
        if (step < n_steps) {
            load_swizzled<WIDTH, THREADS>(tile, outputs - first, Strided{w + (size_t)first * depth + step * STEP, (size_t)depth});
            load_swizzled<64, THREADS>(tile + WIDTH * STEP, n, Strided{x + step * STEP, (size_t)depth});
        }
        commit();
    };
    for (int step = 0; step < STAGES - 1; ++step) load_step(step);
    float d[8][4];
    for (int step = 0; step < n_steps; ++step) {
        wait<STAGES - 2>();
        publish();
        __syncthreads();
        load_step(step + STAGES - 1);
        const bf16* tile = memory + step % STAGES * STAGE;
        group_begin();
#pragma unroll
        for (int c = 0; c < STEP; c += 16)
            multiply_rows(d, by_rows<WIDTH>(tile, group * 64, c), by_rows<64>(tile + WIDTH * STEP, 0, c), step + c > 0);
        group_end();
        group_wait<0>();
        settle(d);
    }
    // Turned round in shared memory, so that rows of y are written whole.
    constexpr int PIECE = 16 / sizeof(Out), STRIDE_OUT = WIDTH + PIECE;
    Out* turned = (Out*)memory;
    wait<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4 + i / 2 * 8, row = j * 8 + lane % 4 * 2 + i % 2;
            turned[row * STRIDE_OUT + column] = narrow<Out>(d[j][i]);
        }
    __syncthreads();
    for (int at = threadIdx.x; at < n * (WIDTH / PIECE); at += THREADS) {
        int row = at / (WIDTH / PIECE), column = at % (WIDTH / PIECE) * PIECE;
        if (first + column < outputs)
            *(uint4*)(y + (size_t)row * outputs + first + column) = *(uint4*)(turned + row * STRIDE_OUT + column);
    }
}

#define NARROW(Out, GROUPS)                                                                                            \
    KERNEL __launch_bounds__(128 * GROUPS, 1)                                                                          \
    narrow_product_##Out##_##GROUPS(const bf16* w, const bf16* x, Out* y, int n, int outputs, int depth) {             \
        narrow_product<Out, GROUPS>(w, x, y, n, outputs, depth);                                                       \
    }

NARROW(bf16, 1)
NARROW(bf16, 2)
NARROW(bf16, 4)
NARROW(float, 1)
NARROW(float, 2)
NARROW(float, 4)
