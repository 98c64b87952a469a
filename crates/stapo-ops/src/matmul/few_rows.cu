// Products of at most 8 rows: y = x W^T, as decode of few sequences has them. The chains of sums are those of small_m.cu,
// by the same instruction, and so are the bits. What differs is memory: the rows of x lie in shared memory whole, and
// weights have the rest of what a block may take (see few_rows.rs): so little that the blocks of the next kernel find
// room beside those of this one, and the copies of the next kernel's weights fill the time in which this kernel ends.
//
// Where x is a normed residual stream, every block computes the addition and the norm itself, with the sums of
// rmsnorm.cu in the same order.

#define FEW 8
#define MAX_STAGES 48
// The most columns of x that are normed, and the columns that a warp sums in rmsnorm.cu.
#define MAX_NORMED 8192
#define WARP_COLUMNS 256

struct FewRows {
    // [n, depth]: x; where x is normed here, the residual stream, and `addend` (0: nothing) is added to it.
    const bf16 *x, *addend;
    const bf16* norm_weight;
    // [n, depth]: where the stream with its addend goes.
    bf16* sum;
    bf16* y;
    float eps;
    // The product is the sum of `chains` chains over as many parts of the depth; a row of y has `width` columns.
    int n, depth, width, chains, stages;
};

// As Ring, with a number of stages that is given when the kernel starts.
struct WeightRing {
    bf16* tiles;
    u64 *full, *empty;
    int stages;
};

// A step's stage, and the parity of the phases in which it is full.
struct Place {
    int stage, parity;
    __device__ __forceinline__ Place next(int stages) const {
        return stage + 1 == stages ? Place{0, parity ^ 1} : Place{stage + 1, parity};
    }
};

template <int N, int MATRICES>
__device__ __forceinline__ void produce_few(const WeightRing& ring, const TensorMap& map, const FewRows& args) {
    Place at = {0, 0};
    for (int step = 0; step < args.depth / STEP; ++step, at = at.next(ring.stages)) {
        u64* full = ring.full + at.stage;
        if (step >= ring.stages) mbarrier_wait(ring.empty + at.stage, at.parity ^ 1);
        mbarrier_arrive_expect_bytes(full, 2 * MATRICES * N * STEP);
#pragma unroll
        for (int m = 0; m < MATRICES; ++m)
#pragma unroll
            for (int c = 0; c < STEP; c += 64)
                tma_load_tile(ring.tiles + (at.stage * MATRICES + m) * N * STEP + c * N, map, step * STEP + c,
                              (int)blockIdx.x * N + m * args.width, full);
    }
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Elements from one row of x to the next in shared memory: eight rows of 16 bytes lie in different banks.
__device__ __forceinline__ int pitch(const FewRows& args) { return args.depth + 8; }

// Starts copies of `n` rows; `wait_for_copies` waits for those of this thread.
__device__ __forceinline__ void copy_rows(bf16* to, const bf16* from, int n, const FewRows& args) {
    int eights = args.depth / 8;
    for (int i = threadIdx.x; i < n * eights; i += CONSUMERS) {
        int row = i / eights, column = (i - row * eights) * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + row * pitch(args) + column)),
                     "l"(from + (size_t)row * args.depth + column)
                     : "memory");
    }
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Adds and norms as `forward` in rmsnorm.cu does. A warp takes what a warp sums there: 256 columns of a row.
// The norm's weights lie behind the rows.
__device__ __forceinline__ void norm_rows(bf16* rows, const FewRows& args) {
    __shared__ float squares[FEW][MAX_NORMED / WARP_COLUMNS];
    constexpr int AT_ONCE = 4;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (args.depth + WARP_COLUMNS - 1) / WARP_COLUMNS;
    int n_parts = args.n * warps;
    for (int first = warp; first < n_parts; first += AT_ONCE * (CONSUMERS / 32)) {
        uint4 x[AT_ONCE], d[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            int part = first + k * (CONSUMERS / 32), row = part / warps;
            int column = (part - row * warps) * WARP_COLUMNS + 8 * lane;
            if (part >= n_parts || column >= args.depth) continue;
            size_t at = (size_t)row * args.depth + column;
            x[k] = *(const uint4*)(args.x + at);
            if (args.addend) d[k] = *(const uint4*)(args.addend + at);
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            int part = first + k * (CONSUMERS / 32), row = part / warps;
            int column = (part - row * warps) * WARP_COLUMNS + 8 * lane;
            if (part >= n_parts) break;
            float sum = 0.0f;
            if (column < args.depth) {
                float v[8], a[8];
                load8((const bf16*)(x + k), 0, 8, true, v);
                if (args.addend) {
                    load8((const bf16*)(d + k), 0, 8, true, a);
#pragma unroll
                    for (int i = 0; i < 8; ++i) v[i] = widen(round_to<bf16>(v[i] + a[i]));
                    if (blockIdx.x == 0) store8(args.sum + (size_t)row * args.depth, column, args.depth, true, v);
                }
                store8(rows + row * pitch(args), column, args.depth, true, v);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum = fmaf(v[i], v[i], sum);
            }
            sum = warp_sum(sum);
            if (lane == 0) squares[row][part - row * warps] = sum;
        }
    }
    wait_for_copies();
    sync_consumers();
    const bf16* norm_weight = rows + args.n * pitch(args);
    for (int part = warp; part < n_parts; part += CONSUMERS / 32) {
        int row = part / warps, column = (part - row * warps) * WARP_COLUMNS + 8 * lane;
        if (column >= args.depth) continue;
        float v[8], w[8], total = squares[row][0];
        load8(norm_weight, column, args.depth, true, w);
        for (int i = 1; i < warps; ++i) total += squares[row][i];
        float inv = 1.0f / sqrtf(total / (float)args.depth + args.eps);
        load8(rows + row * pitch(args), column, args.depth, true, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * inv * w[i];
        store8(rows + row * pitch(args), column, args.depth, true, v);
    }
}

// One chain: `n_steps` steps from `from` on, whose first stage is at `at`. The rows of x fill the 64 rows of the
// instruction again and again; the results of the first 8, which warp 0 has, are kept.
template <int N, int MATRICES>
__device__ __forceinline__ void multiply_few(float (&d)[MATRICES][N / 8][4], u32 row_address, const WeightRing& ring,
                                             int from, int n_steps, Place& at) {
    u32 a[2][STEP / 16][4];
    int lane = threadIdx.x % 32, previous = 0;
    auto load = [&](u32(&a)[STEP / 16][4], int step) {
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c) ldmatrix_at(a[c], row_address + ((from + step) * STEP + c * 16) * 2);
    };
    auto multiply = [&](u32(&now)[STEP / 16][4], u32(&next)[STEP / 16][4], int step) {
        if (step >= n_steps) return;
        mbarrier_wait(ring.full + at.stage, at.parity);
        const bf16* w = ring.tiles + at.stage * MATRICES * N * STEP;
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c)
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                wgmma_tile<N>(d[m], now[c], k_major_operand<N>(w + m * N * STEP, 0, c * 16), step + c > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0 && lane == 0) mbarrier_arrive(ring.empty + previous);
        previous = at.stage;
        at = at.next(ring.stages);
        if (step + 1 < n_steps) load(next, step + 1);
    };
    load(a[0], 0);
    for (int step = 0; step < n_steps; step += 2) multiply(a[0], a[1], step), multiply(a[1], a[0], step + 1);
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(ring.empty + previous);
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) fence_registers(d[m]);
}

// Shared memory: `stages` of MATRICES x W [N, STEP], x [n, pitch], and with NORM the norm's weights. `finish` gets the results of the threads that have
// rows, and the row and the column of the first.
template <int N, int MATRICES, bool NORM, class Finish>
__device__ __forceinline__ void few_rows_product(const TensorMap& map, const FewRows& args, Finish finish) {
    __shared__ u64 full[MAX_STAGES], empty[MAX_STAGES];
    bf16 *tiles = aligned_memory(), *rows = tiles + args.stages * MATRICES * N * STEP;
    WeightRing ring = {tiles, full, empty, args.stages};
    launch_dependents();
    if (threadIdx.x == CONSUMERS) {
        prefetch_tensor_map(map);
        for (int s = 0; s < args.stages; ++s) mbarrier_init(full + s, 1), mbarrier_init(empty + s, 4);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x == CONSUMERS) produce_few<N, MATRICES>(ring, map, args);
        return;
    }
    if (NORM) copy_rows(rows + args.n * pitch(args), args.norm_weight, 1, args);
    wait_for_previous_kernel();
    if (NORM) {
        norm_rows(rows, args);
    } else {
        copy_rows(rows, args.x, args.n, args);
        wait_for_copies();
    }
    sync_consumers();
    int lane = threadIdx.x % 32, n_steps = args.depth / STEP / args.chains;
    u32 row_address = shared_address(rows + min(lane % 8, args.n - 1) * pitch(args) + lane / 16 * 8);
    float d[MATRICES][N / 8][4];
    Place at = {0, 0};
    multiply_few<N, MATRICES>(d, row_address, ring, 0, n_steps, at);
    // Only a product with one matrix has several chains.
    for (int chain = 1; MATRICES == 1 && chain < args.chains; ++chain) {
        float next[MATRICES][N / 8][4];
        multiply_few<N, MATRICES>(next, row_address, ring, chain * n_steps, n_steps, at);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) d[0][j][0] += next[0][j][0], d[0][j][1] += next[0][j][1];
    }
    if (threadIdx.x < 32 && lane / 4 < args.n) finish(d, lane / 4, (int)blockIdx.x * N + lane % 4 * 2);
}

template <int N, bool NORM> __device__ __forceinline__ void few_rows(const TensorMap& map, const FewRows& args) {
    few_rows_product<N, 1, NORM>(map, args, [&](const float (&d)[1][N / 8][4], int row, int column) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            if (column + j * 8 < args.width)
                *(u32*)(args.y + (size_t)row * args.width + column + j * 8) = pack(d[0][j][0], d[0][j][1]);
    });
}

template <int N, bool NORM> __device__ __forceinline__ void few_rows_swiglu(const TensorMap& map, const FewRows& args) {
    few_rows_product<N, 2, NORM>(map, args, [&](const float (&d)[2][N / 8][4], int row, int column) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            float y[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float g = widen(round_to<bf16>(d[0][j][i])), u = widen(round_to<bf16>(d[1][j][i]));
                y[i] = g * sigmoid(g) * u;
            }
            if (column + j * 8 < args.width)
                *(u32*)(args.y + (size_t)row * args.width + column + j * 8) = pack(y[0], y[1]);
        }
    });
}

#define FEW_ROWS(NAME, FUNCTION, N, NORM)                                                                              \
    KERNEL __launch_bounds__(CONSUMERS + 32, 2)                                                                        \
        NAME(const __grid_constant__ TensorMap w, const __grid_constant__ FewRows args) {                              \
        FUNCTION<N, NORM>(w, args);                                                                                    \
    }
FEW_ROWS(few_rows_16, few_rows, 16, false)
FEW_ROWS(few_rows_32, few_rows, 32, false)
FEW_ROWS(few_rows_48, few_rows, 48, false)
FEW_ROWS(few_rows_norm_16, few_rows, 16, true)
FEW_ROWS(few_rows_norm_32, few_rows, 32, true)
FEW_ROWS(few_rows_norm_48, few_rows, 48, true)
FEW_ROWS(few_rows_swiglu_48, few_rows_swiglu, 48, false)
FEW_ROWS(few_rows_norm_swiglu_48, few_rows_swiglu, 48, true)
