// Packed attention with copies, products and softmax overlapped as in FlashAttention-3 (Shah et al., 2024): the steps
// of forward_hopper.cu, and so the same bits. A block stays on its multiprocessor and takes tile after tile of three
// units, each 64 queries of one head, whose heads share their keys and values. One warp, the producer, copies queries,
// keys and values by TMA; three warpgroups, the consumers, have a unit each. While the matrix units multiply for one
// consumer, the others take their softmax.

#define CONSUMERS 3
#define ROWS (64 * CONSUMERS)
#define THREADS (128 * CONSUMERS + 128)
#define STAGES 5
// Slices of 16 columns of the queries that are held in registers: products with them read less of shared memory, and
// with one at least the compiler keeps the operands of all products in uniform registers.
#define SLICES 1
#define TILE (KEYS * DIM)

// A block's next tile: the sequence's first token and its rows (0: there are no more tiles), the key/value head, and
// the first of the tile's units. The units of a sequence and key/value head are numbered by position, then by head: so
// those of a tile see about as many keys.
struct Turn {
    int start, rows, kv_head, unit;

    __device__ __forceinline__ int n_units(int heads) const { return (rows + 63) / 64 * heads; }
    // Steps of the unit that sees most keys.
    __device__ __forceinline__ int n_steps(int heads) const {
        return min(unit + CONSUMERS - 1, n_units(heads) - 1) / heads + 1;
    }
};

struct PipelineShared {
    u64 queries_full, queries_empty, full[STAGES], empty[STAGES];
    Turn turns[2];
};

struct ForwardArgs {
    const u32* offsets;
    bf16* out;
    float* lse;
    int sequences, query, kv;
};

// A place in the ring of stages: tiles of keys and of values alternate there.
struct Cursor {
    int stage, parity;

    __device__ __forceinline__ void advance(int n) {
        stage += n;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// Tiles come with falling numbers of keys, and every second turn the blocks take them in the opposite order: so all
// multiprocessors get about the same number of keys.
__device__ __forceinline__ Turn find_turn(int turn, const ForwardArgs& args) {
    WorkTile work;
    int n = gridDim.x, index = turn * n + (turn % 2 ? n - 1 - (int)blockIdx.x : (int)blockIdx.x);
    if (!find_work_tile<64>(args.offsets, args.sequences, args.query / args.kv, ROWS, index / args.kv, &work))
        return {0, 0, 0, 0};
    int start = args.offsets[work.sequence];
    return {start, (int)args.offsets[work.sequence + 1] - start, index % args.kv, work.first / 64};
}

// The producer's loop. It finds the tiles for the consumers too.
__device__ __forceinline__ void produce(const TensorMap& map, const ForwardArgs& args, PipelineShared& shared,
                                        bf16* queries, bf16* tiles) {
    Cursor at = {0, 0};
    bool is_first = true, goes_on = true;
    int heads = args.query / args.kv;
    for (int turn = 0; goes_on; ++turn) {
        Turn t = find_turn(turn, args);
        goes_on = t.rows > 0;
        if (threadIdx.x % 32 > 0) continue;
        if (turn > 0) mbarrier_wait(&shared.queries_empty, (turn - 1) % 2);
        shared.turns[turn % 2] = t;
        int n_units = min(CONSUMERS, t.n_units(heads) - t.unit);
        mbarrier_arrive_expect_bytes(&shared.queries_full, n_units * 64 * DIM * 2);
        for (int i = 0; i < n_units * PARTS; ++i) {
            int unit = t.unit + i / PARTS, head = t.kv_head * heads + unit % heads;
            tma_load_tile(queries + i * 64 * 64, map, head * HEAD_DIM + i % PARTS * 64, t.start + unit / heads * 64,
                          &shared.queries_full);
        }
        int n_tiles = goes_on ? 2 * t.n_steps(heads) : 0;
        for (int i = 0; i < n_tiles; ++i) {
            int first_head = i % 2 ? args.query + args.kv : args.query;
            if (!is_first) mbarrier_wait(shared.empty + at.stage, at.parity ^ 1);
            mbarrier_arrive_expect_bytes(shared.full + at.stage, TILE * 2);
            for (int part = 0; part < PARTS; ++part)
                tma_load_tile(tiles + at.stage * TILE + part * KEYS * 64, map,
                              (first_head + t.kv_head) * HEAD_DIM + part * 64, t.start + i / 2 * KEYS,
                              shared.full + at.stage);
            at.advance(1);
            is_first = is_first && at.stage > 0;
        }
    }
}

// d (+)= a b^T: a [64, 16] in registers, b [64, 16] a K-major operand in shared memory.
__device__ __forceinline__ void wgmma_registers_rows(float (&d)[8][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

// The combined result of earlier splits. Outputs lie in shared memory, [DIM / 8][128] of four a thread.
struct EarlierSplits {
    u32 at;
    float reference[2], sum[2];

    __device__ __forceinline__ void save(const RowState& rows) {
#pragma unroll
        for (int h = 0; h < 2; ++h) reference[h] = rows.reference[h], sum[h] = rows.sum[h];
#pragma unroll
        for (int j = 0; j < DIM / 8; ++j)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + j * 128 * 16), "f"(rows.o[j][0]),
                         "f"(rows.o[j][1]), "f"(rows.o[j][2]), "f"(rows.o[j][3])
                         : "memory");
    }
    __device__ __forceinline__ void combine_with(RowState& rows, float factor) const {
        Combine combine[2] = {Combine(reference[0], rows.reference[0], factor),
                              Combine(reference[1], rows.reference[1], factor)};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            rows.reference[h] = combine[h].reference;
            rows.sum[h] = combine[h](sum[h], rows.sum[h]);
        }
#pragma unroll
        for (int j = 0; j < DIM / 8; ++j) {
            float before[4];
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(before[0]), "=f"(before[1]), "=f"(before[2]), "=f"(before[3])
                         : "r"(at + j * 128 * 16)
                         : "memory");
#pragma unroll
            for (int i = 0; i < 4; ++i) rows.o[j][i] = combine[i / 2](before[i], rows.o[j][i]);
        }
    }
    // As end_split in softmax.cu, where every row sees a key of the split.
    __device__ __forceinline__ void end_split(RowState& rows, bool is_first, float factor) const {
        rows.sum[0] = quad_sum(rows.sum[0]), rows.sum[1] = quad_sum(rows.sum[1]);
        if (!is_first) combine_with(rows, factor);
    }
};

// What a consumer reads: its 64 queries, the ring, and its places there.
struct Inputs {
    PipelineShared& shared;
    bf16 *tiles, *queries;
    Cursor keys, values;
    // Where this thread's outputs of earlier splits lie.
    u32 earlier;
    u32 q[SLICES][4];

    __device__ __forceinline__ void load_queries() {
        int r = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
        for (int c = 0; c < SLICES * 16; c += 16) {
            int chunk = c / 8 + threadIdx.x % 32 / 16;
            ldmatrix_at(q[c / 16],
                        shared_address(queries + chunk / 8 * 64 * 64 + r * 64 + (chunk % 8 ^ r % 8) * 8));
        }
    }
    __device__ __forceinline__ void wait(const Cursor& at) const { mbarrier_wait(shared.full + at.stage, at.parity); }
    __device__ __forceinline__ bf16* tile(const Cursor& at) const { return tiles + at.stage * TILE; }
    __device__ __forceinline__ void release(Cursor& at) {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty + at.stage);
        at.advance(2);
    }
    // Starts the scores of the next step.
    __device__ __forceinline__ void start_scores(float (&s)[KEYS / 8][4]) {
        wait(keys);
        fence_registers(s);
        wgmma_fence();
        u64 left = k_major_operand<64>(queries, 0, 0), right = k_major_operand<64>(tile(keys), 0, 0);
#pragma unroll
        for (int c = 0; c < DIM; c += 16) {
            u64 b = advance(right, column_bytes<64>(c));
            if (c < 16 * SLICES)
                wgmma_registers_rows(s, q[c / 16], b, c > 0);
            else
                wgmma_shared(s, advance(left, column_bytes<64>(c)), b, c > 0);
        }
        wgmma_commit();
    }
};

// Zeros V past the last key of a sequence: the rows there belong to the next sequence and may hold NaN, and 0 * NaN is
// NaN. All consumers write the same zeros.
__device__ __forceinline__ void zero_hidden_values(bf16* values, int n_keys) {
    for (int i = threadIdx.x % 128; i < (KEYS - n_keys) * DIM / 8; i += 128)
        *(uint4*)(values + i / 8 % PARTS * KEYS * 64 + (n_keys + i / 8 / PARTS) * 64 + i % 8 * 8) =
            make_uint4(0, 0, 0, 0);
    fence_async_proxy_shared();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + (int)threadIdx.x / 128) : "memory");
}

// Ends the product of the last step's weights and values.
__device__ __forceinline__ void end_product(Inputs& in, RowState& rows) {
    wgmma_wait<0>();
    fence_registers(rows.o);
    in.release(in.values);
}

// Takes a step whose scores are in s. At the start, unless a split begins with this step, the product of the step
// before and its values is under way; at the end that of this step. Unless the step is the last one, the scores of the
// next are in s at the end.
template <bool IS_LAST>
__device__ __forceinline__ void take_step(int step, float (&s)[KEYS / 8][4], Inputs& in, const LastKeys& last,
                                          int n_keys, float factor, RowState& rows) {
    float scale[2];
    u32 p[KEYS / 16][4];
    if (IS_LAST) mask_hidden_keys(s, step * KEYS, last.of_row);
    softmax_weights(s, rows, factor, scale);
    fence_registers(s);
    // A wait is a loop, across which the compiler moves no arithmetic: the softmax stays in front of the wait for the
    // product.
    Cursor values = in.values;
    if (step % SPLIT_STEPS > 0) values.advance(2);
    in.wait(values);
    wgmma_wait<0>();
    fence_registers(rows.o);
    if (step % SPLIT_STEPS > 0) in.release(in.values);
    pack_operands(p, s);
    if (!IS_LAST) in.start_scores(s);
    // Once the rows have met their largest scores, the factors are 1.
    if (__any_sync(0xffffffffu, scale[0] != 1.0f || scale[1] != 1.0f)) rescale(rows, scale);
    if (IS_LAST && n_keys < step * KEYS + KEYS) zero_hidden_values(in.tile(values), n_keys - step * KEYS);
    start_columns_product(rows.o, p, in.tile(values));
    if (!IS_LAST) {
        wgmma_wait<1>();
        fence_registers(s);
        in.release(in.keys);
    }
}

// Takes all steps of 64 rows.
__device__ __forceinline__ void attend(int n_steps, Inputs& in, const LastKeys& last, int n_keys, float factor,
                                       RowState& rows) {
    float s[KEYS / 8][4];
    EarlierSplits earlier;
    earlier.at = in.earlier;
    clear(rows);
    in.start_scores(s);
    wgmma_wait<0>();
    fence_registers(s);
    in.release(in.keys);
    int step = 0;
    for (; step < n_steps - 1; ++step) {
        take_step<false>(step, s, in, last, n_keys, factor, rows);
        if ((step + 1) % SPLIT_STEPS == 0) {
            end_product(in, rows);
            earlier.end_split(rows, step + 1 == SPLIT_STEPS, factor);
            earlier.save(rows);
            clear(rows);
        }
    }
    // All scores are multiplied: the queries may be overwritten.
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&in.shared.queries_empty);
    take_step<true>(step, s, in, last, n_keys, factor, rows);
    end_product(in, rows);
    earlier.end_split(rows, step < SPLIT_STEPS, factor);
}

// A consumer's loop.
__device__ __forceinline__ void consume(const ForwardArgs& args, PipelineShared& shared, bf16* queries, bf16* tiles) {
    int consumer = uniform(threadIdx.x / 128), heads = args.query / args.kv;
    float factor = score_factor();
    Inputs in = {shared, tiles, queries + consumer * 64 * DIM, {0, 0}, {1, 0}};
    in.earlier = shared_address(tiles + STAGES * TILE) + threadIdx.x / 128 * 64 * DIM * 4 + threadIdx.x % 128 * 16;
    for (int turn = 0;; ++turn) {
        mbarrier_wait(&shared.queries_full, turn % 2);
        const Turn& next = shared.turns[turn % 2];
        Turn t = {uniform(next.start), uniform(next.rows), uniform(next.kv_head), uniform(next.unit)};
        if (t.rows == 0) break;
        int unit = t.unit + consumer, top_row = unit / heads * 64, row = warpgroup_row();
        in.load_queries();
        LastKeys last = {{top_row + row, top_row + row + 8}, top_row, top_row + 63};
        RowState rows;
        // The tile's last units may be missing.
        bool has_rows = unit < t.n_units(heads);
        int n_own = has_rows ? unit / heads + 1 : 0;
        if (has_rows) attend(n_own, in, last, t.rows, factor, rows);
        for (int step = n_own; step < t.n_steps(heads); ++step) {
            in.wait(in.keys), in.release(in.keys);
            in.wait(in.values), in.release(in.values);
        }
        if (!has_rows && threadIdx.x % 32 == 0) mbarrier_arrive(&shared.queries_empty);
        QueryTile tile;
        tile.token = (size_t)t.start + top_row;
        tile.n_rows = has_rows ? min(64, t.rows - top_row) : 0;
        tile.head = t.kv_head * heads + unit % heads;
        store_rows(tile, rows, row, args.query, factor, args.out, args.lse);
    }
}

// Grid: multiprocessors. Map: qkv [T, query + 2 kv heads, HEAD_DIM] in tiles of 64 rows.
// Shared: queries [ROWS], keys and values [STAGES][64], and in f32 the outputs of earlier splits [ROWS].
KERNEL __launch_bounds__(THREADS, 1)
attention_forward_pipelined_hopper_bf16(const __grid_constant__ TensorMap map,
                                        const __grid_constant__ ForwardArgs args) {
    __shared__ PipelineShared shared;
    bf16 *queries = aligned_memory(), *tiles = queries + ROWS * DIM;
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.queries_full, 1), mbarrier_init(&shared.queries_empty, 4 * CONSUMERS);
        for (int b = 0; b < STAGES; ++b)
            mbarrier_init(shared.full + b, 1), mbarrier_init(shared.empty + b, 4 * CONSUMERS);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (uniform(threadIdx.x / 128) == CONSUMERS) {
        take_producer_registers<24>();
        if (threadIdx.x / 32 == 4 * CONSUMERS) produce(map, args, shared, queries, tiles);
    } else {
        take_consumer_registers<160>();
        consume(args, shared, queries, tiles);
    }
}
