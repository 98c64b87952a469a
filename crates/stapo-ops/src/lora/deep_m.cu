// Split-K products of some hundred rows with joined adapters: y [PARTS, n, outputs] in f32 has the sums over each part of the
// inputs, the last with the ranks. Every block multiplies the tiles of x that it has in shared memory anyway with eight rows of A
// too; blocks that computed the same otherwise share the rows of A. The sums of the parts, which are few, go through device memory to the
// blocks of the last part, which make s x A^T of them and add the ranks. A kernel of its own for x A^T takes 5 us, and blocks
// of this one that compute nothing else read two and a half times as much as the others and end last.
//
// Tiles of 128 x 256 in clusters of two, which share those of W, see middle_m.cu.

#define DEEP_N 256
#define DEEP_STAGES 4
#define DEEP_SHARING 2
// Rows of A that a block multiplies.
#define DEEP_RANKS 8
// Elements of a stage: x [M, STEP], W [DEEP_N, STEP], A [DEEP_RANKS, STEP].
#define DEEP_SIZE ((M + DEEP_N + DEEP_RANKS) * STEP)

// What a block computes: the part of the depth, the tile of columns and its rows of A.
struct DeepShare {
    int part, tile, n_tiles, n_inputs, rank;

    __device__ __forceinline__ DeepShare(const Projection& of) {
        n_tiles = gridDim.y / PARTS;
        part = blockIdx.y / n_tiles, tile = blockIdx.y % n_tiles;
        n_inputs = of.inputs / PARTS / STEP;
        rank = tile % (of.columns / DEEP_RANKS) * DEEP_RANKS;
    }
    // Ranks lie behind each part of a row of W; those behind all but the last are 0, and left out.
    __device__ __forceinline__ bool is_last() const { return part == PARTS - 1; }
};

struct DeepRing {
    bf16* tiles;
    u64 *full, *empty;

    __device__ __forceinline__ void init() const {
        for (int s = 0; s < DEEP_STAGES; ++s)
            mbarrier_init(full + s, 1), mbarrier_init(empty + s, MULTIPLIERS / 32 * DEEP_SHARING);
    }
    __device__ __forceinline__ void wait_full(int step) const {
        mbarrier_wait(full + step % DEEP_STAGES, step / DEEP_STAGES % 2);
    }
    // By all lanes of a warp that has read the stage: both blocks copy to it.
    __device__ __forceinline__ void release(int step) const {
        if (threadIdx.x % 32 < DEEP_SHARING) mbarrier_arrive_at(empty + step % DEEP_STAGES, threadIdx.x % 32);
    }
    // W, half of it from the other block, and A, which do not depend on the kernel in front. The step over ranks has no A.
    __device__ __forceinline__ void begin_fill(const TensorMap& map_w, const TensorMap& map_a, const DeepShare& share,
                                               int ranks, int step) const {
        constexpr int HALF = DEEP_N / DEEP_SHARING;
        int place = blockIdx.x % DEEP_SHARING * HALF, x_start = share.part * share.n_inputs * STEP;
        bf16* to = tiles + step % DEEP_STAGES * DEEP_SIZE + M * STEP;
        u64* barrier = full + step % DEEP_STAGES;
        bool has_inputs = step < share.n_inputs;
        mbarrier_arrive_expect_bytes(barrier, 2 * (has_inputs ? DEEP_SIZE : DEEP_N * STEP));
        tma_load_tile_to_all(to + place * STEP, map_w, x_start + share.part * ranks + step * STEP,
                             share.tile * DEEP_N + place, barrier, DEEP_SHARING);
        if (has_inputs) tma_load_tile(to + DEEP_N * STEP, map_a, x_start + step * STEP, share.rank, barrier);
    }
    __device__ __forceinline__ void produce(const TensorMap& map_x, const TensorMap& map_w, const TensorMap& map_a,
                                            const DeepShare& share, int ranks) const {
        int n_steps = share.n_inputs + share.is_last(), n_ahead = min(n_steps, DEEP_STAGES);
        for (int step = 0; step < n_ahead; ++step) begin_fill(map_w, map_a, share, ranks, step);
        wait_for_previous_kernel();
        for (int step = 0; step < n_steps; ++step) {
            if (step >= DEEP_STAGES) {
                mbarrier_wait(empty + step % DEEP_STAGES, (step / DEEP_STAGES - 1) % 2);
                begin_fill(map_w, map_a, share, ranks, step);
            }
            if (step < share.n_inputs)
                tma_load_tile(tiles + step % DEEP_STAGES * DEEP_SIZE, map_x, (share.part * share.n_inputs + step) * STEP,
                              blockIdx.x * M, full + step % DEEP_STAGES);
        }
    }
    // d = x W^T and e = x A^T over the part's inputs.
    __device__ __forceinline__ void multiply(float (&d)[DEEP_N / 8][4], float (&e)[1][4], int n_inputs) const {
        u64 of_x = k_major_operand<M>(tiles, uniform(threadIdx.x / 128) * 64, 0);
        u64 of_w = k_major_operand<DEEP_N>(tiles + M * STEP, 0, 0);
        u64 of_a = k_major_operand<DEEP_RANKS>(tiles + (M + DEEP_N) * STEP, 0, 0);
        for (int step = 0; step < n_inputs; ++step) {
            wait_full(step);
            u32 at = uniform(2 * (step % DEEP_STAGES) * DEEP_SIZE);
            wgmma_fence();
#pragma unroll
            for (int c = 0; c < STEP; c += 16) {
                wgmma_shared<0, 0>(d, advance(of_x, at + 2 * c), advance(of_w, at + 2 * c), step + c > 0);
                wgmma_shared<0, 0>(e, advance(of_x, at + 2 * c), advance(of_a, at + 2 * c), step + c > 0);
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(step - 1);
        }
        wgmma_wait<0>();
        fence_registers(d);
        fence_registers(e);
        release(n_inputs - 1);
    }
};

// Gives a part of x A^T to the blocks of the last part: sums [PARTS, n, columns].
__device__ __forceinline__ void give_sums(const float (&e)[1][4], const DeepShare& share, const Projection& of,
                                          float* sums, u32* count) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int row = blockIdx.x * M + threadIdx.x / 128 * 64 + result_row() + half * 8;
        if (row < of.to.n)
            *(float2*)(sums + ((size_t)share.part * of.to.n + row) * of.columns + share.rank + result_column()) =
                make_float2(e[0][2 * half], e[0][2 * half + 1]);
    }
    barrier<1, MULTIPLIERS>();
    if (threadIdx.x == 0) tell(count);
}

// Makes s x A^T of the sums, in the place of a tile of x [M, STEP], and stores it if this is the first tile of columns.
__device__ __forceinline__ void take_sums(bf16* tile, const DeepShare& share, const Projection& of, const float* sums) {
    const Projected& to = of.to;
#pragma unroll 1
    for (int i = threadIdx.x; i < M * STEP / 8; i += MULTIPLIERS) {
        int r = i / 8, column = i % 8 * 8, row = blockIdx.x * M + r;
        u32 words[4] = {};
        if (row < to.n && column < of.columns) {
#pragma unroll
            for (int quarter = 0; quarter < 2; ++quarter) {
                const float4* from = (const float4*)(sums + (size_t)row * of.columns + column) + quarter;
                float4 sum = __ldcg(from);
#pragma unroll
                for (int part = 1; part < PARTS; ++part) {
                    float4 next = __ldcg(from + (size_t)part * to.n * of.columns / 4);
                    sum.x += next.x, sum.y += next.y, sum.z += next.z, sum.w += next.w;
                }
                words[2 * quarter] = pack(sum.x * to.scale, sum.y * to.scale);
                words[2 * quarter + 1] = pack(sum.z * to.scale, sum.w * to.scale);
            }
        }
        uint4 packed = make_uint4(words[0], words[1], words[2], words[3]);
        *(uint4*)(tile + r * STEP + (column / 8 ^ r % 8) * 8) = packed;
        if (share.tile == 0 && row < to.n) *(uint4*)(to.hidden + (size_t)row * to.of + column) = packed;
    }
}

// By the blocks of the last part: d += s x A^T B^T.
__device__ __forceinline__ void add_ranks(float (&d)[DEEP_N / 8][4], const DeepRing& ring, const DeepShare& share,
                                          const Projection& of, const float* sums, u32* count) {
    int stage = share.n_inputs % DEEP_STAGES;
    bf16* tile = ring.tiles + stage * DEEP_SIZE;
    // B is there, and so whatever was in the stage has been read.
    ring.wait_full(share.n_inputs);
    if (threadIdx.x == 0) {
        wait_for_count(count, PARTS * (of.columns / DEEP_RANKS));
        leave(count, share.n_tiles);
    }
    barrier<1, MULTIPLIERS>();
    take_sums(tile, share, of, sums);
    fence_async_proxy_shared();
    barrier<1, MULTIPLIERS>();
    u64 of_x = k_major_operand<M>(tile, uniform(threadIdx.x / 128) * 64, 0);
    u64 of_w = k_major_operand<DEEP_N>(tile + M * STEP, 0, 0);
    fence_registers(d);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < STEP; c += 16) wgmma_shared<0, 0>(d, advance(of_x, 2 * c), advance(of_w, 2 * c), true);
    wgmma_commit();
    wgmma_wait<0>();
    fence_registers(d);
}

// Stores the results of a block by way of shared memory, in the place of the tiles.
__device__ __forceinline__ void store_sums(const float (&d)[DEEP_N / 8][4], const DeepShare& share, float* y, int n,
                                           int outputs) {
    constexpr int APART = DEEP_N + 8, PIECES = DEEP_N / 4;
    static_assert(4 * M * APART <= 2 * DEEP_STAGES * DEEP_SIZE, "results take the place of the stages");
    float* staged = (float*)aligned_memory();
    int row = threadIdx.x / 128 * 64 + result_row(), thread = threadIdx.x;
    // Keeps addresses from being computed ahead of the product, which leaves no registers for them.
    asm volatile("" : "+r"(row), "+r"(thread));
    // Both warpgroups have read the last stages.
    barrier<1, MULTIPLIERS>();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < DEEP_N / 8; ++j)
            *(float2*)(staged + (row + half * 8) * APART + result_column() + j * 8) =
                make_float2(d[j][2 * half], d[j][2 * half + 1]);
    barrier<1, MULTIPLIERS>();
    for (int i = thread; i < M * PIECES; i += MULTIPLIERS) {
        int r = i / PIECES, c = share.tile * DEEP_N + i % PIECES * 4, at = blockIdx.x * M + r;
        if (at < n && c < outputs)
            *(float4*)(y + ((size_t)share.part * n + at) * outputs + c) = *(const float4*)(staged + r * APART + i % PIECES * 4);
    }
}

// x [n, inputs + ranks], W [outputs, PARTS (inputs / PARTS + ranks)], with as many ranks as STEP. Grid: (tiles of rows, parts x tiles
// of columns), all of it at once. `counts`: two for each tile of rows. Shared: stages, mbarriers.
KERNEL __cluster_dims__(DEEP_SHARING, 1, 1) __launch_bounds__(MULTIPLIERS + 32, 1)
    lora_deep_m(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap w, float* y, int n, int outputs,
                int ranks, const __grid_constant__ TensorMap a, const __grid_constant__ Projection of, float* sums,
                u32* counts) {
    bf16* tiles = aligned_memory();
    u64* barriers = (u64*)(tiles + DEEP_STAGES * DEEP_SIZE);
    DeepRing ring = {tiles, barriers, barriers + DEEP_STAGES};
    DeepShare share(of);
    u32* count = counts + 2 * blockIdx.x;
    launch_dependents();
    if (threadIdx.x == MULTIPLIERS) ring.init(), mbarrier_init_fence();
    __syncthreads();
    // No block copies to another before that one's mbarriers are there, and none ends before the others have arrived at its own.
    cluster_barrier();
    if (threadIdx.x == MULTIPLIERS) {
        ring.produce(x, w, a, share, ranks);
    } else if (threadIdx.x < MULTIPLIERS) {
        float d[DEEP_N / 8][4], e[1][4];
        ring.multiply(d, e, share.n_inputs);
        wait_for_previous_kernel();
        if (share.tile < of.columns / DEEP_RANKS) give_sums(e, share, of, sums, count);
        if (share.is_last()) add_ranks(d, ring, share, of, sums, count);
        store_sums(d, share, y, n, outputs);
    }
    cluster_barrier();
}
