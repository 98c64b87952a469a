// Eight elements as they are stored, loaded ahead of their use. They are kept as words because the compiler gives each
// 16-bit value a register of its own.
template <class S> struct Eight {
    u32 word[2 * sizeof(S)];
};

template <class S> __device__ __forceinline__ Eight<S> fetch8(const S* row, int at, int n, bool whole) {
    Eight<S> x = {};
    if (whole) {
#pragma unroll
        for (int i = 0; i < 2 * (int)sizeof(S); i += 4) {
            uint4 v = *(const uint4*)((const u32*)(row + at) + i);
            x.word[i] = v.x, x.word[i + 1] = v.y, x.word[i + 2] = v.z, x.word[i + 3] = v.w;
        }
    } else {
        float y[8];
        load8(row, at, n, false, y);
#pragma unroll
        for (int i = 0; i < 2 * (int)sizeof(S); ++i)
            x.word[i] = sizeof(S) == 2 ? pack(y[2 * i % 8], y[(2 * i + 1) % 8]) : __float_as_uint(y[i % 8]);
    }
    return x;
}

template <class S> __device__ __forceinline__ float widen_at(const Eight<S>& x, int i) {
    if (sizeof(S) == 4) return __uint_as_float(x.word[i % (2 * sizeof(S))]);
    u32 both = x.word[i / 2];
    return __uint_as_float(i % 2 ? both & 0xffff0000u : both << 16);
}

