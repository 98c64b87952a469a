// A head of one token in a warp. The elements i and i + HEAD_DIM / 2 are a pair, which is rotated by one angle; a lane
// holds two neighbouring pairs of every 64. HEAD_DIM is given when compiling.
#define PAIRS ((HEAD_DIM / 2 + 63) / 64 * 2)

__device__ __forceinline__ int pair_of(int p) { return threadIdx.x % 32 * 2 + p % 2 + p / 2 * 64; }

// Two neighbouring elements of a head whose half is even, and so aligned.
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
                if (i < half) x[i] = round_to<S>(h.low[q]), x[i + half] = round_to<S>(h.high[q]);
        }
    }
}

__device__ __forceinline__ float dot(const Head& a, const Head& b) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) sum = fmaf(a.high[p], b.high[p], fmaf(a.low[p], b.low[p], sum));
    return warp_sum(sum);
}

// Cosines and sines of a position: the same for all heads.
struct Rotation {
    float cos[PAIRS], sin[PAIRS];
};

__device__ __forceinline__ Rotation load_rotation(const float* cos, const float* sin, int half) {
    Rotation t;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        int i = pair_of(p);
        t.cos[p] = i < half ? cos[i] : 0.0f;
        t.sin[p] = i < half ? sin[i] : 0.0f;
    }
    return t;
}

// Rotates every pair by its angle; `sign` -1 rotates back.
__device__ __forceinline__ void rotate(Head& h, const Rotation& t, float sign) {
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        float low = h.low[p], high = h.high[p], s = sign * t.sin[p];
        h.low[p] = fmaf(-high, s, low * t.cos[p]);
        h.high[p] = fmaf(low, s, high * t.cos[p]);
    }
}

// Norms a query or a key, where its model norms heads, and rotates it. Returns the factor 1 / rms of the norm.
__device__ __forceinline__ float norm_and_rotate(Head& h, bool is_normed, const Head& weight, float eps,
                                                 const Rotation& rotation) {
    float inv = 1.0f;
    if (is_normed) {
        inv = 1.0f / sqrtf(dot(h, h) / (float)HEAD_DIM + eps);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            h.low[p] = h.low[p] * inv * weight.low[p];
            h.high[p] = h.high[p] * inv * weight.high[p];
        }
    }
    rotate(h, rotation, 1.0f);
    return inv;
}
