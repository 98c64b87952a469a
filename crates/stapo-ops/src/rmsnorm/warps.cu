// rmsnorm_forward_add of many rows, a warp each: the lanes do one after the other what the warps of a block do for a row, in the same
// order, and so to the same bits. There is no barrier, and all loads of a row are under way at once. Rows have up to 256 CHUNKS
// columns, a multiple of 256.
template <int CHUNKS>
__device__ __forceinline__ void forward_add_by_warps(const bf16* x, const bf16* addend, const bf16* weight, bf16* sum,
                                                     bf16* out, int pitch, float* inv_rms, int rows, int width,
                                                     float eps) {
    int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, n = width / 256;
    if (row >= rows) return;
    size_t first = (size_t)row * width + 8 * lane;
    uint4 v[CHUNKS], d[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (c < n) v[c] = *(const uint4*)(x + first + 256 * c), d[c] = *(const uint4*)(addend + first + 256 * c);
    float total = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c >= n) continue;
        u32 *a = &v[c].x, *b = &d[c].x;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            a[i] = pack(low_half(a[i]) + low_half(b[i]), high_half(a[i]) + high_half(b[i]));
            squares = fmaf(low_half(a[i]), low_half(a[i]), squares);
            squares = fmaf(high_half(a[i]), high_half(a[i]), squares);
        }
        *(uint4*)(sum + first + 256 * c) = v[c];
        squares = warp_sum(squares);
        total = c == 0 ? squares : total + squares;
    }
    float inv = 1.0f / sqrtf(total / (float)width + eps);
    if (lane == 0) inv_rms[row] = inv;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (c >= n) continue;
        uint4 w = *(const uint4*)(weight + 8 * lane + 256 * c);
        u32 *a = &v[c].x, *b = &w.x;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            a[i] = pack(low_half(a[i]) * inv * low_half(b[i]), high_half(a[i]) * inv * high_half(b[i]));
        *(uint4*)(out + (size_t)row * pitch + 8 * lane + 256 * c) = v[c];
    }
}

#define BY_WARPS(CHUNKS)                                                                                               \
    KERNEL __launch_bounds__(256)                                                                                      \
        rmsnorm_forward_add_by_warps_##CHUNKS(const bf16* x, const bf16* addend, const bf16* weight, bf16* sum,        \
                                              bf16* out, int pitch, float* inv_rms, int rows, int width, float eps) {  \
        forward_add_by_warps<CHUNKS>(x, addend, weight, sum, out, pitch, inv_rms, rows, width, eps);                   \
    }
BY_WARPS(8)
BY_WARPS(16)
