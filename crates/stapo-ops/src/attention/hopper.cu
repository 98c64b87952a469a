// What the attention kernels with Hopper's matrix instruction share: a tile [rows, DIM] lies as DIM / 64 parts.

#define PARTS (DIM / 64)

// As load_rows. A thread keeps to one column, and to one place in the swizzle, which repeats every eight rows.
template <int ROWS, int THREADS, class Row> __device__ __forceinline__ void load_swizzled(bf16* tile, int n, Row row) {
    constexpr int CHUNKS = DIM / 8, AT_ONCE = THREADS / CHUNKS;
    static_assert(AT_ONCE % 8 == 0 && ROWS % AT_ONCE == 0, "whole turns of the swizzle");
    int r = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS;
    u32 to = shared_address(tile + c / 8 * ROWS * 64 + r * 64 + ((c % 8) ^ (r % 8)) * 8);
#pragma unroll
    for (int k = 0; k < ROWS; k += AT_ONCE) cp_async(to + k * 128, row(r + k) + c * 8, r + k < n);
}

// d (+)= a b, a by rows of shared memory, b by rows (its transpose is multiplied).
__device__ __forceinline__ void multiply_rows(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7)
        : "l"(a), "l"(b), "r"((int)adds));
}

// d += a b, a in registers, b by columns of shared memory.
__device__ __forceinline__ void multiply_columns(float (&d)[8][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

__device__ __forceinline__ void multiply_columns(float (&d)[16][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7),
          FOUR(d, 8), FOUR(d, 9), FOUR(d, 10), FOUR(d, 11), FOUR(d, 12), FOUR(d, 13), FOUR(d, 14), FOUR(d, 15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

// 64 results of a row as four operands of 16.
__device__ __forceinline__ void pack_operands(u32 (&a)[KEYS / 16][4], const float (&x)[KEYS / 8][4]) {
#pragma unroll
    for (int c = 0; c < KEYS / 16; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[c][i] = pack(x[2 * c + i / 2][i % 2 * 2], x[2 * c + i / 2][i % 2 * 2 + 1]);
}

template <int N>
__device__ __forceinline__ void store_row(bf16* to, const float (&x)[N][4], int half, float scale) {
#pragma unroll
    for (int j = 0; j < N; ++j)
        *(u32*)(to + j * 8 + threadIdx.x % 4 * 2) = pack(x[j][2 * half] * scale, x[j][2 * half + 1] * scale);
}
