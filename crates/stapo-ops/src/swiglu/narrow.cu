// Few rows through gate and up and their joining at once: out = silu(g) u with g, u = x W^T, x [n, depth] with n at most
// 64, W [2 width, depth], out [n, width]. A block makes 64 columns of out, one warpgroup of g and one of u, over the whole
// depth in steps of 16: the chain of the products with more rows, rounded as they are, and the same bits. Bound by the
// bytes of W, so many of them are on the way.

#define STEP 64
#define THREADS 256
#define STAGE ((128 + 64) * STEP)
#define STAGES 8

KERNEL __launch_bounds__(THREADS, 1)
swiglu_narrow_bf16(const bf16* w, const bf16* x, bf16* out, int n, int width, int depth) {
    bf16* memory = aligned_memory();
    int group = threadIdx.x / 128, lane = threadIdx.x % 32, first = blockIdx.x * 64, n_steps = depth / STEP;
    auto load_step = [&](int step) {
        bf16* tile = memory + step % STAGES * STAGE;
        if (step < n_steps) {
            load_swizzled<128, THREADS>(tile, 128, [&](int r) {
                return w + (size_t)(first + (r < 64 ? r : width + r - 64)) * depth + step * STEP;
            });
            load_swizzled<64, THREADS>(tile + 128 * STEP, n, Strided{x + step * STEP, (size_t)depth});
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
            multiply_rows(d, by_rows<128>(tile, group * 64, c), by_rows<64>(tile + 128 * STEP, 0, c), step + c > 0);
        group_end();
        group_wait<0>();
        settle(d);
    }
    // Turned round in shared memory, where g and u meet and rows of out are written whole.
    constexpr int TURNED = 128 + 8;
    wait<0>();
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int column = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4 + i / 2 * 8, row = j * 8 + lane % 4 * 2 + i % 2;
            memory[row * TURNED + column] = narrow<bf16>(d[j][i]);
        }
    __syncthreads();
    for (int at = threadIdx.x; at < n * 8; at += THREADS) {
        int row = at / 8, column = at % 8 * 8;
        float g[8], u[8];
        load8(memory + row * TURNED, column, 128, true, g);
        load8(memory + row * TURNED, 64 + column, 128, true, u);
#pragma unroll
        for (int i = 0; i < 8; ++i) u[i] = g[i] * sigmoid(g[i]) * u[i];
        store8(out + (size_t)row * width + first, column, width, true, u);
    }
}
