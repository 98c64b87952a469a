// One warp per token and head; a lane holds two neighbouring pairs of every 64. HEAD_DIM is given when compiling.
#define PAIRS ((HEAD_DIM / 2 + 63) / 64 * 2)

__device__ __forceinline__ int pair_of(int p) { return threadIdx.x % 32 * 2 + p % 2 + p / 2 * 64; }

// Two neighbours of a head, whose halves have an even width.
__device__ __forceinline__ void load2(const bf16* x, float* a, float* b) {
    u32 both = *(const u32*)x;
    *a = __uint_as_float(both << 16), *b = __uint_as_float(both & 0xffff0000u);
}
__device__ __forceinline__ void load2(const float* x, float* a, float* b) { *a = x[0], *b = x[1]; }
__device__ __forceinline__ void store2(bf16* x, float a, float b) { *(u32*)x = pack(a, b); }
__device__ __forceinline__ void store2(float* x, float a, float b) { x[0] = a, x[1] = b; }

struct Head {
    float low[PAIRS], high[PAIRS];
};

template <class S> __device__ __forceinline__ Head load_head(const S* x, int half) {
    Head h;
#pragma unroll
    for (int p = 0; p < PAIRS; p += 2) {
        int i = pair_of(p);
        h.low[p] = h.low[p + 1] = h.high[p] = h.high[p + 1] = 0.0f;
        if (half % 2 == 0) {
            if (i < half) {
                load2(x + i, &h.low[p], &h.low[p + 1]);
                load2(x + i + half, &h.high[p], &h.high[p + 1]);
            }
        } else {
#pragma unroll
            for (int q = p; q < p + 2; ++q, ++i)
                if (i < half) h.low[q] = widen(x[i]), h.high[q] = widen(x[i + half]);
        }
    }
    return h;
}

template <class S> __device__ __forceinline__ void store_head(S* x, int half, const Head& h) {
#pragma unroll
    for (int p = 0; p < PAIRS; p += 2) {
        int i = pair_of(p);
        if (half % 2 == 0) {
            if (i < half) {
                store2(x + i, h.low[p], h.low[p + 1]);
                store2(x + i + half, h.high[p], h.high[p + 1]);
            }
        } else {
#pragma unroll
            for (int q = p; q < p + 2; ++q, ++i)
                if (i < half) x[i] = narrow<S>(h.low[q]), x[i + half] = narrow<S>(h.high[q]);
        }
    }
}

__device__ __forceinline__ float dot(const Head& a, const Head& b) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) sum = fmaf(a.high[p], b.high[p], fmaf(a.low[p], b.low[p], sum));
    return warp_sum(sum);
}

// cos and sin of a position: the same for all its heads.
struct Turn {
    float cos[PAIRS], sin[PAIRS];
};

__device__ __forceinline__ Turn load_turn(const float* cos, const float* sin, int half) {
    Turn t;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        int i = pair_of(p);
        t.cos[p] = i < half ? cos[i] : 0.0f;
        t.sin[p] = i < half ? sin[i] : 0.0f;
    }
    return t;
}

// Rotates every pair by its angle; `sign` -1 rotates back.
__device__ __forceinline__ void turn(Head& h, const Turn& t, float sign) {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        float low = h.low[p], high = h.high[p], s = sign * t.sin[p];
        h.low[p] = fmaf(-high, s, low * t.cos[p]);
        h.high[p] = fmaf(low, s, high * t.cos[p]);
    }
}

// Grid: tokens. norms: 0 where heads have no norm.
template <class S>
__device__ __forceinline__ void forward(const S* __restrict__ raw, S* __restrict__ out, const float* __restrict__ cos,
                                        const float* __restrict__ sin, const u32* __restrict__ positions,
                                        const S* __restrict__ q_weight, const S* __restrict__ k_weight, float* inv_rms, int query, int kv,
                                        float eps) {
    constexpr int half = HEAD_DIM / 2, dim = HEAD_DIM;
    int heads = query + 2 * kv, normed = query + kv;
    size_t token = blockIdx.x, row = token * heads * dim;
    size_t place = (size_t)positions[token] * half;
    Turn angles = load_turn(cos + place, sin + place, half);
#pragma unroll 4
    for (int head = threadIdx.x / 32; head < heads; head += blockDim.x / 32) {
        Head h = load_head(raw + row + head * dim, half);
        if (head < normed) {
            if (q_weight) {
                float inv = 1.0f / sqrtf(dot(h, h) / (float)dim + eps);
                Head w = load_head(head < query ? q_weight : k_weight, half);
#pragma unroll
                for (int p = 0; p < PAIRS; ++p) {
                    h.low[p] = h.low[p] * inv * w.low[p];
                    h.high[p] = h.high[p] * inv * w.high[p];
                }
                if (threadIdx.x % 32 == 0) inv_rms[token * normed + head] = inv;
            }
            turn(h, angles, 1.0f);
        }
        store_head(out + row + head * dim, half, h);
    }
}

// Blocks take consecutive tokens. parts [blocks, 2, dim]: each block's gradient of the query and the key norm.
template <class S>
__device__ __forceinline__ void backward(const S* __restrict__ d_out, S* __restrict__ d_raw,
                                         const float* __restrict__ cos, const float* __restrict__ sin,
                                         const u32* __restrict__ positions, const S* __restrict__ raw,
                                         const S* __restrict__ q_weight, const S* __restrict__ k_weight,
                                         const float* __restrict__ inv_rms, float* parts, int tokens, int query, int kv) {
    extern __shared__ float sums[];
    constexpr int half = HEAD_DIM / 2, dim = HEAD_DIM;
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
        Turn angles = load_turn(cos + place, sin + place, half);
        for (int head = warp; head < heads; head += blockDim.x / 32) {
            Head d = load_head(d_out + row + head * dim, half);
            if (head < normed) {
                turn(d, angles, -1.0f);
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
                    float pull = dot(g, x) / (float)dim;
#pragma unroll
                    for (int p = 0; p < PAIRS; ++p) {
                        d.low[p] = inv * fmaf(-x.low[p], pull, g.low[p]);
                        d.high[p] = inv * fmaf(-x.high[p], pull, g.high[p]);
                    }
                }
            }
            store_head(d_raw + row + head * dim, half, d);
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
                            const S* q_weight, const S* k_weight, float* inv_rms, int query, int kv, float eps) {      \
        forward<S>(raw, out, cos, sin, positions, q_weight, k_weight, inv_rms, query, kv, eps);                        \
    }                                                                                                                  \
    KERNEL __launch_bounds__(256, 4)                                                                                   \
    rope_backward_##S(const S* d_out, S* d_raw, const float* cos, const float* sin, const u32* positions,              \
                      const S* raw, const S* q_weight, const S* k_weight, const float* inv_rms, float* parts,          \
                      int tokens, int query, int kv) {                                                                 \
        backward<S>(d_out, d_raw, cos, sin, positions, raw, q_weight, k_weight, inv_rms, parts, tokens, query, kv);    \
    }

ROPE(float)
ROPE(bf16)
