// What kernels that finish heads share: where heads go, and norm and rotation by eight lanes a head. HEAD_DIM is given when
// compiling.

// Where keys and values go, instead of to the rows of the output: the slots of a paged cache, keys and values [blocks, kv heads,
// block_size, HEAD_DIM]. `slots` is 0 where all go to the output.
template <class S> struct Stored {
    const u32* slots;
    S *keys, *values;
    int block_size;
    u32 n_slots;

    __device__ __forceinline__ S* at(u32 slot, int head, int kv) const {
        if (slot >= n_slots) __trap();
        bool is_key = head < kv;
        size_t row = ((size_t)(slot / block_size) * kv + (is_key ? head : head - kv)) * block_size + slot % block_size;
        return (is_key ? keys : values) + row * HEAD_DIM;
    }
};

#if HEAD_DIM == 128

// Sixteen elements of a head in a lane: eight from `at` on, and those half a head behind.
struct Eights {
    float low[8], high[8];
};

__device__ __forceinline__ Eights load_eights(const bf16* x, int at) {
    Eights e;
    load8(x, at, HEAD_DIM, true, e.low);
    load8(x, at + HEAD_DIM / 2, HEAD_DIM, true, e.high);
    return e;
}

__device__ __forceinline__ void store_eights(bf16* x, int at, const Eights& e) {
    store8(x, at, HEAD_DIM, true, e.low);
    store8(x, at + HEAD_DIM / 2, HEAD_DIM, true, e.high);
}

// Cosines and sines of a lane's elements: the same for all heads of a token.
struct Angles {
    float cos[8], sin[8];
};

__device__ __forceinline__ Angles load_angles(const float* cos, const float* sin) {
    Angles t;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        *(float4*)(t.cos + i) = *(const float4*)(cos + i);
        *(float4*)(t.sin + i) = *(const float4*)(sin + i);
    }
    return t;
}

// The factor 1 / rms of a head's norm, by all lanes of a warp. A lane has what four lanes of a warp with one head have, and sums
// are added as theirs are in head.cu, so the bits are the same.
__device__ __forceinline__ float inv_rms_of(const Eights& h, float eps) {
    float sums[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        sums[j] = fmaf(h.high[2 * j], h.high[2 * j], fmaf(h.low[2 * j], h.low[2 * j], 0.0f));
        sums[j] = fmaf(h.high[2 * j + 1], h.high[2 * j + 1], fmaf(h.low[2 * j + 1], h.low[2 * j + 1], sums[j]));
    }
#pragma unroll
    for (int step = 4; step > 0; step >>= 1)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], step);
    float sum = (sums[0] + sums[2]) + (sums[1] + sums[3]);
    return 1.0f / sqrtf(sum / (float)HEAD_DIM + eps);
}

__device__ __forceinline__ void scale(Eights& h, float inv, const Eights& weight) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        h.low[i] = h.low[i] * inv * weight.low[i], h.high[i] = h.high[i] * inv * weight.high[i];
}

__device__ __forceinline__ void rotate(Eights& h, const Angles& t) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float low = h.low[i], high = h.high[i];
        h.low[i] = fmaf(-high, t.sin[i], low * t.cos[i]);
        h.high[i] = fmaf(low, t.sin[i], high * t.cos[i]);
    }
}

#endif
