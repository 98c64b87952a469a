// How the product of a query and a key becomes a score, and which keys a token sees. Sources that define SCORE_RULE take the
// rule as an argument of their kernels; the others have the plain rule, all keys and the scale HEAD_DIM^-0.5, as constants.

#ifdef SCORE_RULE

struct ScoreRule {
    // One for each query head; null: none.
    const bf16* sinks;
    // `softcap` 0: none. `window` 0: all keys.
    float scale, softcap;
    int window;

    // What a score is multiplied by to be an exponent of 2; a capped score is scaled already.
    __device__ __forceinline__ float factor() const { return softcap != 0.0f ? LOG2_E : scale * LOG2_E; }
    // What the gradients of queries and keys are multiplied by.
    __device__ __forceinline__ float gradient_scale() const { return scale; }
    // The first key that the token at `position` sees.
    __device__ __forceinline__ int first_key(int position) const {
        return window > 0 ? max(0, position - window + 1) : 0;
    }
    // Whether a key lies in front of the window.
    __device__ __forceinline__ bool hides(int key, int position) const { return key < first_key(position); }
    // The end of the queries that see keys up to `last_key`.
    __device__ __forceinline__ int end_of_queries(int last_key, int rows) const {
        return window > 0 ? min(rows, last_key + window) : rows;
    }
    __device__ __forceinline__ bool is_capped() const { return softcap != 0.0f; }
    __device__ __forceinline__ float cap(float product) const {
        return softcap != 0.0f ? softcap * tanhf(product * scale / softcap) : product;
    }
    // The slope of a capped score by the scaled product.
    __device__ __forceinline__ float slope(float score) const {
        float t = softcap != 0.0f ? score / softcap : 0.0f;
        return 1.0f - t * t;
    }
};
#define RULE_PARAMETER , const __grid_constant__ ScoreRule rule
#define RULE_CONSTANT

#else

struct ScoreRule {
    __device__ __forceinline__ float factor() const { return score_factor(); }
    __device__ __forceinline__ float gradient_scale() const { return rsqrtf((float)HEAD_DIM); }
    __device__ __forceinline__ int first_key(int) const { return 0; }
    __device__ __forceinline__ bool hides(int, int) const { return false; }
    __device__ __forceinline__ int end_of_queries(int, int rows) const { return rows; }
    __device__ __forceinline__ bool is_capped() const { return false; }
    __device__ __forceinline__ float cap(float product) const { return product; }
    __device__ __forceinline__ float slope(float) const { return 1.0f; }
};
#define RULE_PARAMETER
#define RULE_CONSTANT const ScoreRule rule = {};

#endif

// Whether a step adds to the product of the step before it: it begins neither a split nor the steps that its rows see.
__device__ __forceinline__ bool adds_to_split(int step, int first) {
#ifdef SCORE_RULE
    return step % SPLIT_STEPS > 0 && step > first;
#else
    return step % SPLIT_STEPS > 0;
#endif
}

// Caps the scores of a step and hides the keys in front of the windows of a lane's two rows, whose positions are given.
template <int N>
__device__ __forceinline__ void apply_rule(float (&s)[N][4], int first_key, const int (&position)[2],
                                           const ScoreRule& rule) {
#ifdef SCORE_RULE
    if (rule.is_capped()) {
#pragma unroll
        for (int j = 0; j < N; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[j][i] = rule.cap(s[j][i]);
    }
    if (!rule.hides(first_key, position[1])) return;
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (rule.hides(first_key + fragment_column(j, i), position[i / 2])) s[j][i] = MINUS_INFINITY;
#endif
}

#ifdef SCORE_RULE

// Ends the split that begins with key `split` of a tile whose first step begins with key `begin`. A row that sees no key of
// this split keeps what was before; of a row that saw no key before, this split is the whole result.
template <int N>
__device__ __forceinline__ void end_split(RowStateOf<N>& rows, const SavedRows<N>& before, int split, int begin,
                                          const int (&position)[2], const ScoreRule& rule) {
    rows.sum[0] = quad_sum(rows.sum[0]), rows.sum[1] = quad_sum(rows.sum[1]);
    if (split <= begin) return;
    float4 old = get_saved(&before.rows);
    float factor = rule.factor();
    float references[2] = {old.x, old.y}, sums[2] = {old.z, old.w};
    bool sees[2], saw[2];
    float by_before[2], by_next[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sees[h] = split <= position[h];
        saw[h] = rule.first_key(position[h]) < split;
        Combine combine(references[h], rows.reference[h], factor);
        // Factors of what was before and of this split. Those of a row that saw or sees nothing are 0 and 1, exactly.
        by_before[h] = !saw[h] ? 0.0f : sees[h] ? combine.before : 1.0f;
        by_next[h] = !sees[h] ? 0.0f : saw[h] ? combine.next : 1.0f;
        rows.sum[h] = !saw[h] ? rows.sum[h] : sees[h] ? combine(sums[h], rows.sum[h]) : sums[h];
        rows.reference[h] = !saw[h] ? rows.reference[h] : sees[h] ? combine.reference : references[h];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) {
        float4 o = get_saved(before.o + j);
        float olds[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int h = i / 2;
            float both = fmaf(olds[i], by_before[h], rows.o[j][i] * by_next[h]);
            rows.o[j][i] = !saw[h] ? rows.o[j][i] : sees[h] ? both : olds[i];
        }
    }
}

#endif

// end_split of softmax.cu for a tile whose first step is `first`; `from` is the first step of the split.
template <int N>
__device__ __forceinline__ void end_split_from(int from, int first, RowStateOf<N>& rows, const SavedRows<N>& saved,
                                               const int (&position)[2], const ScoreRule& rule) {
#ifdef SCORE_RULE
    end_split(rows, saved, from * KEYS, first * KEYS, position, rule);
#else
    end_split(rows, saved, from * KEYS, position, rule.factor());
#endif
}

// begin_step and end_steps of softmax.cu for a tile whose first step is `first`.
template <int N>
__device__ __forceinline__ void begin_step(int step, int first, RowStateOf<N>& rows, SavedRows<N>& saved,
                                           const int (&position)[2], const ScoreRule& rule) {
#ifdef SCORE_RULE
    if (step == first || step % SPLIT_STEPS > 0) return;
    end_split(rows, saved, (step - SPLIT_STEPS) * KEYS, first * KEYS, position, rule);
    save_rows(saved, rows);
    clear(rows);
#else
    begin_step(step, rows, saved, position, rule.factor());
#endif
}

template <int N>
__device__ __forceinline__ void end_steps(int n_steps, int first, RowStateOf<N>& rows, const SavedRows<N>& saved,
                                          const int (&position)[2], const ScoreRule& rule) {
#ifdef SCORE_RULE
    end_split(rows, saved, (n_steps - 1) / SPLIT_STEPS * SPLIT, first * KEYS, position, rule);
#else
    end_steps(n_steps, rows, saved, position, rule.factor());
#endif
}

// A row behind its last split and its head's sink, which is combined like a split of one key whose value is 0.
struct EndedRow {
    float reference, sum;
#ifdef SCORE_RULE
    float before = 1.0f;
#endif

    __device__ __forceinline__ EndedRow(float reference, float sum, int head, const ScoreRule& rule)
        : reference(reference), sum(sum) {
#ifdef SCORE_RULE
        if (!rule.sinks) return;
        float factor = rule.factor();
        Combine combine(reference, widen(rule.sinks[head]) * LOG2_E / factor, factor);
        this->reference = combine.reference, this->sum = combine(sum, 1.0f), before = combine.before;
#endif
    }
    // What outputs are multiplied by.
    __device__ __forceinline__ float scale() const {
#ifdef SCORE_RULE
        return before / sum;
#else
        return 1.0f / sum;
#endif
    }
};

// Writes the outputs and the log-sum-exp of the rows of a packed tile; `row` is the first of the lane's two rows. Rows of
// `out` are `pitch` apart.
__device__ __forceinline__ void store_rows(const QueryTile& t, const RowState& rows, int row, int query, float factor,
                                           const ScoreRule& rule, bf16* out, int pitch, float* lse) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        bool is_there = t.has(row + h * 8);
        size_t token = t.token + row + h * 8;
        EndedRow ended(rows.reference[h], rows.sum[h], t.head, rule);
        if (is_there && threadIdx.x % 4 == 0)
            lse[token * query + t.head] = log_sum_exp(ended.reference, ended.sum, factor);
        store_row({out + token * pitch + t.head * HEAD_DIM, is_there, pitch % 8 == 0}, rows.o, h, ended.scale());
    }
}
