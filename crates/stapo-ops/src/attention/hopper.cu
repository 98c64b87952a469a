// What the attention kernels with Hopper's matrix instruction (wgmma) share. HEAD_DIM is 64, 96, 128 or 256.

// A tile [rows, DIM] lies as PARTS parts of 64 columns, one after another, swizzled as wgmma.cu says. Columns from DIM to
// COLUMNS hold anything, and no result depends on them.
#define PARTS ((DIM + 63) / 64)
#define COLUMNS (PARTS * 64)

struct SwizzledTile {
    static constexpr int WIDTH = COLUMNS;

    // wgmma reads through the async proxy: it sees what cp.async wrote after this fence.
    static __device__ __forceinline__ void fence() { fence_async_proxy_shared(); }

    // As PaddedTile::load. A thread keeps to one column.
    template <int ROWS, int THREADS, class Row>
    static __device__ __forceinline__ void load(bf16* tile, int n, Row row) {
        constexpr int CHUNKS = COLUMNS / 8, AT_ONCE = THREADS / CHUNKS;
        static_assert(THREADS % CHUNKS == 0 && ROWS % AT_ONCE == 0, "whole rows at once");
        int r = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS;
        u32 to = shared_address(tile + c / 8 * ROWS * 64 + r * 64);
        bool has_column = COLUMNS == HEAD_DIM || c * 8 < HEAD_DIM;
#pragma unroll
        for (int k = 0; k < ROWS; k += AT_ONCE)
            cp_async(to + k * 128 + ((c % 8) ^ (r + k) % 8) * 16, row(r + k) + c * 8, has_column && r + k < n);
    }
};

#define FOUR_SET(d, j) "=f"(d[j][0]), "=f"(d[j][1]), "=f"(d[j][2]), "=f"(d[j][3])

// d = a b^T as wgmma_shared below. The compiler must know that d has no value before: otherwise it would keep registers for
// that value.
__device__ __forceinline__ void wgmma_shared_set(float (&d)[8][4], u64 a, u64 b) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, 0, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : FOUR_SET(d, 0), FOUR_SET(d, 1), FOUR_SET(d, 2), FOUR_SET(d, 3), FOUR_SET(d, 4), FOUR_SET(d, 5),
          FOUR_SET(d, 6), FOUR_SET(d, 7)
        : "l"(a), "l"(b));
}

// d (+)= a b^T: a [64, 16] and b [64, 16] are K-major operands in shared memory.
__device__ __forceinline__ void wgmma_shared(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7)
        : "l"(a), "l"(b), "r"((int)adds));
}

// d (+)= a b for the fragments of d from J on: a [64, 16] in registers, b [16, 32], [16, 64] or [16, 128] an MN-major operand in
// shared memory.
template <int J, int N>
__device__ __forceinline__ void wgmma_registers_32(float (&d)[N][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %21, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, p, 1, 1, 1; }"
        : FOUR(d, J), FOUR(d, J + 1), FOUR(d, J + 2), FOUR(d, J + 3)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

template <int J, int N>
__device__ __forceinline__ void wgmma_registers_64(float (&d)[N][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
        : FOUR(d, J), FOUR(d, J + 1), FOUR(d, J + 2), FOUR(d, J + 3), FOUR(d, J + 4), FOUR(d, J + 5), FOUR(d, J + 6),
          FOUR(d, J + 7)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

template <int J, int N>
__device__ __forceinline__ void wgmma_registers_128(float (&d)[N][4], const u32* a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %69, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
        : FOUR(d, J), FOUR(d, J + 1), FOUR(d, J + 2), FOUR(d, J + 3), FOUR(d, J + 4), FOUR(d, J + 5), FOUR(d, J + 6),
          FOUR(d, J + 7), FOUR(d, J + 8), FOUR(d, J + 9), FOUR(d, J + 10), FOUR(d, J + 11), FOUR(d, J + 12),
          FOUR(d, J + 13), FOUR(d, J + 14), FOUR(d, J + 15)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

// d (+)= a b: a [64, 16] in registers, b 16 rows of a tile of ROWS.
template <int ROWS>
__device__ __forceinline__ void wgmma_registers(float (&d)[DIM / 8][4], const u32* a, u64 b, bool adds) {
#if HEAD_DIM == 64
    wgmma_registers_64<0>(d, a, b, adds);
#elif HEAD_DIM == 96
    wgmma_registers_64<0>(d, a, b, adds);
    wgmma_registers_32<8>(d, a, advance(b, ROWS * 128), adds);
#elif HEAD_DIM == 128
    wgmma_registers_128<0>(d, a, b, adds);
#else
    wgmma_registers_128<0>(d, a, b, adds);
    wgmma_registers_128<16>(d, a, advance(b, 2 * ROWS * 128), adds);
#endif
}

// The first of the two rows whose results a thread holds, among the 64 rows of its warpgroup (four warps).
__device__ __forceinline__ int warpgroup_row() { return threadIdx.x / 32 % 4 * 16 + fragment_row(0); }

// Starts s = a b^T: 64 rows from `row` on of a tile of ROWS against a tile of 64 rows. The caller fences and waits.
template <int ROWS>
__device__ __forceinline__ void start_rows_product(float (&s)[8][4], const bf16* a, int row, const bf16* b) {
    u64 left = k_major_operand<ROWS>(a, row, 0), right = k_major_operand<64>(b, 0, 0);
    wgmma_shared_set(s, left, right);
#pragma unroll
    for (int c = 16; c < DIM; c += 16)
        wgmma_shared(s, advance(left, column_bytes<ROWS>(c)), advance(right, column_bytes<64>(c)), true);
    wgmma_commit();
}

// Starts d (+)= a b: 64 rows in registers against the columns of a tile of 64 rows. The caller waits.
__device__ __forceinline__ void start_columns_product(float (&d)[DIM / 8][4], const u32 (&a)[4][4], const bf16* b,
                                                      bool adds = true) {
    fence_registers(d);
    wgmma_fence();
    u64 right = mn_major_operand<64>(b, 0);
#pragma unroll
    for (int c = 0; c < 4; ++c) wgmma_registers<64>(d, a[c], advance(right, c * 16 * 128), adds || c > 0);
    wgmma_commit();
}

// Registers of a thread of the producer's and of the consumers' warpgroups: together those of a multiprocessor.
template <int N> __device__ __forceinline__ void take_producer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ __forceinline__ void take_consumer_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
