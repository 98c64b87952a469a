// Products of some hundred rows with joined adapters: y = [x | s x A^T] [W | B]^T, each element one chain over the depth in steps of
// 16, as in every other product, and so the same bits. The first blocks compute s x A^T, one for each tile of rows, while
// all others multiply over the inputs; these wait for their rows of it only before the steps over the ranks. A kernel of its own
// for x A^T would take 5 us, for it can run beside no product that fills the multiprocessors.
//
// A block computes M rows and N columns of y, two warpgroups 64 rows each; one warp copies tiles into a ring. The SHARING blocks
// of a cluster compute the same columns of other rows: each copies a part of every tile of W to all of them.

#define M 128
#define MULTIPLIERS 256

template <int N_, int STAGES_, int SHARING_> struct Tiling {
    static constexpr int N = N_, STAGES = STAGES_, SHARING = SHARING_;
    // Elements of a stage: x [M, STEP] and W [N, STEP].
    static constexpr int SIZE = (M + N) * STEP;
};

// Which part of a product a block computes: columns from `column` on and every `apart` columns to `end`, in n_steps each, of which
// the first n_inputs are over inputs.
struct Share {
    int column, apart, end, n_steps, n_inputs;
};

// Tiles of x and W on their way from the warp that copies to those that multiply.
template <class T> struct Tiles {
    bf16* tiles;
    u64 *full, *empty;

    __device__ __forceinline__ void init() const {
        for (int s = 0; s < T::STAGES; ++s)
            mbarrier_init(full + s, 1), mbarrier_init(empty + s, MULTIPLIERS / 32 * T::SHARING);
    }
    // By all lanes of a warp that has read the stage: whoever copies to it is told.
    __device__ __forceinline__ void release(int stage) const {
        int lane = threadIdx.x % 32;
        if (T::SHARING == 1) {
            if (lane == 0) mbarrier_arrive(empty + stage);
        } else if (lane < T::SHARING) {
            mbarrier_arrive_at(empty + stage, lane);
        }
    }
    __device__ __forceinline__ void begin_fill(const TensorMap& map_w, const Share& share, int step, int stage) const {
        constexpr int PART = T::N / T::SHARING;
        int place = blockIdx.x % T::SHARING * PART;
        bf16* to = tiles + stage * T::SIZE + (M + place) * STEP;
        mbarrier_arrive_expect_bytes(full + stage, 2 * T::SIZE);
        if (T::SHARING == 1) {
            tma_load_tile(to, map_w, step * STEP, share.column, full + stage);
        } else {
            tma_load_tile_to_all(to, map_w, step * STEP, share.column + place, full + stage, T::SHARING);
        }
    }
    // By the thread that copies. First tiles of W, which do not depend on the kernel in front, are fetched while that still runs.
    __device__ __forceinline__ void produce(const TensorMap& map_x, const TensorMap& map_w, Share share, u32* count,
                                            int n_multiplying) const {
        int n_ahead = min(share.n_steps, T::STAGES), stage = 0, parity = 1;
        for (int step = 0; step < n_ahead; ++step) begin_fill(map_w, share, step, step);
        wait_for_previous_kernel();
        for (; share.column < share.end; share.column += share.apart)
            for (int step = 0; step < share.n_steps; ++step, --n_ahead) {
                if (n_ahead <= 0) {
                    mbarrier_wait(empty + stage, parity);
                    begin_fill(map_w, share, step, stage);
                }
                if (step == share.n_inputs) wait_for_count(count, 1);
                tma_load_tile(tiles + stage * T::SIZE, map_x, step * STEP, blockIdx.x * M, full + stage);
                if (++stage == T::STAGES) stage = 0, parity ^= 1;
            }
        leave(count, n_multiplying);
    }
    // The chain of a warpgroup's results, from the next stage on.
    __device__ __forceinline__ void multiply(float (&d)[T::N / 8][4], int n_steps, int& stage, int& parity) const {
        u64 of_x = k_major_operand<M>(tiles, uniform(threadIdx.x / 128) * 64, 0);
        u64 of_w = k_major_operand<T::N>(tiles + M * STEP, 0, 0);
        int last = 0;
        for (int step = 0; step < n_steps; ++step) {
            mbarrier_wait(full + stage, parity);
            u32 at = uniform(2 * stage * T::SIZE);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < STEP; c += 16)
                wgmma_shared<0, 0>(d, advance(of_x, at + 2 * c), advance(of_w, at + 2 * c), step + c > 0);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(last);
            last = stage;
            if (++stage == T::STAGES) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        fence_registers(d);
        release(last);
    }
};

// A barrier of N threads. The compiler must see its number: where it does not, a block takes every barrier that there is.
template <int ID, int N> __device__ __forceinline__ void barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(N) : "memory");
}

// The first factors, and x A^T of a tile of rows of which the block at work has `N` columns at most.
struct Projection {
    Projected to;
    int inputs, split, columns;
};

// hidden = s x A^T of the rows of this block, part after part of the depth, with the sums of forward.cu. Rows of A beyond the last
// are 0. Shared: as many stages as fit of x [M, STEP] and A [N, STEP] in the place of T's, mbarriers behind them.
template <class T, int N>
__device__ __forceinline__ void project(const TensorMap& map_x, const TensorMap& map_a, const Projection& of, u32* count) {
    constexpr int SIZE = (M + N) * STEP, STAGES = T::STAGES * T::SIZE / SIZE < 8 ? T::STAGES * T::SIZE / SIZE : 8;
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + T::STAGES * T::SIZE);
    Ring<STAGES, SIZE, MULTIPLIERS / 32> ring = {tiles, barriers, barriers + STAGES};
    int first = blockIdx.x * M, n_steps = steps_between(0, of.inputs);
    auto fetch_factor = [&](int step) {
        tma_load_tile(ring.tile(step) + M * STEP, map_a, step * STEP, 0, ring.begin_fill(step));
    };
    if (threadIdx.x == MULTIPLIERS) {
        ring.init(), mbarrier_init_fence();
        for (int step = 0; step < min(n_steps, STAGES); ++step) fetch_factor(step);
    }
    __syncthreads();
    wait_for_previous_kernel();
    if (threadIdx.x == MULTIPLIERS) {
        for (int step = 0; step < n_steps; ++step) {
            if (step >= STAGES) fetch_factor(step);
            tma_load_tile(ring.tile(step), map_x, step * STEP, first, ring.full + step % STAGES);
        }
    }
    if (threadIdx.x >= MULTIPLIERS) return;
    float sum[N / 8][4], d[N / 8][4];
    u64 of_x = k_major_operand<M>(tiles, uniform(threadIdx.x / 128) * 64, 0), of_a = k_major_operand<N>(tiles + M * STEP, 0, 0);
    for (int part = 0, step = 0; part < PARTS; ++part) {
        int begin = step, end = steps_between(0, min(of.inputs, (part + 1) * of.split));
        for (; step < end; ++step) {
            ring.wait_full(step);
            u32 at = uniform(2 * ring.offset(step));
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < STEP; c += 16)
                wgmma_shared<0, 0>(d, advance(of_x, at + 2 * c), advance(of_a, at + 2 * c), step > begin || c > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_registers(d);
            if (threadIdx.x % 32 == 0) ring.arrive_empty(step);
        }
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = end > begin ? d[j][i] : 0.0f;
                sum[j][i] = part == 0 ? x : sum[j][i] + x;
            }
    }
    const Projected& to = of.to;
    first += threadIdx.x / 128 * 64;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            int row = first + result_row() + half * 8, at = result_column() + j * 8;
            if (row < to.n && at < to.pitch)
                *(u32*)(to.hidden + (size_t)row * to.of + at) =
                    pack(sum[j][2 * half] * to.scale, sum[j][2 * half + 1] * to.scale);
        }
    if (threadIdx.x < 128) clear_columns(to.hidden, to.of, blockIdx.x * M, min(blockIdx.x * M + M, to.n), N, to.pitch, 128);
    barrier<1, MULTIPLIERS>();
    if (threadIdx.x == 0) tell(count);
}

// The product of this block's share. `finish` gets each thread's results and the column of the first of them.
template <class T, class Finish>
__device__ __forceinline__ void multiply(const TensorMap& map_x, const TensorMap& map_w, Share share, u32* count,
                                         Finish finish) {
    bf16* memory = aligned_memory();
    u64* barriers = (u64*)(memory + T::STAGES * T::SIZE);
    Tiles<T> tiles = {memory, barriers, barriers + T::STAGES};
    if (threadIdx.x == MULTIPLIERS) {
        prefetch_tensor_map(map_x), prefetch_tensor_map(map_w);
        tiles.init(), mbarrier_init_fence();
    }
    __syncthreads();
    // No block copies to another before that one's mbarriers are there, and none ends before the others have arrived at its own.
    if (T::SHARING > 1) cluster_barrier();
    if (threadIdx.x == MULTIPLIERS) {
        tiles.produce(map_x, map_w, share, count, gridDim.y - 1);
    } else if (threadIdx.x < MULTIPLIERS) {
        float d[T::N / 8][4];
        for (int stage = 0, parity = 0; share.column < share.end; share.column += share.apart) {
            tiles.multiply(d, share.n_steps, stage, parity);
            wait_for_previous_kernel();
            finish(d, share.column);
        }
    }
    if (T::SHARING > 1) cluster_barrier();
}

// By all blocks: those at the beginning of the grid compute x A^T and return true.
template <class T>
__device__ __forceinline__ bool projects(const TensorMap& x, const TensorMap& a, const Projection& of, u32* count) {
    launch_dependents();
    if (blockIdx.y > 0) return false;
    if (of.columns <= 32) {
        project<T, 32>(x, a, of, count);
    } else if (of.columns <= 64) {
        project<T, 64>(x, a, of, count);
    } else {
        project<T, 96>(x, a, of, count);
    }
    return true;
}

// x [n, inputs + ranks], W [outputs, inputs + ranks], y [n, outputs]. Grid: (tiles of rows, 1 for x A^T and as many as share the
// columns). `counts`: two for each tile of rows. Shared: stages, 32 mbarriers, the results [M, N + 8] on their way to y, whose rows
// lie in four threads each.
template <class T>
__device__ __forceinline__ void product(const TensorMap& x, const TensorMap& w, bf16* y, int n, int outputs, int ranks,
                                        const TensorMap& a, const Projection& of, u32* counts) {
    constexpr int APART = T::N + 8, PIECES = T::N / 8;
    u32* count = counts + 2 * blockIdx.x;
    if (projects<T>(x, a, of, count)) return;
    int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    bf16* staged = aligned_memory() + T::STAGES * T::SIZE + 32 * 4 + group * 64 * APART;
    auto wait_for_group = [&] {
        if (group == 0) {
            barrier<2, 128>();
        } else {
            barrier<3, 128>();
        }
    };
    auto finish = [&](const float (&d)[T::N / 8][4], int column) {
        u32 to = shared_address(staged + (threadIdx.x % 128 / 32 * 16 + lane % 16) * APART + lane / 16 * 8);
        wait_for_group();
#pragma unroll
        for (int j = 0; j < T::N / 8; j += 2)
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 16),
                         "r"(pack(d[j][0], d[j][1])), "r"(pack(d[j][2], d[j][3])),
                         "r"(pack(d[j + 1][0], d[j + 1][1])), "r"(pack(d[j + 1][2], d[j + 1][3]))
                         : "memory");
        wait_for_group();
        for (int i = threadIdx.x % 128; i < 64 * PIECES; i += 128) {
            int r = i / PIECES, c = i % PIECES * 8, row = blockIdx.x * M + group * 64 + r;
            if (row < n && column + c < outputs)
                *(uint4*)(y + (size_t)row * outputs + column + c) = *(const uint4*)(staged + r * APART + c);
        }
    };
    int apart = (gridDim.y - 1) * T::N, column = (blockIdx.y - 1) * T::N, n_inputs = of.inputs / STEP;
    multiply<T>(x, w, Share{column, apart, outputs, n_inputs + ranks / STEP, n_inputs}, count, finish);
}

#define PRODUCT(N, STAGES, SHARING)                                                                                    \
    KERNEL __cluster_dims__(SHARING, 1, 1) __launch_bounds__(MULTIPLIERS + 32, 1)                                      \
        lora_middle_m_##N(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, bf16* y, int n,    \
                          int outputs, int ranks, const __grid_constant__ TensorMap a,                                 \
                          const __grid_constant__ Projection of, u32* counts) {                                        \
        product<Tiling<N, STAGES, SHARING>>(x, w, y, n, outputs, ranks, a, of, counts);                                \
    }
PRODUCT(64, 6, 1)
PRODUCT(128, 5, 1)
PRODUCT(192, 4, 2)
