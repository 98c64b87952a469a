// What decode attention reads: the work of a block, tiles of keys and values by a warp of their own, and the new tokens'
// queries, keys and values. decode_hopper.cu has the rest.

#define CONSUMERS 128
#define THREADS (CONSUMERS + 32)
#define TILE (KEYS * COLUMNS)

// A row of `partials`: an output that is not yet divided by the sum, the reference of the scores, and the sum.
#define PARTIAL (HEAD_DIM + 4)
#define PARTIAL_REFERENCE HEAD_DIM
#define PARTIAL_SUM (HEAD_DIM + 1)

// Grid: (kv heads, groups). Where there are positions, qkv is what the product gave: queries and keys are normed (if
// there are weights) and rotated here as rope.cu does it. The tokens' keys and values are stored in the cache [blocks,
// kv heads, 2^shift, HEAD_DIM].
struct DecodeArgs {
    bf16 *keys, *values;
    const bf16* qkv;
    const u32* positions;
    const float *cos, *sin;
    const bf16 *q_norm, *k_norm;
    const u32 *slots, *contexts, *tables;
    // [n, 4]: first sequence, how many (0: nothing to do), how many steps of 64 keys from the first on they have in
    // common, and the split. The first sequence has keys in the split.
    const u32* groups;
    // [sequences]: the first row of partials [_, query heads, PARTIAL] of each sequence of several splits.
    const u32* first_partials;
    float* partials;
    bf16* out;
    float eps;
    int table_width, query, kv, shift, out_pitch;
};

// A group of sequences, and the query rows (sequence by sequence, head by head) of the block's key/value head.
struct Group {
    int first, count, common, split, heads, kv_head;
    __device__ __forceinline__ int n_rows() const { return count * heads; }
    __device__ __forceinline__ int first_tile() const { return split * SPLIT_STEPS; }
    __device__ __forceinline__ int end_key() const { return (split + 1) * SPLIT; }
};

// Beside the tiles in dynamic shared memory: [STAGES] tiles, queries [QUERIES], weights [2][QUERIES, 64].
template <int QUERIES, int STAGES> struct DecodeShared {
    // Parts of a step's sums of exponentials by warp, lane of a quad (see sum_of_four) and query; two steps.
    float parts[2][4][4][QUERIES];
    // Where references rise: the largest scores by warp, and what sums shrink by.
    float tops[4][QUERIES], scales[QUERIES];
    float references[QUERIES], totals[QUERIES];
    // Keys of each member up to the end of the split, and all keys.
    int n_keys[QUERIES], contexts[QUERIES];
    // Of each member's new token, where it is to be rotated.
    u32 positions[QUERIES];
#ifdef SCORE_RULE
    // The first tile of the split that each member sees.
    int first_tiles[QUERIES];
#endif
    u64 full[STAGES], empty[STAGES];
    // The key and the value of the first member's new token, where its last step is in this split.
    alignas(16) bf16 fresh[2][HEAD_DIM];
};

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, 128;" ::: "memory"); }
// The same; true where `x` holds for one of them. The compiler learns that all threads get the same.
__device__ __forceinline__ bool sync_consumers_or(bool x) {
    int any;
    asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %1, 0; bar.red.or.pred q, 1, 128, p; selp.b32 %0, 1, 0, q; }"
                 : "=r"(any)
                 : "r"((int)x)
                 : "memory");
    return __shfl_sync(0xffffffffu, any, 0) != 0;
}
// Named barriers at which consumers arrive and for which the producer waits.
template <int ID> __device__ __forceinline__ void named_barrier_arrive() {
    asm volatile("bar.arrive %0, 160;" ::"n"(ID) : "memory");
}
template <int ID> __device__ __forceinline__ void named_barrier_wait() {
    asm volatile("bar.sync %0, 160;" ::"n"(ID) : "memory");
}
// The mbarriers are initialised and the key counts are in shared memory.
#define COUNTED 2

// Tile number `tile` of 64 keys of one member of a group. The common tiles are taken once, as those of member 0.
struct Step {
    int member, tile;
};

// The first tile that a member takes alone.
template <int QUERIES, int STAGES>
__device__ __forceinline__ int first_tile_alone(int member, const Group& g, const DecodeShared<QUERIES, STAGES>& shared) {
#ifdef SCORE_RULE
    return max(g.common, member < g.count ? shared.first_tiles[member] : 0);
#else
    return max(g.common, g.first_tile());
#endif
}

// The step itself, or the next one that has keys.
template <int QUERIES, int STAGES>
__device__ __forceinline__ Step with_keys(Step s, const Group& g, const DecodeShared<QUERIES, STAGES>& shared) {
    while (s.member < g.count && s.tile * KEYS >= shared.n_keys[s.member])
        ++s.member, s.tile = first_tile_alone(s.member, g, shared);
    return s;
}

template <int QUERIES, int STAGES>
__device__ __forceinline__ Step next_step(Step s, const Group& g, const DecodeShared<QUERIES, STAGES>& shared) {
    ++s.tile;
    return with_keys(s, g, shared);
}

// The first step. With a window, tiles that no member sees are left out; there may be no step then.
template <int QUERIES, int STAGES>
__device__ __forceinline__ Step first_step(const Group& g, const DecodeShared<QUERIES, STAGES>& shared) {
#ifdef SCORE_RULE
    int first = shared.first_tiles[0];
    for (int member = 1; member < g.count; ++member) first = min(first, shared.first_tiles[member]);
    return with_keys({0, first < g.common ? first : first_tile_alone(0, g, shared)}, g, shared);
#else
    return {0, g.first_tile()};
#endif
}

// The blocks of the cache in which a step's keys lie.
__device__ __forceinline__ void look_up_blocks(u32 (&blocks)[4], Step s, const Group& g, const DecodeArgs& args) {
    int at = s.tile * KEYS >> args.shift;
    const u32* table = args.tables + (size_t)(g.first + s.member) * args.table_width;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (s.member < g.count && at + e < args.table_width && (e == 0 || e << args.shift < KEYS))
            blocks[e] = table[at + e];
}

// Copies a tile of keys or values into stage n % STAGES once the consumers have left it.
template <int QUERIES, int STAGES>
__device__ __forceinline__ void load_tile(int n, Step s, const u32 (&blocks)[4], const TensorMap& map, const Group& g,
                                          const DecodeArgs& args, DecodeShared<QUERIES, STAGES>& shared, bf16* tiles) {
    int stage = n % STAGES, at_once = min(KEYS, 1 << args.shift), mask = (1 << args.shift) - 1;
    if (n >= STAGES) mbarrier_wait(shared.empty + stage, (n / STAGES - 1) % 2);
    if (threadIdx.x % 32 > 0) return;
    int n_blocks = min(KEYS / at_once, (shared.n_keys[s.member] - s.tile * KEYS + at_once - 1) / at_once);
    mbarrier_arrive_expect_bytes(shared.full + stage, n_blocks * at_once * COLUMNS * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (e < n_blocks)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                tma_load_tile(tiles + stage * TILE + part * KEYS * 64 + e * at_once * 64, map, part * 64,
                              ((blocks[e] * args.kv + g.kv_head) << args.shift) + (s.tile * KEYS & mask),
                              shared.full + stage);
}

// The producer's loop: tiles of keys, values, keys, .., number n into stage n % STAGES. The producer waits neither for the
// kernel in front of this one nor for the new token's key and value: the consumers write these into the tiles.
template <int QUERIES, int STAGES>
__device__ __forceinline__ void produce(const TensorMap& map_k, const TensorMap& map_v, const Group& g,
                                        const DecodeArgs& args, DecodeShared<QUERIES, STAGES>& shared, bf16* tiles) {
    u32 blocks[4] = {};
    Step start = {0, g.first_tile()};
    look_up_blocks(blocks, start, g, args);
    named_barrier_wait<COUNTED>();
    Step now = first_step(g, shared);
    // A window may leave out the first tiles of the split.
    if (now.tile != start.tile || now.member > 0) look_up_blocks(blocks, now, g, args);
    for (int n = 0; now.member < g.count; n += 2) {
        load_tile(n, now, blocks, map_k, g, args, shared, tiles);
        load_tile(n + 1, now, blocks, map_v, g, args, shared, tiles);
        __syncwarp();
        now = next_step(now, g, shared);
        look_up_blocks(blocks, now, g, args);
    }
}

template <int QUERIES, int STAGES>
__device__ __forceinline__ void begin_consumers(const Group& g, const DecodeArgs& args, const ScoreRule& rule,
                                                DecodeShared<QUERIES, STAGES>& shared) {
    if (threadIdx.x == 0) {
        for (int b = 0; b < STAGES; ++b)
            mbarrier_init(shared.full + b, 1), mbarrier_init(shared.empty + b, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    if (threadIdx.x < g.count) {
        int context = args.contexts[g.first + threadIdx.x];
        shared.contexts[threadIdx.x] = context;
        shared.n_keys[threadIdx.x] = min(context, g.end_key());
        if (args.positions) shared.positions[threadIdx.x] = args.positions[g.first + threadIdx.x];
#ifdef SCORE_RULE
        shared.first_tiles[threadIdx.x] = max(g.first_tile(), rule.first_key(context - 1) / KEYS);
#endif
    }
    named_barrier_arrive<COUNTED>();
    if (threadIdx.x < QUERIES) shared.references[threadIdx.x] = MINUS_INFINITY;
}

// A query row [HEAD_DIM] into the swizzled tile of queries [QUERIES, DIM].
template <int QUERIES> __device__ __forceinline__ void store_query(bf16* queries, int row, const Head& h) {
    constexpr int half = HEAD_DIM / 2;
    auto at = [&](int c) {
        return (u32*)(queries + c / 64 * QUERIES * 64 + row * 64 + (c % 64 / 8 ^ row % 8) * 8 + c % 8);
    };
#pragma unroll
    for (int p = 0; p < PAIRS; p += 2) {
        int c = pair_of(p);
        if (c < half) *at(c) = pack(h.low[p], h.low[p + 1]), *at(c + half) = pack(h.high[p], h.high[p + 1]);
    }
}

// Where the key or value of a slot lies in the cache.
__device__ __forceinline__ size_t cached_row(u32 slot, const Group& g, const DecodeArgs& args) {
    u32 mask = (1 << args.shift) - 1;
    return ((((size_t)(slot >> args.shift) * args.kv + g.kv_head) << args.shift) + (slot & mask)) * HEAD_DIM;
}

// A head as it lies in memory, two neighbouring elements in a word: what was loaded is not needed before it is unpacked.
struct PackedHead {
    u32 low[PAIRS / 2], high[PAIRS / 2];

    __device__ __forceinline__ void load(const bf16* x) {
#pragma unroll
        for (int p = 0; p < PAIRS; p += 2)
            if (pair_of(p) < HEAD_DIM / 2)
                low[p / 2] = *(const u32*)(x + pair_of(p)), high[p / 2] = *(const u32*)(x + pair_of(p) + HEAD_DIM / 2);
    }
    __device__ __forceinline__ Head unpack() const {
        Head h;
#pragma unroll
        for (int p = 0; p < PAIRS; p += 2) {
            h.low[p] = low_half(low[p / 2]), h.low[p + 1] = high_half(low[p / 2]);
            h.high[p] = low_half(high[p / 2]), h.high[p + 1] = high_half(high[p / 2]);
        }
        return h;
    }
};

// A head of a new token: a query, the key or the value, with what norms and rotates it.
struct NewHead {
    PackedHead raw = {}, weight = {};
    Rotation rotation = {};

    // What does not depend on the kernel in front of this one is read before that kernel is waited for.
    template <int QUERIES, int STAGES>
    __device__ __forceinline__ NewHead(int member, int part, const Group& g, const DecodeArgs& args,
                                       const DecodeShared<QUERIES, STAGES>& shared) {
        bool is_query = part < g.heads, is_value = part > g.heads;
        int head = is_query ? g.kv_head * g.heads + part : args.query + (part - g.heads) * args.kv + g.kv_head;
        if (args.positions && !is_value) {
            size_t place = (size_t)shared.positions[member] * (HEAD_DIM / 2);
            rotation = load_rotation(args.cos + place, args.sin + place, HEAD_DIM / 2);
        }
        if (args.q_norm && !is_value) weight.load(is_query ? args.q_norm : args.k_norm);
        wait_for_previous_kernel();
        raw.load(args.qkv + ((size_t)(g.first + member) * (args.query + 2 * args.kv) + head) * HEAD_DIM);
    }
};

// Rotates the tokens' queries and keys; queries go to shared memory. Keys and values of the sequences that end in this
// split go to the cache. A warp takes one head of one token at a time: the group's query heads, then the key, then the
// value. The next head is loaded before the current one is computed.
template <int QUERIES, int STAGES>
__device__ __forceinline__ void rotate_and_store(const Group& g, const DecodeArgs& args,
                                                 DecodeShared<QUERIES, STAGES>& shared, bf16* queries) {
    constexpr int half = HEAD_DIM / 2, WARPS = CONSUMERS / 32;
    int per_token = g.heads + 2, end = g.count * per_token, i = threadIdx.x / 32;
    auto load = [&](int i) { return NewHead(i / per_token, i % per_token, g, args, shared); };
    // Positions are in shared memory.
    sync_consumers();
    if (i >= end) return;
    for (NewHead next = load(i); i < end; i += WARPS) {
        NewHead now = next;
        if (i + WARPS < end) next = load(i + WARPS);
        int member = i / per_token, part = i % per_token;
        bool is_query = part < g.heads, is_value = part > g.heads;
        if (!is_query && shared.contexts[member] > g.end_key()) continue;
        Head h = now.raw.unpack();
        if (args.positions && !is_value) norm_and_rotate(h, args.q_norm, now.weight.unpack(), args.eps, now.rotation);
        if (is_query) {
            store_query<QUERIES>(queries, member * g.heads + part, h);
        } else {
            store_head((is_value ? args.values : args.keys) + cached_row(args.slots[g.first + member], g, args), half, h);
            if (member == 0) store_head(shared.fresh[is_value], half, h);
        }
    }
}
