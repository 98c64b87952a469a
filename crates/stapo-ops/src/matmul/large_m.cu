// Products of many rows (a large M) whose results are finished before they reach memory: y = x W^T, and with joined adapters what
// these add, each element one chain over the depth in steps of 16, as in every other product, and so the same bits.
// - gated: silu(g) u, or gelu(g) u, with g and u the two halves of x W^T. A separate kernel would read both again.
// - deep: the sum of several chains, each over a part of the depth (split-K). The sums stay in registers; as separate products,
//   chains would write f32 and a further kernel would read it.
// - heads: queries, keys and values, whose heads are normed and rotated (heads_large_m.cu).
//
// A block computes M rows and N columns at a time and goes on to other tiles; there are as many blocks as multiprocessors. One warp
// copies tiles of x and W into a ring, warpgroups multiply 64 rows each, and three warps finish what these leave in shared
// memory, while they multiply the next tile. The two blocks of a cluster compute the same columns of neighbouring rows: each
// copies one half of every tile of W to both.

#define STEP 64
#define SHARING 2
#define FINISHERS 96
// Clusters at work take tiles of this many pairs of row tiles before others, so that rows and weights stay in the L2 cache.
#define GROUP 8

enum Kind { GATED, DEEP, HEADS };

// A block with GROUPS_ warpgroups that multiply, 64 rows and N_ columns each, and STAGES_ stages of the ring.
template <Kind KIND_, int GROUPS_, int STAGES_, int N_> struct Tiling {
    static constexpr Kind KIND = KIND_;
    static constexpr int GROUPS = GROUPS_, STAGES = STAGES_, M = 64 * GROUPS, N = N_;
    // Elements from one row of results in shared memory to the next.
    static constexpr int APART = N + 8;
    // Columns of y in a tile.
    static constexpr int WIDTH = KIND == GATED ? N / 2 : N;
    static constexpr int MULTIPLIERS = 128 * GROUPS, THREADS = MULTIPLIERS + 32 + FINISHERS;
    // Elements of a stage: x [M, STEP] and W [N, STEP].
    static constexpr int SIZE = (M + N) * STEP;
    // Registers of a thread that multiplies and of the others: together those of a multiprocessor.
    static constexpr int REGISTERS = KIND == HEADS ? 192 : GROUPS == 2 ? 224 : 152;
    static constexpr int OTHER_REGISTERS = KIND == HEADS ? 120 : 56;
};

struct Product {
    bf16* y;
    // Gated: where g and u go, [n, 2 width]; 0: nowhere.
    bf16* kept;
    // y is [n, width], with rows `pitch` apart.
    int n, width, pitch;
    // Chains, and steps of a chain, of which the first n_inputs are over inputs. The others are over columns that lie behind the inputs
    // in a row of x, the same for each chain, and in a row of W behind the inputs of each chain.
    int n_chains, n_steps, n_inputs;
    int is_gelu;
};

// The first row of a block's tile, and the number of its tile of columns.
struct Place {
    int row, column;
};

// The pairs of tiles that a cluster computes.
template <class T> struct Schedule {
    int n_row_pairs, n_columns;

    __device__ __forceinline__ Schedule(const Product& p)
        : n_row_pairs((p.n + SHARING * T::M - 1) / (SHARING * T::M)), n_columns((p.width + T::WIDTH - 1) / T::WIDTH) {}
    __device__ __forceinline__ int first() const { return blockIdx.x / SHARING; }
    __device__ __forceinline__ int apart() const { return gridDim.x / SHARING; }
    __device__ __forceinline__ int end() const { return n_row_pairs * n_columns; }
    __device__ __forceinline__ Place place(int pair) const {
        int group = pair / (GROUP * n_columns), in_group = pair % (GROUP * n_columns);
        int rows = min(GROUP, n_row_pairs - group * GROUP);
        int row_pair = group * GROUP + in_group % rows;
        return {(row_pair * SHARING + (int)blockIdx.x % SHARING) * T::M, in_group / rows};
    }
};

// Shared memory: stages, mbarriers, and the results on their way to those who finish them, each warpgroup's 64 rows by themselves.
template <class T> struct Shared {
    bf16 *tiles, *results;
    u64 *full, *empty, *left, *taken;

    __device__ __forceinline__ Shared() {
        tiles = aligned_memory();
        full = (u64*)(tiles + T::STAGES * T::SIZE), empty = full + T::STAGES;
        left = empty + T::STAGES, taken = left + T::GROUPS;
        results = (bf16*)(full + 16);
    }
    __device__ __forceinline__ void init() const {
        for (int s = 0; s < T::STAGES; ++s)
            mbarrier_init(full + s, 1), mbarrier_init(empty + s, T::MULTIPLIERS / 32 * SHARING);
        for (int g = 0; g < T::GROUPS; ++g) mbarrier_init(left + g, 4), mbarrier_init(taken + g, FINISHERS / 32);
        mbarrier_init_fence();
    }
};

// A place in the ring. Of the stages' first round a producer finds the mbarriers of parity 1 passed.
template <int STAGES> struct Cursor {
    int stage, parity;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The loop of the thread that copies. The block copies its rows of x, and rows of W from `w_row` on for both blocks of the cluster.
template <class T>
__device__ __forceinline__ void produce(const TensorMap& map_x, const TensorMap& map_w, const Product& p,
                                        const Schedule<T>& schedule, const Shared<T>& shared) {
    constexpr int N = T::N, PART = N / SHARING;
    int rank = blockIdx.x % SHARING;
    Cursor<T::STAGES> at = {0, 1};
    for (int pair = schedule.first(); pair < schedule.end(); pair += schedule.apart()) {
        Place place = schedule.place(pair);
        int w_row = T::KIND == GATED ? rank * p.width + place.column * PART : place.column * N + rank * PART;
        for (int w_step = 0, chain = 0, step = 0; chain < p.n_chains; ++w_step, at.advance()) {
            int x_step = step < p.n_inputs ? chain * p.n_inputs + step : (p.n_chains - 1) * p.n_inputs + step;
            bf16* tile = shared.tiles + at.stage * T::SIZE;
            u64* full = shared.full + at.stage;
            mbarrier_wait(shared.empty + at.stage, at.parity);
            mbarrier_arrive_expect_bytes(full, 2 * T::SIZE);
            tma_load_tile_to_all(tile + (T::M + rank * PART) * STEP, map_w, w_step * STEP, w_row, full, SHARING);
            tma_load_tile(tile, map_x, x_step * STEP, place.row, full);
            if (++step == p.n_steps) step = 0, ++chain;
        }
    }
}

// By all lanes of a warp that has read the stage: both blocks copy to it.
template <class T> __device__ __forceinline__ void release(const Shared<T>& shared, int stage) {
    int lane = threadIdx.x % 32;
    if (lane < SHARING) mbarrier_arrive_at(shared.empty + stage, lane);
}

// One chain of a warpgroup's results, from the next stage on.
template <class T>
__device__ __forceinline__ void multiply(float (&d)[T::N / 8][4], int n_steps, const Shared<T>& shared,
                                         Cursor<T::STAGES>& at) {
    u64 of_x = k_major_operand<T::M>(shared.tiles, uniform(threadIdx.x / 128) * 64, 0);
    u64 of_w = k_major_operand<T::N>(shared.tiles + T::M * STEP, 0, 0);
    int last = 0;
    for (int step = 0; step < n_steps; ++step) {
        mbarrier_wait(shared.full + at.stage, at.parity);
        u32 offset = uniform(2 * at.stage * T::SIZE);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < STEP; c += 16)
            wgmma_shared<0, 0>(d, advance(of_x, offset + 2 * c), advance(of_w, offset + 2 * c), step + c > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (step > 0) release(shared, last);
        last = at.stage;
        at.advance();
    }
    wgmma_wait<0>();
    fence_registers(d);
    release(shared, last);
}

// Leaves a warpgroup's rounded results to those who finish them.
template <class T>
__device__ __forceinline__ void leave(const float (&d)[T::N / 8][4], const Shared<T>& shared, int turn) {
    int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    int row = threadIdx.x / 32 * 16 + lane % 16;
    u32 to = shared_address(shared.results + row * T::APART + lane / 16 * 8);
    mbarrier_wait(shared.taken + group, turn % 2 ^ 1);
#pragma unroll
    for (int j = 0; j < T::N / 8; j += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 16),
                     "r"(pack(d[j][0], d[j][1])), "r"(pack(d[j][2], d[j][3])), "r"(pack(d[j + 1][0], d[j + 1][1])),
                     "r"(pack(d[j + 1][2], d[j + 1][3]))
                     : "memory");
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared.left + group);
}

// The loop of the warpgroups that multiply.
template <class T, class P>
__device__ __forceinline__ void consume(const P& p, const Schedule<T>& schedule, const Shared<T>& shared) {
    constexpr int N = T::N;
    Cursor<T::STAGES> at = {0, 0};
    int turn = 0;
    for (int pair = schedule.first(); pair < schedule.end(); pair += schedule.apart(), ++turn) {
        float d[N / 8][4];
        multiply(d, p.n_steps, shared, at);
        if (T::KIND == DEEP) {
            float sum[N / 8][4];
#pragma unroll
            for (int j = 0; j < N / 8; ++j)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[j][i] = d[j][i];
            for (int chain = 1; chain < p.n_chains; ++chain) {
                multiply(d, p.n_steps, shared, at);
#pragma unroll
                for (int j = 0; j < N / 8; ++j)
#pragma unroll
                    for (int i = 0; i < 4; ++i) sum[j][i] += d[j][i];
            }
            leave(sum, shared, turn);
        } else {
            leave(d, shared, turn);
        }
    }
    if constexpr (T::KIND == HEADS)
        finish_own(p, shared, schedule.place(schedule.first() + (turn - 1) * schedule.apart()));
}

// Stores the 64 rows of results of a warpgroup, eight columns of which a thread takes at a time. Gated, g and u stand side by
// side in a row.
template <class T>
__device__ __forceinline__ void finish(const Product& p, const Shared<T>& shared, Place place, int group, int turn) {
    constexpr int WIDTH = T::WIDTH, PIECES = WIDTH / 8, ROWS_AT_ONCE = FINISHERS / PIECES;
    int i = threadIdx.x - (T::THREADS - FINISHERS), c = i % PIECES * 8, to = place.column * WIDTH + c;
    int row = place.row + group * 64;
    mbarrier_wait(shared.left + group, turn % 2);
    if (to >= p.width) return;
#pragma unroll 2
    for (int r = i / PIECES; r < 64; r += ROWS_AT_ONCE) {
        if (row + r >= p.n) return;
        const bf16* from = shared.results + (group * 64 + r) * T::APART + c;
        uint4 first = *(const uint4*)from;
        bf16* y = p.y + (size_t)(row + r) * p.pitch + to;
        if (T::KIND == DEEP) {
            *(uint4*)y = first;
            continue;
        }
        float g[8], u[8];
        load8(from, 0, 8, true, g);
        load8(from + WIDTH, 0, 8, true, u);
#pragma unroll
        for (int k = 0; k < 8; ++k) u[k] = (p.is_gelu ? activate<true>(g[k]) : activate<false>(g[k])) * u[k];
        store8(y, 0, 8, true, u);
        if (p.kept) {
            bf16* kept = p.kept + (size_t)(row + r) * 2 * p.width + to;
            *(uint4*)kept = first;
            *(uint4*)(kept + p.width) = *(const uint4*)(from + WIDTH);
        }
    }
}

// The loop of the warps that finish. Heads of the last tile are left to those that have multiplied, which are more.
template <class T, class P>
__device__ __forceinline__ void finish_all(const P& p, const Schedule<T>& schedule, const Shared<T>& shared) {
    int turn = 0, end = schedule.end() - (T::KIND == HEADS ? schedule.apart() : 0);
    for (int pair = schedule.first(); pair < end; pair += schedule.apart(), ++turn) {
        Place place = schedule.place(pair);
        for (int group = 0; group < T::GROUPS; ++group) {
            finish(p, shared, place, group, turn);
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.taken + group);
        }
    }
}

// Grid: a block for each multiprocessor. Maps: x in tiles of M rows, W in tiles of N / SHARING.
template <class T, class P>
__device__ __forceinline__ void product(const TensorMap& x, const TensorMap& w, const P& p) {
    Shared<T> shared;
    Schedule<T> schedule(p);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(x), prefetch_tensor_map(w);
        shared.init();
    }
    __syncthreads();
    // No block copies to another before that one's mbarriers are there, and none ends before the others have arrived at its own.
    cluster_barrier();
    if (uniform(threadIdx.x / 128) == T::GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(T::OTHER_REGISTERS));
        if (uniform(threadIdx.x / 32) > T::MULTIPLIERS / 32) {
            finish_all(p, schedule, shared);
        } else if (threadIdx.x == T::MULTIPLIERS) {
            produce(x, w, p, schedule, shared);
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(T::REGISTERS));
        consume(p, schedule, shared);
    }
    cluster_barrier();
}

#define PRODUCT(NAME, P, KIND, GROUPS, STAGES, N)                                                                      \
    KERNEL __cluster_dims__(SHARING, 1, 1) __launch_bounds__(128 * GROUPS + 32 + FINISHERS, 1)                         \
        NAME(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w,                                 \
             const __grid_constant__ P p) {                                                                            \
        product<Tiling<KIND, GROUPS, STAGES, N>>(x, w, p);                                                             \
    }
// Compiled apart, at the same time.
#if defined(DEEP_PRODUCTS)
PRODUCT(deep_large_m_128, Product, DEEP, 2, 4, 192)
#elif !defined(HEAD_DIM)
PRODUCT(gated_large_m_128, Product, GATED, 2, 4, 192)
PRODUCT(gated_large_m_192, Product, GATED, 3, 3, 192)
#endif
