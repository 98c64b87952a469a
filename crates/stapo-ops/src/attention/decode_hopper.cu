// Decode: one token of each sequence over a paged cache, with Hopper's matrix instruction. Steps of 64 keys by absolute
// position as in forward_hopper.cu, with the operands of each product exchanged (keys and columns of values are the 64
// rows of the instruction, queries its QUERIES columns, 8 or 16). Each element is the same chain of sums: the same
// bits, with an eighth or a quarter of the work. A block has one split of the keys (see softmax.cu) of a group of
// sequences. Those begin with the same blocks of the cache (prefix sharing), which are read once for all of them. Where
// a sequence has several splits, their results go to `partials`, and attention_combine_splits_bf16 combines them.
//
// One warp, the producer, copies tiles of keys and values by TMA; four warps, the consumers, multiply.

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
                                            int n_keys, const Group& g, const int (&contexts)[QUERIES],
                                            const ScoreRule& rule) {
    int key = threadIdx.x / 32 * 16 + fragment_row(0);
#pragma unroll
    for (int j = 0; j < QUERIES / 8; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int member = columns.member[j][i % 2];
            bool sees = member < g.count && (now.tile < g.common || member == now.member);
#ifdef SCORE_RULE
            s[j][i] = rule.cap(s[j][i]);
#endif
            if (!sees || key + i / 2 * 8 >= n_keys) s[j][i] = MINUS_INFINITY;
#ifdef SCORE_RULE
            if (sees && rule.hides(now.tile * KEYS + key + i / 2 * 8, contexts[member] - 1)) s[j][i] = MINUS_INFINITY;
#endif
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
template <int QUERIES, int STAGES>
__device__ __forceinline__ void raise_references(const float (&s)[QUERIES / 8][4], Columns<QUERIES>& columns,
                                                 float factor, DecodeShared<QUERIES, STAGES>& shared,
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
    for (int i = threadIdx.x; i < (KEYS - n_keys) * COLUMNS / 8; i += CONSUMERS)
        *(uint4*)(values + i / 8 % PARTS * KEYS * 64 + (n_keys + i / 8 / PARTS) * 64 + i % 8 * 8) =
            make_uint4(0, 0, 0, 0);
}

// Whether a step has the key of its member's new token.
template <int QUERIES, int STAGES>
__device__ __forceinline__ bool has_new_key(Step s, const DecodeShared<QUERIES, STAGES>& shared) {
    return (s.tile + 1) * KEYS >= shared.contexts[s.member];
}

// Writes the new token's key or value into the tile of its step, which was copied from the cache without it. The first
// member's lies in shared memory; those of others this block has stored in the cache.
template <int QUERIES, int STAGES>
__device__ __forceinline__ void write_new_row(bf16* tile, Step s, bool is_value, const Group& g, const DecodeArgs& args,
                                              const DecodeShared<QUERIES, STAGES>& shared) {
    int c = threadIdx.x, row = shared.contexts[s.member] - 1 - s.tile * KEYS;
    if (c >= HEAD_DIM / 8) return;
    const bf16* from = s.member == 0 ? shared.fresh[is_value]
                                     : (is_value ? args.values : args.keys) +
                                           cached_row(args.slots[g.first + s.member], g, args);
    *(uint4*)(tile + c / 8 * KEYS * 64 + row * 64 + (c % 8 ^ row % 8) * 8) = *(const uint4*)(from + c * 8);
}

// Waits for the keys of a step, number n, and writes the new token's.
template <int QUERIES, int STAGES>
__device__ __forceinline__ void wait_for_keys(int n, Step s, const Group& g, const DecodeArgs& args,
                                              DecodeShared<QUERIES, STAGES>& shared, bf16* tiles) {
    mbarrier_wait(shared.full + n % STAGES, n / STAGES % 2);
    if (!has_new_key(s, shared)) return;
    write_new_row(tiles + n % STAGES * TILE, s, false, g, args, shared);
    fence_async_proxy_shared();
    sync_consumers();
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
template <int QUERIES, int STAGES>
__device__ __forceinline__ void consume(const Group& g, const DecodeArgs& args, const ScoreRule& rule,
                                        DecodeShared<QUERIES, STAGES>& shared, bf16* tiles, const bf16* queries,
                                        bf16* weights, float (&o)[PARTS][QUERIES / 8][4], float& sum) {
    int lane = threadIdx.x % 32;
    float factor = rule.factor(), s[QUERIES / 8][4];
    Columns<QUERIES> columns;
#pragma unroll
    for (int i = 0; i < QUERIES / 4; ++i) {
        columns.member[i / 2][i % 2] = fragment_column(i / 2, i % 2) / g.heads;
        columns.reference[i / 2][i % 2] = MINUS_INFINITY;
    }
    Step now = first_step(g, shared);
#ifdef SCORE_RULE
    if (now.member >= g.count) return;
#endif
    wait_for_keys(0, now, g, args, shared, tiles);
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
        hide_scores(s, columns, now, n_keys, g, shared.contexts, rule);
        bool rises = false;
#pragma unroll
        for (int j = 0; j < QUERIES / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) rises = rises || exceeds(s[j][i], columns.reference[j][i % 2], factor);
        store_weights(s, columns, factor, p, shared.parts[at]);
        if (has_new_key(now, shared)) {
            mbarrier_wait(shared.full + (n + 1) % STAGES, (n + 1) / STAGES % 2);
            write_new_row(values, now, true, g, args, shared);
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
            wait_for_keys(n + 2, now, g, args, shared, tiles);
            start_qk<QUERIES>(s, tiles + (n + 2) % STAGES * TILE, queries);
        }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int part = 0; part < PARTS; ++part) fence_registers(o[part]);
}

// Writes the rows of sequences of one split to `out`, and those of longer sequences to `partials`.
template <int QUERIES, int STAGES>
__device__ __forceinline__ void store_rows(const Group& g, const DecodeArgs& args, const ScoreRule& rule,
                                           DecodeShared<QUERIES, STAGES>& shared, float sum,
                                           const float (&o)[PARTS][QUERIES / 8][4]) {
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
            float scale = EndedRow(shared.references[row], shared.totals[row], head, rule).scale();
#pragma unroll
            for (int part = 0; part < PARTS; ++part)
#pragma unroll
                for (int low = 0; low < 2; ++low) {
                    int column = part * 64 + threadIdx.x / 32 * 16 + fragment_row(2 * low);
                    float x = o[part][j][2 * low + i];
                    if (HEAD_DIM < COLUMNS && column >= HEAD_DIM) continue;
                    if (is_whole)
                        out[column] = round_to<bf16>(x * scale);
                    else
                        to[column] = x;
                }
        }
}

template <int QUERIES, int STAGES>
__device__ __forceinline__ void decode(const TensorMap& map_k, const TensorMap& map_v, const DecodeArgs& args,
                                       const ScoreRule& rule) {
    bf16 *tiles = aligned_memory(), *queries = tiles + STAGES * TILE, *weights = queries + QUERIES * COLUMNS;
    __shared__ DecodeShared<QUERIES, STAGES> shared;
    launch_dependents();
    uint4 group = *(const uint4*)(args.groups + 4 * blockIdx.y);
    Group g = {(int)group.x, (int)group.y, (int)group.z, (int)group.w, args.query / args.kv, (int)blockIdx.x};
    if (g.count == 0) return;
    if (threadIdx.x / 32 == CONSUMERS / 32) {
        produce(map_k, map_v, g, args, shared, tiles);
        return;
    }
    begin_consumers(g, args, rule, shared);
    rotate_and_store<QUERIES>(g, args, shared, queries);
    fence_async_proxy_shared();
    sync_consumers();

    float o[PARTS][QUERIES / 8][4], sum = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; ++part) clear(o[part]), fence_registers(o[part]);
    consume(g, args, rule, shared, tiles, queries, weights, o, sum);
    store_rows(g, args, rule, shared, sum, o);
}

// Maps: keys and values by rows of one head. Kernels for groups of at most 8 and of at most 16 query rows. With 3 stages
// most blocks fit on a multiprocessor; where there are few blocks, each has more stages.
#define DECODE(QUERIES, STAGES, BLOCKS)                                                                                \
    KERNEL __launch_bounds__(THREADS, BLOCKS) attention_decode_##QUERIES##_##STAGES##_hopper_bf16(                     \
        const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,                              \
        const __grid_constant__ DecodeArgs args RULE_PARAMETER) {                                                      \
        RULE_CONSTANT                                                                                                  \
        decode<QUERIES, STAGES>(map_k, map_v, args, rule);                                                             \
    }
DECODE(8, 3, 4)
DECODE(8, 6, 2)
DECODE(8, 8, 1)
DECODE(16, 3, 3)

// Grid: (query heads, sequences); a thread has a column. Combines the splits of sequences that have several, in their
// order.
KERNEL __launch_bounds__(HEAD_DIM)
attention_combine_splits_bf16(const float* partials, const u32* first_partials, const u32* contexts, bf16* out,
                              int out_pitch, int query RULE_PARAMETER) {
    RULE_CONSTANT
    launch_dependents();
    int n_splits = ((int)contexts[blockIdx.y] + SPLIT - 1) / SPLIT;
    size_t first = first_partials[blockIdx.y];
    wait_for_previous_kernel();
    if (n_splits < 2) return;
    auto partial = [&](int split) { return partials + ((first + split) * query + blockIdx.x) * PARTIAL; };
    // Splits in front of the window have no result.
    int split = rule.first_key((int)contexts[blockIdx.y] - 1) / SPLIT;
    float factor = rule.factor(), reference = partial(split)[PARTIAL_REFERENCE], sum = partial(split)[PARTIAL_SUM];
    float o = partial(split)[threadIdx.x];
    for (++split; split < n_splits; ++split) {
        const float* next = partial(split);
        Combine combine(reference, next[PARTIAL_REFERENCE], factor);
        reference = combine.reference;
        sum = combine(sum, next[PARTIAL_SUM]);
        o = combine(o, next[threadIdx.x]);
    }
    float scale = EndedRow(reference, sum, blockIdx.x, rule).scale();
    out[(size_t)blockIdx.y * out_pitch + blockIdx.x * HEAD_DIM + threadIdx.x] = round_to<bf16>(o * scale);
}
