// Products of few rows with adapters. The first PARTS blocks compute x A^T, each a part of the depth, while the others
// multiply with the weights; these add the term before they write. The first blocks of a grid start first, so no block
// waits for one that has no place to run. The bits are those of lora/forward.cu.

// Columns of x A^T that one matrix instruction computes in the first blocks.
#define HIDDEN_COLUMNS 32

// The adapters of a product. parts [PARTS, 64, pitch] are the parts of x A^T; counters: how many are there, and how many
// blocks have read them. The last block to read sets both back to 0 for the next product.
struct Adapters {
    float* parts;
    u32* counters;
    float scale;
    int split;
    Modules modules;
};

__device__ __forceinline__ u32 load_acquire(const u32* from) {
    u32 x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
    return x;
}

// One of the first blocks: its part of x A^T. Shared memory is that of the products, which have more.
template <int MATRICES>
__device__ __forceinline__ void hidden_part(const TensorMap& x, const TensorMap& a, const Adapters& adapters, int n,
                                            int depth) {
    int part = blockIdx.x, pitch = adapters.modules.pitch, from = part * adapters.split;
    float* to = adapters.parts + (size_t)part * ROWS * pitch;
    auto finish = [&](const float (&d)[MATRICES][HIDDEN_COLUMNS / 8][4], int row, int column, NoExtra) {
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
#pragma unroll
                for (int j = 0; j < HIDDEN_COLUMNS / 8; ++j) {
                    int at = column + m * HIDDEN_COLUMNS + j * 8;
                    if (row < n && at < pitch)
                        *(float2*)(to + row * pitch + at) = make_float2(d[m][j][2 * half], d[m][j][2 * half + 1]);
                }
        __threadfence();
    };
    int own = max(0, min(adapters.split, depth - from));
    if (own > 0) {
        constexpr int STAGES = MATRICES == 1 ? 4 : 3;
        small_m_product<HIDDEN_COLUMNS, MATRICES, STAGES, STAGES>(x, a, Share{0, from, own, HIDDEN_COLUMNS}, n, finish);
    } else {
        launch_dependents();
        wait_for_previous_kernel();
        for (int i = threadIdx.x; i < n * pitch; i += blockDim.x) to[i] = 0.0f;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(adapters.counters, 1u);
    }
}

__device__ __forceinline__ void hidden_parts(const TensorMap& x, const TensorMap& a, const Adapters& adapters, int n,
                                             int depth) {
    if (adapters.modules.pitch <= HIDDEN_COLUMNS)
        hidden_part<1>(x, a, adapters, n, depth);
    else if (adapters.modules.pitch <= 2 * HIDDEN_COLUMNS)
        hidden_part<2>(x, a, adapters, n, depth);
    else
        hidden_part<3>(x, a, adapters, n, depth);
}

// s x A^T and the second factors of the modules that a block's N columns belong to, at most two.
template <int N> struct Terms {
    // Two tiles of second factors, and one of s x A^T: ranks of the first module in columns 0 to 31, then of the second.
    static constexpr int SIZE = 2 * N * 64 + ROWS * 64;
    const Maps* maps;
    const Adapters* adapters;
    // Rows of x, and blocks that read x A^T.
    int n_rows, n_blocks;
    int n, module[2], row[2];
    bf16 *tiles, *hidden;
    u64 *factors_full, *hidden_full;

    __device__ __forceinline__ void init(bf16* memory, u64* barriers) {
        tiles = memory, hidden = memory + 2 * N * 64, factors_full = barriers, hidden_full = barriers + 1;
        if (threadIdx.x == CONSUMERS) mbarrier_init(factors_full, 1), mbarrier_init(hidden_full, 64);
    }
    __device__ __forceinline__ void load() {
        if (n == 0) return;
        mbarrier_arrive_expect_bytes(factors_full, n * N * 64 * 2);
        for (int i = 0; i < n; ++i) tma_load_tile(tiles + i * N * 64, maps->of[module[i]], 0, row[i], factors_full);
    }
    __device__ __forceinline__ void add(int of, int first) { module[n] = of, row[n] = first, ++n; }

    // Two warps wait for the parts of x A^T, a thread for each row, add them up and leave them in shared memory. The
    // kernel in front, which sets the counters back, has ended then.
    __device__ __forceinline__ void help() {
        if (n_blocks == 0) return;
        const Modules& m = adapters->modules;
        int at = threadIdx.x - THREADS;
        wait_for_previous_kernel();
        if (at % 32 == 0)
            while (load_acquire(adapters->counters) < PARTS) {
            }
        __syncwarp();
        for (int i = 0; i < n; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                int column = m.hidden[module[i]] + c * 8;
                bool is_there = at < n_rows && column < m.pitch && c * 8 < m.rank;
                float x[8] = {};
                const float* from = adapters->parts + at * m.pitch + column;
#pragma unroll
                for (int p = 0; p < PARTS && is_there; ++p)
#pragma unroll
                    for (int q = 0; q < 8; q += 4) {
                        float4 part = __ldcg((const float4*)(from + p * ROWS * m.pitch + q));
                        float y[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
                        for (int k = 0; k < 4; ++k) x[q + k] = p == 0 ? y[k] : x[q + k] + y[k];
                    }
#pragma unroll
                for (int k = 0; k < 8; ++k) x[k] *= adapters->scale;
                *(uint4*)(hidden + at * 64 + ((i * 4 + c) ^ at % 8) * 8) =
                    make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
            }
        mbarrier_arrive(hidden_full);
        __syncwarp();
        if (at % 32 == 0 && atomicAdd(adapters->counters + 1, 1u) == 2 * n_blocks - 1) {
            adapters->counters[0] = 0, adapters->counters[1] = 0;
            __threadfence();
        }
    }
};

// The modules of N columns of y from `first` on. Rows of a module's factor outside of it are read as 0.
template <int N>
__device__ __forceinline__ Terms<N> terms_of(const Maps& maps, const Adapters& adapters, int n_rows, int n_blocks,
                                             int first) {
    const Modules& m = adapters.modules;
    Terms<N> terms = {&maps, &adapters, n_rows, n_blocks};
    for (int i = 0; i < m.n; ++i)
        if (first < m.start[i] + m.outputs[i] && first + N > m.start[i] && terms.n < 2) terms.add(i, first - m.start[i]);
    return terms;
}

// The chain over the ranks of the terms' module i for its columns; 0 for the others. Ranks up to 32.
template <int N>
__device__ __forceinline__ void add_chain(float (&term)[N / 8][4], const Terms<N>& terms, int i, bool adds) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16, rank = terms.adapters->modules.rank;
    u32 of_row = shared_address(terms.hidden + row * 64), a[2][4];
#pragma unroll
    for (int c = 0; c < 2; ++c) ldmatrix_at(a[c], of_row + ((i * 4 + c * 2 + lane / 16) ^ row % 8) * 16);
    wgmma_fence();
    wgmma_tile<N>(term, a[0], k_major_operand<N>(terms.tiles + i * N * 64, 0, 0), adds);
    if (rank > 16) wgmma_tile<N>(term, a[1], k_major_operand<N>(terms.tiles + i * N * 64, 0, 16), true);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(term);
}

// The term of the block's columns.
template <int N> __device__ __forceinline__ void compute_term(float (&term)[N / 8][4], const Terms<N>& terms) {
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) term[j][i] = 0.0f;
    if (terms.n == 0) return;
    mbarrier_wait(terms.factors_full, 0);
    mbarrier_wait(terms.hidden_full, 0);
    add_chain<N>(term, terms, 0, false);
    if (terms.n > 1) add_chain<N>(term, terms, 1, true);
}

__device__ __forceinline__ float rounded(float x) { return widen(round_to<bf16>(x)); }

template <int N, int X_STAGES, int W_STAGES>
__device__ __forceinline__ void product(const TensorMap& x, const TensorMap& w, const TensorMap& a, const Maps& b,
                                        const Adapters& adapters, bf16* y, int n, int outputs, int depth) {
    if (blockIdx.x < PARTS) return hidden_parts(x, a, adapters, n, depth);
    int first = (blockIdx.x - PARTS) * N;
    auto finish = [&](const float (&d)[1][N / 8][4], int row, int column, const Terms<N>& terms) {
        float term[N / 8][4];
        compute_term<N>(term, terms);
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
                if (row < n && column + j * 8 < outputs)
                    *(u32*)(y + (size_t)row * outputs + column + j * 8) =
                        pack(rounded(d[0][j][2 * half]) + term[j][2 * half],
                             rounded(d[0][j][2 * half + 1]) + term[j][2 * half + 1]);
    };
    small_m_product<N, 1, X_STAGES, W_STAGES>(x, w, Share{first, 0, depth, 0}, n, finish,
                                              terms_of<N>(b, adapters, n, gridDim.x - PARTS, first));
}

#define PRODUCT_WITH_ADAPTERS(N, X_STAGES, W_STAGES)                                                                   \
    KERNEL __launch_bounds__(THREADS + 64, 1)                                                                               \
        lora_small_m_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                     \
                         const __grid_constant__ TensorMap a, const __grid_constant__ Maps b,                          \
                         const __grid_constant__ Adapters adapters, bf16* y, int n, int outputs, int depth) {          \
        product<N, X_STAGES, W_STAGES>(x, w, a, b, adapters, y, n, outputs, depth);                                    \
    }
PRODUCT_WITH_ADAPTERS(16, 5, 8)
PRODUCT_WITH_ADAPTERS(32, 5, 6)
PRODUCT_WITH_ADAPTERS(48, 4, 5)

// Split-K: parts [n_splits + 1, n, outputs], the partial sum of each part of the depth and, last, the term. Grid: PARTS
// blocks, then n_splits for each 64 columns, those of the first split in front.
KERNEL __launch_bounds__(THREADS + 64, 1)
lora_small_m_split_k(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                     const __grid_constant__ TensorMap a, const __grid_constant__ Maps b,
                     const __grid_constant__ Adapters adapters, float* parts, int n, int outputs, int depth,
                     int n_splits) {
    if (blockIdx.x < PARTS) return hidden_parts(x, a, adapters, n, depth);
    int n_columns = (gridDim.x - PARTS) / n_splits, at = blockIdx.x - PARTS;
    int split = at / n_columns, first = at % n_columns * 64, own = depth / n_splits;
    auto finish = [&](const float (&d)[1][8][4], int row, int column, const Terms<64>& terms) {
        auto store = [&](const float (&values)[8][4], int part) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (row + half * 8 < n && column + j * 8 < outputs)
                        *(float2*)(parts + ((size_t)part * n + row + half * 8) * outputs + column + j * 8) =
                            make_float2(values[j][2 * half], values[j][2 * half + 1]);
        };
        store(d[0], split);
        if (split > 0) return;
        float term[8][4];
        compute_term<64>(term, terms);
        store(term, n_splits);
    };
    Terms<64> terms = terms_of<64>(b, adapters, n, n_columns, first);
    if (split > 0) terms.n = 0, terms.n_blocks = 0;
    small_m_product<64, 1, 4, 4>(x, w, Share{first, split * own, own, 0}, n, finish, terms);
}

// Gate and up with their terms, and their SwiGLU. Module 0 is gate, module 1 up.
KERNEL __launch_bounds__(THREADS + 64, 1)
lora_swiglu_small_m_48(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,
                       const __grid_constant__ TensorMap a, const __grid_constant__ Maps b,
                       const __grid_constant__ Adapters adapters, bf16* out, int n, int width, int depth) {
    if (blockIdx.x < PARTS) return hidden_parts(x, a, adapters, n, depth);
    int first = (blockIdx.x - PARTS) * 48;
    auto finish = [&](const float (&d)[2][6][4], int row, int column, const Terms<48>& terms) {
        float term[2][6][4];
        mbarrier_wait(terms.factors_full, 0);
        mbarrier_wait(terms.hidden_full, 0);
        add_chain<48>(term[0], terms, 0, false);
        add_chain<48>(term[1], terms, 1, false);
#pragma unroll
        for (int half = 0; half < 2; ++half, row += 8)
#pragma unroll
            for (int j = 0; j < 6; ++j) {
                float y[2];
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    int at = 2 * half + i;
                    float g = rounded(rounded(d[0][j][at]) + term[0][j][at]),
                          u = rounded(rounded(d[1][j][at]) + term[1][j][at]);
                    y[i] = g * sigmoid(g) * u;
                }
                if (row < n && column + j * 8 < width)
                    *(u32*)(out + (size_t)row * width + column + j * 8) = pack(y[0], y[1]);
            }
    };
    Terms<48> terms = {&b, &adapters, n, (int)gridDim.x - PARTS};
    terms.add(0, first), terms.add(1, first);
    small_m_product<48, 2, 3, 4>(x, w, Share{first, 0, depth, width}, n, finish, terms);
}
