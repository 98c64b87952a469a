// Packed sequences, backward, on Hopper in seven products, for heads wider than 128: one kernel gives the gradients of the queries,
// one those of keys and values. Both compute the weights anew. Every sum has one order and stays in registers.

// Named barriers: the weights of a step are in one of two buffers; they may be overwritten; a consumer's own.
#define FILLED 1
#define EMPTIED 3
#define OWN 5

// Waits until the threads of a consumer have come here.
__device__ __forceinline__ void sync_consumer(int group) { named_barrier_wait<128>(OWN + group); }

// By a consumer: it has read what a barrier counts as empty.
__device__ __forceinline__ void release(u64* empty) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// Keys and values of a block; [STAGES] of queries [64] and d_out [64]; [2] of weights [64 keys, 64 queries].
struct Tiles {
    bf16 *keys, *values, *queries;
    float* weights;

    __device__ __forceinline__ Tiles(bf16* memory)
        : keys(memory),
          values(keys + ROWS * COLUMNS),
          queries(values + ROWS * COLUMNS),
          weights((float*)(queries + STAGES * 2 * TILE)) {}
    __device__ __forceinline__ bf16* queries_of(const Cursor& at) const { return queries + at.stage * 2 * TILE; }
    __device__ __forceinline__ bf16* d_outs_of(const Cursor& at) const { return queries_of(at) + TILE; }
    // Where a thread's part of a step's weights lies, fragment j after fragment j - 1 by 128 of these.
    __device__ __forceinline__ float4* weights_of(int step) const {
        return (float4*)(weights + step % 2 * ROWS * STEP) + threadIdx.x % 128;
    }
};

// The two consumers of a block of 64 keys. The first multiplies scores and adds up the gradients of values, the second multiplies
// the gradients of weights and adds up the gradients of keys.
struct KeyConsumer {
    const Work& w;
    const ScoreRule& rule;
    BackwardShared& shared;
    Tiles tiles;
    int group;

    // Waits for a step's queries and starts x = k q^T, or x = v d_out^T.
    __device__ __forceinline__ void start_step(float (&x)[STEP / 8][4], const Cursor& at, int step) {
        mbarrier_wait(shared.full + at.stage, at.parity);
        if (zero_missing_queries<128>(w, w.first_query(step), tiles.queries_of(at), tiles.d_outs_of(at)))
            sync_consumer(group);
        wgmma_fence();
        start_rows_product<ROWS>(x, group == 0 ? tiles.keys : tiles.values, 0,
                                 group == 0 ? tiles.queries_of(at) : tiles.d_outs_of(at));
    }

    // Scores become weights, of which the second consumer gets those times the slope of the scores. CAPPED: the rule has a softcap.
    template <bool CAPPED>
    __device__ __forceinline__ void share_weights(float (&s)[STEP / 8][4], int first_query, const float* lse_log2, float4* to) {
        int key = w.t.first + warpgroup_row();
        bool hides_keys = first_query < w.t.first + ROWS || rule.hides(w.t.first, first_query + STEP - 1);
        float factor = rule.factor();
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j) {
            float2 shift = *(const float2*)(lse_log2 + fragment_column(j, 0));
            float sloped[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int query = first_query + fragment_column(j, i);
                float score = CAPPED ? rule.cap(s[j][i]) : s[j][i];
                s[j][i] = exp2_fast(fmaf(score, factor, i % 2 ? -shift.y : -shift.x));
                if (hides_keys && (key + i / 2 * 8 > query || rule.hides(key + i / 2 * 8, query))) s[j][i] = 0.0f;
                sloped[i] = CAPPED ? s[j][i] * rule.slope(score) : s[j][i];
            }
            to[j * 128] = make_float4(sloped[0], sloped[1], sloped[2], sloped[3]);
        }
    }
    __device__ __forceinline__ void share_weights(float (&s)[STEP / 8][4], int step, const float* lse_log2) {
        int first_query = w.first_query(step);
        if (step > 1) named_barrier_wait<128 * CONSUMERS>(EMPTIED + step % 2);
        if (rule.is_capped())
            share_weights<true>(s, first_query, lse_log2, tiles.weights_of(step));
        else
            share_weights<false>(s, first_query, lse_log2, tiles.weights_of(step));
        named_barrier_arrive<128 * CONSUMERS>(FILLED + step % 2);
    }

    // The gradients of weights become those of scores.
    __device__ __forceinline__ void take_weights(float (&d)[STEP / 8][4], int step, const float* deltas) {
        const float4* from = tiles.weights_of(step);
        named_barrier_wait<128 * CONSUMERS>(FILLED + step % 2);
#pragma unroll
        for (int j = 0; j < STEP / 8; ++j) {
            float4 p = from[j * 128];
            float2 delta = *(const float2*)(deltas + fragment_column(j, 0));
            d[j][0] = p.x * (d[j][0] - delta.x), d[j][1] = p.y * (d[j][1] - delta.y);
            d[j][2] = p.z * (d[j][2] - delta.x), d[j][3] = p.w * (d[j][3] - delta.y);
        }
        if (step + 2 < w.n_steps) named_barrier_arrive<128 * CONSUMERS>(EMPTIED + step % 2);
    }

    // Takes a step whose product is in x, and starts the product of the next behind those of this step.
    template <bool OF_VALUES, bool IS_LAST>
    __device__ __forceinline__ void take_step(float (&x)[STEP / 8][4], float (&sums)[DIM / 8][4], Cursor& at, int step) {
        u32 left[STEP / 16][4];
        u64* empty = shared.empty + at.stage;
        if (OF_VALUES)
            share_weights(x, step, shared.lse_log2[at.stage]);
        else
            take_weights(x, step, shared.delta[at.stage]);
        pack_operands(left, x);
        start_columns_product(sums, left, OF_VALUES ? tiles.d_outs_of(at) : tiles.queries_of(at));
        at.advance();
        if (!IS_LAST) start_step(x, at, step + 1);
        wgmma_wait<IS_LAST ? 0 : 1>();
        fence_registers(sums);
        release(empty);
        if (IS_LAST) return;
        wgmma_wait<0>();
        fence_registers(x);
    }

    // All steps, of which there is one at least.
    template <bool OF_VALUES> __device__ __forceinline__ void attend(float (&sums)[DIM / 8][4]) {
        float x[STEP / 8][4];
        Cursor at = {0, 0};
        start_step(x, at, 0);
        wgmma_wait<0>();
        fence_registers(x);
        int step = 0;
        for (; step < w.n_steps - 1; ++step) take_step<OF_VALUES, false>(x, sums, at, step);
        take_step<OF_VALUES, true>(x, sums, at, step);
    }
};

// Grid: (kv heads x tiles of 64 keys). Maps: qkv [T, query + 2 kv heads, HEAD_DIM], rows of keys and values, and d_out [T, query
// heads, HEAD_DIM] in tiles of 64 rows. Shared: see Tiles.
KERNEL __launch_bounds__(THREADS, 1)
attention_backward_keys_wide_hopper_bf16(const __grid_constant__ TensorMap map_qkv,
                                         const __grid_constant__ TensorMap map_keys,
                                         const __grid_constant__ TensorMap map_d_out,
                                         const __grid_constant__ BackwardArgs args RULE_PARAMETER) {
    RULE_CONSTANT
    __shared__ BackwardShared shared;
    Tiles tiles(aligned_memory());
    begin_backward(shared);
    __syncthreads();
    Work w;
    if (!find_work(blockIdx.x, args, rule, &w)) return;
    int group = uniform(threadIdx.x / 128);
    if (group == CONSUMERS) {
        take_producer_registers<24>();
        if (threadIdx.x / 32 == 4 * CONSUMERS)
            produce(map_qkv, map_keys, map_d_out, args, w, shared, tiles.keys, tiles.queries);
    } else {
        take_consumer_registers<240>();
        float sums[DIM / 8][4];
        clear(sums);
        mbarrier_wait(&shared.keys_full, 0);
        KeyConsumer consumer = {w, rule, shared, tiles, group};
        // With a window, keys far in front of the first query are seen by none.
        if (w.n_steps > 0 && group == 0)
            consumer.attend<true>(sums);
        else if (w.n_steps > 0)
            consumer.attend<false>(sums);
        store_key_part(w.t, args.d_keys, warpgroup_row(), w.t.kv_head + (group == 0 ? args.packing.kv : 0), sums,
                       group == 0 ? 1.0f : rule.gradient_scale());
    }
}

#define Q_ROWS (64 * CONSUMERS)
// Tiles of 64 keys or values in shared memory: two of keys, and the last of values.
#define Q_TILES 3
#define VALUES 2

struct QueriesShared {
    u64 rows_full, full[Q_TILES], empty[Q_TILES];
};

// The steps of keys that a block's queries see.
struct KeySteps {
    int first, end;
};

// The copying thread's loop.
__device__ __forceinline__ void produce_keys(const TensorMap& map_qkv, const TensorMap& map_keys,
                                             const TensorMap& map_d_out, const BackwardArgs& args, const QueryTile& t,
                                             KeySteps steps, QueriesShared& shared, bf16* queries, bf16* tiles) {
    mbarrier_arrive_expect_bytes(&shared.rows_full, 2 * Q_ROWS * COLUMNS * 2);
    for (int part = 0; part < PARTS; ++part)
        for (int from = 0; from < Q_ROWS; from += 64) {
            int column = t.head * HEAD_DIM + part * 64, row = (int)t.token + from;
            bf16* to = queries + (part * Q_ROWS + from) * 64;
            tma_load_tile(to, map_qkv, column, row, &shared.rows_full);
            tma_load_tile(to + Q_ROWS * COLUMNS, map_d_out, column, row, &shared.rows_full);
        }
    int kv = args.packing.kv, head = args.heads_before_keys + t.head / (args.packing.query / kv);
    auto load = [&](int slot, int head, int step) {
        mbarrier_arrive_expect_bytes(shared.full + slot, TILE * 2);
        for (int part = 0; part < PARTS; ++part)
            tma_load_tile(tiles + slot * TILE + part * 64 * 64, map_keys, head * HEAD_DIM + part * 64,
                          t.key_start + step * KEYS, shared.full + slot);
    };
    for (int n = 0; n < steps.end - steps.first; ++n) {
        if (n > 1) mbarrier_wait(shared.empty + n % 2, (n / 2 - 1) % 2);
        load(n % 2, head, steps.first + n);
        if (n > 0) mbarrier_wait(shared.empty + VALUES, (n - 1) % 2);
        load(VALUES, head + kv, steps.first + n);
    }
}

// A consumer: 64 of the block's queries.
struct QueryConsumer {
    const QueryTile& t;
    const ScoreRule& rule;
    QueriesShared& shared;
    bf16 *queries, *tiles;
    KeySteps steps;
    int group;

    // Waits for the keys of a step, or for its values, number n.
    __device__ __forceinline__ void wait_keys(int n) const { mbarrier_wait(shared.full + n % 2, n / 2 % 2); }
    __device__ __forceinline__ void wait_values(int n) const { mbarrier_wait(shared.full + VALUES, n % 2); }

    // Zeros rows past the last key: they belong to the next sequence and may hold NaN, and 0 * NaN is NaN. Both consumers write the
    // same zeros.
    __device__ __forceinline__ void zero_hidden_rows(bf16* tile, int step) {
        if (t.n_keys - step * KEYS >= KEYS) return;
        zero_rows<KEYS, 128>(tile, t.n_keys - step * KEYS);
        fence_async_proxy_shared();
        sync_consumer(group);
    }

    // Starts s = q k^T and d = d_out v^T of a step.
    __device__ __forceinline__ void start_step(float (&s)[KEYS / 8][4], float (&d)[KEYS / 8][4], int step) {
        // Found anew in every step: the compiler would compute all operands once and keep them in local memory.
        int n = step - steps.first, row = uniform(group * 64);
        bf16 *keys = tiles + n % 2 * TILE, *values = tiles + VALUES * TILE;
        wait_keys(n);
        zero_hidden_rows(keys, step);
        wgmma_fence();
        start_rows_product<Q_ROWS>(s, queries, row, keys);
        wait_values(n);
        zero_hidden_rows(values, step);
        wgmma_fence();
        start_rows_product<Q_ROWS>(d, queries + Q_ROWS * COLUMNS, row, values);
    }

    // Passes steps that this consumer's rows do not see.
    __device__ __forceinline__ void pass_steps(int from, int end) {
        for (int n = from - steps.first; n < end - steps.first; ++n) {
            wait_keys(n), release(shared.empty + n % 2);
            wait_values(n), release(shared.empty + VALUES);
        }
    }

    // Takes a step whose products are in s and d, and starts those of the next behind that of this step.
    template <bool IS_LAST>
    __device__ __forceinline__ void take_step(float (&s)[KEYS / 8][4], float (&d)[KEYS / 8][4], int step,
                                              const RowNumbers& numbers, float (&d_q)[DIM / 8][4]) {
        u32 left[KEYS / 16][4];
        int slot = (step - steps.first) % 2, top = t.first + group * 64;
        release(shared.empty + VALUES);
        query_score_gradient(s, d, numbers, step * KEYS, top + threadIdx.x / 32 % 4 * 16, IS_LAST, rule);
        pack_operands(left, d);
        start_columns_product(d_q, left, tiles + slot * TILE);
        if (!IS_LAST) start_step(s, d, step + 1);
        wgmma_wait<IS_LAST ? 0 : 2>();
        fence_registers(d_q);
        release(shared.empty + slot);
        if (IS_LAST) return;
        wgmma_wait<0>();
        fence_registers(s);
        fence_registers(d);
    }

    // Takes the steps from `from` on, of which there is one at least. The last has the rows' own keys, and no other hides keys
    // behind them.
    __device__ __forceinline__ void attend(int from, int end, const RowNumbers& numbers, float (&d_q)[DIM / 8][4]) {
        float s[KEYS / 8][4], d[KEYS / 8][4];
        start_step(s, d, from);
        wgmma_wait<0>();
        fence_registers(s);
        fence_registers(d);
        int step = from;
        for (; step < end - 1; ++step) take_step<false>(s, d, step, numbers, d_q);
        take_step<true>(s, d, step, numbers, d_q);
    }
};

// Grid: (query heads, tiles of 128 tokens). Maps as above. Shared: queries and d_out [128], keys [2][64], values [64].
KERNEL __launch_bounds__(THREADS, 1)
attention_backward_queries_wide_hopper_bf16(const __grid_constant__ TensorMap map_qkv,
                                            const __grid_constant__ TensorMap map_keys,
                                            const __grid_constant__ TensorMap map_d_out,
                                            const __grid_constant__ BackwardArgs args, bf16* d_qkv RULE_PARAMETER) {
    RULE_CONSTANT
    __shared__ QueriesShared shared;
    bf16 *queries = aligned_memory(), *tiles = queries + 2 * Q_ROWS * COLUMNS;
    if (threadIdx.x == 0) {
        mbarrier_init(&shared.rows_full, 1);
        for (int b = 0; b < Q_TILES; ++b) mbarrier_init(shared.full + b, 1), mbarrier_init(shared.empty + b, 4 * CONSUMERS);
        mbarrier_init_fence();
    }
    __syncthreads();
    QueryTile t;
    if (!find_query_tile<Q_ROWS>(d_qkv, args.packing, &t)) return;
    t.first = uniform(t.first), t.n_keys = uniform(t.n_keys), t.n_rows = uniform(t.n_rows);
    KeySteps steps = {rule.first_key(t.first) / KEYS, (t.n_keys + KEYS - 1) / KEYS};
    int group = uniform(threadIdx.x / 128), row = group * 64 + warpgroup_row();
    if (group == CONSUMERS) {
        take_producer_registers<24>();
        if (threadIdx.x == 128 * CONSUMERS)
            produce_keys(map_qkv, map_keys, map_d_out, args, t, steps, shared, queries, tiles);
    } else {
        take_consumer_registers<240>();
        RowNumbers numbers = load_row_numbers(t, row, args.lse, args.delta, args.packing.query);
        QueryConsumer consumer = {t, rule, shared, queries, tiles, steps, group};
        int top = t.first + group * 64;
        if (group * 64 >= t.n_rows) {
            consumer.pass_steps(steps.first, steps.end);
            return;
        }
        int from = rule.first_key(top) / KEYS, end = min(steps.end, top / KEYS + 1);
        float d_q[DIM / 8][4];
        clear(d_q);
        mbarrier_wait(&shared.rows_full, 0);
        consumer.pass_steps(steps.first, from);
        consumer.attend(from, end, numbers, d_q);
        consumer.pass_steps(end, steps.end);
        store_query_rows(t, d_qkv, row, d_q, rule.gradient_scale());
    }
}
