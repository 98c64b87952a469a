// Products of at most 8 rows, y = x W^T, as decode of few sequences has them. The chains of sums are those of small_m.cu,
// by the same instruction: the same bits. The rows of x lie in shared memory whole. Where x is a normed residual stream,
// every block computes the addition and the norm itself, with the sums of rmsnorm.cu in the same order: one kernel less
// between two products. Stages, threads and shared memory: see few_rows.rs.

#define FEW 8
#define MAX_STAGES 48
// The most columns of x that are normed, and the columns that a warp sums in rmsnorm.cu.
#define MAX_NORMED 8192
#define WARP_COLUMNS 256

struct FewRows {
    // [n, depth]: x; where x is normed here, the residual stream, to which `addend` is added or, where that is 0, the
    // rounded sum of the partial sums `parts` [4, n, depth] of a split-K product.
    const bf16 *x, *addend;
    const float* parts;
    const bf16* norm_weight;
    // [n, depth]: where the stream with its addend goes.
    bf16* sum;
    // [n, width] in bf16, or with split-K [gridDim.y, n, width] in f32.
    void* y;
    float eps;
    // `depth` is that of a part of the depth with split-K; rows of x are `stride` apart.
    int n, depth, stride, width, stages;
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
                tma_load_tile(ring.tiles + (at.stage * MATRICES + m) * N * STEP + c * N, map,
                              (int)blockIdx.y * args.depth + step * STEP + c,
                              (int)blockIdx.x * N + m * args.width, full);
    }
}

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// Elements from one row of x to the next in shared memory: eight rows of 16 bytes lie in different banks.
__device__ __forceinline__ int pitch(const FewRows& args) { return args.depth + 8; }

// Starts copies of `n` rows; `wait_for_copies` waits for those of this thread.
__device__ __forceinline__ void copy_rows(bf16* to, const bf16* from, int n, const FewRows& args) {
    for (int row = 0; row < n; ++row)
        for (int column = 8 * threadIdx.x; column < args.depth; column += 8 * CONSUMERS)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                             shared_address(to + row * pitch(args) + column)),
                         "l"(from + (size_t)row * args.stride + column)
                         : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The warps that norm: the consumers and as many helpers, which come behind the producer's warp.
#define NORM_WARPS 8
#define NORM_THREADS (CONSUMERS + 32 + 128)
__device__ __forceinline__ void sync_norm() { asm volatile("bar.sync 2, 256;" ::: "memory"); }

// Eight elements of a split-K product, added up and rounded as rmsnorm.cu does.
__device__ __forceinline__ uint4 sum_of_parts(const FewRows& args, size_t at) {
    float4 low[4], high[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const float4* part = (const float4*)(args.parts + (size_t)p * args.n * args.depth + at);
        low[p] = part[0], high[p] = part[1];
    }
#pragma unroll
    for (int p = 1; p < 4; ++p) {
        low[0].x += low[p].x, low[0].y += low[p].y, low[0].z += low[p].z, low[0].w += low[p].w;
        high[0].x += high[p].x, high[0].y += high[p].y, high[0].z += high[p].z, high[0].w += high[p].w;
    }
    return make_uint4(pack(low[0].x, low[0].y), pack(low[0].z, low[0].w), pack(high[0].x, high[0].y),
                      pack(high[0].z, high[0].w));
}

// Adds and norms as `forward` in rmsnorm.cu does. A warp takes parts of 256 columns of a row, what a warp sums there; the
// parts' sums of squares are added up in order. The norm's weights lie behind the rows.
__device__ __forceinline__ void norm_rows(bf16* rows, const FewRows& args) {
    constexpr int PARTS = MAX_NORMED / WARP_COLUMNS, AT_ONCE = 2;
    __shared__ float squares[FEW][PARTS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per_row = (args.depth + WARP_COLUMNS - 1) / WARP_COLUMNS;
    if (warp > CONSUMERS / 32) --warp;
    int n_parts = args.n * per_row;
    // Sums of parts that are not there are 0.
    for (int i = threadIdx.x; i < FEW * PARTS && threadIdx.x < CONSUMERS; i += CONSUMERS)
        if (i % PARTS >= per_row) squares[i / PARTS][i % PARTS] = 0.0f;
    for (int first = warp; first < n_parts; first += AT_ONCE * NORM_WARPS) {
        uint4 x[AT_ONCE] = {}, d[AT_ONCE] = {};
        int row[AT_ONCE], column[AT_ONCE];
        float sum[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            int part = first + k * NORM_WARPS;
            row[k] = part / per_row, column[k] = (part - row[k] * per_row) * WARP_COLUMNS + 8 * lane;
            if (part >= n_parts) column[k] = args.depth;
            size_t at = (size_t)row[k] * args.depth + column[k];
            if (column[k] < args.depth) {
                x[k] = *(const uint4*)(args.x + at);
                if (args.addend) d[k] = *(const uint4*)(args.addend + at);
                if (args.parts) d[k] = sum_of_parts(args, at);
            }
        }
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            float v[8], a[8];
            load8((const bf16*)(x + k), 0, 8, true, v);
            load8((const bf16*)(d + k), 0, 8, true, a);
            sum[k] = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (args.sum) v[i] = widen(round_to<bf16>(v[i] + a[i]));
                sum[k] = fmaf(v[i], v[i], sum[k]);
            }
            if (column[k] >= args.depth) continue;
            store8(rows + row[k] * pitch(args), column[k], args.depth, true, v);
            if (args.sum && blockIdx.x == 0)
                store8(args.sum + (size_t)row[k] * args.depth, column[k], args.depth, true, v);
        }
#pragma unroll
        for (int step = 16; step > 0; step >>= 1)
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], step);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
            int part = first + k * NORM_WARPS;
            if (lane == 0 && part < n_parts) squares[row[k]][part - row[k] * per_row] = sum[k];
        }
    }
    wait_for_copies();
    sync_norm();
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
    for (int part = warp; part < n_parts; part += NORM_WARPS) {
        int row = part / per_row, column = (part - row * per_row) * WARP_COLUMNS + 8 * lane;
        float inv = __shfl_sync(0xffffffffu, inverse, row), v[8], w[8];
        if (column >= args.depth) continue;
        load8(norm_weight, column, args.depth, true, w);
        load8(rows + row * pitch(args), column, args.depth, true, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * inv * w[i];
        store8(rows + row * pitch(args), column, args.depth, true, v);
    }
    sync_norm();
}

// The rows of x fill the 64 rows of the
// instruction again and again; the results of the first 8, which warp 0 has, are kept.
template <int N, int MATRICES>
__device__ __forceinline__ void multiply_few(float (&d)[MATRICES][N / 8][4], u32 row_address, const WeightRing& ring,
                                             int n_steps) {
    u32 a[2][STEP / 16][4];
    int lane = threadIdx.x % 32, previous = 0;
    Place at = {0, 0};
    auto load = [&](u32(&a)[STEP / 16][4], int step) {
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c) ldmatrix_at(a[c], row_address + (step * STEP + c * 16) * 2);
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
#pragma unroll
    for (int m = 0; m < MATRICES; ++m) fence_registers(d[m]);
}

// Shared memory: `stages` of MATRICES x W [N, STEP], x [n, pitch], and with NORM the norm's weights. `finish` gets the
// results of the threads that have rows, and the row and the column of the first.
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
    if (threadIdx.x / 32 == CONSUMERS / 32) {
        if (threadIdx.x == CONSUMERS) produce_few<N, MATRICES>(ring, map, args);
        return;
    }
    // Threads beyond are there for their registers only: see few_rows.rs.
    if (threadIdx.x >= NORM_THREADS) return;
    if (NORM) {
        if (threadIdx.x < CONSUMERS) copy_rows(rows + args.n * pitch(args), args.norm_weight, 1, args);
        wait_for_previous_kernel();
        norm_rows(rows, args);
        if (threadIdx.x >= CONSUMERS) return;
    } else {
        wait_for_previous_kernel();
        copy_rows(rows, args.x + blockIdx.y * args.depth, args.n, args);
        wait_for_copies();
        sync_consumers();
    }
    int lane = threadIdx.x % 32;
    u32 row_address = shared_address(rows + min(lane % 8, args.n - 1) * pitch(args) + lane / 16 * 8);
    float d[MATRICES][N / 8][4];
    multiply_few<N, MATRICES>(d, row_address, ring, args.depth / STEP);
    if (threadIdx.x < 32 && lane / 4 < args.n) finish(d, lane / 4, (int)blockIdx.x * N + lane % 4 * 2);
}

template <int N, bool NORM> __device__ __forceinline__ void few_rows(const TensorMap& map, const FewRows& args) {
    few_rows_product<N, 1, NORM>(map, args, [&](const float (&d)[1][N / 8][4], int row, int column) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            if (column + j * 8 < args.width)
                *(u32*)((bf16*)args.y + (size_t)row * args.width + column + j * 8) = pack(d[0][j][0], d[0][j][1]);
    });
}

// Split-K: block (_, y) computes the partial sum of part y of the depth.
template <int N, bool NORM>
__device__ __forceinline__ void few_rows_split_k(const TensorMap& map, const FewRows& args) {
    few_rows_product<N, 1, NORM>(map, args, [&](const float (&d)[1][N / 8][4], int row, int column) {
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            if (column + j * 8 < args.width)
                *(float2*)((float*)args.y + ((size_t)blockIdx.y * args.n + row) * args.width + column + j * 8) =
                    make_float2(d[0][j][0], d[0][j][1]);
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
                *(u32*)((bf16*)args.y + (size_t)row * args.width + column + j * 8) = pack(y[0], y[1]);
        }
    });
}

#define FEW_ROWS(NAME, FUNCTION, N, NORM)                                                                              \
    KERNEL __launch_bounds__(NORM ? NORM_THREADS + 64 : CONSUMERS + 32, 1)                                             \
        NAME(const __grid_constant__ TensorMap w, const __grid_constant__ FewRows args) {                              \
        FUNCTION<N, NORM>(w, args);                                                                                    \
    }
FEW_ROWS(few_rows_16, few_rows, 16, false)
FEW_ROWS(few_rows_32, few_rows, 32, false)
FEW_ROWS(few_rows_48, few_rows, 48, false)
FEW_ROWS(few_rows_split_k_64, few_rows_split_k, 64, false)
FEW_ROWS(few_rows_norm_16, few_rows, 16, true)
FEW_ROWS(few_rows_norm_32, few_rows, 32, true)
FEW_ROWS(few_rows_norm_48, few_rows, 48, true)
FEW_ROWS(few_rows_norm_swiglu_48, few_rows_swiglu, 48, true)
