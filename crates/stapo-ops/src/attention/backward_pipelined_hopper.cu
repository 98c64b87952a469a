// Packed sequences, backward, on Hopper in five products: a block has 128 keys of one key/value head and takes the
// queries that see them in steps of 64, head by head, from the end of the sequence to the keys' own position. The
// gradients of keys and values stay in registers. A step's gradient of the queries is added to sums in global memory.
// So that every sum has one order, the blocks of a sequence add to a tile of queries in turns, first keys first, and
// `turns` counts those that have added. Blocks draw tickets in this order, so a block waits only for blocks that run.
// All blocks begin with the last queries: those of one sequence that run together follow each other through the same few
// tiles of the sums, which stay in L2, and the longest run first.
//
// Three warpgroups: of the producer's, one warp copies queries and gradients of outputs by TMA, and two add the
// gradients of queries to the sums, in turn; two consumers have 64 keys each and multiply.

#define CONSUMERS 2
#define ROWS (64 * CONSUMERS)
#define STEP 64
#define THREADS (128 * CONSUMERS + 128)
#define STAGES 2
#define TILE (STEP * DIM)

struct BackwardArgs {
    Packing packing;
    const float *lse, *delta;
    // [tiles of 64 queries, query heads, STEP * DIM]: sums of the gradients of queries, in the order in which
    // Consumer::hand_over stores them.
    float* sums;
    // A ticket counter, then for each tile in `sums` how many blocks have added to it. All 0 before the launch.
    u32* turns;
    // The gradient of the first key of row 0.
    bf16* d_keys;
    // Heads in front of the keys in a row of keys.
    int heads_before_keys;
};

struct BackwardShared {
    u64 keys_full, full[STAGES], empty[STAGES];
    // Log-sum-exps to the base 2 and deltas of a stage's queries.
    float lse_log2[STAGES][STEP], delta[STAGES][STEP];
    u32 ticket;
};

// A place in the ring of stages.
struct Cursor {
    int stage, parity;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Warps that add gradients of queries to the sums, each with a buffer of its own.
#define ADDERS 2

// Named barriers: both consumers' gradients of scores are in shared memory; the consumers have filled an adder's
// buffer; it may be filled again.
#define SCORES 1
#define FILLED 2
#define EMPTIED (FILLED + ADDERS)
#define WITH_ADDER (128 * CONSUMERS + 32)
template <int N> __device__ __forceinline__ void named_barrier_wait(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(N) : "memory");
}

__device__ __forceinline__ void stmatrix_at(u32 address, const u32* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

#define FOUR_SET(d, j) "=f"(d[j][0]), "=f"(d[j][1]), "=f"(d[j][2]), "=f"(d[j][3])

// d = a b^T as wgmma_shared. That d has no value before is told to the compiler: otherwise it would keep registers for
// that value.
__device__ __forceinline__ void wgmma_shared_set(float (&d)[8][4], u64 a, u64 b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : FOUR_SET(d, 0), FOUR_SET(d, 1), FOUR_SET(d, 2), FOUR_SET(d, 3), FOUR_SET(d, 4), FOUR_SET(d, 5),
          FOUR_SET(d, 6), FOUR_SET(d, 7)
        : "l"(a), "l"(b));
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

// A block's keys and the steps over the queries that see them.
struct Work {
    KeyTile t;
    // See first_sums_tile; `end` is the end of the queries that see the keys.
    int sums_tile, heads, end, n_tiles, n_steps;

    __device__ __forceinline__ int first_query(int step) const { return last_query() - step % n_tiles * STEP; }
    __device__ __forceinline__ int head(int step) const { return t.kv_head * heads + step / n_tiles; }
    // The first query of the last tile.
    __device__ __forceinline__ int last_query() const { return (end - 1) / STEP * STEP; }
};

// Tickets count tiles of keys by rising position: the first keys of a sequence are seen by most queries.
__device__ __forceinline__ bool find_work(int ticket, const BackwardArgs& args, const ScoreRule& rule, Work* w) {
    int kv = args.packing.kv;
    WorkTile work;
    KeyTile t;
    if (!find_key_tile<ROWS>(args.packing, ticket / kv, &t, &work)) return false;
    w->t = t;
    w->t.first = uniform(t.first), w->t.rows = uniform(t.rows), w->t.begin = uniform(t.begin);
    w->t.first_query = uniform(t.first_query), w->t.query_token = uniform(t.query_token);
    w->t.token = (size_t)uniform((int)t.token);
    w->t.n_keys = min(ROWS, w->t.rows - w->t.first);
    w->t.kv_head = uniform(ticket % kv);
    w->sums_tile = uniform(first_sums_tile(args.packing, work.sequence, t.first_query));
    w->heads = args.packing.query / kv;
    w->end = rule.end_of_queries(w->t.first + w->t.n_keys - 1, w->t.rows);
    w->n_tiles = max(0, (w->end - w->t.begin + STEP - 1) / STEP);
    w->n_steps = w->n_tiles * w->heads;
    return true;
}

// The copying warp's loop.
__device__ __forceinline__ void produce(const TensorMap& map_qkv, const TensorMap& map_keys, const TensorMap& map_d_out,
                                        const BackwardArgs& args, const Work& w, BackwardShared& shared, bf16* keys,
                                        bf16* queries) {
    int lane = threadIdx.x % 32;
    if (lane == 0) {
        mbarrier_arrive_expect_bytes(&shared.keys_full, 2 * ROWS * DIM * 2);
        for (int of = 0; of < 2; ++of)
            for (int part = 0; part < PARTS; ++part)
                for (int half = 0; half < 2; ++half)
                    tma_load_tile(keys + of * ROWS * DIM + part * ROWS * 64 + half * 64 * 64, map_keys,
                                  (args.heads_before_keys + of * args.packing.kv + w.t.kv_head) * HEAD_DIM + part * 64,
                                  w.t.token + half * 64, &shared.keys_full);
    }
    Cursor at = {0, 0};
    for (int step = 0; step < w.n_steps; ++step) {
        int first = w.first_query(step), head = w.head(step), token = w.t.query_token + first;
        float lse[2], delta[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            size_t place = ((long long)token + lane + k * 32) * args.packing.query + head;
            bool is_there = w.t.has_query(first + lane + k * 32);
            // An infinite log-sum-exp gives weight 0 to a row without a query.
            lse[k] = is_there ? args.lse[place] * LOG2_E : INFINITY_F32;
            delta[k] = is_there ? args.delta[place] : 0.0f;
        }
        if (step >= STAGES) mbarrier_wait(shared.empty + at.stage, at.parity ^ 1);
        if (lane == 0) {
            mbarrier_arrive_expect_bytes(shared.full + at.stage, 2 * TILE * 2);
            for (int part = 0; part < PARTS; ++part) {
                tma_load_tile(queries + at.stage * 2 * TILE + part * 64 * 64, map_qkv, head * HEAD_DIM + part * 64,
                              token, shared.full + at.stage);
                tma_load_tile(queries + (at.stage * 2 + 1) * TILE + part * 64 * 64, map_d_out,
                              head * HEAD_DIM + part * 64, token, shared.full + at.stage);
            }
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
            shared.lse_log2[at.stage][lane + k * 32] = lse[k], shared.delta[at.stage][lane + k * 32] = delta[k];
        mbarrier_arrive(shared.full + at.stage);
        at.advance();
    }
}

// Adds a tile of gradients in shared memory to `to`, or sets it. Returns when the tile has been read.
__device__ __forceinline__ void add_tile(float* to, const float* from, bool adds) {
    if (adds)
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(from)), "n"(STEP * DIM * 4)
                     : "memory");
    else
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                     "r"(shared_address(from)), "n"(STEP * DIM * 4)
                     : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The loop of adding warp `adder`.
__device__ __forceinline__ void add_up(const BackwardArgs& args, const Work& w, const ScoreRule& rule, int adder,
                                       const float* d_queries) {
    u32 tile_of_keys = w.t.first / ROWS;
    named_barrier_arrive<WITH_ADDER>(EMPTIED + adder);
    for (int step = adder; step < w.n_steps; step += ADDERS) {
        // Tiles of keys in front of the windows of a step's queries do not add to it.
        u32 turn = tile_of_keys - rule.first_key(w.first_query(step)) / ROWS;
        size_t tile = (size_t)(w.sums_tile + w.first_query(step) / STEP) * args.packing.query + w.head(step);
        u32 *counter = args.turns + 1 + tile, seen = 0;
        named_barrier_wait<WITH_ADDER>(FILLED + adder);
        if (threadIdx.x % 32 == 0) {
            while (seen < turn)
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
            fence_async_proxy();
            add_tile(args.sums + tile * STEP * DIM, d_queries, turn > 0);
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

// Zeros the rows begin..end of a tile of N rows, which belong to other sequences: they may hold NaN, and 0 * NaN is NaN. All
// consumers take part; the caller fences and waits for them.
template <int N> __device__ __forceinline__ void zero_rows(bf16* tile, int begin, int end = N) {
    for (int i = threadIdx.x; i < (end - begin) * DIM / 8; i += 128 * CONSUMERS)
        *(uint4*)(tile + i / 8 % PARTS * N * 64 + (begin + i / 8 / PARTS) * 64 + i % 8 * 8) = make_uint4(0, 0, 0, 0);
}

// What the consumers read and write in shared memory.
struct Tiles {
    // [128] each; [STAGES] of queries [64] and d_out [64]; gradients of scores [2][64 keys, 64 queries]; [ADDERS]
    // of gradients of queries.
    bf16 *keys, *values, *queries, *d_scores;
    float* d_queries;

    __device__ __forceinline__ Tiles(bf16* memory)
        : keys(memory),
          values(keys + ROWS * DIM),
          queries(values + ROWS * DIM),
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
        int n = min(STEP, w.t.rows - first_query), lead = max(0, w.t.first_query - first_query);
        mbarrier_wait(shared.full + at.stage, at.parity);
        if (n < STEP || lead > 0) {
            zero_rows<STEP>(queries, 0, lead);
            zero_rows<STEP>(tiles.d_outs_of(at), 0, lead);
            zero_rows<STEP>(queries, n);
            zero_rows<STEP>(tiles.d_outs_of(at), n);
            fence_async_proxy_shared();
            named_barrier_wait<128 * CONSUMERS>(SCORES);
        }
        wgmma_fence();
        u64 left = k_major_operand<ROWS>(tiles.keys, group * 64, 0), right = k_major_operand<64>(queries, 0, 0);
        wgmma_shared_set(s, left, right);
#pragma unroll
        for (int c = 16; c < DIM; c += 16)
            wgmma_shared(s, advance(left, column_bytes<ROWS>(c)), advance(right, column_bytes<64>(c)), true);
        wgmma_commit();
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
    __device__ __forceinline__ void start_query_gradient(float (&d_q)[DIM / 16][4]) {
        constexpr int half = DIM / 2;
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
    __device__ __forceinline__ void hand_over(const float (&d_q)[DIM / 16][4], int adder) {
        named_barrier_wait<WITH_ADDER>(EMPTIED + adder);
        u32 to = shared_address(tiles.d_queries + adder * STEP * DIM) + threadIdx.x * 16;
#pragma unroll
        for (int j = 0; j < DIM / 16; ++j)
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
            float d[STEP / 8][4], d_q[DIM / 16][4];
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
        zero_rows<ROWS>(tiles.keys, w.t.n_keys);
        zero_rows<ROWS>(tiles.values, w.t.n_keys);
        fence_async_proxy_shared();
        named_barrier_wait<128 * CONSUMERS>(SCORES);
    }
    Consumer consumer = {w, rule, shared, tiles, group};
    // With a window, keys far in front of the first query are seen by none.
    if (w.n_steps > 0) consumer.attend(d_k, d_v);
    store_key_rows(w.t, args.d_keys, group * 64 + warpgroup_row(), args.packing.kv, d_k, d_v, rule.gradient_scale());
}

// Grid: (kv heads x tiles of 128 keys). Maps: qkv [T, query + 2 kv heads, HEAD_DIM], rows of keys and values, and d_out [T, query
// heads, HEAD_DIM] in tiles of 64 rows. Shared: see Tiles.
KERNEL __launch_bounds__(THREADS, 1)
attention_backward_pipelined_hopper_bf16(const __grid_constant__ TensorMap map_qkv,
                                         const __grid_constant__ TensorMap map_keys,
                                         const __grid_constant__ TensorMap map_d_out,
                                         const __grid_constant__ BackwardArgs args RULE_PARAMETER) {
    RULE_CONSTANT
    __shared__ BackwardShared shared;
    Tiles tiles(aligned_memory());
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.keys_full, 1);
        // Filled by all lanes of the copying warp and by TMA.
        for (int b = 0; b < STAGES; ++b)
            mbarrier_init(shared.full + b, 33), mbarrier_init(shared.empty + b, 4 * CONSUMERS);
        mbarrier_init_fence();
        shared.ticket = atomicAdd(args.turns, 1);
    }
    __syncthreads();
    Work w;
    if (!find_work(uniform(shared.ticket), args, rule, &w)) return;
    if (uniform(threadIdx.x / 128) == CONSUMERS) {
        take_producer_registers<24>();
        if (threadIdx.x / 32 == 4 * CONSUMERS)
            produce(map_qkv, map_keys, map_d_out, args, w, shared, tiles.keys, tiles.queries);
        int adder = (int)threadIdx.x / 32 - 4 * CONSUMERS - 1;
        if (adder >= 0 && adder < ADDERS) add_up(args, w, rule, adder, tiles.d_queries + adder * STEP * DIM);
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
    const float* from = sums + ((size_t)tile * packing.query + blockIdx.x) * STEP * DIM;
    int row = warpgroup_row();
    float d_q[DIM / 16][4];
#pragma unroll
    for (int j = 0; j < DIM / 16; ++j) {
        float4 x = *(const float4*)(from + (j * 128 * CONSUMERS + threadIdx.x) * 4);
        d_q[j][0] = x.x, d_q[j][1] = x.y, d_q[j][2] = x.z, d_q[j][3] = x.w;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int position = work.first + row + h * 8;
        if (position >= s.first_query && position < s.n_keys)
            store_row(d_qkv + ((long long)s.token + position) * (packing.query + 2 * packing.kv) * HEAD_DIM +
                          blockIdx.x * HEAD_DIM + threadIdx.x / 128 * (DIM / 2),
                      d_q, h, rule.gradient_scale());
    }
}
