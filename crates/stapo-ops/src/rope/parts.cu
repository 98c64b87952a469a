// Norms of all query heads and all key heads of a token together, and rotations of the first dimensions of a head alone.
// Rows are [query heads, key heads, value heads] of `dim` columns.

// out = x inv weight for the queries and the keys of a token, a block each; values are copied. inv_rms [T, query + kv heads] has
// the same number for all heads of a kind.
template <class S>
__device__ __forceinline__ void projection_norm(const S* raw, S* out, const S* q_weight, const S* k_weight,
                                                float* inv_rms, int query, int kv, int dim, float eps) {
    size_t row = (size_t)blockIdx.x * (query + 2 * kv) * dim;
    int first = 0;
    for (int kind = 0; kind < 2; ++kind) {
        int heads = kind == 0 ? query : kv, width = heads * dim;
        const S *x = raw + row + first * dim, *weight = kind == 0 ? q_weight : k_weight;
        float sum = 0.0f;
        for (int i = threadIdx.x; i < width; i += blockDim.x) sum = fmaf(widen(x[i]), widen(x[i]), sum);
        float inv = 1.0f / sqrtf(block_sum(sum) / (float)width + eps);
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            out[row + first * dim + i] = round_to<S>(widen(x[i]) * inv * widen(weight[i]));
        for (int i = threadIdx.x; i < heads; i += blockDim.x)
            inv_rms[(size_t)blockIdx.x * (query + kv) + first + i] = inv;
        first += heads;
    }
    for (int i = threadIdx.x; i < kv * dim; i += blockDim.x) out[row + first * dim + i] = raw[row + first * dim + i];
}

// d [T, pitch] holds the gradient of the norm's output and becomes that of its input. A block takes consecutive tokens;
// parts [blocks, (query + kv) dim], where given, are its sums for the gradients of the weights.
template <class S>
__device__ __forceinline__ void projection_norm_backward(const S* raw, S* d, const S* q_weight, const S* k_weight,
                                                         const float* inv_rms, float* parts, int tokens, int query,
                                                         int kv, int dim, int pitch) {
    int per_block = (tokens + gridDim.x - 1) / gridDim.x, normed = query + kv;
    int end = min(tokens, ((int)blockIdx.x + 1) * per_block);
    float* sums = parts + (size_t)blockIdx.x * normed * dim;
    for (int i = threadIdx.x; i < normed * dim; i += blockDim.x) sums[i] = 0.0f;
    for (int token = blockIdx.x * per_block; token < end; ++token) {
        int first = 0;
        for (int kind = 0; kind < 2; ++kind) {
            int heads = kind == 0 ? query : kv, width = heads * dim;
            const S *x = raw + (size_t)token * (query + 2 * kv) * dim + first * dim;
            const S* weight = kind == 0 ? q_weight : k_weight;
            S* d_row = d + (size_t)token * pitch + first * dim;
            float inv = inv_rms[(size_t)token * normed + first], sum = 0.0f;
            for (int i = threadIdx.x; i < width; i += blockDim.x) {
                float normed_x = widen(x[i]) * inv, d_out = widen(d_row[i]);
                sums[first * dim + i] += d_out * normed_x;
                sum = fmaf(d_out * widen(weight[i]), normed_x, sum);
            }
            float projection = block_sum(sum) / (float)width;
            for (int i = threadIdx.x; i < width; i += blockDim.x) {
                float normed_x = widen(x[i]) * inv, g = widen(d_row[i]) * widen(weight[i]);
                d_row[i] = round_to<S>(inv * fmaf(-normed_x, projection, g));
            }
            first += heads;
        }
    }
}

// Rotates the first `rotary` dimensions of each query and key head by its angles, with `sign` -1 back; all else is copied.
template <class S>
__device__ __forceinline__ void rotate_part(const S* raw, S* out, const float* cos, const float* sin,
                                            const u32* positions, int query, int kv, int dim, int rotary, int pitch,
                                            float sign) {
    size_t token = blockIdx.x;
    int heads = query + 2 * kv, half = rotary / 2;
    const S* row = raw + token * heads * dim;
    size_t place = (size_t)positions[token] * half;
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) {
        int head = i / dim, column = i % dim;
        S x = row[i];
        if (head < query + kv && column < rotary) {
            int pair = column % half;
            float c = cos[place + pair], s = sign * sin[place + pair];
            float other = widen(row[column < half ? i + half : i - half]);
            x = round_to<S>(fmaf(column < half ? -other : other, s, widen(x) * c));
        }
        out[token * pitch + i] = x;
    }
}

#define PARTS(S)                                                                                                       \
    KERNEL projection_norm_##S(const S* raw, S* out, const S* q_weight, const S* k_weight, float* inv_rms, int query,  \
                               int kv, int dim, float eps) {                                                           \
        projection_norm(raw, out, q_weight, k_weight, inv_rms, query, kv, dim, eps);                                   \
    }                                                                                                                  \
    KERNEL projection_norm_backward_##S(const S* raw, S* d, const S* q_weight, const S* k_weight,                      \
                                        const float* inv_rms, float* parts, int tokens, int query, int kv, int dim,    \
                                        int pitch) {                                                                   \
        projection_norm_backward(raw, d, q_weight, k_weight, inv_rms, parts, tokens, query, kv, dim, pitch);           \
    }                                                                                                                  \
    KERNEL rotate_part_##S(const S* raw, S* out, const float* cos, const float* sin, const u32* positions, int query,  \
                           int kv, int dim, int rotary, int pitch, float sign) {                                       \
        rotate_part(raw, out, cos, sin, positions, query, kv, dim, rotary, pitch, sign);                               \
    }

PARTS(float)
PARTS(bf16)
