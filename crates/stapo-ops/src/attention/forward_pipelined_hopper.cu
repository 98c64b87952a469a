// Packed attention with copies, products and softmax overlapped as in FlashAttention-3 (Shah et al., 2024): the steps
// of forward_hopper.cu, and so the same bits. A block stays on its multiprocessor and takes tile after tile of 192
// queries of one head. One warp, the producer, copies queries, keys and values by TMA; three warpgroups, the consumers,
// have 64 queries each. While the matrix units multiply for one consumer, the others take their softmax.

#define CONSUMERS 3
#define ROWS (64 * CONSUMERS)
#define THREADS (128 * CONSUMERS + 128)
#define STAGES 8
#define TILE (KEYS * DIM)

// Registers of a thread of the producer's and of the consumers' warpgroups: together those of a multiprocessor.
__device__ __forceinline__ void take_producer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
__device__ __forceinline__ void take_consumer_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 160;"); }

// A number that is the same in all lanes, in a form that tells the compiler so: it then lies in a uniform register,
// from which wgmma takes its operands.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

struct PipelineShared {
    u64 queries_full[2], queries_empty[2], full[STAGES], empty[STAGES];
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

// A block's tile number `turn`: its rows, head and keys.
struct Turn {
    WorkTile work;
    int head, n_keys, n_steps;
};

// Tiles come with falling numbers of keys, and every second turn the blocks take them in the opposite order: so all
// multiprocessors get about the same number of keys. False: there are no more tiles.
__device__ __forceinline__ bool find_turn(int turn, const ForwardArgs& args, Turn* t) {
    int n = gridDim.x, index = turn * n + (turn % 2 ? n - 1 - (int)blockIdx.x : (int)blockIdx.x);
    if (!find_work_tile(args.offsets, args.sequences, 1, ROWS, index / args.query, &t->work)) return false;
    t->head = index % args.query;
    t->n_keys = uniform(min(t->work.rows, t->work.first + ROWS));
    t->n_steps = (t->n_keys + KEYS - 1) / KEYS;
    return true;
}

// The producer's loop.
__device__ __forceinline__ void produce(const TensorMap& map_q, const TensorMap& map_kv, const ForwardArgs& args,
                                        PipelineShared& shared, bf16* queries, bf16* tiles) {
    Turn t;
    Cursor at = {0, 0};
    bool is_first = true;
    for (int turn = 0; find_turn(turn, args, &t); ++turn) {
        int start = args.offsets[t.work.sequence], kv_head = t.head / (args.query / args.kv);
        if (threadIdx.x % 32 > 0) continue;
        if (turn > 1) mbarrier_wait(shared.queries_empty + turn % 2, (turn / 2 - 1) % 2);
        mbarrier_arrive_expect_bytes(shared.queries_full + turn % 2, ROWS * DIM * 2);
        for (int part = 0; part < PARTS; ++part)
            tma_load_tile(queries + (turn % 2 * DIM + part * 64) * ROWS, map_q, t.head * HEAD_DIM + part * 64,
                          start + t.work.first, shared.queries_full + turn % 2);
        for (int i = 0; i < 2 * t.n_steps; ++i) {
            int first_head = i % 2 ? args.query + args.kv : args.query;
            if (!is_first) mbarrier_wait(shared.empty + at.stage, at.parity ^ 1);
            mbarrier_arrive_expect_bytes(shared.full + at.stage, TILE * 2);
            for (int part = 0; part < PARTS; ++part)
                tma_load_tile(tiles + at.stage * TILE + part * KEYS * 64, map_kv,
                              (first_head + kv_head) * HEAD_DIM + part * 64, start + i / 2 * KEYS,
                              shared.full + at.stage);
            at.advance(1);
            is_first = is_first && at.stage > 0;
        }
    }
}

// What a consumer reads: its 64 queries from `row` on, the ring, and its places there.
struct Inputs {
    PipelineShared& shared;
    bf16 *tiles, *queries;
    int row;
    Cursor keys, values;

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
        start_rows_product<ROWS>(s, queries, row, tile(keys));
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
    SavedRows<DIM / 8> saved;
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
            end_split(rows, saved, (step + 1) * KEYS - SPLIT, last.of_row, factor);
            save_rows(saved, rows);
            clear(rows);
        }
    }
    take_step<true>(step, s, in, last, n_keys, factor, rows);
    end_product(in, rows);
    end_split(rows, saved, step / SPLIT_STEPS * SPLIT, last.of_row, factor);
}

// A consumer's loop.
__device__ __forceinline__ void consume(const ForwardArgs& args, PipelineShared& shared, bf16* queries, bf16* tiles) {
    int top_row = uniform(threadIdx.x / 128) * 64, row = top_row + warpgroup_row();
    float factor = score_factor();
    Inputs in = {shared, tiles, queries, top_row, {0, 0}, {1, 0}};
    Turn t;
    for (int turn = 0; find_turn(turn, args, &t); ++turn) {
        int first = t.work.first;
        in.queries = queries + turn % 2 * ROWS * DIM;
        mbarrier_wait(shared.queries_full + turn % 2, turn / 2 % 2);
        LastKeys last = {{first + row, first + row + 8}, first + top_row, first + top_row + 63};
        RowState rows;
        // Steps that this consumer's rows see: none where the tile has no such rows.
        bool has_rows = first + top_row < t.n_keys;
        int n_own = has_rows ? min(t.n_steps, (first + top_row) / KEYS + 1) : 0;
        if (has_rows) attend(n_own, in, last, t.n_keys, factor, rows);
        for (int step = n_own; step < t.n_steps; ++step) {
            in.wait(in.keys), in.release(in.keys);
            in.wait(in.values), in.release(in.values);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.queries_empty + turn % 2);
        QueryTile tile;
        tile.token = (size_t)args.offsets[t.work.sequence] + first;
        tile.n_rows = has_rows ? t.n_keys - first : 0;
        tile.head = t.head;
        store_rows(tile, rows, row, args.query, factor, args.out, args.lse);
    }
}

// Grid: multiprocessors. Maps: qkv [T, query + 2 kv heads, HEAD_DIM] in tiles of ROWS queries and of 64 keys or values.
// Shared: queries [2][ROWS], keys and values [STAGES][64].
KERNEL __launch_bounds__(THREADS, 1)
attention_forward_pipelined_hopper_bf16(const __grid_constant__ TensorMap map_q,
                                        const __grid_constant__ TensorMap map_kv,
                                        const __grid_constant__ ForwardArgs args) {
    __shared__ PipelineShared shared;
    bf16 *queries = aligned_memory(), *tiles = queries + 2 * ROWS * DIM;
    if (threadIdx.x == 0) {
        for (int b = 0; b < 2; ++b)
            mbarrier_init(shared.queries_full + b, 1), mbarrier_init(shared.queries_empty + b, 4 * CONSUMERS);
        for (int b = 0; b < STAGES; ++b)
            mbarrier_init(shared.full + b, 1), mbarrier_init(shared.empty + b, 4 * CONSUMERS);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (uniform(threadIdx.x / 128) == CONSUMERS) {
        take_producer_registers();
        if (threadIdx.x / 32 == 4 * CONSUMERS) produce(map_q, map_kv, args, shared, queries, tiles);
    } else {
        take_consumer_registers();
        consume(args, shared, queries, tiles);
    }
}
