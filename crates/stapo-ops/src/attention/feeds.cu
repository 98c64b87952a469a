// Feeds bring the keys and values of a sequence into shared memory, step by step, for the forward kernels. Both feeds
// are used alike: wait_keys, read the keys, keys_are_read, wait_values, read the values, values_are_read, next step.

// Keys and values of a packed batch. Two steps of each lie in shared memory, and a step is copied while the step before
// it is multiplied.
template <class Tile, int THREADS> struct PackedFeed {
    static constexpr int SIZE = KEYS * Tile::WIDTH;
    // Shared memory: [2][KEYS] rows each.
    bf16 *keys, *values;
    QueryTile t;
    int n_steps;

    __device__ __forceinline__ PackedFeed(const QueryTile& t, bf16* memory)
        : keys(memory), values(memory + 2 * SIZE), t(t), n_steps((t.n_keys + KEYS - 1) / KEYS) {}

    __device__ __forceinline__ void load(int step) const {
        int first = step * KEYS, n = min(KEYS, t.n_keys - first), at = step % 2 * SIZE;
        Tile::template load<KEYS, THREADS>(keys + at, n, Strided{t.k + (size_t)first * t.key_width, t.key_width});
        cp_async_commit();
        Tile::template load<KEYS, THREADS>(values + at, n, Strided{t.v + (size_t)first * t.key_width, t.key_width});
        cp_async_commit();
    }
    __device__ __forceinline__ void begin(int first = 0) const { load(first); }

    __device__ __forceinline__ const bf16* keys_of(int step) const { return keys + step % 2 * SIZE; }
    __device__ __forceinline__ const bf16* values_of(int step) const { return values + step % 2 * SIZE; }
    __device__ __forceinline__ void wait_keys() const {
        cp_async_wait<1>();
        Tile::fence();
        __syncthreads();
    }
    __device__ __forceinline__ void keys_are_read(int) const {}
    __device__ __forceinline__ void wait_values(int step) const {
        cp_async_wait<0>();
        Tile::fence();
        __syncthreads();
        if (step + 1 < n_steps) load(step + 1);
    }
    __device__ __forceinline__ void values_are_read(int) const {}
};

// The sizes of a call over a paged cache.
struct PagedShape {
    int sequences, table_width, query, kv, block_shift;
    // From one token of `out` to the next.
    int out_pitch;
};

// Entries of a sequence's block table that fit shared memory.
#define TABLE 512

// The query rows of one block over a paged cache, for the `heads` query heads of one key/value head.
struct PagedTile {
    size_t width, start;
    int first, n_rows, heads, kv_head;
    // Position of the sequence's first query, and keys that the tile's last row sees.
    int position, n_keys;
    const u32* table;

    // The last key that row r of the tile sees.
    __device__ __forceinline__ int last_key(int r) const { return position + (first + r) / heads; }
    __device__ __forceinline__ GroupedQueries queries(const bf16* qkv) const {
        return {qkv + start * width + kv_head * heads * HEAD_DIM, width, first, heads};
    }
    // The query head of row r.
    __device__ __forceinline__ int head(int r) const { return kv_head * heads + (first + r) % heads; }
    // Where row r goes in out [T, query heads, HEAD_DIM], whose tokens are `pitch` apart.
    __device__ __forceinline__ bf16* out_row(bf16* out, int pitch, int r) const {
        int row = first + r;
        return out + (size_t)(start + row / heads) * pitch + (kv_head * heads + row % heads) * HEAD_DIM;
    }
};

// The tile of block (kv head, index); false where there are fewer tiles.
template <int ROWS>
__device__ __forceinline__ bool find_paged_tile(const u32* offsets, const u32* contexts, const u32* tables,
                                                int sequences, int table_width, int query, int kv, PagedTile* t) {
    WorkTile work;
    t->heads = query / kv;
    t->kv_head = blockIdx.x;
    if (!find_work_tile(offsets, sequences, t->heads, ROWS, blockIdx.y, &work)) return false;
    t->width = (size_t)(query + 2 * kv) * HEAD_DIM;
    t->start = offsets[work.sequence];
    t->first = work.first;
    t->n_rows = min(ROWS, work.rows - work.first);
    t->position = (int)contexts[work.sequence] - work.rows / t->heads;
    t->n_keys = t->last_key(t->n_rows - 1) + 1;
    t->table = tables + (size_t)work.sequence * table_width;
    return true;
}

// Keys and values of a paged cache [blocks, kv heads, 2^shift, HEAD_DIM]. One step of each lies in shared memory; the
// copy of the next step starts when all threads have read the current one.
template <class Tile, int THREADS> struct PagedFeed {
    // Shared memory: [KEYS] rows each.
    bf16 *keys, *values;
    const bf16 *k, *v;
    const u32* table;
    int n_keys, n_steps, shift, kv, kv_head;

    __device__ __forceinline__ PagedFeed(const PagedTile& t, bf16* memory, const bf16* k, const bf16* v, int shift,
                                         int kv)
        : keys(memory),
          values(memory + KEYS * Tile::WIDTH),
          k(k),
          v(v),
          table(t.table),
          n_keys(t.n_keys),
          n_steps((t.n_keys + KEYS - 1) / KEYS),
          shift(shift),
          kv(kv),
          kv_head(t.kv_head) {}

    // Reads the block table from shared memory where its first entries fit there. All threads of the block take part.
    __device__ __forceinline__ void stage_table(u32 (&memory)[TABLE]) {
        int n_blocks = ((n_keys - 1) >> shift) + 1;
        bool fits = n_blocks <= TABLE;
        for (int i = threadIdx.x; fits && i < n_blocks; i += THREADS) memory[i] = table[i];
        table = fits ? memory : table;
        __syncthreads();
    }

    // Past the last step nothing is copied, but a group is committed all the same: cp_async_wait counts groups.
    __device__ __forceinline__ void load(int step, bf16* tile, const bf16* from) const {
        int first = step * KEYS, n = min(KEYS, n_keys - first);
        if (n > 0) Tile::template load<KEYS, THREADS>(tile, n, Pages{from, table, first, shift, kv, kv_head});
        cp_async_commit();
    }
    __device__ __forceinline__ void begin(int first = 0) const {
        load(first, keys, k);
        load(first, values, v);
    }

    __device__ __forceinline__ const bf16* keys_of(int) const { return keys; }
    __device__ __forceinline__ const bf16* values_of(int) const { return values; }
    __device__ __forceinline__ void wait_keys() const {
        cp_async_wait<1>();
        Tile::fence();
        __syncthreads();
    }
    __device__ __forceinline__ void keys_are_read(int step) const {
        __syncthreads();
        load(step + 1, keys, k);
    }
    __device__ __forceinline__ void wait_values(int) const { wait_keys(); }
    __device__ __forceinline__ void values_are_read(int step) const {
        __syncthreads();
        load(step + 1, values, v);
    }
};
