// Products of few rows with joined adapters. The kernel in front leaves s x A^T in `hidden` [n, pitch]. A block continues its
// chains over the ranks, as a product of depth inputs + pitch does.

// s x A^T and the second factors of the modules that a block's N columns belong to, at most two. Ranks up to 64.
//
// The kernel in front is always lora_project. It lets this one start once its own predecessor, which wrote x, has ended: a
// block reads x at once, and its chain over the inputs runs beside lora_project. Only the copy of hidden waits for the end of
// lora_project, whose blocks are all running by then, so that nothing can wait for ever.
template <int N> struct Terms {
    static constexpr int SIZE = 2 * (N + ROWS) * 64;
    static constexpr bool INPUTS_FIRST = true;
    const Maps* factors;
    const TensorMap* hidden;
    const Modules* modules;
    int n, module[2], row[2];
    bf16* tiles;
    u64* full;

    __device__ __forceinline__ void init(bf16* memory, u64* barriers) {
        tiles = memory, full = barriers;
        if (threadIdx.x == CONSUMERS) mbarrier_init(full, 1), mbarrier_init(full + 1, 1);
    }
    __device__ __forceinline__ void load() {
        mbarrier_arrive_expect_bytes(full, n * N * 64 * 2);
        for (int i = 0; i < n; ++i) tma_load_tile(tiles + i * N * 64, factors->of[module[i]], 0, row[i], full);
    }
    __device__ __forceinline__ void load_inputs() {
        mbarrier_arrive_expect_bytes(full + 1, n * ROWS * 64 * 2);
        for (int i = 0; i < n; ++i)
            tma_load_tile(hidden_tile(i), *hidden, modules->hidden[module[i]], 0, full + 1);
    }
    __device__ __forceinline__ bf16* hidden_tile(int i) const { return tiles + 2 * N * 64 + i * ROWS * 64; }
    __device__ __forceinline__ void add(int of, int first) { module[n] = of, row[n] = first, ++n; }
    __device__ __forceinline__ void wait() const { mbarrier_wait(full, 0), mbarrier_wait(full + 1, 0); }
};

// The modules of N columns of y from `first` on. Rows of a module's factor outside of it are read as 0.
template <int N>
__device__ __forceinline__ Terms<N> terms_of(const Maps& factors, const TensorMap& hidden, const Modules& m, int first) {
    Terms<N> terms = {&factors, &hidden, &m};
    for (int i = 0; i < m.n; ++i)
        if (first < m.start[i] + m.outputs[i] && first + N > m.start[i] && terms.n < 2) terms.add(i, first - m.start[i]);
    return terms;
}

// Continues the chains of the columns of the terms' module i over its ranks; adds 0 to the others.
template <int N> __device__ __forceinline__ void add_chain(float (&d)[N / 8][4], const Terms<N>& terms, int i) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16, rank = terms.modules->rank;
    u32 of_row = shared_address(terms.hidden_tile(i) + row * 64), a[4][4];
#pragma unroll
    for (int c = 0; c < 4; ++c) ldmatrix_at(a[c], of_row + ((c * 2 + lane / 16) ^ row % 8) * 16);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < 4; ++c)
        if (c * 16 < rank)
            wgmma_tile<N>(d, a[c], k_major_operand<N>(terms.tiles + i * N * 64, 0, c * 16), true);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(d);
}

// Continues the chains of the block's columns over the ranks, modules in order.
template <int N> __device__ __forceinline__ void continue_chains(float (&d)[N / 8][4], const Terms<N>& terms) {
    if (terms.n == 0) return;
    terms.wait();
    add_chain<N>(d, terms, 0);
    if (terms.n > 1) add_chain<N>(d, terms, 1);
}

__device__ __forceinline__ float rounded(float x) { return widen(round_to<bf16>(x)); }

template <int N, int X_STAGES, int W_STAGES>
__device__ __forceinline__ void product(const TensorMap& x, const TensorMap& w, const TensorMap& hidden, const Maps& b,
                                        const Modules& modules, bf16* y, int n, int outputs, int depth) {
    int first = blockIdx.x * N;
    auto finish = [&](float (&d)[1][N / 8][4], int row, int column, const Terms<N>& terms) {
        continue_chains<N>(d[0], terms);
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
                if (row < n && column + j * 8 < outputs)
                    *(u32*)(y + (size_t)row * outputs + column + j * 8) =
                        pack(d[0][j][2 * half], d[0][j][2 * half + 1]);
    };
    small_m_product<N, 1, X_STAGES, W_STAGES>(x, w, Share{first, 0, depth, 0}, n, finish,
                                              terms_of<N>(b, hidden, modules, first));
}

#define PRODUCT_WITH_ADAPTERS(N, X_STAGES, W_STAGES)                                                                   \
    KERNEL __launch_bounds__(THREADS, 1)                                                                               \
        lora_small_m_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                     \
                         const __grid_constant__ TensorMap hidden, const __grid_constant__ Maps b,                     \
                         const __grid_constant__ Modules modules, bf16* y, int n, int outputs, int depth) {            \
        product<N, X_STAGES, W_STAGES>(x, w, hidden, b, modules, y, n, outputs, depth);                                \
    }
PRODUCT_WITH_ADAPTERS(16, 5, 8)
PRODUCT_WITH_ADAPTERS(32, 5, 6)
PRODUCT_WITH_ADAPTERS(48, 4, 5)

// One TMA descriptor for each part of the depth of a split-K product.
struct alignas(64) Splits {
    TensorMap of[PARTS];
};

// Split-K: parts [gridDim.y, n, outputs], the partial sum of each part of the depth, `depth` long. The
// last goes on over the ranks.
KERNEL __launch_bounds__(THREADS, 1)
lora_small_m_split_k(const __grid_constant__ Splits x, const __grid_constant__ Splits w,
                            const __grid_constant__ TensorMap hidden, const __grid_constant__ Maps b,
                            const __grid_constant__ Modules modules, float* parts, int n, int outputs, int depth) {
    int split = blockIdx.y, first = blockIdx.x * 64;
    auto finish = [&](float (&d)[1][8][4], int row, int column, const Terms<64>& terms) {
        continue_chains<64>(d[0], terms);
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < 8; ++j)
                if (row < n && column + j * 8 < outputs)
                    *(float2*)(parts + ((size_t)split * n + row) * outputs + column + j * 8) =
                        make_float2(d[0][j][2 * half], d[0][j][2 * half + 1]);
    };
    Terms<64> terms = terms_of<64>(b, hidden, modules, first);
    if (split + 1 < gridDim.y) terms.n = 0;
    small_m_product<64, 1, 4, 4>(x.of[split], w.of[split], Share{first, 0, depth, 0}, n, finish, terms);
}

// Gate and up, and their SwiGLU. Module 0 is gate, module 1 up. Rows of `out` are `pitch` apart.
KERNEL __launch_bounds__(THREADS, 1)
lora_swiglu_small_m_48(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                              const __grid_constant__ TensorMap hidden, const __grid_constant__ Maps b,
                              const __grid_constant__ Modules modules, bf16* out, int n, int width, int depth,
                              int pitch) {
    int first = blockIdx.x * 48;
    auto finish = [&](float (&d)[2][6][4], int row, int column, const Terms<48>& terms) {
        terms.wait();
        add_chain<48>(d[0], terms, 0);
        add_chain<48>(d[1], terms, 1);
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < 6; ++j) {
                float y[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float g = rounded(d[0][j][2 * half + i]), u = rounded(d[1][j][2 * half + i]);
                    y[i] = g * sigmoid(g) * u;
                }
                if (row < n && column + j * 8 < width)
                    *(u32*)(out + (size_t)row * pitch + column + j * 8) = pack(y[0], y[1]);
            }
    };
    Terms<48> terms = {&b, &hidden, &modules};
    terms.add(0, first), terms.add(1, first);
    small_m_product<48, 2, 3, 4>(x, w, Share{first, 0, depth, width}, n, finish, terms);
}
