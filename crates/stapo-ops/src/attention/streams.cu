// Streams bring the rows of the other side into shared memory for the backward kernels, in steps of STEP rows: keys and
// values for the gradients of the queries, queries and d_out for the gradients of keys and values. Two steps lie in
// shared memory, and a step is copied while the step before it is multiplied.

template <class Tile, int STEP, int THREADS> struct KeyStream {
    static constexpr int SIZE = STEP * Tile::WIDTH;
    // Shared memory: [2][STEP] rows each.
    bf16 *keys, *values;
    QueryTile t;
    int n_steps;

    __device__ __forceinline__ KeyStream(const QueryTile& t, bf16* memory)
        : keys(memory), values(memory + 2 * SIZE), t(t), n_steps((t.n_keys + STEP - 1) / STEP) {}

    __device__ __forceinline__ void load(int step) const {
        int from = step * STEP, n = min(STEP, t.n_keys - from), at = step % 2 * SIZE;
        Tile::template load<STEP, THREADS>(keys + at, n, Strided{t.k + (size_t)from * t.key_width, t.key_width});
        Tile::template load<STEP, THREADS>(values + at, n, Strided{t.v + (size_t)from * t.key_width, t.key_width});
        cp_async_commit();
    }

    // Waits for a step and starts the copy of the next.
    __device__ __forceinline__ void wait(int step) const {
        cp_async_wait<0>();
        Tile::fence();
        __syncthreads();
        if (step + 1 < n_steps) load(step + 1);
    }
    __device__ __forceinline__ const bf16* keys_of(int step) const { return keys + step % 2 * SIZE; }
    __device__ __forceinline__ const bf16* values_of(int step) const { return values + step % 2 * SIZE; }
};

// A block's keys of one key/value head of a packed batch.
struct KeyTile {
    // Elements of a row of keys; the row of the tile's first key.
    size_t width, token;
    // Position of the tile's first key in its sequence; keys of the tile; positions of the sequence.
    int first, n_keys, rows, kv_head;
    // Positions of the sequence's first query and of the first step of queries that see the tile's keys; the row of qkv at position 0.
    int first_query, begin, query_token;

    // Whether there is a query at a position.
    __device__ __forceinline__ bool has_query(int position) const { return position >= first_query && position < rows; }
};

// The tile of keys of number `index`; false where there are fewer tiles. The first keys of a sequence are seen by most queries:
// their tiles are begun first.
template <int ROWS>
__device__ __forceinline__ bool find_key_tile(const Packing& packing, int index, KeyTile* t, WorkTile* work) {
    if (!packing.find_keys(ROWS, index, work)) return false;
    Sequence s = packing.sequence(work->sequence);
    t->first = (work->rows - 1) / ROWS * ROWS - work->first;
    t->width = packing.key_width;
    t->token = (size_t)s.key_start + t->first;
    t->rows = work->rows;
    t->n_keys = min(ROWS, t->rows - t->first);
    t->first_query = s.first_query;
    t->begin = max(t->first, s.origin());
    t->query_token = s.token;
    return true;
}

// The queries that see a tile's keys: all heads of the group one after another, each from the position `begin` on.
template <class Tile, int STEP, int THREADS> struct QueryStream {
    static constexpr int SIZE = STEP * Tile::WIDTH;
    const bf16 *qkv, *d_out;
    const float *lse, *delta;
    // Shared memory: [2][STEP] rows, and as many numbers; log-sum-exps to the base 2.
    bf16 *queries, *d_outs;
    float *lse_log2, *deltas;
    KeyTile t;
    size_t width;
    int query, heads, n_tiles, n_steps;

    __device__ __forceinline__ QueryStream(const bf16* qkv, const bf16* d_out, const float* lse, const float* delta,
                                           const KeyTile& t, int query, int kv, int end)
        : qkv(qkv),
          d_out(d_out),
          lse(lse),
          delta(delta),
          t(t),
          width((size_t)(query + 2 * kv) * HEAD_DIM),
          query(query),
          heads(query / kv),
          n_tiles(max(0, (end - t.begin + STEP - 1) / STEP)),
          n_steps(n_tiles * heads) {}

    __device__ __forceinline__ void use(bf16* memory) {
        queries = memory;
        d_outs = queries + 2 * SIZE;
        lse_log2 = (float*)(d_outs + 2 * SIZE);
        deltas = lse_log2 + 2 * STEP;
    }

    // Position of a step's first query.
    __device__ __forceinline__ int first_of(int step) const { return t.begin + step % n_tiles * STEP; }

    __device__ __forceinline__ void load(int step) const {
        int head = t.kv_head * heads + step / n_tiles, from = first_of(step);
        int n = min(STEP, t.rows - from), lead = t.first_query - from, at = step % 2;
        long long token = (long long)t.query_token + from;
        const bf16* q = qkv + token * (long long)width + head * HEAD_DIM;
        const bf16* d = d_out + (token * query + head) * HEAD_DIM;
        Tile::template load<STEP, THREADS>(queries + at * SIZE, n, QueryRows{q, width, lead});
        Tile::template load<STEP, THREADS>(d_outs + at * SIZE, n, QueryRows{d, (size_t)query * HEAD_DIM, lead});
        if (threadIdx.x < STEP) {
            int r = threadIdx.x;
            bool is_there = t.has_query(from + r);
            size_t place = (token + r) * query + head;
            // An infinite log-sum-exp gives weight 0 to a row without a query.
            lse_log2[at * STEP + r] = is_there ? lse[place] * LOG2_E : INFINITY_F32;
            deltas[at * STEP + r] = is_there ? delta[place] : 0.0f;
        }
        cp_async_commit();
    }

    // As KeyStream::wait.
    __device__ __forceinline__ void wait(int step) const {
        cp_async_wait<0>();
        Tile::fence();
        __syncthreads();
        if (step + 1 < n_steps) load(step + 1);
    }
    __device__ __forceinline__ const bf16* queries_of(int step) const { return queries + step % 2 * SIZE; }
    __device__ __forceinline__ const bf16* d_outs_of(int step) const { return d_outs + step % 2 * SIZE; }
    __device__ __forceinline__ const float* lse_log2_of(int step) const { return lse_log2 + step % 2 * STEP; }
    __device__ __forceinline__ const float* deltas_of(int step) const { return deltas + step % 2 * STEP; }
};

// The log-sum-exp to the base 2 and the delta of the two rows whose results a lane holds; 0 where a row has no query.
struct RowNumbers {
    float lse_log2[2], delta[2];
};

__device__ __forceinline__ RowNumbers load_row_numbers(const QueryTile& t, int row, const float* lse,
                                                       const float* delta, int query) {
    RowNumbers numbers;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        size_t at = (t.token + row + h * 8) * query + t.head;
        bool is_there = t.has(row + h * 8);
        numbers.lse_log2[h] = is_there ? lse[at] * LOG2_E : 0.0f;
        numbers.delta[h] = is_there ? delta[at] : 0.0f;
    }
    return numbers;
}

// Of a warp's 16 queries from `position` on and the keys from `first_key` on, d becomes d_score, from the products s. CAPPED: the
// rule has a softcap.
template <bool CAPPED, int N>
__device__ __forceinline__ void query_score_gradient(const float (&s)[N][4], float (&d)[N][4], const RowNumbers& numbers,
                                                     int first_key, int position, bool hides_keys,
                                                     const ScoreRule& rule) {
    float factor = rule.factor();
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int key = first_key + fragment_column(j, i), query = position + fragment_row(i);
            float score = CAPPED ? rule.cap(s[j][i]) : s[j][i];
            float p = exp2_fast(fmaf(score, factor, -numbers.lse_log2[i / 2]));
            if (hides_keys && (key > query || rule.hides(key, query))) p = 0.0f;
            if (CAPPED) p *= rule.slope(score);
            d[j][i] = p * (d[j][i] - numbers.delta[i / 2]);
        }
}

// The same. Most steps hide no keys, and most rules have no softcap.
template <int N>
__device__ __forceinline__ void query_score_gradient(const float (&s)[N][4], float (&d)[N][4], const RowNumbers& numbers,
                                                     int first_key, int position, bool hides_keys,
                                                     const ScoreRule& rule) {
    hides_keys = hides_keys || rule.hides(first_key, position + 15);
    if (rule.is_capped())
        query_score_gradient<true>(s, d, numbers, first_key, position, hides_keys, rule);
    else
        query_score_gradient<false>(s, d, numbers, first_key, position, hides_keys, rule);
}

// Writes the gradients of the two keys, or of the two values, from `row` on, times `scale`; `head` counts the key heads, then the
// value heads; d_keys is the first key of row 0.
__device__ __forceinline__ void store_key_part(const KeyTile& t, bf16* d_keys, int row, int head,
                                               const float (&d)[DIM / 8][4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        store_row({d_keys + (t.token + row + h * 8) * t.width + head * HEAD_DIM, row + h * 8 < t.n_keys}, d, h, scale);
}

// Writes the gradients of the two queries from `row` on.
__device__ __forceinline__ void store_query_rows(const QueryTile& t, bf16* d_qkv, int row,
                                                 const float (&d_q)[DIM / 8][4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        store_row({d_qkv + (t.token + row + h * 8) * (long long)t.width + t.head * HEAD_DIM, t.has(row + h * 8)}, d_q,
                  h, scale);
}
