// A warp takes a head at a time. Grid: tokens. The weights are 0 where heads have no norm.
template <class S>
__device__ __forceinline__ void forward(const S* __restrict__ raw, S* __restrict__ out, const float* __restrict__ cos,
                                        const float* __restrict__ sin, const u32* __restrict__ positions,
                                        const S* __restrict__ q_weight, const S* __restrict__ k_weight, float* inv_rms,
                                        int query, int kv, float eps, const Stored<S>& stored) {
    constexpr int half = HEAD_DIM / 2, dim = HEAD_DIM;
    int heads = query + 2 * kv, normed = query + kv;
    u32 slot = stored.slots ? stored.slots[blockIdx.x] : 0;
    size_t token = blockIdx.x, row = token * heads * dim;
    size_t place = (size_t)positions[token] * half;
    Rotation rotation = load_rotation(cos + place, sin + place, half);
#pragma unroll 4
    for (int head = threadIdx.x / 32; head < heads; head += blockDim.x / 32) {
        Head h = load_head(raw + row + head * dim, half);
        if (head < normed) {
            Head weight = {};
            if (q_weight) weight = load_head(head < query ? q_weight : k_weight, half);
            float inv = norm_and_rotate(h, q_weight, weight, eps, rotation);
            if (q_weight && threadIdx.x % 32 == 0) inv_rms[token * normed + head] = inv;
        }
        bool is_stored = stored.slots && head >= query;
        store_head(is_stored ? stored.at(slot, head - query, kv) : out + row + head * dim, half, h);
    }
}

#if HEAD_DIM == 128

// As `forward`, to the same bits, with 16 bytes of each half of a head in a lane. All rows begin at multiples of 16 bytes.
__device__ __forceinline__ void forward_eights(const bf16* raw, bf16* out, const float* cos, const float* sin,
                                               const u32* positions, const bf16* q_weight, const bf16* k_weight,
                                               float* inv_rms, int query, int kv, float eps,
                                               const Stored<bf16>& stored) {
    constexpr int half = HEAD_DIM / 2, dim = HEAD_DIM;
    int heads = query + 2 * kv, normed = query + kv, at = threadIdx.x % 8 * 8;
    u32 slot = stored.slots ? stored.slots[blockIdx.x] : 0;
    size_t token = blockIdx.x, row = token * heads * dim, place = (size_t)positions[token] * half + at;
    // Whole warps take every turn, as sums need all lanes.
    for (int first = threadIdx.x / 32 * 4; first < heads; first += blockDim.x / 8) {
        int head = first + threadIdx.x % 32 / 8;
        bool is_there = head < heads;
        Eights h = load_eights(raw + row + (is_there ? head : first) * dim, at);
        // Behind the loads of the head, which do not wait for the position.
        Angles angles = load_angles(cos + place, sin + place);
        if (q_weight) {
            float inv = inv_rms_of(h, eps);
            if (head < normed) {
                scale(h, inv, load_eights(head < query ? q_weight : k_weight, at));
                if (at == 0) inv_rms[token * normed + head] = inv;
            }
        }
        if (head < normed) rotate(h, angles);
        if (!is_there) continue;
        bool is_stored = stored.slots && head >= query;
        store_eights(is_stored ? stored.at(slot, head - query, kv) : out + row + head * dim, at, h);
    }
}

KERNEL __launch_bounds__(256, 4)
    rope_forward_eights(const bf16* raw, bf16* out, const float* cos, const float* sin, const u32* positions,
                        const bf16* q_weight, const bf16* k_weight, float* inv_rms, int query, int kv, float eps,
                        const __grid_constant__ Stored<bf16> stored) {
    forward_eights(raw, out, cos, sin, positions, q_weight, k_weight, inv_rms, query, kv, eps, stored);
}

#endif

struct Shape {
    int tokens, query, kv;
    // From one token of d_raw to the next.
    int pitch;
};

// A block takes consecutive tokens. parts [blocks, 2, dim]: each block's sums for the gradients of the query and the
// key norm's weights.
template <class S>
__device__ __forceinline__ void backward(const S* __restrict__ d_out, S* __restrict__ d_raw,
                                         const float* __restrict__ cos, const float* __restrict__ sin,
                                         const u32* __restrict__ positions, const S* __restrict__ raw,
                                         const S* __restrict__ q_weight, const S* __restrict__ k_weight,
                                         const float* __restrict__ inv_rms, float* parts, const Shape& shape) {
    extern __shared__ float sums[];
    constexpr int half = HEAD_DIM / 2, dim = HEAD_DIM;
    int tokens = shape.tokens, query = shape.query, kv = shape.kv;
    int heads = query + 2 * kv, normed = query + kv, warp = threadIdx.x / 32;
    Head weight_sums[2];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p)
        weight_sums[0].low[p] = weight_sums[0].high[p] = weight_sums[1].low[p] = weight_sums[1].high[p] = 0.0f;
    int per_block = (tokens + gridDim.x - 1) / gridDim.x;
    int end = min(tokens, ((int)blockIdx.x + 1) * per_block);
    for (int token = blockIdx.x * per_block; token < end; ++token) {
        size_t row = (size_t)token * heads * dim;
        size_t place = (size_t)positions[token] * half;
        Rotation rotation = load_rotation(cos + place, sin + place, half);
        for (int head = warp; head < heads; head += blockDim.x / 32) {
            Head d = load_head(d_out + row + head * dim, half);
            if (head < normed) {
                rotate(d, rotation, -1.0f);
                if (q_weight) {
                    float inv = inv_rms[(size_t)token * normed + head];
                    Head x = load_head(raw + row + head * dim, half);
                    Head w = load_head(head < query ? q_weight : k_weight, half), g;
                    bool is_query = head < query;
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) {
                        x.low[p] *= inv, x.high[p] *= inv;
                        g.low[p] = d.low[p] * w.low[p], g.high[p] = d.high[p] * w.high[p];
                        float a = d.low[p] * x.low[p], b = d.high[p] * x.high[p];
                        weight_sums[0].low[p] += is_query ? a : 0.0f, weight_sums[0].high[p] += is_query ? b : 0.0f;
                        weight_sums[1].low[p] += is_query ? 0.0f : a, weight_sums[1].high[p] += is_query ? 0.0f : b;
                    }
                    float projection = dot(g, x) / (float)dim;
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) {
                        d.low[p] = inv * fmaf(-x.low[p], projection, g.low[p]);
                        d.high[p] = inv * fmaf(-x.high[p], projection, g.high[p]);
                    }
                }
            }
            store_head(d_raw + (size_t)token * shape.pitch + head * dim, half, d);
        }
    }
    if (!q_weight) return;
    for (int k = 0; k < 2; ++k) store_head(sums + (warp * 2 + k) * dim, half, weight_sums[k]);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * dim; i += blockDim.x) {
        float sum = 0.0f;
        for (int w = 0; w < (int)blockDim.x / 32; ++w) sum += sums[w * 2 * dim + i];
        parts[(size_t)blockIdx.x * 2 * dim + i] = sum;
    }
}

#define ROPE(S)                                                                                                        \
    KERNEL rope_forward_##S(const S* raw, S* out, const float* cos, const float* sin, const u32* positions,            \
                            const S* q_weight, const S* k_weight, float* inv_rms, int query, int kv, float eps,        \
                            const __grid_constant__ Stored<S> stored) {                                                \
        forward<S>(raw, out, cos, sin, positions, q_weight, k_weight, inv_rms, query, kv, eps, stored);                \
    }                                                                                                                  \
    KERNEL __launch_bounds__(256, 4)                                                                                   \
        rope_backward_##S(const S* d_out, S* d_raw, const float* cos, const float* sin, const u32* positions,          \
                          const S* raw, const S* q_weight, const S* k_weight, const float* inv_rms, float* parts,      \
                          const __grid_constant__ Shape shape) {                                                       \
        backward<S>(d_out, d_raw, cos, sin, positions, raw, q_weight, k_weight, inv_rms, parts, shape);                \
    }

ROPE(float)
ROPE(bf16)
