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

// Most modules of a linear layer.
#define MODULES 3
// Parts of the depth of x A^T, each a chain of its own; they are added in order.
#define PARTS 4

// One TMA descriptor for each module.
struct alignas(64) Maps {
    TensorMap of[MODULES];
};

// The modules of a linear layer that have an adapter. `hidden` [T, pitch] has x A^T of module i from column hidden[i]
// on, where each module takes `apart` columns, the rank rounded up to 16, the depth of a matrix instruction.
// The module's outputs are `outputs[i]` columns of y from start[i] on. `columns` of hidden take part in a product: the
// rank, or all of them.
struct Modules {
    int n, rank, apart, columns, pitch, hidden[MODULES], start[MODULES], outputs[MODULES];
};

// d (+)= a b: a [64, 16] and b [16, N] in shared memory. TA, TB: 1 where the operand is MN-major. An instruction names each of
// its registers, so every width N is written out: N / 2 results, then the operands.
#define RESULTS_8(d, j) FOUR(d, j), FOUR(d, j + 1)
#define RESULTS_16(d, j) RESULTS_8(d, j), RESULTS_8(d, j + 2)
#define RESULTS_64(d, j) RESULTS_16(d, j), RESULTS_16(d, j + 4), RESULTS_16(d, j + 8), RESULTS_16(d, j + 12)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96 NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_SHARED(N, NAMES, A, B, ADDS, MAJOR_A, MAJOR_B, ...)                                                      \
    template <int TA, int TB>                                                                                          \
    __device__ __forceinline__ void wgmma_shared(float (&d)[N / 8][4], u64 a, u64 b, bool adds) {                      \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADDS ", 0; "                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, %" #A ", %" #B             \
                     ", p, 1, 1, %" #MAJOR_A ", %" #MAJOR_B "; }"                                                      \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"((int)adds), "n"(TA), "n"(TB));                                              \
    }
WGMMA_SHARED(8, NAMES_4, 4, 5, 6, 7, 8, FOUR(d, 0))
WGMMA_SHARED(24, NAMES_12, 12, 13, 14, 15, 16, RESULTS_8(d, 0), FOUR(d, 2))
WGMMA_SHARED(16, NAMES_8, 8, 9, 10, 11, 12, RESULTS_8(d, 0))
WGMMA_SHARED(32, NAMES_16, 16, 17, 18, 19, 20, RESULTS_16(d, 0))
WGMMA_SHARED(64, NAMES_32, 32, 33, 34, 35, 36, RESULTS_16(d, 0), RESULTS_16(d, 4))
WGMMA_SHARED(96, NAMES_48, 48, 49, 50, 51, 52, RESULTS_16(d, 0), RESULTS_16(d, 4), RESULTS_16(d, 8))
WGMMA_SHARED(128, NAMES_64, 64, 65, 66, 67, 68, RESULTS_64(d, 0))
WGMMA_SHARED(192, NAMES_96, 96, 97, 98, 99, 100, RESULTS_64(d, 0), RESULTS_16(d, 16), RESULTS_16(d, 20))

// The module that a tile of `width` columns belongs to, and the first of the columns. Each module begins with a tile.
struct Place {
    int module, column;
};
__device__ __forceinline__ Place find_place(const Modules& m, int width, int tile) {
    int module = 0;
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

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() { cluster_arrive(), cluster_wait(); }
// Two numbers in the shared memory of another block of the cluster.
__device__ __forceinline__ float2 load_of_block(const float* at, int block) {
    u32 address;
    float2 x;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(at)), "r"(block));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

// A number to the shared memory of another block of the cluster.
__device__ __forceinline__ void store_to_block(float* to, int block, float x) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(to)), "r"(block));
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// Clears the columns from `from` to `end` of the rows from `first` to `last`, which are `of` elements apart. By all of `threads`.
__device__ __forceinline__ void clear_columns(bf16* to, int of, int first, int last, int from, int end, int threads) {
    int width = (end - from) / 2;
    for (int i = threadIdx.x; i < (last - first) * width; i += threads)
        *(u32*)(to + (size_t)(first + i / width) * of + from + i % width * 2) = 0;
}

// Stores a warpgroup's results of a product with 64 rows and N columns at (row, 0) of a matrix with rows N + 2 apart.
template <int N> __device__ __forceinline__ void put_part(const float (&d)[N / 8][4], float* to, int row) {
    row += result_row();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
            *(float2*)(to + (row + half * 8) * (N + 2) + result_column() + j * 8) =
                make_float2(d[j][2 * half], d[j][2 * half + 1]);
}

// Two numbers of each of the N blocks of a cluster, added up in their order.
template <int N> __device__ __forceinline__ float2 sum_of_parts(const float* at) {
    float2 sum = load_of_block(at, 0);
#pragma unroll
    for (int p = 1; p < N; ++p) {
        float2 next = load_of_block(at, p);
        sum.x += next.x, sum.y += next.y;
    }
    return sum;
}

// Steps of the depth from `from` to `end`.
__device__ __forceinline__ int steps_between(int from, int end) { return (max(0, end - from) + STEP - 1) / STEP; }

// Where x A^T goes: hidden [n, pitch], with rows `of` elements apart, times `scale`. Columns behind the last tile are cleared.
struct Projected {
    bf16* hidden;
    int of, n, pitch;
    float scale;
};
