// The consumers of packed attention, and its kernel. forward_feed_hopper.cu, in front of this, says how they share the work.

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

// What a consumer reads: its 64 queries from `row` on, the ring, and its places there.
struct Inputs {
    PipelineShared& shared;
    bf16 *tiles, *queries;
    int row;
    Cursor keys, values;
    // What scores are multiplied by to be exponents of 2.
    float factor;
    // Which buffer of queries.
    int buffer;
    u32 q[SLICES][4];

    __device__ __forceinline__ void release_queries() {
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.queries_empty + buffer);
    }
    __device__ __forceinline__ void load_queries() {
        int r = threadIdx.x / 32 * 16 + threadIdx.x % 16;
#pragma unroll
        for (int c = 0; c < SLICES * 16; c += 16) {
            int chunk = c / 8 + threadIdx.x % 32 / 16;
            ldmatrix_at(q[c / 16],
                        shared_address(queries + chunk / 8 * ROWS * 64 + r * 64 + (chunk % 8 ^ r % 8) * 8));
        }
    }
    __device__ __forceinline__ void wait(const Cursor& at) const { mbarrier_wait(shared.full + at.stage, at.parity); }
    __device__ __forceinline__ bf16* tile(const Cursor& at) const { return tiles + at.stage * TILE; }
    __device__ __forceinline__ void release(Cursor& at) {
#ifdef PAIRED_BLOCKS
        // Both blocks copy to the stage.
        if (threadIdx.x % 32 < BLOCKS) mbarrier_arrive_at(shared.empty + at.stage, threadIdx.x % 32);
#else
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty + at.stage);
#endif
        at.advance(2);
    }
    // Starts the scores of the next step; without keys, those of whatever lies there.
    __device__ __forceinline__ void start_scores(float (&s)[KEYS / 8][4], bool has_keys = true) {
        if (has_keys) wait(keys);
        fence_registers(s);
        wgmma_fence();
        u64 left = k_major_operand<ROWS>(queries, row, 0), right = k_major_operand<64>(tile(keys), 0, 0);
#pragma unroll
        for (int c = 0; c < DIM; c += 16) {
            u64 b = advance(right, column_bytes<64>(c));
            if (c < 16 * SLICES)
                wgmma_registers_rows(s, q[c / 16], b, c > 0);
            else
                wgmma_shared(s, advance(left, column_bytes<ROWS>(c)), b, c > 0);
        }
        wgmma_commit();
    }
};

// Zeros V past the last key of a sequence: the rows there belong to the next sequence and may hold NaN, and 0 * NaN is
// NaN. All consumers write the same zeros.
__device__ __forceinline__ void zero_hidden_values(bf16* values, int n_keys) {
    for (int i = threadIdx.x % 128; i < (KEYS - n_keys) * COLUMNS / 8; i += 128)
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

// Begins a split. The first product of its weights sets the outputs.
__device__ __forceinline__ void begin_split(RowState& rows) {
    rows.reference[0] = rows.reference[1] = MINUS_INFINITY;
    rows.sum[0] = rows.sum[1] = 0.0f;
}

// Ends the split of step `step`. Without a window every row sees one of its keys.
__device__ __forceinline__ void end_seen_split(int step, int first, RowState& rows, const SavedRows<DIM / 8>& earlier,
                                               const int (&last_key)[2], const ScoreRule& rule, float factor) {
#ifdef SCORE_RULE
    end_split_from(step / SPLIT_STEPS * SPLIT_STEPS, first, rows, earlier, last_key, rule);
#else
    rows.sum[0] = quad_sum(rows.sum[0]), rows.sum[1] = quad_sum(rows.sum[1]);
    if (step >= SPLIT_STEPS) combine_splits(rows, earlier, true, true, factor);
#endif
}

// Takes a step whose scores are in s. At the start, unless a split or the consumer's steps begin with this step, the product
// of the step before and its values is under way; at the end that of this step. Unless the step is the last one, the scores
// of the next are in s at the end.
template <bool IS_LAST>
__device__ __forceinline__ void take_step(int step, int first, float (&s)[KEYS / 8][4], Inputs& in, const int (&last_key)[2],
                                          int n_keys, const ScoreRule& rule, RowState& rows) {
    float scale[2], factor = in.factor;
    u32 p[KEYS / 16][4];
    apply_rule(s, step * KEYS, last_key, rule);
    if (IS_LAST) mask_hidden_keys(s, step * KEYS, last_key);
    softmax_weights(s, rows, factor, scale);
    fence_registers(s);
    // A wait is a loop, across which the compiler moves no arithmetic: the softmax stays in front of the wait for the
    // product.
    Cursor values = in.values;
    if (adds_to_split(step, first)) values.advance(2);
    in.wait(values);
    wgmma_wait<0>();
    fence_registers(rows.o);
    if (adds_to_split(step, first)) in.release(in.values);
    pack_operands(p, s);
    if (!IS_LAST) in.start_scores(s);
    // References seldom rise: then the factors are 1.
    bool adds = adds_to_split(step, first);
    if (adds && __any_sync(0xffffffffu, scale[0] != 1.0f || scale[1] != 1.0f)) rescale(rows, scale);
    if (IS_LAST && n_keys < step * KEYS + KEYS) zero_hidden_values(in.tile(values), n_keys - step * KEYS);
    start_columns_product(rows.o, p, in.tile(values), adds);
    if (!IS_LAST) {
        wgmma_wait<1>();
        fence_registers(s);
        in.release(in.keys);
    }
}

// Takes the steps of 64 rows from `first` on, whose first scores are started in s.
__device__ __forceinline__ void attend(int first, int n_steps, float (&s)[KEYS / 8][4], Inputs& in,
                                       const int (&last_key)[2], int n_keys, const ScoreRule& rule, RowState& rows) {
    SavedRows<DIM / 8> earlier;
    begin_split(rows);
    wgmma_wait<0>();
    fence_registers(s);
    in.release(in.keys);
    int step = first;
    for (; step < n_steps - 1; ++step) {
        take_step<false>(step, first, s, in, last_key, n_keys, rule, rows);
        if ((step + 1) % SPLIT_STEPS == 0) {
            end_product(in, rows);
            end_seen_split(step, first, rows, earlier, last_key, rule, in.factor);
            save_rows(earlier, rows);
            begin_split(rows);
        }
    }
    // All scores are multiplied: the queries may be overwritten.
    in.release_queries();
    take_step<true>(step, first, s, in, last_key, n_keys, rule, rows);
    end_product(in, rows);
    end_seen_split(step, first, rows, earlier, last_key, rule, in.factor);
}

// Waits for the queries of a turn, which `in` reads from then on.
__device__ __forceinline__ Turn begin_turn(int turn, bf16* queries, Inputs& in) {
    in.buffer = turn % QUERY_BUFFERS;
    in.queries = queries + in.buffer * ROWS * COLUMNS;
    mbarrier_wait(in.shared.queries_full + in.buffer, turn / QUERY_BUFFERS % 2);
    return in.shared.turn(in.buffer);
}

// Writes the results of a consumer's rows from position `first` on, of which `n_rows` are there.
__device__ __forceinline__ void store_part(const Turn& t, int consumer, int first, int n_rows, const RowState& rows,
                                           const ForwardArgs& args, const ScoreRule& rule, float factor) {
    QueryTile tile;
    tile.token = (long long)t.token + first;
    tile.lead = t.first_query - first;
    tile.n_rows = n_rows;
    tile.head = t.head + consumer % TILE_HEADS;
    store_rows(tile, rows, warpgroup_row(), args.packing.query, factor, rule, args.out, args.out_pitch, args.lse);
}

#if EARLY_SCORES

// A consumer's loop. All consumers see all steps of a tile.
__device__ __forceinline__ void consume(const ForwardArgs& args, const ScoreRule& rule, PipelineShared& shared,
                                        bf16* queries, bf16* tiles) {
    int consumer = uniform(threadIdx.x / 128), row = warpgroup_row();
    Inputs in = {shared, tiles, queries, consumer * 64, {0, 0}, {1, 0}, rule.factor()};
    float s[KEYS / 8][4];
    Turn t = begin_turn(0, queries, in);
    in.load_queries();
    in.start_scores(s, t.n_keys > 0);
    for (int turn = 1; t.n_keys > 0; ++turn) {
        int last_key[2] = {t.first + row, t.first + row + 8};
        RowState rows;
        attend(rule.first_key(t.first) / KEYS, t.first / KEYS + 1, s, in, last_key, t.n_keys, rule, rows);
        Turn next = begin_turn(turn, queries, in);
        in.load_queries();
        in.start_scores(s, next.n_keys > 0);
        store_part(t, consumer, t.first, t.n_keys - t.first, rows, args, rule, in.factor);
        t = next;
    }
    wgmma_wait<0>();
}

#else

// Passes steps that a consumer's rows do not see.
__device__ __forceinline__ void pass_steps(int from, int end, Inputs& in) {
    for (int step = from; step < end; ++step) {
        in.wait(in.keys), in.release(in.keys);
        in.wait(in.values), in.release(in.values);
    }
}

// A consumer's loop.
__device__ __forceinline__ void consume(const ForwardArgs& args, const ScoreRule& rule, PipelineShared& shared,
                                        bf16* queries, bf16* tiles) {
    int consumer = uniform(threadIdx.x / 128), row = warpgroup_row();
    Inputs in = {shared, tiles, queries, consumer * 64, {0, 0}, {1, 0}, rule.factor()};
    for (int turn = 0;; ++turn) {
        Turn t = begin_turn(turn, queries, in);
        if (t.n_keys == 0) break;
        int n_steps = count_steps(t.n_keys), first = t.first + 64 * consumer % HEIGHT;
        in.load_queries();
        int last_key[2] = {first + row, first + row + 8};
        RowState rows;
        // Steps that this consumer's rows see: none where the tile has no such rows.
        bool has_rows = first < t.n_keys;
        int first_step = rule.first_key(t.first) / KEYS, first_seen = rule.first_key(first) / KEYS;
        int n_own = has_rows ? min(n_steps, first / KEYS + 1) : first_step;
        if (has_rows) {
            float s[KEYS / 8][4];
            pass_steps(first_step, first_seen, in);
            in.start_scores(s);
            attend(first_seen, n_own, s, in, last_key, t.n_keys, rule, rows);
        }
        pass_steps(n_own, n_steps, in);
        if (!has_rows) in.release_queries();
        store_part(t, consumer, first, has_rows ? t.n_keys - first : 0, rows, args, rule, in.factor);
    }
}

#endif

// Grid: multiprocessors. Maps: qkv [T, query + 2 kv heads, HEAD_DIM] and rows of keys and values, both in tiles of 64; with
// PAGED_KEYS keys and values of the cache in tiles of a block, at most 64.
// Shared: queries [QUERY_BUFFERS][ROWS], keys and values [STAGES][64].
KERNEL
#ifdef PAIRED_BLOCKS
    __cluster_dims__(BLOCKS, 1, 1)
#endif
        __launch_bounds__(THREADS, 1)
attention_forward_pipelined_hopper_bf16(const __grid_constant__ TensorMap map_q, const __grid_constant__ KeyMaps maps,
                                        const __grid_constant__ ForwardArgs args RULE_PARAMETER) {
    RULE_CONSTANT
    __shared__ PipelineShared shared;
    bf16 *queries = aligned_memory(), *tiles = queries + QUERY_BUFFERS * ROWS * COLUMNS;
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int b = 0; b < QUERY_BUFFERS; ++b)
            mbarrier_init(shared.queries_full + b, 1),
                mbarrier_init(shared.queries_empty + b, 4 * CONSUMERS + PRODUCERS - 1);
        for (int b = 0; b < STAGES; ++b)
            mbarrier_init(shared.full + b, 1), mbarrier_init(shared.empty + b, 4 * CONSUMERS * BLOCKS);
#ifdef PAGED_KEYS
        for (int b = 0; b < QUERY_BUFFERS; ++b) mbarrier_init(shared.turn_full + b, 1);
#endif
#ifdef PAIRED_BLOCKS
        mbarrier_init(&shared.number_full, 1), mbarrier_init(&shared.number_empty, 1);
#endif
        mbarrier_init_fence();
    }
    __syncthreads();
#ifdef PAIRED_BLOCKS
    // No block copies to another before that one's mbarriers are there, and none ends before the other has arrived at its own.
    cluster_barrier();
#endif
    wait_for_previous_kernel();
    if (uniform(threadIdx.x / 128) == CONSUMERS) {
        take_producer_registers<PRODUCER_REGISTERS>();
        int warp = uniform(threadIdx.x / 32) - 4 * CONSUMERS;
        if (warp == 0) produce(map_q, maps, args, rule, shared, queries, tiles);
#ifdef PAGED_KEYS
        if (warp == 1) produce_values(maps, args, rule, shared, tiles);
#endif
    } else {
        take_consumer_registers<CONSUMER_REGISTERS>();
        consume(args, rule, shared, queries, tiles);
    }
#ifdef PAIRED_BLOCKS
    cluster_barrier();
#endif
}
