// Hopper's matrix instruction: four warps together, operands in shared memory as descriptors, results in registers once
// waited for. A tile [rows, DIM] lies as DIM / 64 parts of rows of 128 bytes, their 16-byte pieces swizzled.

#define PARTS (DIM / 64)

__device__ __forceinline__ u64 descriptor(const bf16* p, u32 leading_bytes, u32 stride_bytes) {
    u64 address = (shared_address(p) & 0x3ffff) >> 4;
    return address | (u64)(leading_bytes >> 4) << 16 | (u64)(stride_bytes >> 4) << 32 | (u64)1 << 62;
}

// Rows `row`.. of a tile as an operand whose depth is the columns, from `column` on.
template <int ROWS> __device__ __forceinline__ u64 by_rows(const bf16* tile, int row, int column) {
    return descriptor(tile + column / 64 * ROWS * 64 + row * 64 + column % 64, 16, 1024);
}

// All columns of a tile as an operand whose depth is the rows, from `row` on.
template <int ROWS> __device__ __forceinline__ u64 by_columns(const bf16* tile, int row) {
    return descriptor(tile + row * 64, ROWS * 128, 1024);
}

// As load_rows. A thread keeps to one column, and to one place in the swizzle, which repeats every eight rows.
template <int ROWS, int THREADS, class Row> __device__ __forceinline__ void load_swizzled(bf16* tile, int n, Row row) {
    constexpr int CHUNKS = DIM / 8, AT_ONCE = THREADS / CHUNKS;
    static_assert(AT_ONCE % 8 == 0 && ROWS % AT_ONCE == 0, "whole turns of the swizzle");
    int r = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS;
    u32 to = shared_address(tile + c / 8 * ROWS * 64 + r * 64 + ((c % 8) ^ (r % 8)) * 8);
#pragma unroll
    for (int k = 0; k < ROWS; k += AT_ONCE) copy_async(to + k * 128, row(r + k) + c * 8, r + k < n);
}

__device__ __forceinline__ void group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void group_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void group_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// What ordinary copies wrote is seen by the matrix unit.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Results stay where they are: nothing that reads them may move above this.
template <int N> __device__ __forceinline__ void settle(float (&x)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(x[j][i])::"memory");
}

// d (+)= a b, a by rows of shared memory, b by rows (its transpose is multiplied).
__device__ __forceinline__ void multiply_rows(float (&d)[8][4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0; "
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
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
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3])
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
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]),
          "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]), "+f"(d[8][3]),
          "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]),
          "+f"(d[10][0]), "+f"(d[10][1]), "+f"(d[10][2]), "+f"(d[10][3]),
          "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]),
          "+f"(d[12][0]), "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]),
          "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
          "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]),
          "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]), "+f"(d[15][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)adds));
}

template <int N> __device__ __forceinline__ void clear(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[n][i] = 0.0f;
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

// Shared memory from a multiple of 1024 bytes on, where swizzled tiles must start.
__device__ __forceinline__ bf16* aligned_memory() {
    extern __shared__ uint4 memory[];
    return (bf16*)(((u64)memory + 1023) / 1024 * 1024);
}
