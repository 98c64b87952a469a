// AdamW with moments of 8 bits in blocks of 256, each with its largest magnitude (after Dettmers et al., 2022), and
// weights in bf16 alone, with stochastic rounding so that small steps are not lost on average. A warp has one block.

#define BLOCK 256

// A first moment is a signed 7-bit number squared, with its sign. A second moment is an 8-bit number to the fourth
// power: the update divides by the second moment's root, so small second moments need the finest steps.
struct First {
    typedef signed char Code;
    static __device__ __forceinline__ float value(Code c) {
        float x = (float)c / 127.0f;
        return x * fabsf(x);
    }
    static __device__ __forceinline__ Code code(float x) { return (Code)rintf(copysignf(sqrtf(fabsf(x)), x) * 127.0f); }
};
struct Second {
    typedef unsigned char Code;
    static __device__ __forceinline__ float value(Code c) {
        float x = (float)c / 255.0f, y = x * x;
        return y * y;
    }
    static __device__ __forceinline__ Code code(float x) { return (Code)rintf(sqrtf(sqrtf(x)) * 255.0f); }
};

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

// A lane's eight elements of a block, from `at` on; elements past n are 0.
template <class M>
__device__ __forceinline__ void load_codes(const typename M::Code* codes, float scale, u64 at, u64 n, float* x) {
    typename M::Code c[8] = {};
    if (at + 8 <= n) {
        *(uint2*)c = *(const uint2*)(codes + at);
    } else {
        for (int i = 0; i < 8; ++i)
            if (at + i < n) c[i] = codes[at + i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = M::value(c[i]) * scale;
}

template <class M>
__device__ __forceinline__ void store_codes(typename M::Code* codes, float* scales, u64 block, u64 at, u64 n,
                                            const float* x) {
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(x[i]));
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) scales[block] = top;
    typename M::Code c[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) c[i] = top > 0.0f ? M::code(x[i] / top) : (typename M::Code)0;
    if (at + 8 <= n) {
        *(uint2*)(codes + at) = *(const uint2*)c;
    } else {
        for (int i = 0; i < 8; ++i)
            if (at + i < n) codes[at + i] = c[i];
    }
}

// A hash of element and step: the random bits that decide which way a weight is rounded.
__device__ __forceinline__ u32 mix(u64 at, u64 step) {
    u64 x = at ^ step * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
    x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
    return (u32)(x >> 32);
}

__device__ __forceinline__ bf16 round_stochastically(float x, u32 random) {
    u32 bits = __float_as_uint(x);
    // Infinity and NaN stay what they are.
    if ((bits & 0x7f800000u) != 0x7f800000u) bits += random & 0xffffu;
    bf16 y;
    y.bits = (u16)(bits >> 16);
    return y;
}

KERNEL adamw_step_8bit(bf16* param, const float* grad, signed char* m, float* m_scales, unsigned char* v,
                       float* v_scales, u64 n, u64 first, u64 step, const __grid_constant__ AdamW rule) {
    u64 block = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, at = block * BLOCK + threadIdx.x % 32 * 8;
    if (block * BLOCK >= n) return;
    float a[8], b[8], g[8] = {}, p[8] = {};
    load_codes<First>(m, m_scales[block], at, n, a);
    load_codes<Second>(v, v_scales[block], at, n, b);
    int left = at < n ? (int)min((u64)8, n - at) : 0;
    load8(grad + at, 0, left, left == 8, g);
    load8(param + at, 0, left, left == 8, p);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float to = updated(rule, g[i], a[i], b[i], p[i]);
        if (i < left) param[at + i] = round_stochastically(to, mix(first + at + i, step));
    }
    store_codes<First>(m, m_scales, block, at, n, a);
    store_codes<Second>(v, v_scales, block, at, n, b);
}

template <class M>
__device__ __forceinline__ void encode(const float* x, typename M::Code* codes, float* scales, u64 n) {
    u64 block = (u64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, at = block * BLOCK + threadIdx.x % 32 * 8;
    if (block * BLOCK >= n) return;
    float y[8] = {};
    for (int i = 0; i < 8; ++i)
        if (at + i < n) y[i] = x[at + i];
    store_codes<M>(codes, scales, block, at, n, y);
}

template <class M>
__device__ __forceinline__ void decode(const typename M::Code* codes, const float* scales, float* x, u64 n) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = M::value(codes[i]) * scales[i / BLOCK];
}

KERNEL encode_first(const float* x, signed char* codes, float* scales, u64 n) { encode<First>(x, codes, scales, n); }
KERNEL encode_second(const float* x, unsigned char* codes, float* scales, u64 n) {
    encode<Second>(x, codes, scales, n);
}
KERNEL decode_first(const signed char* codes, const float* scales, float* x, u64 n) {
    decode<First>(codes, scales, x, n);
}
KERNEL decode_second(const unsigned char* codes, const float* scales, float* x, u64 n) {
    decode<Second>(codes, scales, x, n);
}
