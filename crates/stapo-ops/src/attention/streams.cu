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
        Tile::template load<STEP, THREADS>(keys + at, n, Strided{t.k + (size_t)from * t.width, t.width});
        Tile::template load<STEP, THREADS>(values + at, n, Strided{t.v + (size_t)from * t.width, t.width});
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
    // Elements of a token in qkv; the sequence's first token and the tile's first token in the batch.
    size_t width, start, token;
    // Position of the tile's first key in its sequence; keys of the tile; rows of the sequence.
    int first, n_keys, rows, kv_head;
};

// The tile of block (kv head, index); false where there are fewer tiles. The first keys of a sequence are seen by most
// queries: their tiles are begun first.
template <int ROWS>
__device__ __forceinline__ bool find_key_tile(const u32* offsets, int sequences, int query, int kv, KeyTile* t) {
    WorkTile work;
    if (!find_work_tile(offsets, sequences, 1, ROWS, blockIdx.y, &work)) return false;
    t->first = (work.rows - 1) / ROWS * ROWS - work.first;
    t->width = (size_t)(query + 2 * kv) * HEAD_DIM;
    t->start = offsets[work.sequence];
    t->token = t->start + t->first;
    t->n_keys = min(ROWS, work.rows - t->first);
    t->rows = work.rows;
    t->kv_head = blockIdx.x;
    return true;
}

// The queries that see a tile's keys: all heads of the group one after another, each from the tile's first position on.
template <class Tile, int STEP, int THREADS> struct QueryStream {
    static constexpr int SIZE = STEP * Tile::WIDTH;
    const bf16 *qkv, *d_out;
    const float *lse, *delta;
    // Shared memory: [2][STEP] rows, and as many numbers; log-sum-exps to the base 2.
    bf16 *queries, *d_outs;
    float *lse_log2, *deltas;
    KeyTile t;
    int query, heads, n_tiles, n_steps;

    __device__ __forceinline__ QueryStream(const bf16* qkv, const bf16* d_out, const float* lse, const float* delta,
                                           const KeyTile& t, int query, int kv)
        : qkv(qkv),
          d_out(d_out),
          lse(lse),
          delta(delta),
          t(t),
          query(query),
          heads(query / kv),
          n_tiles((t.rows - t.first + STEP - 1) / STEP),
          n_steps(n_tiles * heads) {}

    __device__ __forceinline__ void use(bf16* memory) {
        queries = memory;
        d_outs = queries + 2 * SIZE;
        lse_log2 = (float*)(d_outs + 2 * SIZE);
        deltas = lse_log2 + 2 * STEP;
    }

    // Leaves out the queries from position `end` on.
    __device__ __forceinline__ void end_at(int end) {
        n_tiles = (end - t.first + STEP - 1) / STEP;
        n_steps = n_tiles * heads;
    }

    // Position of a step's first query.
    __device__ __forceinline__ int first_of(int step) const { return t.first + step % n_tiles * STEP; }

    __device__ __forceinline__ void load(int step) const {
        int head = t.kv_head * heads + step / n_tiles, from = first_of(step);
        int n = min(STEP, t.rows - from), at = step % 2;
        const bf16* q = qkv + (t.start + from) * t.width + head * HEAD_DIM;
        const bf16* d = d_out + ((t.start + from) * query + head) * HEAD_DIM;
        Tile::template load<STEP, THREADS>(queries + at * SIZE, n, Strided{q, t.width});
        Tile::template load<STEP, THREADS>(d_outs + at * SIZE, n, Strided{d, (size_t)query * HEAD_DIM});
        if (threadIdx.x < STEP) {
            int r = threadIdx.x;
            size_t place = (t.start + from + r) * query + head;
            // An infinite log-sum-exp gives weight 0 to a query past the end of the sequence.
            lse_log2[at * STEP + r] = r < n ? lse[place] * LOG2_E : INFINITY_F32;
            deltas[at * STEP + r] = r < n ? delta[place] : 0.0f;
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

// The log-sum-exp to the base 2 and the delta of the two rows whose results a lane holds; 0 past the end of the tile.
struct RowNumbers {
    float lse_log2[2], delta[2];
};

__device__ __forceinline__ RowNumbers load_row_numbers(const QueryTile& t, int row, const float* lse,
                                                       const float* delta, int query) {
    RowNumbers numbers;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        size_t at = (t.token + row + h * 8) * query + t.head;
        bool is_there = row + h * 8 < t.n_rows;
        numbers.lse_log2[h] = is_there ? lse[at] * LOG2_E : 0.0f;
        numbers.delta[h] = is_there ? delta[at] : 0.0f;
    }
    return numbers;
}

// Writes the gradients of the two keys and values from `row` on; `scale` is that of the scores.
__device__ __forceinline__ void store_key_rows(const KeyTile& t, bf16* d_qkv, int row, int query, int kv,
                                               const float (&d_k)[DIM / 8][4], const float (&d_v)[DIM / 8][4],
                                               float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row + h * 8 >= t.n_keys) continue;
        bf16* to = d_qkv + (t.token + row + h * 8) * t.width + (query + t.kv_head) * HEAD_DIM;
        store_row(to, d_k, h, scale);
        store_row(to + kv * HEAD_DIM, d_v, h, 1.0f);
    }
}

// Writes the gradients of the two keys, or of the two values, from `row` on, times `scale`.
__device__ __forceinline__ void store_key_part(const KeyTile& t, bf16* d_qkv, int row, int head,
                                               const float (&d)[DIM / 8][4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (row + h * 8 < t.n_keys) store_row(d_qkv + (t.token + row + h * 8) * t.width + head * HEAD_DIM, d, h, scale);
}

// Writes the gradients of the two queries from `row` on.
__device__ __forceinline__ void store_query_rows(const QueryTile& t, bf16* d_qkv, int row,
                                                 const float (&d_q)[DIM / 8][4], float scale) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
        if (row + h * 8 < t.n_rows)
            store_row(d_qkv + (t.token + row + h * 8) * t.width + t.head * HEAD_DIM, d_q, h, scale);
}
