// Products of few rows with joined adapters: the products of matmul/small_m.cu, whose depth goes on over the ranks. Behind x in
// its rows lies s x A^T, behind W in its rows the second factors.

// The kernel in front is always lora_project, which lets this one start at once. A block fetches weights while the kernel that
// writes x still runs; its chain over the inputs runs beside lora_project, and only the steps over the ranks wait for that one.
struct BesideProjection {
    Signals signals;
    int inputs;

    __device__ __forceinline__ void wait() const { wait_for_count(signals.counts, 1); }
    __device__ __forceinline__ int n_ready(const Share&) const { return inputs / STEP; }
    __device__ __forceinline__ void wait_for_rest() const {
        wait_for_count(signals.counts + 2, signals.n_projecting);
    }
    // By the thread that copies x, when all copies are under way: the counts of those that have left take their time.
    __device__ __forceinline__ void leave_counts() const {
        leave(signals.counts, signals.n_multiplying);
        leave(signals.counts + 2, signals.n_multiplying);
    }
    __device__ __forceinline__ void before_stores() const { wait_for_previous_kernel(); }
};

// x [n, inputs + ranks], W [outputs, inputs + ranks].
template <int N, int X_STAGES, int W_STAGES>
__device__ __forceinline__ void product(const TensorMap& x, const TensorMap& w, bf16* y, int n, int outputs,
                                        int inputs, int ranks, const Signals& signals) {
    auto finish = [&](const float (&d)[1][N / 8][4], int row, int column) {
        store_product<N>(d[0], y, n, outputs, row, column);
    };
    small_m_product<N, 1, X_STAGES, W_STAGES>(x, w, Share{(int)blockIdx.x * N, 0, inputs + ranks, 0}, n, finish,
                                              BesideProjection{signals, inputs});
}

#define PRODUCT_WITH_ADAPTERS(N, X_STAGES, W_STAGES)                                                                   \
    KERNEL __launch_bounds__(THREADS, 1)                                                                               \
        lora_small_m_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* y, int n,     \
                         int outputs, int inputs, int ranks, const __grid_constant__ Signals signals) {                \
        product<N, X_STAGES, W_STAGES>(x, w, y, n, outputs, inputs, ranks, signals);                                   \
    }
PRODUCT_WITH_ADAPTERS(16, 5, 8)
PRODUCT_WITH_ADAPTERS(32, 5, 6)
PRODUCT_WITH_ADAPTERS(48, 4, 5)
PRODUCT_WITH_ADAPTERS(64, 4, 4)

// Split-K: parts [gridDim.y, n, outputs], the partial sum of each part of the depth. In W there are `ranks` columns behind each
// part. The last part goes on over the ranks.
KERNEL __launch_bounds__(THREADS, 1)
lora_small_m_split_k(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, float* parts, int n,
                     int outputs, int inputs, int ranks, const __grid_constant__ Signals signals) {
    int split = blockIdx.y, part = inputs / gridDim.y, is_last = split + 1 == gridDim.y;
    auto finish = [&](const float (&d)[1][8][4], int row, int column) {
        store_part<64>(d[0], parts + (size_t)split * n * outputs, n, outputs, row, column);
    };
    Share share = {(int)blockIdx.x * 64, split * part, part + is_last * ranks, 0, 0, split * ranks};
    small_m_product<64, 1, 4, 4>(x, w, share, n, finish, BesideProjection{signals, part});
}

// Gate and up, and their SwiGLU. Rows of `out` are `pitch` apart.
KERNEL __launch_bounds__(THREADS, 1)
lora_swiglu_small_m_48(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* out, int n,
                       int width, int inputs, int ranks, const __grid_constant__ Signals signals, int pitch) {
    auto finish = [&](const float (&d)[2][6][4], int row, int column) {
        store_swiglu<48>(d, out, pitch, n, width, row, column);
    };
    small_m_product<48, 2, 3, 4>(x, w, Share{(int)blockIdx.x * 48, 0, inputs + ranks, width}, n, finish,
                                 BesideProjection{signals, inputs});
}
