// delta [T, query heads] = sum over a head's columns of d_out * out: FlashAttention's D, which the derivative of the
// softmax subtracts. Tokens of `out` are `pitch` apart. Grid: tokens; a warp takes every fourth head.
KERNEL attention_delta_bf16(const bf16* out, int pitch, const bf16* d_out, float* delta, int query) {
    for (int head = threadIdx.x / 32; head < query; head += blockDim.x / 32) {
        size_t at = ((size_t)blockIdx.x * query + head) * HEAD_DIM, from = (size_t)blockIdx.x * pitch + head * HEAD_DIM;
        float sum = 0.0f;
        for (int i = threadIdx.x % 32 * 2; i < HEAD_DIM; i += 64) {
            u32 a = *(const u32*)(out + from + i), b = *(const u32*)(d_out + at + i);
            sum = fmaf(__uint_as_float(a << 16), __uint_as_float(b << 16), sum);
            sum = fmaf(__uint_as_float(a & 0xffff0000u), __uint_as_float(b & 0xffff0000u), sum);
        }
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) delta[(size_t)blockIdx.x * query + head] = sum;
    }
}
