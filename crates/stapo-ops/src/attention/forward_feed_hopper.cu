// Packed attention with copies, products and softmax overlapped as in FlashAttention-3 (Shah et al., 2024): the steps
// of forward_hopper.cu, and so the same bits. A block stays on its multiprocessor and takes tile after tile of 192
// queries of one head. One warp, the producer, copies queries, keys and values by TMA; three warpgroups, the consumers,
// have 64 queries each. While the matrix units multiply for one consumer, the others take their softmax.
//
// LONG_SEQUENCES: two consumers instead of three. Each has so many registers that the results of earlier splits stay there, which
// is worth more than the third consumer where sequences have many splits. Heads of 256 have two consumers too: their outputs
// take so many registers, and queries so much shared memory that there is one buffer of them.
//
// SHORT_SEQUENCES: two consumers, which have the same 64 positions, of two query heads that share a key head. Both take as many
// steps, keys and values are copied once for both, and the first scores of the next tile are multiplied while the results of a
// tile are stored.

// PAGED_KEYS: prefill. The queries are the new tokens of sequences whose keys and values lie in a paged cache [blocks, kv heads,
// 2^shift, HEAD_DIM]. The steps of keys are the same, and so are the bits. Copies are smaller, so a second warp copies the values.
//
// PAIRED_BLOCKS: the two blocks of a cluster take the same positions of two query heads that share a key head. Each copies one half
// of the columns of every tile of keys and values to both, so that these leave the L2 cache once for 256 rows instead of 128.

#if HEAD_DIM > 128
#define CONSUMERS 2
#define CONSUMER_REGISTERS 240
#define PRODUCER_REGISTERS 24
#define STAGES 5
#define QUERY_BUFFERS 1
#elif defined(LONG_SEQUENCES) || defined(SHORT_SEQUENCES)
#define CONSUMERS 2
#define CONSUMER_REGISTERS 232
#define PRODUCER_REGISTERS 40
#define STAGES 10
#else
#define CONSUMERS 3
#define CONSUMER_REGISTERS 160
#define PRODUCER_REGISTERS 32
#define STAGES 8
#endif
#ifndef QUERY_BUFFERS
#define QUERY_BUFFERS 2
#endif
#define ROWS (64 * CONSUMERS)
#ifdef SHORT_SEQUENCES
#define TILE_HEADS CONSUMERS
#else
#define TILE_HEADS 1
#endif
// Positions of a tile.
#define HEIGHT (ROWS / TILE_HEADS)
// With one buffer, the next tile's queries come too late.
#define EARLY_SCORES (TILE_HEADS > 1 && QUERY_BUFFERS > 1)
#define THREADS (128 * CONSUMERS + 128)
// Slices of 16 columns of the queries that are held in registers: products with them read less of shared memory, and
// with one at least the compiler keeps the operands of all products in uniform registers.
#ifdef LONG_SEQUENCES
#define SLICES (DIM / 16)
#else
#define SLICES 1
#endif
#define TILE (KEYS * COLUMNS)
#ifdef PAGED_KEYS
#define PRODUCERS 2
#else
#define PRODUCERS 1
#endif
#ifdef PAIRED_BLOCKS
#define BLOCKS 2
#else
#define BLOCKS 1
#endif
// The block's place in its cluster.
#define RANK ((int)blockIdx.x % BLOCKS)

// A block's next tile: the row of qkv at its sequence's position 0, the sequence's first row of keys (with PAGED_KEYS the first entry
// of its table of blocks), positions of the tile's first row and of the sequence's first query, the first consumer's head, and the
// keys that the last row sees (0: there are no more tiles).
struct Turn {
    int token, key_start, first, first_query, head, n_keys;
};

struct PipelineShared {
    u64 queries_full[QUERY_BUFFERS], queries_empty[QUERY_BUFFERS], full[STAGES], empty[STAGES];
    Turn turns[QUERY_BUFFERS];
#ifdef PAGED_KEYS
    // For the producer of values: that a turn is there.
    u64 turn_full[QUERY_BUFFERS];
#endif
#ifdef PAIRED_BLOCKS
    // In the second block: the number of the next tile, which the first one draws for both. In the first: that it is read.
    u64 number_full, number_empty;
    u32 number;
#endif

    // A turn, which may be overwritten once the queries are released.
    __device__ __forceinline__ Turn turn(int buffer) const {
        const Turn& t = turns[buffer];
        return {uniform(t.token),       uniform(t.key_start), uniform(t.first),
                uniform(t.first_query), uniform(t.head),      uniform(t.n_keys)};
    }
};

struct ForwardArgs {
    Packing packing;
    bf16* out;
    float* lse;
    // How many tiles were drawn beyond the first of each block, and how many blocks have drawn their last. Both are 0 before
    // and after a launch.
    u32* drawn;
    // Heads in front of the keys in a row of keys.
    int out_pitch, heads_before_keys;
#ifdef PAGED_KEYS
    // As in paged.cu. `packing` has no keys then.
    const u32 *contexts, *tables;
    int table_width, shift;
#endif

    __device__ __forceinline__ Sequence sequence(int s) const {
#ifdef PAGED_KEYS
        int start = packing.offsets[s], first_query = (int)contexts[s] - ((int)packing.offsets[s + 1] - start);
        return {start - first_query, s * table_width, first_query, (int)contexts[s]};
#else
        return packing.sequence(s);
#endif
    }
    // Tiles of a sequence, by position.
    __device__ __forceinline__ TileRange tiles(int s) const {
        Sequence q = sequence(s);
        int first = q.origin() / HEIGHT, n = (q.n_keys - q.origin() + HEIGHT - 1) / HEIGHT;
        return {first, q.first_query < q.n_keys ? first + n : first};
    }
};

// A place in the ring of stages: tiles of keys and of values alternate there.
struct Cursor {
    int stage, parity;

    __device__ __forceinline__ void advance(int n) {
        stage += n;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
};

// Draws the number of a block's next tile, less the number of those who draw. Whoever is ready draws the next: tiles with most keys come
// first, so all blocks end at about the same time. No bit depends on who computes a tile. By one thread. Nothing waits for the
// number before it is used; the compiler would make an `add` one of the whole warp, and wait.
__device__ __forceinline__ u32 draw_tile(const ForwardArgs& args) {
    u32 n;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(n) : "l"(args.drawn) : "memory");
    return n;
}

// After the block's last draw: the last of all blocks leaves the counters as it found them. By one thread.
__device__ __forceinline__ void end_draws(const ForwardArgs& args) {
    u32 n = gridDim.x / BLOCKS;
    if (atomicInc(args.drawn + 1, n - 1) == n - 1) *args.drawn = 0;
}

// The tile of number `index`: all heads of some positions, then the next positions. By a whole warp.
__device__ __forceinline__ Turn find_turn(int index, TileSearch& search, const ForwardArgs& args) {
    int n_at_once = args.packing.query / (TILE_HEADS * BLOCKS), sequence, tile;
    auto tiles = [&](int s) { return args.tiles(s); };
    if (!search.find(tiles, args.packing.sequences, index / n_at_once, &sequence, &tile)) return {0, 0, 0, 0, 0, 0};
    Sequence s = args.sequence(sequence);
    int first = s.origin() % HEIGHT + tile * HEIGHT, head = (index % n_at_once * BLOCKS + RANK) * TILE_HEADS;
    return {s.token, s.key_start, first, s.first_query, head, min(s.n_keys, first + HEIGHT)};
}

// tma_load_tile to an address in shared memory, of both blocks where they are paired.
__device__ __forceinline__ void tma_load_at(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
#ifdef PAIRED_BLOCKS
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
#endif
}

#ifdef PAGED_KEYS

// The keys and the values of the cache.
struct KeyMaps {
    TensorMap keys, values;
};

// The numbers of the blocks of the cache with a sequence's keys; behind the last, that of the last again: what lies behind the last
// key counts for nothing. Each lane holds one, so that nothing waits for memory. By a whole warp, with rising steps.
struct BlockNumbers {
    const u32* table;
    // Blocks of the sequence; the first of those that the lanes hold, the lane's number, and its number 32 blocks further on.
    int n, first;
    u32 number, next;

    __device__ __forceinline__ u32 load(int from) const { return table[min(from + (int)threadIdx.x % 32, n - 1)]; }
    __device__ __forceinline__ BlockNumbers(int step, const Turn& t, const ForwardArgs& args)
        : table(args.tables + t.key_start),
          n(((t.n_keys - 1) >> args.shift) + 1),
          first((step * KEYS >> args.shift) / 32 * 32),
          number(load(first)),
          next(load(first + 32)) {}
    // By how many blocks a step's keys go on; blocks of more than 64 keys hold several steps.
    __device__ __forceinline__ void go_to(int step, const ForwardArgs& args) {
        if (step * KEYS >> args.shift < first + 32) return;
        first += 32, number = next, next = load(first + 32);
    }
    // The row of the cache with a head's keys from `key` on.
    __device__ __forceinline__ int row(int key, int kv_head, const ForwardArgs& args) const {
        u32 block = __shfl_sync(0xffffffffu, number, (key >> args.shift) % 32u);
        return ((block * args.packing.kv + kv_head) << args.shift) + (key & ((1 << args.shift) - 1));
    }
};

// Copies tile i, of the keys or values of step i / 2. By a whole warp. Most caches have blocks of 32.
__device__ __forceinline__ void load_tile(u32 tile, int i, BlockNumbers& blocks, int kv_head, const Turn&,
                                          const KeyMaps& maps, const ForwardArgs& args, u32 barrier) {
    const TensorMap& map = i % 2 ? maps.values : maps.keys;
    int key = i / 2 * KEYS;
    blocks.go_to(i / 2, args);
    auto copy = [&](int from, int row) {
#pragma unroll
        for (int i = 0; i < PARTS; i += BLOCKS) {
            int part = i + RANK;
            tma_load_at(tile + (part * KEYS + from) * 128, map, part * 64, row, barrier);
        }
    };
    if (args.shift == 5) {
        int rows[2] = {blocks.row(key, kv_head, args), blocks.row(key + 32, kv_head, args)};
        if (threadIdx.x % 32 == 0) copy(0, rows[0]), copy(32, rows[1]);
        return;
    }
    for (int from = 0; from < KEYS; from += min(KEYS, 1 << args.shift)) {
        int row = blocks.row(key + from, kv_head, args);
        if (threadIdx.x % 32 == 0) copy(from, row);
    }
}

#else

typedef TensorMap KeyMaps;

struct BlockNumbers {
    __device__ __forceinline__ BlockNumbers(int, const Turn&, const ForwardArgs&) {}
};

// Copies tile i, of the keys or values of step i / 2. By a whole warp.
__device__ __forceinline__ void load_tile(u32 tile, int i, BlockNumbers&, int kv_head, const Turn& t,
                                          const KeyMaps& map, const ForwardArgs& args, u32 barrier) {
    int first_head = args.heads_before_keys + (i % 2 ? args.packing.kv : 0);
    if (threadIdx.x % 32 > 0) return;
#pragma unroll
    for (int j = 0; j < PARTS; j += BLOCKS) {
        int part = j + RANK;
        tma_load_at(tile + part * KEYS * 128, map, (first_head + kv_head) * HEAD_DIM + part * 64,
                    t.key_start + i / 2 * KEYS, barrier);
    }
}

#endif

__device__ __forceinline__ int count_steps(int n_keys) { return (n_keys + KEYS - 1) / KEYS; }

// Copies the queries of a turn to a buffer. By one thread.
__device__ __forceinline__ void start_queries(const Turn& t, const TensorMap& map, bf16* to, PipelineShared& shared,
                                              int buffer) {
    shared.turns[buffer] = t;
#ifdef PAGED_KEYS
    mbarrier_arrive(shared.turn_full + buffer);
#endif
    mbarrier_arrive_expect_bytes(shared.queries_full + buffer, t.n_keys > 0 ? ROWS * COLUMNS * 2 : 0);
    for (int c = 0; t.n_keys > 0 && c < CONSUMERS; ++c) {
        // A consumer without rows gets the tile's first, which are there.
        int row = t.first + 64 * c % HEIGHT < t.n_keys ? 64 * c % HEIGHT : 0, head = t.head + c % TILE_HEADS;
        for (int part = 0; part < PARTS; ++part)
            tma_load_tile(to + (part * ROWS + c * 64) * 64, map, head * HEAD_DIM + part * 64, t.token + t.first + row,
                          shared.queries_full + buffer);
    }
}

// Copies every BY-th tile of keys and values of a turn, from `from` on. In front of the last, calls before_last. By a whole warp. To
// wait for the first time that a stage is empty ends at once.
template <int BY, class BeforeLast>
__device__ __forceinline__ void copy_tiles(const Turn& t, int from, Cursor& at, const KeyMaps& maps,
                                           const ForwardArgs& args, PipelineShared& shared, bf16* tiles,
                                           const BeforeLast& before_last) {
    // Addresses that the compiler does not compute again for every copy.
    u32 first_tile = uniform(shared_address(tiles)), first_full = uniform(shared_address(shared.full));
    int kv_head = t.head / (args.packing.query / args.packing.kv), n_tiles = 2 * count_steps(t.n_keys);
    BlockNumbers blocks(from / 2, t, args);
    for (int i = from; i < n_tiles; i += BY) {
        if (i + BY >= n_tiles) before_last();
        mbarrier_wait(shared.empty + at.stage, at.parity ^ 1);
        if (threadIdx.x % 32 == 0) mbarrier_arrive_expect_bytes(shared.full + at.stage, TILE * 2);
        load_tile(first_tile + at.stage * TILE * 2, i, blocks, kv_head, t, maps, args, first_full + at.stage * 8);
        at.advance(BY);
    }
}

#ifdef PAIRED_BLOCKS

// Tells the second block of a cluster the number of its tile of turn `turn`. By the first block's drawing thread.
__device__ __forceinline__ void tell_number(u32 number, int turn, PipelineShared& shared) {
    if (turn > 0) mbarrier_wait(&shared.number_empty, (turn - 1) % 2);
    u32 to, barrier;
    asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(to) : "r"(shared_address(&shared.number)));
    asm volatile("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(barrier) : "r"(shared_address(&shared.number_full)));
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to), "r"(number),
                 "r"(barrier)
                 : "memory");
}

// What the first block tells. By one thread of the second.
__device__ __forceinline__ u32 hear_number(int turn, PipelineShared& shared) {
    mbarrier_arrive_expect_bytes(&shared.number_full, sizeof(u32));
    mbarrier_wait(&shared.number_full, turn % 2);
    u32 number = *(volatile u32*)&shared.number;
    mbarrier_arrive_at(&shared.number_empty, 0);
    return number;
}

#endif

// The producer's loop, of one warp. It finds the tiles for the consumers too.
__device__ __forceinline__ void produce(const TensorMap& map_q, const KeyMaps& maps, const ForwardArgs& args,
                                        const ScoreRule& rule, PipelineShared& shared, bf16* queries, bf16* tiles) {
    Cursor at = {0, 0};
    bool leads = threadIdx.x % 32 == 0;
    u32 next = blockIdx.x / BLOCKS - gridDim.x / BLOCKS;
    TileSearch search([&](int s) { return args.tiles(s); }, args.packing.sequences, NEAR / HEIGHT);
    for (int turn = 0;; ++turn) {
#ifdef PAIRED_BLOCKS
        // Both know the first.
        if (leads && turn > 0) {
            if (RANK > 0)
                next = hear_number(turn - 1, shared);
            else
                tell_number(next, turn - 1, shared);
        }
#endif
        Turn t = find_turn(gridDim.x / BLOCKS + __shfl_sync(0xffffffffu, next, 0), search, args);
        int buffer = turn % QUERY_BUFFERS, round = turn / QUERY_BUFFERS;
        if (round > 0) mbarrier_wait(shared.queries_empty + buffer, (round - 1) % 2);
        if (leads) start_queries(t, map_q, queries + buffer * ROWS * COLUMNS, shared, buffer);
        if (t.n_keys == 0) break;
        int first = 2 * (rule.first_key(t.first) / KEYS);
        copy_tiles<PRODUCERS>(t, first, at, maps, args, shared, tiles, [&] {
            if (leads && RANK == 0) next = draw_tile(args);
        });
    }
    if (leads && RANK == 0) end_draws(args);
}

#ifdef PAGED_KEYS

// The loop of the second producer, which copies the values.
__device__ __forceinline__ void produce_values(const KeyMaps& maps, const ForwardArgs& args, const ScoreRule& rule,
                                               PipelineShared& shared, bf16* tiles) {
    Cursor at = {1, 0};
    for (int turn = 0;; ++turn) {
        int buffer = turn % QUERY_BUFFERS;
        mbarrier_wait(shared.turn_full + buffer, turn / QUERY_BUFFERS % 2);
        Turn t = shared.turn(buffer);
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.queries_empty + buffer);
        if (t.n_keys == 0) break;
        copy_tiles<2>(t, 2 * (rule.first_key(t.first) / KEYS) + 1, at, maps, args, shared, tiles, [] {});
    }
}

#endif
