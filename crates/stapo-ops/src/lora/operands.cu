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

// Copies the tile in shared memory to (row, column) of a matrix; rows and columns beyond its end are left out.
__device__ __forceinline__ void tma_store_tile(const TensorMap& map, int column, int row, const bf16* from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column),
                 "r"(row), "r"(shared_address(from))
                 : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the copies have read shared memory.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

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
