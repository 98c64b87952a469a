// Products of at most 8 rows, y = x W^T, as decode of few sequences has them. A warp computes 16 columns of y by the matrix
// instruction of single warps (mma.sync), whose rows are rows of W and whose 8 columns are the rows of x. Each element is the
// chain of sums of small_m.cu: on Hopper mma.sync and wgmma add 16 products to an accumulator in the same way, so the bits
// are the same, and a chain takes less time. The rows of x lie in shared memory whole. Where x is a normed residual
// stream, every block computes the addition and the norm itself, with the sums of rmsnorm.cu in the same order: one kernel
// less between two products. Stages, threads and shared memory: see few_rows.rs.

#define FEW 8
// The most columns of x that are normed, and the columns that a warp sums in rmsnorm.cu.
#define MAX_NORMED 8192
#define WARP_COLUMNS 256

struct FewRows {
    // [n, depth]: x; where x is normed here, the residual stream, to which `addend` is added.
    const bf16 *x, *addend, *norm_weight;
    // [n, depth]: where the stream with its addend goes.
    bf16* sum;
    // [n, width]
    bf16* y;
    float eps;
    int n, depth, width;
};

// d += a b^T: a [16, 16] of W and b [8, 16] of x, both in registers.
__device__ __forceinline__ void mma_rows(float (&d)[4], const u32* a, const u32* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A barrier of the first WARPS warps, with an identifier of its own.
template <int ID, int WARPS> __device__ __forceinline__ void sync_warps() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(WARPS * 32) : "memory");
}

// Elements from one row of x to the next in shared memory: eight rows of 16 bytes lie in different banks.
__device__ __forceinline__ int pitch(const FewRows& args) { return args.depth + 8; }

// Starts copies of `n` rows by WARPS warps; `wait_for_copies` waits for those of this thread.
template <int WARPS>
__device__ __forceinline__ void copy_rows(bf16* to, const bf16* from, int n, const FewRows& args) {
    for (int row = 0; row < n; ++row)
        for (int column = 8 * threadIdx.x; column < args.depth; column += 8 * 32 * WARPS)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             shared_address(to + row * pitch(args) + column)),
                         "l"(from + (size_t)row * args.depth + column)
                         : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Adds and norms as `forward` in rmsnorm.cu does. A warp takes parts of 256 columns of a row, what a warp sums there; the
// parts' sums of squares are added up in order. The norm's weights lie behind the rows.
template <int WARPS> __device__ __forceinline__ void norm_rows(bf16* rows, const FewRows& args) {
    constexpr int PARTS = MAX_NORMED / WARP_COLUMNS, AT_ONCE = 2;
    static_assert(PARTS == 32 && WARPS >= FEW, "a lane for each part of a row, and a warp for each row");
    __shared__ float squares[FEW][PARTS];
    int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    int per_row = (args.depth + WARP_COLUMNS - 1) / WARP_COLUMNS, n_parts = args.n * per_row;
    // Sums of parts that are not there are 0.
    if (warp < FEW && lane >= per_row) squares[warp][lane] = 0.0f;
    for (int first = warp; first < n_parts; first += AT_ONCE * WARPS) {
        uint4 x[AT_ONCE] = {}, d[AT_ONCE] = {};
        int row[AT_ONCE], column[AT_ONCE];
        float sum[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            int part = first + k * WARPS;
            row[k] = part / per_row, column[k] = (part - row[k] * per_row) * WARP_COLUMNS + 8 * lane;
            if (part >= n_parts) column[k] = args.depth;
            size_t at = (size_t)row[k] * args.depth + column[k];
            if (column[k] < args.depth) x[k] = *(const uint4*)(args.x + at), d[k] = *(const uint4*)(args.addend + at);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            float v[8], a[8];
            load8((const bf16*)(x + k), 0, 8, true, v);
            load8((const bf16*)(d + k), 0, 8, true, a);
            sum[k] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                v[i] = widen(round_to<bf16>(v[i] + a[i]));
                sum[k] = fmaf(v[i], v[i], sum[k]);
            }
            if (column[k] < args.depth) {
                store8(rows + row[k] * pitch(args), column[k], args.depth, true, v);
                if (blockIdx.x == 0) store8(args.sum + (size_t)row[k] * args.depth, column[k], args.depth, true, v);
            }
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1)
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], step);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            int part = first + k * WARPS;
            if (lane == 0 && part < n_parts) squares[row[k]][part - row[k] * per_row] = sum[k];
        }
    }
    wait_for_copies();
    sync_warps<1, WARPS>();
    // Each lane computes one row's inverse.
    float total = squares[lane % FEW][0];
#pragma unroll
    for (int i = 1; i < 8; ++i) total += squares[lane % FEW][i];
    for (int from = 8; from < per_row; from += 8)
#pragma unroll
        for (int i = 0; i < 8; ++i) total += squares[lane % FEW][from + i];
    float inverse = 1.0f / sqrtf(total / (float)args.depth + args.eps);
    const bf16* norm_weight = rows + args.n * pitch(args);
#pragma unroll 4
    for (int part = warp; part < n_parts; part += WARPS) {
        int row = part / per_row, column = (part - row * per_row) * WARP_COLUMNS + 8 * lane;
        float inv = __shfl_sync(0xffffffffu, inverse, row), v[8], w[8];
        if (column < args.depth) {
            load8(norm_weight, column, args.depth, true, w);
            load8(rows + row * pitch(args), column, args.depth, true, v);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = v[i] * inv * w[i];
            store8(rows + row * pitch(args), column, args.depth, true, v);
        }
    }
    sync_warps<1, WARPS>();
}

// What a warp multiplies in a step: 16 rows of W and the rows of x.
struct StepOperands {
    u32 w[STEP / 16][4], x[STEP / 32][4];
};

// d = 16 rows of W, from `row` on of a tile of N in each stage, times the rows of x. The operands of the next step are loaded
// between the instructions of this one, which wait for each other.
template <int N, class Weights>
__device__ __forceinline__ void multiply_rows(float (&d)[4], const bf16* x, const Weights& weights, int matrix, int row,
                                              const FewRows& args, int n_steps) {
    StepOperands operands[2];
    int lane = threadIdx.x % 32, half = lane / 16;
    row += lane % 16;
    u32 of_w = shared_address(weights.tiles + matrix * N * STEP + row * 64);
    u32 of_x = shared_address(x + min(lane % 8, args.n - 1) * pitch(args) + lane / 8 * 8);
    auto load = [&](StepOperands& to, int c, int step) {
        u32 tile = of_w + 2 * Weights::offset(step);
        ldmatrix_at(to.w[c], tile + c / 4 * N * 128 + ((c % 4 * 2 + half) ^ row % 8) * 16);
        if (c % 2 == 0) ldmatrix_at(to.x[c / 2], of_x + 2 * (step * STEP + c * 16));
    };
    auto multiply = [&](StepOperands& now, StepOperands& next, int step) {
        if (step >= n_steps) return;
        // Behind the last step nothing is multiplied: it is loaded once more.
        int after = min(step + 1, n_steps - 1);
        weights.wait_full(after);
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c) {
            mma_rows(d, now.w[c], now.x[c / 2] + c % 2 * 2);
            load(next, c, after);
        }
        if (lane == 0 && step + 1 < n_steps) weights.arrive_empty(step);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = 0.0f;
    weights.wait_full(0);
#pragma unroll
    for (int c = 0; c < STEP / 16; ++c) load(operands[0], c, 0);
    for (int step = 0; step < n_steps; step += 2)
        multiply(operands[0], operands[1], step), multiply(operands[1], operands[0], step + 1);
}

// A block computes N columns of y from PARTS products: of as many matrices, whose rows are `width` apart, or of as many parts
// of the depth (split-K). A warp computes 16 columns of one of them; `combine` makes an element of y of its PARTS results.
// Shared memory: STAGES of PARTS x W [N, STEP], x [n, pitch], and with NORM the norm's weights.
template <int N, int PARTS, bool SPLIT_K, int STAGES, bool NORM, class Combine>
__device__ __forceinline__ void few_rows_product(const TensorMap& map, const FewRows& args, Combine combine) {
    constexpr int TILES = N / 16, UNITS = PARTS * TILES, LEAST = NORM ? 8 : 4, WORKERS = UNITS > LEAST ? UNITS : LEAST;
    __shared__ u64 barriers[2 * STAGES];
    __shared__ float4 results[PARTS][TILES][32];
    Ring<STAGES, PARTS * N * STEP, UNITS> weights = {aligned_memory(), barriers, barriers + STAGES};
    bf16* rows = weights.tiles + STAGES * PARTS * N * STEP;
    int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, depth = SPLIT_K ? args.depth / PARTS : args.depth;
    launch_dependents();
    if (threadIdx.x == 0) {
        prefetch_tensor_map(map);
        weights.init();
        mbarrier_init_fence();
    }
    __syncthreads();
    if (warp == WORKERS) {
        Share share = {(int)blockIdx.x * N, 0, depth, SPLIT_K ? 0 : args.width, SPLIT_K ? depth : 0};
        if (lane == 0) produce_weights<N, PARTS>(weights, map, share);
    } else {
        if constexpr (NORM) {
            copy_rows<WORKERS>(rows + args.n * pitch(args), args.norm_weight, 1, args);
            wait_for_previous_kernel();
            norm_rows<WORKERS>(rows, args);
        } else {
            wait_for_previous_kernel();
            copy_rows<WORKERS>(rows, args.x, args.n, args);
            wait_for_copies();
            sync_warps<1, WORKERS>();
        }
        if (warp < UNITS) {
            float d[PARTS][4];
            int part = warp / TILES, tile = warp % TILES;
            const bf16* x = rows + (SPLIT_K ? part * depth : 0);
            multiply_rows<N>(d[0], x, weights, part, tile * 16, args, depth / STEP);
            if (PARTS > 1) {
                if (part > 0) results[part][tile][lane] = make_float4(d[0][0], d[0][1], d[0][2], d[0][3]);
                sync_warps<2, UNITS>();
#pragma unroll
                for (int p = 1; p < PARTS; ++p) {
                    float4 r = results[p][tile][lane];
                    d[p][0] = r.x, d[p][1] = r.y, d[p][2] = r.z, d[p][3] = r.w;
                }
            }
            if (part == 0)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    int row = lane % 4 * 2 + i % 2, column = (int)blockIdx.x * N + tile * 16 + lane / 4 + i / 2 * 8;
                    float of_parts[PARTS];
#pragma unroll
                    for (int p = 0; p < PARTS; ++p) of_parts[p] = d[p][i];
                    if (row < args.n && column < args.width)
                        args.y[(size_t)row * args.width + column] = round_to<bf16>(combine(of_parts));
                }
        }
    }
}

template <int N, int STAGES, bool NORM>
__device__ __forceinline__ void few_rows(const TensorMap& map, const FewRows& args) {
    few_rows_product<N, 1, false, STAGES, NORM>(map, args, [](const float (&x)[1]) { return x[0]; });
}

// The partial sums of a split-K product are added up as rmsnorm.cu does.
template <int N, int STAGES, bool NORM>
__device__ __forceinline__ void few_rows_split_k(const TensorMap& map, const FewRows& args) {
    few_rows_product<N, 4, true, STAGES, NORM>(map, args,
                                               [](const float (&x)[4]) { return x[0] + x[1] + x[2] + x[3]; });
}

template <int N, int STAGES, bool NORM>
__device__ __forceinline__ void few_rows_swiglu(const TensorMap& map, const FewRows& args) {
    few_rows_product<N, 2, false, STAGES, NORM>(map, args, [](const float (&x)[2]) {
        float gate = widen(round_to<bf16>(x[0])), up = widen(round_to<bf16>(x[1]));
        return gate * sigmoid(gate) * up;
    });
}

#define FEW_ROWS(NAME, FUNCTION, N, STAGES, NORM, THREADS_OF_BLOCK)                                                    \
    KERNEL __launch_bounds__(THREADS_OF_BLOCK, 1)                                                                      \
        NAME(const __grid_constant__ TensorMap w, const __grid_constant__ FewRows args) {                              \
        FUNCTION<N, STAGES, NORM>(w, args);                                                                            \
    }
FEW_ROWS(few_rows_16, few_rows, 16, 16, false, 160)
FEW_ROWS(few_rows_32, few_rows, 32, 8, false, 160)
FEW_ROWS(few_rows_48, few_rows, 48, 5, false, 160)
FEW_ROWS(few_rows_split_k_16, few_rows_split_k, 16, 5, false, 160)
FEW_ROWS(few_rows_split_k_32, few_rows_split_k, 32, 3, false, 288)
FEW_ROWS(few_rows_split_k_48, few_rows_split_k, 48, 2, false, 416)
FEW_ROWS(few_rows_norm_16, few_rows, 16, 16, true, 288)
FEW_ROWS(few_rows_norm_32, few_rows, 32, 8, true, 288)
FEW_ROWS(few_rows_norm_48, few_rows, 48, 5, true, 288)
FEW_ROWS(few_rows_norm_swiglu_48, few_rows_swiglu, 48, 6, true, 288)
