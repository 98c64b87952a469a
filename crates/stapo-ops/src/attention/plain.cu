// Attention in f32, for tests: a warp per row, no matrix instructions. HEAD_DIM is given when compiling, up to 256.

#define COLUMNS ((HEAD_DIM + 31) / 32)
#define MINUS_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ float dot(const float* a, const float* b) {
    float sum = 0.0f;
    for (int i = 0; i < HEAD_DIM; ++i) sum = fmaf(a[i], b[i], sum);
    return sum;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// Keys per split: see softmax.cu.
#define SPLIT 1024

// How scores are made: see ScoreRule in rule.cu. `softcap` 0: none; `window` 0: all keys.
struct Rule {
    // One for each query head; null: none.
    const float* sinks;
    float scale, softcap;
    int window;

    __device__ __forceinline__ float score(float product) const {
        float scaled = product * scale;
        return softcap != 0.0f ? softcap * tanhf(scaled / softcap) : scaled;
    }
    __device__ __forceinline__ float slope(float score) const {
        float t = softcap != 0.0f ? score / softcap : 0.0f;
        return scale * (1.0f - t * t);
    }
    // The first of the last `n` keys that is seen.
    __device__ __forceinline__ int first_key(int n) const { return window > 0 ? max(0, n - window) : 0; }
};

// One query against the last keys of 0..n: `key(j)`, `value(j)` are addresses.
template <class Key, class Value>
__device__ __forceinline__ void attend(const float* q, int head, int n, Key key, Value value, float* out, float* lse,
                                       const Rule& rule) {
    int lane = threadIdx.x % 32, begin = rule.first_key(n);
    float top = MINUS_INFINITY, sum = 0.0f, o[COLUMNS] = {};
    for (int split = begin / SPLIT * SPLIT; split < n; split += SPLIT) {
        int first = max(begin, split), end = min(n, split + SPLIT);
        float split_top = MINUS_INFINITY, split_sum = 0.0f, split_o[COLUMNS] = {};
        for (int j = first + lane; j < end; j += 32) split_top = fmaxf(split_top, rule.score(dot(q, key(j))));
        split_top = warp_max(split_top);
        for (int from = first; from < end; from += 32) {
            float p = from + lane < end ? expf(rule.score(dot(q, key(from + lane))) - split_top) : 0.0f;
            split_sum += p;
            for (int j = 0; j < min(32, end - from); ++j) {
                float weight = __shfl_sync(0xffffffffu, p, j);
                const float* v = value(from + j);
                for (int c = 0; c < COLUMNS; ++c)
                    if (lane + 32 * c < HEAD_DIM) split_o[c] = fmaf(weight, v[lane + 32 * c], split_o[c]);
            }
        }
        // The first split is combined with nothing: 0 times 0 plus itself times 1.
        float top_before = top;
        top = fmaxf(top, split_top);
        float before = expf(top_before - top), next = expf(split_top - top);
        sum = fmaf(sum, before, warp_sum(split_sum) * next);
        for (int c = 0; c < COLUMNS; ++c) o[c] = fmaf(o[c], before, split_o[c] * next);
    }
    if (rule.sinks) {
        float top_before = top, sink = rule.sinks[head];
        top = fmaxf(top, sink);
        float before = expf(top_before - top);
        sum = fmaf(sum, before, expf(sink - top));
        for (int c = 0; c < COLUMNS; ++c) o[c] *= before;
    }
    for (int c = 0; c < COLUMNS; ++c)
        if (lane + 32 * c < HEAD_DIM) out[lane + 32 * c] = o[c] / sum;
    if (lse && lane == 0) *lse = top + logf(sum);
}

__device__ __forceinline__ int sequence_of(const u32* offsets, int sequences, u32 token) {
    int s = 0;
    while (s + 1 < sequences && offsets[s + 1] <= token) ++s;
    return s;
}

// Packed sequences: see Packing in tiles.cu.
struct Packing {
    const u32 *offsets, *key_offsets;
    const float* keys;
    int key_width, sequences, query, kv;

    // The first key of sequence s and of a key/value head.
    __device__ __forceinline__ const float* first_key(int s, int kv_head) const {
        return keys + (size_t)key_offsets[s] * key_width + kv_head * HEAD_DIM;
    }
    // The first token of sequence s less the position of its first query.
    __device__ __forceinline__ int start(int s) const {
        int n_queries = offsets[s + 1] - offsets[s], n_keys = key_offsets[s + 1] - key_offsets[s];
        return (int)offsets[s] - (n_keys - n_queries);
    }
};

// Grid: (tokens, query heads), one warp.
KERNEL attention_forward_float(const float* qkv, const __grid_constant__ Packing packing, float* out, float* lse,
                               const __grid_constant__ Rule rule) {
    int query = packing.query, kv = packing.kv;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, token = blockIdx.x, key_width = packing.key_width;
    int head = blockIdx.y, kv_head = head / (query / kv), s = sequence_of(packing.offsets, packing.sequences, token);
    const float* k = packing.first_key(s, kv_head);
    attend(
        qkv + token * width + head * HEAD_DIM, head, (int)token - packing.start(s) + 1,
        [&](int j) { return k + j * key_width; }, [&](int j) { return k + j * key_width + kv * HEAD_DIM; }, out + (token * query + head) * HEAD_DIM,
        lse + token * query + head, rule);
}

KERNEL attention_store_float(const float* qkv, const u32* slots, float* keys, float* values, int query, int kv,
                             int block_size, u32 n_slots) {
    u32 slot = slots[blockIdx.x];
    if (slot >= n_slots) __trap();
    const float* row = qkv + ((size_t)blockIdx.x * (query + 2 * kv) + query) * HEAD_DIM;
    for (int i = threadIdx.x; i < kv * HEAD_DIM; i += blockDim.x) {
        int head = i / HEAD_DIM, column = i % HEAD_DIM;
        size_t at = (((size_t)(slot / block_size) * kv + head) * block_size + slot % block_size) * HEAD_DIM + column;
        keys[at] = row[i];
        values[at] = row[kv * HEAD_DIM + i];
    }
}

// The sizes of a call over a paged cache.
struct PagedShape {
    int sequences, table_width, query, kv, block_size;
};

KERNEL attention_paged_float(const float* qkv, const float* keys, const float* values, const u32* offsets,
                             const u32* contexts, const u32* tables, float* out,
                             const __grid_constant__ PagedShape shape, const __grid_constant__ Rule rule) {
    int query = shape.query, kv = shape.kv, block_size = shape.block_size;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, token = blockIdx.x;
    int head = blockIdx.y, kv_head = head / (query / kv), s = sequence_of(offsets, shape.sequences, token);
    const u32* table = tables + (size_t)s * shape.table_width;
    int n = contexts[s] - (offsets[s + 1] - token) + 1;
    auto place = [&](int j) {
        return (((size_t)table[j / block_size] * kv + kv_head) * block_size + j % block_size) * HEAD_DIM;
    };
    attend(
        qkv + token * width + head * HEAD_DIM, head, n, [&](int j) { return keys + place(j); },
        [&](int j) { return values + place(j); }, out + (token * query + head) * HEAD_DIM, 0, rule);
}

KERNEL attention_delta_float(const float* out, const float* d_out, float* delta, int query) {
    for (int head = threadIdx.x / 32; head < query; head += blockDim.x / 32) {
        size_t at = ((size_t)blockIdx.x * query + head) * HEAD_DIM;
        if (threadIdx.x % 32 == 0) delta[(size_t)blockIdx.x * query + head] = dot(out + at, d_out + at);
    }
}

// Grid: (tokens, query heads), one warp.
KERNEL attention_backward_queries_float(const float* qkv, const float* d_out, const __grid_constant__ Packing packing,
                                        const float* lse, const float* delta, float* d_qkv,
                                        const __grid_constant__ Rule rule) {
    int query = packing.query, kv = packing.kv;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, token = blockIdx.x, key_width = packing.key_width;
    int head = blockIdx.y, kv_head = head / (query / kv), lane = threadIdx.x % 32;
    int s = sequence_of(packing.offsets, packing.sequences, token);
    size_t at = token * query + head;
    const float *q = qkv + token * width + head * HEAD_DIM, *k = packing.first_key(s, kv_head);
    const float *v = k + kv * HEAD_DIM, *d = d_out + at * HEAD_DIM;
    float sums[COLUMNS] = {};
    int n = (int)token - packing.start(s) + 1;
    for (int from = rule.first_key(n); from < n; from += 32) {
        size_t j = from + lane;
        float d_score = 0.0f;
        if (j < n) {
            float score = rule.score(dot(q, k + j * key_width)), p = expf(score - lse[at]);
            d_score = p * (dot(d, v + j * key_width) - delta[at]) * rule.slope(score);
        }
        for (int i = 0; i < min(32, n - from); ++i) {
            float weight = __shfl_sync(0xffffffffu, d_score, i);
            for (int c = 0; c < COLUMNS; ++c)
                if (lane + 32 * c < HEAD_DIM) sums[c] = fmaf(weight, k[(from + i) * key_width + lane + 32 * c], sums[c]);
        }
    }
    for (int c = 0; c < COLUMNS; ++c)
        if (lane + 32 * c < HEAD_DIM) d_qkv[token * width + head * HEAD_DIM + lane + 32 * c] = sums[c];
}

// Grid: (rows of keys, kv heads), one warp. d_keys is the first key of row 0.
KERNEL attention_backward_keys_float(const float* qkv, const float* d_out, const __grid_constant__ Packing packing,
                                     const float* lse, const float* delta, float* d_keys,
                                     const __grid_constant__ Rule rule) {
    int query = packing.query, kv = packing.kv;
    size_t width = (size_t)(query + 2 * kv) * HEAD_DIM, key_width = packing.key_width;
    int kv_head = blockIdx.y, group = query / kv, lane = threadIdx.x % 32;
    int s = sequence_of(packing.key_offsets, packing.sequences, blockIdx.x);
    // The token at the key's position: one in front of the first query where the sequence has none there.
    int key_token = packing.start(s) + (int)(blockIdx.x - packing.key_offsets[s]);
    size_t end = packing.offsets[s + 1], begin = max(key_token, (int)packing.offsets[s]);
    const float *k = packing.keys + blockIdx.x * key_width + kv_head * HEAD_DIM, *v = k + kv * HEAD_DIM;
    float d_k[COLUMNS] = {}, d_v[COLUMNS] = {};
    if (rule.window > 0) end = min((int)end, max((int)begin, key_token + rule.window));
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head)
        for (size_t from = begin; from < end; from += 32) {
            size_t t = from + lane, at = t * query + head;
            float p = 0.0f, d_score = 0.0f;
            if (t < end) {
                float score = rule.score(dot(qkv + t * width + head * HEAD_DIM, k));
                p = expf(score - lse[at]);
                d_score = p * (dot(d_out + at * HEAD_DIM, v) - delta[at]) * rule.slope(score);
            }
            for (int i = 0; i < min((size_t)32, end - from); ++i) {
                float weight = __shfl_sync(0xffffffffu, p, i), d_weight = __shfl_sync(0xffffffffu, d_score, i);
                const float* q = qkv + (from + i) * width + head * HEAD_DIM;
                const float* d = d_out + ((from + i) * query + head) * HEAD_DIM;
                for (int c = 0; c < COLUMNS; ++c)
                    if (lane + 32 * c < HEAD_DIM) {
                        d_v[c] = fmaf(weight, d[lane + 32 * c], d_v[c]);
                        d_k[c] = fmaf(d_weight, q[lane + 32 * c], d_k[c]);
                    }
            }
        }
    float* to = d_keys + blockIdx.x * key_width + kv_head * HEAD_DIM;
    for (int c = 0; c < COLUMNS; ++c)
        if (lane + 32 * c < HEAD_DIM) {
            to[lane + 32 * c] = d_k[c];
            to[kv * HEAD_DIM + lane + 32 * c] = d_v[c];
        }
}
