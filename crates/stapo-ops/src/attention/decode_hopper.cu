// Decode: one token of each sequence over a paged cache, with Hopper's matrix instruction. Steps of 64 keys by absolute
// position as in forward_hopper.cu, with the operands of each product exchanged (keys and columns of values are the 64
// rows of the instruction, queries its QUERIES columns, 8 or 16). Each element is the same chain of sums: the same
// bits, with an eighth or a quarter of the work. A block has one split of the keys (see softmax.cu) of a group of
// sequences. Those begin with the same blocks of the cache (prefix sharing), which are read once for all of them. Where
// a sequence has several splits, their results go to `partials`, and attention_combine_splits_bf16 combines them.
//
// One warp, the producer, copies tiles of keys and values by TMA; four warps, the consumers, multiply.

#define CONSUMERS 128
#define THREADS (CONSUMERS + 32)
#define STAGES 3
#define TILE (KEYS * DIM)

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
template <int QUERIES> struct DecodeShared {
    // Parts of a step's sums of exponentials by warp, lane of a quad (see sum_of_four) and query; two steps.
    float parts[2][4][4][QUERIES];
    // Where references rise: the largest scores by warp, and what sums shrink by.
    float tops[4][QUERIES], scales[QUERIES];
    float references[QUERIES], totals[QUERIES];
    // Keys of each member up to the end of the split, and all keys.
    int n_keys[QUERIES], contexts[QUERIES];
    u64 full[STAGES], empty[STAGES];
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
// The tokens' keys and values are in the cache.
#define STORED 3

// d (+)= a b^T, a [64, 16] in shared memory (MN_MAJOR or K-major), b [8, 16] or [16, 16] K-major.
template <int MN_MAJOR> __device__ __forceinline__ void wgmma_columns(float (&d)[1][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %6, 0; "
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, %7, 0; }"
        : FOUR(d, 0)
        : "l"(a), "l"(b), "r"((int)adds), "n"(MN_MAJOR));
}
template <int MN_MAJOR> __device__ __forceinline__ void wgmma_columns(float (&d)[2][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, "
        "0; }"
        : FOUR(d, 0), FOUR(d, 1)
        : "l"(a), "l"(b), "r"((int)adds), "n"(MN_MAJOR));
}

// Tile number `tile` of 64 keys of one member of a group. The common tiles are taken once, as those of member 0.
struct Step {
    int member, tile;
};

template <int QUERIES>
__device__ __forceinline__ Step next_step(Step s, const Group& g, const DecodeShared<QUERIES>& shared) {
    ++s.tile;
    while (s.member < g.count && s.tile * KEYS >= shared.n_keys[s.member])
        ++s.member, s.tile = max(g.common, g.first_tile());
    return s;
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
template <int QUERIES>
__device__ __forceinline__ void load_tile(int n, Step s, const u32 (&blocks)[4], const TensorMap& map, const Group& g,
                                          const DecodeArgs& args, DecodeShared<QUERIES>& shared, bf16* tiles) {
    int stage = n % STAGES, at_once = min(KEYS, 1 << args.shift), mask = (1 << args.shift) - 1;
    if (n >= STAGES) mbarrier_wait(shared.empty + stage, (n / STAGES - 1) % 2);
    if (threadIdx.x % 32 > 0) return;
    int n_blocks = min(KEYS / at_once, (shared.n_keys[s.member] - s.tile * KEYS + at_once - 1) / at_once);
    mbarrier_arrive_expect_bytes(shared.full + stage, n_blocks * at_once * HEAD_DIM * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e)
        if (e < n_blocks)
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
                tma_load_tile(tiles + stage * TILE + part * KEYS * 64 + e * at_once * 64, map, part * 64,
                              ((blocks[e] * args.kv + g.kv_head) << args.shift) + (s.tile * KEYS & mask),
                              shared.full + stage);
}

// The producer's loop: tiles of keys, values, keys, .., number n into stage n % STAGES.
template <int QUERIES>
__device__ __forceinline__ void produce(const TensorMap& map_k, const TensorMap& map_v, const Group& g,
                                        const DecodeArgs& args, DecodeShared<QUERIES>& shared, bf16* tiles) {
    Step now = {0, g.first_tile()};
    u32 blocks[4] = {};
    look_up_blocks(blocks, now, g, args);
    named_barrier_wait<COUNTED>();
    bool are_stored = false;
    for (int n = 0; now.member < g.count; n += 2) {
        // Only the last step of a sequence has the key of this call's token. The steps before it wait neither for that
        // key nor for the kernel in front of this one.
        bool has_new_key = (now.tile + 1) * KEYS >= shared.contexts[now.member];
        if (has_new_key && !are_stored) named_barrier_wait<STORED>(), are_stored = true;
        load_tile(n, now, blocks, map_k, g, args, shared, tiles);
        load_tile(n + 1, now, blocks, map_v, g, args, shared, tiles);
        __syncwarp();
        now = next_step(now, g, shared);
        look_up_blocks(blocks, now, g, args);
    }
}

template <int QUERIES>
__device__ __forceinline__ void begin_consumers(const Group& g, const DecodeArgs& args, DecodeShared<QUERIES>& shared) {
    if (threadIdx.x == 0) {
        for (int b = 0; b < STAGES; ++b)
            mbarrier_init(shared.full + b, 1), mbarrier_init(shared.empty + b, CONSUMERS / 32);
        mbarrier_init_fence();
    }
    if (threadIdx.x < g.count) {
        int context = args.contexts[g.first + threadIdx.x];
        shared.contexts[threadIdx.x] = context;
        shared.n_keys[threadIdx.x] = min(context, g.end_key());
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
    int column = threadIdx.x % 32 * 2;
    if (column < half) *at(column) = pack(h.low[0], h.low[1]), *at(column + half) = pack(h.high[0], h.high[1]);
}

// Rotates the tokens' queries and keys; queries go to shared memory. Keys and values of the sequences that end in this
// split go to the cache. A warp takes one head of one token at a time: the group's query heads, then the key, then the
// value. What does not depend on the kernel in front of this one is read before that kernel is waited for.
template <int QUERIES>
__device__ __forceinline__ void rotate_and_store(const Group& g, const DecodeArgs& args, bf16* queries) {
    constexpr int half = HEAD_DIM / 2;
    int query = args.query, kv = args.kv, per_token = g.heads + 2;
    for (int i = threadIdx.x / 32; i < g.count * per_token; i += CONSUMERS / 32) {
        int member = i / per_token, part = i - member * per_token;
        bool is_query = part < g.heads;
        bool is_value = part > g.heads;
        if (!is_query && (int)args.contexts[g.first + member] > g.end_key()) continue;
        int head = is_query ? g.kv_head * g.heads + part : is_value ? query + kv + g.kv_head : query + g.kv_head;
        u32 slot = args.slots[g.first + member];
        Rotation rotation = {};
        Head weight = {};
        if (args.positions && !is_value) {
            size_t place = (size_t)args.positions[g.first + member] * half;
            rotation = load_rotation(args.cos + place, args.sin + place, half);
        }
        if (args.q_norm && !is_value) weight = load_head(is_query ? args.q_norm : args.k_norm, half);
        wait_for_previous_kernel();
        Head h = load_head(args.qkv + ((size_t)(g.first + member) * (query + 2 * kv) + head) * HEAD_DIM, half);
        if (args.positions && !is_value) norm_and_rotate(h, args.q_norm, weight, args.eps, rotation);
        if (is_query) {
            store_query<QUERIES>(queries, member * g.heads + part, h);
        } else {
            int mask = (1 << args.shift) - 1;
            size_t to = (((size_t)(slot >> args.shift) * kv + g.kv_head) << args.shift) + (slot & mask);
            store_head((is_value ? args.values : args.keys) + to * HEAD_DIM, half, h);
        }
    }
}

// Starts s = (q k^T)^T of a step. The caller waits.
template <int QUERIES>
__device__ __forceinline__ void start_qk(float (&s)[QUERIES / 8][4], const bf16* keys, const bf16* queries) {
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < DIM; c += 16)
        wgmma_columns<0>(s, k_major_operand<KEYS>(keys, 0, c), k_major_operand<QUERIES>(queries, 0, c), c > 0);
    wgmma_commit();
}

// What a thread knows of its queries: columns 8 j + b and on of the instruction, b being 2 (lane % 4) or one more.
template <int QUERIES> struct Columns {
    int member[QUERIES / 8][2];
    float reference[QUERIES / 8][2];
};

// Scores of keys that a query does not see, and of queries that do not see this step, become minus infinity.
template <int QUERIES>
__device__ __forceinline__ void hide_scores(float (&s)[QUERIES / 8][4], const Columns<QUERIES>& columns, Step now,
                                            int n_keys, const Group& g) {
    int key = threadIdx.x / 32 * 16 + fragment_row(0);
#pragma unroll
    for (int j = 0; j < QUERIES / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int member = columns.member[j][i % 2];
            bool sees = member < g.count && (now.tile < g.common || member == now.member);
            if (!sees || key + i / 2 * 8 >= n_keys) s[j][i] = MINUS_INFINITY;
        }
}

// The weights of a step's scores, as softmax_weights in softmax.cu computes them, and the parts of their sum.
template <int QUERIES>
__device__ __forceinline__ void store_weights(const float (&s)[QUERIES / 8][4], const Columns<QUERIES>& columns,
                                              float factor, bf16* weights, float (&parts)[4][4][QUERIES]) {
    int warp = threadIdx.x / 32, row = fragment_row(0), is_odd = row % 2;
#pragma unroll
    for (int j = 0; j < QUERIES / 8; ++j) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            p[i] = exp2_fast(fmaf(s[j][i], factor, -(columns.reference[j][i % 2] * factor)));
            // Without a reference no key was seen.
            if (s[j][i] == MINUS_INFINITY) p[i] = 0.0f;
        }
        // Two neighbours have two keys of two queries: each takes both keys of one query.
        float low = __shfl_xor_sync(0xffffffffu, is_odd ? p[0] : p[1], 4);
        float high = __shfl_xor_sync(0xffffffffu, is_odd ? p[2] : p[3], 4);
        float a = is_odd ? low : p[0], b = is_odd ? p[1] : low, c = is_odd ? high : p[2], d = is_odd ? p[3] : high;
        int query = fragment_column(j, is_odd), pair = row / 2;
        bf16* to = weights + query * 64 + pair * 2;
        *(u32*)(to + ((warp * 2) ^ query % 8) * 8) = pack(a, b);
        *(u32*)(to + ((warp * 2 + 1) ^ query % 8) * 8) = pack(c, d);
        parts[warp][pair][query] = sum_of_four(a, b, c, d);
    }
}

// Raises the references that a step's scores exceed by more than RISE allows, and shrinks the outputs so far.
template <int QUERIES>
__device__ __forceinline__ void raise_references(const float (&s)[QUERIES / 8][4], Columns<QUERIES>& columns,
                                                 float factor, DecodeShared<QUERIES>& shared,
                                                 float (&o)[PARTS][QUERIES / 8][4]) {
#pragma unroll
    for (int j = 0; j < QUERIES / 8; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            float top = fmaxf(s[j][b], s[j][b + 2]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
            if (threadIdx.x % 32 < 4) shared.tops[threadIdx.x / 32][fragment_column(j, b)] = top;
        }
    sync_consumers();
#pragma unroll
    for (int j = 0; j < QUERIES / 8; ++j)
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            int query = fragment_column(j, b);
            float top = fmaxf(fmaxf(shared.tops[0][query], shared.tops[1][query]),
                              fmaxf(shared.tops[2][query], shared.tops[3][query]));
            float& reference = columns.reference[j][b];
            float scale = rise_to(top, reference, factor);
            if (threadIdx.x < 4) shared.scales[query] = scale, shared.references[query] = reference;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) o[part][j][b] *= scale, o[part][j][b + 2] *= scale;
        }
}

// Zeros V past the last key: memory there may hold NaN, and 0 * NaN is NaN.
__device__ __forceinline__ void zero_hidden_values(bf16* values, int n_keys) {
    for (int i = threadIdx.x; i < (KEYS - n_keys) * DIM / 8; i += CONSUMERS)
        *(uint4*)(values + i / 8 % PARTS * KEYS * 64 + (n_keys + i / 8 / PARTS) * 64 + i % 8 * 8) =
            make_uint4(0, 0, 0, 0);
}

// Starts o += (p v)^T. The caller waits.
template <int QUERIES>
__device__ __forceinline__ void start_pv(float (&o)[PARTS][QUERIES / 8][4], const bf16* values, const bf16* weights) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) fence_registers(o[part]);
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
#pragma unroll
        for (int c = 0; c < KEYS; c += 16)
            wgmma_columns<1>(o[part], mn_major_operand<KEYS>(values + part * KEYS * 64, c),
                             k_major_operand<QUERIES>(weights, 0, c), true);
    wgmma_commit();
}

// The consumers' loop. `sum` is that of query thread / 4 and lane thread % 4 of a quad. The scores of a step are
// multiplied while the weights of the step before are.
template <int QUERIES>
__device__ __forceinline__ void consume(const Group& g, DecodeShared<QUERIES>& shared, bf16* tiles, const bf16* queries,
                                        bf16* weights, float (&o)[PARTS][QUERIES / 8][4], float& sum) {
    int lane = threadIdx.x % 32;
    float factor = score_factor(), s[QUERIES / 8][4];
    Columns<QUERIES> columns;
#pragma unroll
    for (int i = 0; i < QUERIES / 4; ++i) {
        columns.member[i / 2][i % 2] = fragment_column(i / 2, i % 2) / g.heads;
        columns.reference[i / 2][i % 2] = MINUS_INFINITY;
    }
    Step now = {0, g.first_tile()};
    mbarrier_wait(shared.full, 0);
    start_qk<QUERIES>(s, tiles, queries);
    for (int n = 0; now.member < g.count; n += 2) {
        int n_keys = shared.n_keys[now.member] - now.tile * KEYS, at = n / 2 % 2;
        bf16 *values = tiles + (n + 1) % STAGES * TILE, *p = weights + at * QUERIES * KEYS;
        wgmma_wait<0>();
        fence_registers(s);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) fence_registers(o[part]);
        if (lane == 0) mbarrier_arrive(shared.empty + n % STAGES);
        if (lane == 0 && n > 0) mbarrier_arrive(shared.empty + (n - 1) % STAGES);
        hide_scores(s, columns, now, n_keys, g);
        bool rises = false;
#pragma unroll
        for (int j = 0; j < QUERIES / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) rises = rises || exceeds(s[j][i], columns.reference[j][i % 2], factor);
        store_weights(s, columns, factor, p, shared.parts[at]);
        if (n_keys < KEYS) {
            mbarrier_wait(shared.full + (n + 1) % STAGES, (n + 1) / STAGES % 2);
            zero_hidden_values(values, n_keys);
        }
        fence_async_proxy_shared();
        float scale = 1.0f;
        if (sync_consumers_or(rises)) {
            raise_references(s, columns, factor, shared, o);
            store_weights(s, columns, factor, p, shared.parts[at]);
            fence_async_proxy_shared();
            sync_consumers();
            if (threadIdx.x < 4 * QUERIES) scale = shared.scales[threadIdx.x / 4];
        }
        mbarrier_wait(shared.full + (n + 1) % STAGES, (n + 1) / STAGES % 2);
        start_pv<QUERIES>(o, values, p);
        if (threadIdx.x < 4 * QUERIES) {
            auto part = [&](int warp) { return shared.parts[at][warp][threadIdx.x % 4][threadIdx.x / 4]; };
            sum = fmaf(sum, scale, sum_of_four(part(0), part(1), part(2), part(3)));
        }
        now = next_step(now, g, shared);
        if (now.member < g.count) {
            mbarrier_wait(shared.full + (n + 2) % STAGES, (n + 2) / STAGES % 2);
            start_qk<QUERIES>(s, tiles + (n + 2) % STAGES * TILE, queries);
        }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) fence_registers(o[part]);
}

// Writes the rows of sequences of one split to `out`, and those of longer sequences to `partials`.
template <int QUERIES>
__device__ __forceinline__ void store_rows(const Group& g, const DecodeArgs& args, DecodeShared<QUERIES>& shared,
                                           float sum, const float (&o)[PARTS][QUERIES / 8][4]) {
    // The partial of the head that row `row` belongs to.
    auto partial = [&](int row) {
        size_t index = args.first_partials[g.first + row / g.heads] + g.split;
        return args.partials + (index * args.query + g.kv_head * g.heads + row % g.heads) * PARTIAL;
    };
    float total = quad_sum(sum);
    int row = threadIdx.x / 4;
    if (threadIdx.x % 4 == 0 && row < g.n_rows()) {
        shared.totals[row] = total;
        float reference = shared.references[row];
        if (shared.contexts[row / g.heads] > SPLIT && reference != MINUS_INFINITY) {
            partial(row)[PARTIAL_REFERENCE] = reference;
            partial(row)[PARTIAL_SUM] = total;
        }
    }
    sync_consumers();
#pragma unroll
    for (int j = 0; j < QUERIES / 8; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = fragment_column(j, i), member = row / g.heads;
            if (row >= g.n_rows() || shared.contexts[member] <= g.split * SPLIT) continue;
            bool is_whole = shared.contexts[member] <= SPLIT;
            int head = g.kv_head * g.heads + row % g.heads;
            bf16* out = args.out + (size_t)(g.first + member) * args.out_pitch + head * HEAD_DIM;
            float* to = is_whole ? 0 : partial(row);
            float scale = 1.0f / shared.totals[row];
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    int column = part * 64 + threadIdx.x / 32 * 16 + fragment_row(2 * low);
                    float x = o[part][j][2 * low + i];
                    if (is_whole)
                        out[column] = round_to<bf16>(x * scale);
                    else
                        to[column] = x;
                }
        }
}

template <int QUERIES>
__device__ __forceinline__ void decode(const TensorMap& map_k, const TensorMap& map_v, const DecodeArgs& args) {
    bf16 *tiles = aligned_memory(), *queries = tiles + STAGES * TILE, *weights = queries + QUERIES * DIM;
    __shared__ DecodeShared<QUERIES> shared;
    launch_dependents();
    uint4 group = *(const uint4*)(args.groups + 4 * blockIdx.y);
    Group g = {(int)group.x, (int)group.y, (int)group.z, (int)group.w, args.query / args.kv, (int)blockIdx.x};
    if (g.count == 0) return;
    if (threadIdx.x / 32 == CONSUMERS / 32) {
        produce(map_k, map_v, g, args, shared, tiles);
        return;
    }
    begin_consumers(g, args, shared);
    rotate_and_store<QUERIES>(g, args, queries);
    fence_async_proxy();
    named_barrier_arrive<STORED>();
    sync_consumers();

    float o[PARTS][QUERIES / 8][4], sum = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) clear(o[part]), fence_registers(o[part]);
    consume(g, shared, tiles, queries, weights, o, sum);
    store_rows(g, args, shared, sum, o);
}

// Maps: keys and values by rows of one head. One kernel is for groups of at most 8 query rows, one for those of at most
// 16.
KERNEL __launch_bounds__(THREADS, 4)
attention_decode_8_hopper_bf16(const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                               const __grid_constant__ DecodeArgs args) {
    decode<8>(map_k, map_v, args);
}
KERNEL __launch_bounds__(THREADS, 3)
attention_decode_16_hopper_bf16(const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                                const __grid_constant__ DecodeArgs args) {
    decode<16>(map_k, map_v, args);
}

// Grid: (query heads, sequences); a thread has a column. Combines the splits of sequences that have several, in their
// order.
KERNEL __launch_bounds__(HEAD_DIM)
attention_combine_splits_bf16(const float* partials, const u32* first_partials, const u32* contexts, bf16* out,
                              int out_pitch, int query) {
    launch_dependents();
    int n_splits = ((int)contexts[blockIdx.y] + SPLIT - 1) / SPLIT;
    size_t first = first_partials[blockIdx.y];
    wait_for_previous_kernel();
    if (n_splits < 2) return;
    auto partial = [&](int split) { return partials + ((first + split) * query + blockIdx.x) * PARTIAL; };
    float factor = score_factor(), reference = partial(0)[PARTIAL_REFERENCE], sum = partial(0)[PARTIAL_SUM];
    float o = partial(0)[threadIdx.x];
    for (int split = 1; split < n_splits; ++split) {
        const float* next = partial(split);
        Combine combine(reference, next[PARTIAL_REFERENCE], factor);
        reference = combine.reference;
        sum = combine(sum, next[PARTIAL_SUM]);
        o = combine(o, next[threadIdx.x]);
    }
    out[(size_t)blockIdx.y * out_pitch + blockIdx.x * HEAD_DIM + threadIdx.x] = round_to<bf16>(o * (1.0f / sum));
}
