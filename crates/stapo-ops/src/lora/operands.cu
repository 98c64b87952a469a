// What the kernels of adapters share. They run on Hopper and read bf16 through the TMA in tiles of 64 columns; what a
// tile has beyond the end of its matrix is 0, so ranks and widths need not be whole tiles.

#define ROWS 64
#define STEP 64
#define CONSUMERS 128
#define THREADS (CONSUMERS + 32)
// Threads of the kernels that update tiles in place: two warpgroups with half of a tile's columns each.
#define UPDATERS 256
// Elements of a tile of 64 rows and 64 columns.
#define TILE (64 * 64)

// d (+)= a b: a [64, 16] and b [16, N] in shared memory. TA, TB: 1 where the operand is MN-major.
template <int TA, int TB>
__device__ __forceinline__ void wgmma_shared(float (&d)[2][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0; "
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, p, 1, 1, %11, %12; }"
        : FOUR(d, 0), FOUR(d, 1)
        : "l"(a), "l"(b), "r"((int)adds), "n"(TA), "n"(TB));
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma_shared(float (&d)[4][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %18, 0; "
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "%16, %17, p, 1, 1, %19, %20; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3)
        : "l"(a), "l"(b), "r"((int)adds), "n"(TA), "n"(TB));
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma_shared(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, %35, %36; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7)
        : "l"(a), "l"(b), "r"((int)adds), "n"(TA), "n"(TB));
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma_shared(float (&d)[12][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %50, 0; "
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47}, "
        "%48, %49, p, 1, 1, %51, %52; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7), FOUR(d,
          8), FOUR(d, 9), FOUR(d, 10), FOUR(d, 11)
        : "l"(a), "l"(b), "r"((int)adds), "n"(TA), "n"(TB));
}
template <int TA, int TB>
__device__ __forceinline__ void wgmma_shared(float (&d)[16][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63}, "
        "%64, %65, p, 1, 1, %67, %68; }"
        : FOUR(d, 0), FOUR(d, 1), FOUR(d, 2), FOUR(d, 3), FOUR(d, 4), FOUR(d, 5), FOUR(d, 6), FOUR(d, 7), FOUR(d,
          8), FOUR(d, 9), FOUR(d, 10), FOUR(d, 11), FOUR(d, 12), FOUR(d, 13), FOUR(d, 14), FOUR(d, 15)
        : "l"(a), "l"(b), "r"((int)adds), "n"(TA), "n"(TB));
}

// Which module's outputs a block computes, and which of its columns come first. Blocks take `width` columns each.
struct Place {
    int module, column;
};
__device__ __forceinline__ Place find_place(const Modules& m, int width) {
    int module = 0, tile = blockIdx.x;
    for (int tiles; module + 1 < m.n && tile >= (tiles = (m.outputs[module] + width - 1) / width); ++module) tile -= tiles;
    return {module, tile * width};
}

// The row and the column of the first of a thread's results in a product of a warpgroup with 64 rows.
__device__ __forceinline__ int result_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
__device__ __forceinline__ int result_column() { return threadIdx.x % 4 * 2; }

// Where a pair of columns lies in a swizzled tile of 64 rows, in parts of 64 columns.
__device__ __forceinline__ u32* pair_at(bf16* tile, int row, int column) {
    return (u32*)(tile + column / 64 * TILE + row * 64 + ((column % 64 / 8) ^ row % 8) * 8 + column % 8);
}
__device__ __forceinline__ float low_half(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_half(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// Copies the tile in shared memory to (row, column) of a matrix; rows and columns beyond its end are left out.
__device__ __forceinline__ void tma_store_tile(const TensorMap& map, int column, int row, const bf16* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(shared_address(from))
                 : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the copies have read shared memory.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
