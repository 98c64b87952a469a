// Packed sequences, backward, on Hopper in five products, for heads of at most 128. The gradients of keys and values stay in
// registers. A step's gradient of the queries is added to sums in global memory.
// So that every sum has one order, the blocks of a sequence add to a tile of queries in turns, first keys first, and
// `turns` counts those that have added. Blocks draw tickets in this order, so a block waits only for blocks that run.
// All blocks begin with the last queries: those of one sequence and head that run together follow each other through the same few
// tiles of the sums, which stay in L2. So few heads run together that several blocks of each do.
//
// Of the producer's warps, one copies, and two add the gradients of queries to the sums, in turn; the consumers have 64 keys
// each.

// Sums of the gradients of queries.
struct QuerySums {
    // [tiles of 64 queries, query heads, STEP * COLUMNS], in the order in which Consumer::hand_over stores them.
    float* sums;
    // A ticket counter, then for each tile in `sums` how many blocks have added to it. All 0 before the launch.
    u32* turns;
};

// Warps that add gradients of queries to the sums, each with a buffer of its own.
#define ADDERS 2

// Named barriers: both consumers' gradients of scores are in shared memory; the consumers have filled an adder's
// buffer; it may be filled again.
#define SCORES 1
#define FILLED 2
#define EMPTIED (FILLED + ADDERS)
#define WITH_ADDER (128 * CONSUMERS + 32)
__device__ __forceinline__ void stmatrix_at(u32 address, const u32* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

// d (+)= a b: a [64, 16] and b [16, 64] or [16, 32] are MN-major operands.
__device__ __forceinline__ void wgmma_transposed(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 1, 1; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7)
        : "l"(a), "l"(b), "r"((int)adds));
}
__device__ __forceinline__ void wgmma_transposed(float (&d)[4][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, 1, 1; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3)
        : "l"(a), "l"(b), "r"((int)adds));
}

// The number in `sums` of the tile of 64 queries at a sequence's position 0. Where keys lie apart, the first tile of a sequence may
// begin in front of its first query, so that a sequence has up to two tiles that are not full.
__device__ __forceinline__ int first_sums_tile(const Packing& packing, int sequence, int first_query) {
    int n_partial = packing.offsets == packing.key_offsets ? 1 : 2;
    return (int)packing.offsets[sequence] / STEP + n_partial * sequence - first_query / STEP;
}

// Adds a tile of gradients in shared memory to `to`, or sets it. Returns when the tile has been read.
__device__ __forceinline__ void add_tile(float* to, const float* from, bool adds) {
    if (adds)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(from)), "n"(STEP * COLUMNS * 4)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(from)), "n"(STEP * COLUMNS * 4)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The loop of adding warp `adder`.
__device__ __forceinline__ void add_up(const BackwardArgs& args, const QuerySums& to, const Work& w,
                                       const ScoreRule& rule, int adder, const float* d_queries) {
    int sums_tile = first_sums_tile(args.packing, w.sequence, w.t.first_query);
    u32 tile_of_keys = w.t.first / ROWS;
    named_barrier_arrive<WITH_ADDER>(EMPTIED + adder);
    for (int step = adder; step < w.n_steps; step += ADDERS) {
        // Tiles of keys in front of the windows of a step's queries do not add to it.
        u32 turn = tile_of_keys - rule.first_key(w.first_query(step)) / ROWS;
        size_t tile = (size_t)(sums_tile + w.first_query(step) / STEP) * args.packing.query + w.head(step);
        u32 *counter = to.turns + 1 + tile, seen = 0;
        named_barrier_wait<WITH_ADDER>(FILLED + adder);
        if (threadIdx.x % 32 == 0) {
            while (seen < turn)
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
            fence_async_proxy();
            add_tile(to.sums + tile * STEP * COLUMNS, d_queries, turn > 0);
        }
        __syncwarp();
        if (step + ADDERS < w.n_steps) named_barrier_arrive<WITH_ADDER>(EMPTIED + adder);
        if (threadIdx.x % 32 == 0) {
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            fence_async_proxy();
            asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(counter), "r"(turn + 1) : "memory");
        }
        __syncwarp();
    }
}

// Scores become weights; keys hidden from a query get weight 0. `key` is the position of the lane's first key.
__device__ __forceinline__ void weights_of_keys(float (&s)[STEP / 8][4], const float* lse_log2, int first_query,
                                                int key, bool hides_keys, const ScoreRule& rule) {
    float factor = rule.factor();
#ifdef SCORE_RULE
    if (rule.hides(key, first_query + STEP - 1)) {
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (rule.hides(key + i / 2 * 8, first_query + fragment_column(j, i))) s[j][i] = MINUS_INFINITY;
    }
#endif
    if (hides_keys) {
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (key + i / 2 * 8 > first_query + fragment_column(j, i)) s[j][i] = MINUS_INFINITY;
    }
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j) {
        float2 shift = *(const float2*)(lse_log2 + fragment_column(j, 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) s[j][i] = exp2_fast(fmaf(s[j][i], factor, i % 2 ? -shift.y : -shift.x));
    }
}

// d becomes d_score, from the weights p.
__device__ __forceinline__ void key_score_gradient(float (&d)[STEP / 8][4], const float (&p)[STEP / 8][4],
                                                   const float* deltas) {
#pragma unroll
    for (int j = 0; j < STEP / 8; ++j) {
        float2 delta = *(const float2*)(deltas + fragment_column(j, 0));
#pragma unroll
        for (int i = 0; i < 4; ++i) d[j][i] = p[j][i] * (d[j][i] - (i % 2 ? delta.y : delta.x));
    }
}

// What the consumers read and write in shared memory.
struct Tiles {
    // [128] each; [STAGES] of queries [64] and d_out [64]; gradients of scores [2][64 keys, 64 queries]; [ADDERS]
    // of gradients of queries.
    bf16 *keys, *values, *queries, *d_scores;
    float* d_queries;

    __device__ __forceinline__ Tiles(bf16* memory)
        : keys(memory),
          values(keys + ROWS * COLUMNS),
          queries(values + ROWS * COLUMNS),
          d_scores(queries + STAGES * 2 * TILE),
          d_queries((float*)(d_scores + ROWS * STEP)) {}
    __device__ __forceinline__ bf16* queries_of(const Cursor& at) const { return queries + at.stage * 2 * TILE; }
    __device__ __forceinline__ bf16* d_outs_of(const Cursor& at) const { return queries_of(at) + TILE; }
};

// A consumer: 64 of the block's keys.
struct Consumer {
    const Work& w;
    const ScoreRule& rule;
    BackwardShared& shared;
    Tiles tiles;
    int group;

    // Waits for a step's queries and starts s = k q^T.
    __device__ __forceinline__ void start_scores(float (&s)[STEP / 8][4], const Cursor& at, int first_query) {
        bf16* queries = tiles.queries_of(at);
        mbarrier_wait(shared.full + at.stage, at.parity);
        if (zero_missing_queries<128 * CONSUMERS>(w, first_query, queries, tiles.d_outs_of(at)))
            named_barrier_wait<128 * CONSUMERS>(SCORES);
        wgmma_fence();
        start_rows_product<ROWS>(s, tiles.keys, group * 64, queries);
    }

    // Shares the gradients of scores [64 keys, 64 queries] with the other consumer.
    __device__ __forceinline__ void share_scores(const u32 (&d_scores)[STEP / 16][4]) {
        int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
        u32 to = shared_address(tiles.d_scores + (group * 64 + row) * 64) + ((threadIdx.x % 32 / 16) ^ row % 8) * 16;
#pragma unroll
        for (int c = 0; c < STEP / 16; ++c) stmatrix_at(to ^ c * 32, d_scores[c]);
        fence_async_proxy_shared();
        named_barrier_wait<128 * CONSUMERS>(SCORES);
    }

    // Starts d_q = d_score k over all 128 keys, for this consumer's half of the columns.
    __device__ __forceinline__ void start_query_gradient(float (&d_q)[COLUMNS / 16][4]) {
        constexpr int half = COLUMNS / 2;
        fence_registers(d_q);
        wgmma_fence();
        u64 left = mn_major_operand<64>(tiles.d_scores, 0);
        u64 right = mn_major_operand<ROWS>(tiles.keys + group * half / 64 * ROWS * 64 + group * half % 64, 0);
#pragma unroll
        for (int c = 0; c < ROWS / 16; ++c)
            wgmma_transposed(d_q, advance(left, c * 16 * 128), advance(right, c * 16 * 128), c > 0);
        wgmma_commit();
    }

    // Hands the gradient of the queries to an adding warp.
    __device__ __forceinline__ void hand_over(const float (&d_q)[COLUMNS / 16][4], int adder) {
        named_barrier_wait<WITH_ADDER>(EMPTIED + adder);
        u32 to = shared_address(tiles.d_queries + adder * STEP * COLUMNS) + threadIdx.x * 16;
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + j * 128 * CONSUMERS * 16),
                         "f"(d_q[j][0]), "f"(d_q[j][1]), "f"(d_q[j][2]), "f"(d_q[j][3])
                         : "memory");
        fence_async_proxy_shared();
        named_barrier_arrive<WITH_ADDER>(FILLED + adder);
    }

    // All steps. The scores of a step are multiplied at the end of the step before.
    __device__ __forceinline__ void attend(float (&d_k)[DIM / 8][4], float (&d_v)[DIM / 8][4]) {
        int key = w.t.first + group * 64, lane_key = key + warpgroup_row(), first_query = w.last_query();
        float s[STEP / 8][4];
        Cursor at = {0, 0};
        fence_registers(d_k);
        fence_registers(d_v);
        start_scores(s, at, first_query);
        for (int step = 0; step < w.n_steps; ++step) {
            bf16 *queries = tiles.queries_of(at), *d_outs = tiles.d_outs_of(at);
            float d[STEP / 8][4], d_q[COLUMNS / 16][4];
            u32 p[STEP / 16][4], d_scores[STEP / 16][4];
            wgmma_wait<0>();
            fence_registers(s);
            fence_registers(d_k);
            // The product of the step before with its queries has ended too.
            if (step > 0 && threadIdx.x % 32 == 0) mbarrier_arrive(shared.empty + (at.stage + STAGES - 1) % STAGES);
            wgmma_fence();
            start_rows_product<ROWS>(d, tiles.values, group * 64, d_outs);
            weights_of_keys(s, shared.lse_log2[at.stage], first_query, lane_key, first_query < key + 64, rule);
            pack_operands(p, s);
            start_columns_product(d_v, p, d_outs);
            wgmma_wait<1>();
            fence_registers(d);
            key_score_gradient(d, s, shared.delta[at.stage]);
            pack_operands(d_scores, d);
            share_scores(d_scores);
            start_query_gradient(d_q);
            start_columns_product(d_k, d_scores, queries);
            // The product with p has ended: its registers are free for the next scores. After the last step those of
            // this step are multiplied once more, and nobody reads them.
            wgmma_wait<2>();
            fence_registers(d_v);
            if (step + 1 < w.n_steps) {
                at.advance();
                first_query -= STEP;
                if (first_query < w.t.begin) first_query = w.last_query();
            }
            start_scores(s, at, first_query);
            wgmma_wait<2>();
            fence_registers(d_q);
            hand_over(d_q, step % ADDERS);
        }
        wgmma_wait<0>();
        fence_registers(s);
        fence_registers(d_k);
    }
};

__device__ __forceinline__ void consume(const BackwardArgs& args, const Work& w, const ScoreRule& rule,
                                        BackwardShared& shared, const Tiles& tiles) {
    int group = uniform(threadIdx.x / 128);
    float d_k[DIM / 8][4], d_v[DIM / 8][4];
    clear(d_k);
    clear(d_v);
    mbarrier_wait(&shared.keys_full, 0);
    if (w.t.n_keys < ROWS) {
        zero_rows<ROWS, 128 * CONSUMERS>(tiles.keys, w.t.n_keys);
        zero_rows<ROWS, 128 * CONSUMERS>(tiles.values, w.t.n_keys);
        fence_async_proxy_shared();
        named_barrier_wait<128 * CONSUMERS>(SCORES);
    }
    Consumer consumer = {w, rule, shared, tiles, group};
    // With a window, keys far in front of the first query are seen by none.
    if (w.n_steps > 0) consumer.attend(d_k, d_v);
    int row = group * 64 + warpgroup_row(), head = w.t.kv_head;
    store_key_part(w.t, args.d_keys, row, head, d_k, rule.gradient_scale());
    store_key_part(w.t, args.d_keys, row, head + args.packing.kv, d_v, 1.0f);
}

// Grid: (kv heads x tiles of 128 keys). Maps: qkv [T, query + 2 kv heads, HEAD_DIM], rows of keys and values, and d_out [T, query
// heads, HEAD_DIM] in tiles of 64 rows. Shared: see Tiles.
KERNEL __launch_bounds__(THREADS, 1)
attention_backward_pipelined_hopper_bf16(const __grid_constant__ TensorMap map_qkv,
                                         const __grid_constant__ TensorMap map_keys,
                                         const __grid_constant__ TensorMap map_d_out,
                                         const __grid_constant__ BackwardArgs args,
                                         const __grid_constant__ QuerySums sums RULE_PARAMETER) {
    RULE_CONSTANT
    __shared__ BackwardShared shared;
    __shared__ u32 ticket;
    Tiles tiles(aligned_memory());
    begin_backward(shared);
    if (threadIdx.x == 0) ticket = atomicAdd(sums.turns, 1);
    __syncthreads();
    Work w;
    if (!find_work(uniform(ticket), args, rule, &w)) return;
    if (uniform(threadIdx.x / 128) == CONSUMERS) {
        take_producer_registers<24>();
        if (threadIdx.x / 32 == 4 * CONSUMERS)
            produce(map_qkv, map_keys, map_d_out, args, w, shared, tiles.keys, tiles.queries);
        int adder = (int)threadIdx.x / 32 - 4 * CONSUMERS - 1;
        if (adder >= 0 && adder < ADDERS) add_up(args, sums, w, rule, adder, tiles.d_queries + adder * STEP * COLUMNS);
    } else {
        take_consumer_registers<240>();
        consume(args, w, rule, shared, tiles);
    }
}

// Grid: (query heads, tiles of 64 queries). The sums become the gradients of the queries.
KERNEL __launch_bounds__(128 * CONSUMERS)
attention_backward_store_queries_bf16(const float* sums, const __grid_constant__ Packing packing,
                                      bf16* d_qkv RULE_PARAMETER) {
    RULE_CONSTANT
    WorkTile work;
    if (!packing.find_queries(STEP, blockIdx.y, &work)) return;
    Sequence s = packing.sequence(work.sequence);
    int tile = first_sums_tile(packing, work.sequence, s.first_query) + work.first / STEP;
    const float* from = sums + ((size_t)tile * packing.query + blockIdx.x) * STEP * COLUMNS;
    int row = warpgroup_row(), first_column = threadIdx.x / 128 * (COLUMNS / 2);
    float d_q[COLUMNS / 16][4];
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j) {
        float4 x = *(const float4*)(from + (j * 128 * CONSUMERS + threadIdx.x) * 4);
        d_q[j][0] = x.x, d_q[j][1] = x.y, d_q[j][2] = x.z, d_q[j][3] = x.w;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int position = work.first + row + h * 8;
        bf16* to = d_qkv + ((long long)s.token + position) * (packing.query + 2 * packing.kv) * HEAD_DIM +
                   blockIdx.x * HEAD_DIM + first_column;
        store_row({to, position >= s.first_query && position < s.n_keys}, d_q, h, rule.gradient_scale(),
                  HEAD_DIM - first_column);
    }
}
