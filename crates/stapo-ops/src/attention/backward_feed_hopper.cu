// What the backward kernels with Hopper's matrix instruction share: a block has ROWS keys of one key/value head and takes the
// queries that see them in steps of 64, head by head, from the end of the sequence to the keys' own position. One warp copies keys,
// values, queries and gradients of outputs by TMA; two warpgroups, the consumers, multiply.

#define CONSUMERS 2
// Keys of a block. Of wide heads the gradients of 64 keys and values fill the consumers' registers.
#define ROWS (DIM > 128 ? 64 : 128)
#define STEP 64
#define THREADS (128 * CONSUMERS + 128)
#define STAGES 2
#define TILE (STEP * COLUMNS)

struct BackwardArgs {
    Packing packing;
    const float *lse, *delta;
    // The gradient of the first key of row 0.
    bf16* d_keys;
    // Heads in front of the keys in a row of keys; key/value heads whose blocks run together.
    int heads_before_keys, heads_together;
};

struct BackwardShared {
    u64 keys_full, full[STAGES], empty[STAGES];
    // Log-sum-exps to the base 2 and deltas of a stage's queries.
    float lse_log2[STAGES][STEP], delta[STAGES][STEP];
};

// By all threads, which wait for each other behind it.
__device__ __forceinline__ void begin_backward(BackwardShared& shared) {
    if (threadIdx.x > 0) return;
    mbarrier_init(&shared.keys_full, 1);
    // Filled by all lanes of the copying warp and by TMA.
    for (int b = 0; b < STAGES; ++b)
        mbarrier_init(shared.full + b, 33), mbarrier_init(shared.empty + b, 4 * CONSUMERS);
    mbarrier_init_fence();
}

// A place in the ring of stages.
struct Cursor {
    int stage, parity;

    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

template <int N> __device__ __forceinline__ void named_barrier_wait(int id) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(N) : "memory");
}
template <int N> __device__ __forceinline__ void named_barrier_arrive(int id) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(N) : "memory");
}

// A block's keys and the steps over the queries that see them.
struct Work {
    KeyTile t;
    // `end` is the end of the queries that see the keys.
    int sequence, heads, end, n_tiles, n_steps;

    __device__ __forceinline__ int first_query(int step) const { return last_query() - step % n_tiles * STEP; }
    __device__ __forceinline__ int head(int step) const { return t.kv_head * heads + step / n_tiles; }
    // The first query of the last tile.
    __device__ __forceinline__ int last_query() const { return (end - 1) / STEP * STEP; }
};

// The work of number `index`: some heads after others, and of these all tiles of keys by rising position, as the first keys of a
// sequence are seen by most queries.
__device__ __forceinline__ bool find_work(int index, const BackwardArgs& args, const ScoreRule& rule, Work* w) {
    int kv = args.packing.kv, together = args.heads_together, per_part = gridDim.x / kv * together;
    WorkTile work;
    KeyTile t;
    if (!find_key_tile<ROWS>(args.packing, index % per_part / together, &t, &work)) return false;
    w->t = t;
    w->t.first = uniform(t.first), w->t.rows = uniform(t.rows), w->t.begin = uniform(t.begin);
    w->t.first_query = uniform(t.first_query), w->t.query_token = uniform(t.query_token);
    w->t.token = (size_t)uniform((int)t.token);
    w->t.n_keys = min(ROWS, w->t.rows - w->t.first);
    w->t.kv_head = uniform(index / per_part * together + index % together);
    w->sequence = uniform(work.sequence);
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
        mbarrier_arrive_expect_bytes(&shared.keys_full, 2 * ROWS * COLUMNS * 2);
        for (int of = 0; of < 2; ++of)
            for (int part = 0; part < PARTS; ++part)
                for (int half = 0; half < ROWS / 64; ++half)
                    tma_load_tile(keys + of * ROWS * COLUMNS + part * ROWS * 64 + half * 64 * 64, map_keys,
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

// Zeros the rows begin..end of a tile of N rows, which belong to other sequences: they may hold NaN, and 0 * NaN is NaN. WRITERS
// threads take part; the caller fences and waits for them.
template <int N, int WRITERS> __device__ __forceinline__ void zero_rows(bf16* tile, int begin, int end = N) {
    for (int i = threadIdx.x % WRITERS; i < (end - begin) * COLUMNS / 8; i += WRITERS)
        *(uint4*)(tile + i / 8 % PARTS * N * 64 + (begin + i / 8 / PARTS) * 64 + i % 8 * 8) = make_uint4(0, 0, 0, 0);
}

// Zeros the rows of a step's tiles that have no query, by WRITERS threads. True where there are such rows: the caller then waits
// for the other writers.
template <int WRITERS>
__device__ __forceinline__ bool zero_missing_queries(const Work& w, int first_query, bf16* queries, bf16* d_outs) {
    int n = min(STEP, w.t.rows - first_query), lead = max(0, w.t.first_query - first_query);
    if (n == STEP && lead == 0) return false;
    zero_rows<STEP, WRITERS>(queries, 0, lead);
    zero_rows<STEP, WRITERS>(d_outs, 0, lead);
    zero_rows<STEP, WRITERS>(queries, n);
    zero_rows<STEP, WRITERS>(d_outs, n);
    fence_async_proxy_shared();
    return true;
}
