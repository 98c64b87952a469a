// What the attention kernels in bf16 share: where rows lie in memory, how a block finds its rows, and how results are
// spread over the lanes of a warp. HEAD_DIM, the width of a head, is given when compiling; DIM is HEAD_DIM rounded up
// to whole matrix instructions, the columns past HEAD_DIM being 0.

#define DIM ((HEAD_DIM + 15) / 16 * 16)
// Keys per step, by absolute position: training and generation cut the keys in the same places.
#define KEYS 64
// Keys per split, by absolute position: see softmax.cu.
#define SPLIT 1024
#define SPLIT_STEPS (SPLIT / KEYS)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define INFINITY_F32 __int_as_float(0x7f800000)
#define MINUS_INFINITY __int_as_float(0xff800000)

// Copies sixteen bytes; where `is_there` is false nothing is read and zeros are written.
__device__ __forceinline__ void cp_async(u32 to, const bf16* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Row sources: `source(r)` is the address of row r. `load` of PaddedTile and SwizzledTile takes any of them.

// Rows of a matrix, `stride` elements apart.
struct Strided {
    const bf16* base;
    size_t stride;
    __device__ __forceinline__ const bf16* operator()(int r) const { return base + r * stride; }
};

// Query rows of a tile. The first `lead` rows have no query: row `lead` is read in their place, and nothing is made of it.
struct QueryRows {
    const bf16* base;
    size_t stride;
    int lead;
    __device__ __forceinline__ const bf16* operator()(int r) const { return base + max(r, lead) * stride; }
};

// Keys or values from `first` on of a sequence in a paged cache [blocks, kv heads, 2^shift, HEAD_DIM].
struct Pages {
    const bf16* cache;
    const u32* table;
    int first, shift, kv, kv_head;
    __device__ __forceinline__ const bf16* operator()(int r) const {
        int key = first + r;
        u32 block = table[key >> shift], row = ((block * kv + kv_head) << shift) + (key & ((1 << shift) - 1));
        return cache + (size_t)row * HEAD_DIM;
    }
};

// Queries of the `heads` query heads that share one key/value head, from row `first` on: row r is token r / heads of
// the sequence and query head r % heads of the group.
struct GroupedQueries {
    const bf16* base;
    size_t width;
    int first, heads;
    __device__ __forceinline__ const bf16* operator()(int r) const {
        int row = first + r;
        return base + row / heads * width + row % heads * HEAD_DIM;
    }
};

// A tile of the rows of one sequence: which sequence, the tile's first row within it, and the rows of the whole
// sequence.
struct WorkTile {
    int sequence, first, rows;
};

// Cuts the rows_of(s) rows of each sequence s into tiles of `height` and finds tile number `index`. Tiles are numbered by falling
// position within their sequence, whatever the sequence: the tiles whose rows see most keys start first, so that no long tile
// is left running alone at the end. False: there are fewer tiles. All lanes of a warp take part and get the same.
template <class RowsOf>
__device__ __forceinline__ bool find_tile(const RowsOf& n_rows_of, int sequences, int height, int index,
                                          WorkTile* work) {
    int lane = threadIdx.x % 32, most = 0;
    auto rows_of = [&](int s) { return s < sequences ? n_rows_of(s) : 0; };
    auto tiles_of = [&](int s) { return (rows_of(s) + height - 1) / height; };
    // Tiles of all sequences behind the first `level` of each.
    auto n_behind = [&](int level) {
        int n = 0;
        for (int s = lane; s < sequences; s += 32) n += max(0, tiles_of(s) - level);
        return (int)__reduce_add_sync(0xffffffffu, n);
    };
    if (index >= n_behind(0)) return false;
    for (int s = lane; s < sequences; s += 32) most = max(most, tiles_of(s));
    // The tile's place in its sequence: the least level with no more than `index` tiles behind it.
    int low = 1, high = __reduce_max_sync(0xffffffffu, most);
    while (low < high) {
        int middle = (low + high) / 2;
        if (n_behind(middle) <= index)
            high = middle;
        else
            low = middle + 1;
    }
    index -= n_behind(low);
    for (int start = 0;; start += 32) {
        int rows = rows_of(start + lane);
        u32 holds = __ballot_sync(0xffffffffu, rows > (low - 1) * height);
        int n = __popc(holds);
        if (index < n) {
            int owner = __fns(holds, 0, index + 1);
            work->sequence = start + owner;
            work->rows = __shfl_sync(0xffffffffu, rows, owner);
            work->first = (low - 1) * height;
            return true;
        }
        index -= n;
    }
}

// Positions whose tiles come last: see TileSearch.
#define NEAR 512

// The tiles of a sequence from position 0 on are counted from 0; those from `first` to `end` have queries.
struct TileRange {
    int first, end;
};

// Finds tiles one after another for a block that takes many of them; numbers rise. Tiles are numbered by falling position, so by
// falling number of keys, but those of the first NEAR positions come after all others and sequence by sequence: they are short, so
// their order needs not be by length, and blocks that run at a time read the keys of few sequences, which lie in the L2 cache.
struct TileSearch {
    // The search has come to the tiles that are number `level` from 1 on in their sequences (`near`: to all tiles up to that one), of
    // sequences from `start` on; `before` tiles are in front of them.
    int near, level, start = 0, before = 0;

    // tiles(s): the TileRange of sequence s. By a whole warp, as `find`.
    template <class Tiles>
    __device__ __forceinline__ TileSearch(const Tiles& tiles, int sequences, int near) : near(near) {
        int most = near;
        for (int s = threadIdx.x % 32; s < sequences; s += 32) most = max(most, tiles(s).end);
        level = __reduce_max_sync(0xffffffffu, most);
    }

    // The tile of number `index`, counted in its sequence, and that sequence. False: there are fewer tiles.
    template <class Tiles>
    __device__ __forceinline__ bool find(const Tiles& tiles, int sequences, int index, int* sequence, int* tile) {
        int lane = threadIdx.x % 32;
        for (;; start += 32) {
            if (start >= sequences) {
                if (level == near) return false;
                --level, start = 0;
            }
            TileRange range = {0, 0};
            if (start + lane < sequences) range = tiles(start + lane);
            range = {max(range.first, level > near ? level - 1 : 0), min(range.end, level)};
            int behind = max(0, range.end - range.first);
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                int lower = __shfl_up_sync(0xffffffffu, behind, step);
                behind += lane >= step ? lower : 0;
            }
            behind += before;
            u32 holders = __ballot_sync(0xffffffffu, behind > index);
            if (holders > 0) {
                int owner = __ffs(holders) - 1;
                *sequence = start + owner;
                // A sequence's last tile comes first.
                *tile = __shfl_sync(0xffffffffu, range.first + behind - 1, owner) - index;
                return true;
            }
            before = __shfl_sync(0xffffffffu, behind, 31);
        }
    }
};

// As find_tile, for (tokens * per_token) rows of each sequence.
__device__ __forceinline__ bool find_work_tile(const u32* offsets, int sequences, int per_token, int height, int index,
                                               WorkTile* work) {
    auto rows_of = [&](int s) { return (int)(offsets[s + 1] - offsets[s]) * per_token; };
    return find_tile(rows_of, sequences, height, index, work);
}

// One packed sequence. Its queries are those of its last positions.
struct Sequence {
    // The row of qkv at position 0: negative where there would be no such row. The first row of keys.
    int token, key_start;
    // Position of the first query; number of keys, which is the end of all positions.
    int first_query, n_keys;

    // Tiles of queries begin here: with a step of keys, as they do where all positions have queries.
    __device__ __forceinline__ int origin() const { return first_query / KEYS * KEYS; }
};

// Packed sequences: their queries are rows of qkv [T, query + 2 kv heads, HEAD_DIM]. Their keys and values are `key_width` apart;
// `keys` is the first key of row 0, and the values lie kv heads behind the keys. Where all rows of qkv are keys, both offsets
// are the same.
struct Packing {
    const u32 *offsets, *key_offsets;
    const bf16* keys;
    int key_width, sequences, query, kv;

    __device__ __forceinline__ Sequence sequence(int s) const {
        int start = offsets[s], key_start = key_offsets[s];
        int n_queries = (int)offsets[s + 1] - start, n_keys = (int)key_offsets[s + 1] - key_start;
        return {start - (n_keys - n_queries), key_start, n_keys - n_queries, n_keys};
    }

    // The tile of queries of number `index`, by position. It may begin with rows in front of the first query.
    __device__ __forceinline__ bool find_queries(int height, int index, WorkTile* work) const {
        auto rows_of = [&](int s) {
            int n = (int)(offsets[s + 1] - offsets[s]);
            if (offsets == key_offsets || n == 0) return n;
            return n + ((int)(key_offsets[s + 1] - key_offsets[s]) - n) % KEYS;
        };
        if (!find_tile(rows_of, sequences, height, index, work)) return false;
        Sequence s = sequence(work->sequence);
        work->first += s.origin();
        work->rows = s.n_keys;
        return true;
    }

    // The tile of keys of number `index`.
    __device__ __forceinline__ bool find_keys(int height, int index, WorkTile* work) const {
        return find_work_tile(key_offsets, sequences, 1, height, index, work);
    }
};

// A block's query rows of one head of a packed batch, and the keys they see.
struct QueryTile {
    // Elements of a token in qkv and of a row of keys; the tile's first token in the batch, which may have no query.
    size_t width, key_width;
    long long token;
    // Position of the tile's first row in its sequence; rows of the tile, of which the first `lead` have no query; keys that
    // the last of them sees.
    int first, n_rows, lead, n_keys, head;
    // The sequence's first row of keys.
    int key_start;
    // The tile's first query, and the sequence's first key and value.
    const bf16 *q, *k, *v;

    // Whether row r has a query.
    __device__ __forceinline__ bool has(int r) const { return r >= lead && r < n_rows; }
    __device__ __forceinline__ QueryRows queries() const { return {q, width, lead}; }
};

// The tile of block (head, index); false where there are fewer tiles.
template <int ROWS> __device__ __forceinline__ bool find_query_tile(const bf16* qkv, const Packing& packing, QueryTile* t) {
    WorkTile work;
    if (!packing.find_queries(ROWS, blockIdx.y, &work)) return false;
    Sequence s = packing.sequence(work.sequence);
    int query = packing.query, kv = packing.kv;
    t->width = (size_t)(query + 2 * kv) * HEAD_DIM;
    t->key_width = packing.key_width;
    t->token = (long long)s.token + work.first;
    t->first = work.first;
    t->head = blockIdx.x;
    t->n_rows = min(ROWS, work.rows - work.first);
    t->lead = max(0, s.first_query - work.first);
    t->n_keys = work.first + t->n_rows;
    t->key_start = s.key_start;
    t->q = qkv + t->token * (long long)t->width + t->head * HEAD_DIM;
    t->k = packing.keys + (size_t)s.key_start * t->key_width + t->head / (query / kv) * HEAD_DIM;
    t->v = t->k + kv * HEAD_DIM;
    return true;
}

// A matrix instruction leaves four results of each 16 rows and 8 columns in a lane. Result x[j][i] belongs to row
// fragment_row(i) and column fragment_column(j, i).
__device__ __forceinline__ int fragment_row(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int fragment_column(int j, int i) { return j * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <int N> __device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[j][i] = 0.0f;
}

// Results as the left operand of the next product: 16 columns of results are one operand [16, 16].
template <int N> __device__ __forceinline__ void pack_operands(u32 (&a)[N / 2][4], const float (&x)[N][4]) {
#pragma unroll
    for (int c = 0; c < N / 2; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[c][i] = pack(x[2 * c + i / 2][i % 2 * 2], x[2 * c + i / 2][i % 2 * 2 + 1]);
}

// Word k of lane q of a quad becomes word q of lane k. By a whole warp.
__device__ __forceinline__ void transpose_quad(u32 (&word)[4]) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (k & step) continue;
            bool is_upper = threadIdx.x & step;
            u32 other = __shfl_xor_sync(0xffffffffu, is_upper ? word[k] : word[k + step], step);
            word[k] = is_upper ? other : word[k];
            word[k + step] = is_upper ? word[k + step] : other;
        }
}

// Where a row goes, whether there is such a row, and whether rows begin at multiples of 16 bytes, as they do where heads are
// 32 or a multiple of it, unless further columns lie between rows.
struct RowPlace {
    bf16* to;
    bool is_there, is_aligned = true;
};

// Writes row fragment_row(2 * half) of the results as bf16, times `scale`, up to column `n_columns`. By a whole warp; aligned
// rows by 16 bytes a lane.
template <int N>
__device__ __forceinline__ void store_row(RowPlace place, const float (&x)[N][4], int half, float scale,
                                          int n_columns = HEAD_DIM) {
    if (HEAD_DIM % 32 == 0 && N % 4 == 0 && place.is_aligned) {
#pragma unroll
        for (int j = 0; j + 3 < N; j += 4) {
            u32 word[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) word[k] = pack(x[j + k][2 * half] * scale, x[j + k][2 * half + 1] * scale);
            transpose_quad(word);
            if (place.is_there && (HEAD_DIM % 64 == 0 || j * 8 < n_columns))
                *(uint4*)(place.to + (j + threadIdx.x % 4) * 8) = make_uint4(word[0], word[1], word[2], word[3]);
        }
        return;
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
        int column = fragment_column(j, 0);
        if (place.is_there && (HEAD_DIM % 64 == 0 || column < n_columns))
            *(u32*)(place.to + column) = pack(x[j][2 * half] * scale, x[j][2 * half + 1] * scale);
    }
}
