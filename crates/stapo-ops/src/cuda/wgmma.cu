// Hopper's matrix instruction (wgmma): four warps, a warpgroup, multiply together. Operands lie in shared memory and
// are given as descriptors (the left one may lie in registers); results are in registers after wgmma_wait. A tile lies
// as parts of 64 columns, in rows of 128 bytes whose 16-byte chunks are swizzled: chunk c of row r lies at the place of
// chunk c ^ (r % 8).

// Four results of an instruction, as operands of inline assembly.
#define FOUR(d, j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])

// A number that is the same in all lanes, in a form that tells the compiler so: it then lies in a uniform register, from
// which wgmma takes its descriptors. The compiler uses such registers only where it sees that whole warps take every branch
// and every turn of a loop together; elsewhere each instruction waits for its descriptor's way from ordinary registers.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ u64 descriptor(const bf16* p, u32 leading_bytes, u32 stride_bytes) {
    u64 address = (shared_address(p) & 0x3ffff) >> 4;
    return address | (u64)(leading_bytes >> 4) << 16 | (u64)(stride_bytes >> 4) << 32 | (u64)1 << 62;
}

// K-major operand: rows from `row` on of a tile of ROWS, whose columns from `column` on are the depth of the product.
template <int ROWS> __device__ __forceinline__ u64 k_major_operand(const bf16* tile, int row, int column) {
    return descriptor(tile + column / 64 * ROWS * 64 + row * 64 + column % 64, 16, 1024);
}

// MN-major operand: all columns of a tile of ROWS, whose rows from `row` on are the depth of the product.
template <int ROWS> __device__ __forceinline__ u64 mn_major_operand(const bf16* tile, int row) {
    return descriptor(tile + row * 64, ROWS * 128, 1024);
}

// The operand `bytes` further on in shared memory.
__device__ __forceinline__ u64 advance(u64 operand, u32 bytes) {
    return operand & 0xffffffff00000000 | (u32)operand + (bytes >> 4);
}
// From column 0 to column `column` of a K-major operand of ROWS rows.
template <int ROWS> __device__ __forceinline__ constexpr u32 column_bytes(int column) {
    return (column / 64 * ROWS * 64 + column % 64) * 2;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Async proxy fence: wgmma sees what ordinary stores and cp.async wrote to shared memory before.
__device__ __forceinline__ void fence_async_proxy_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A fence for the compiler, which moves no read or write of these registers across. wgmma fills the registers
// asynchronously, and the compiler cannot see that.
template <int N> __device__ __forceinline__ void fence_registers(float (&x)[N][4]) {
#pragma unroll
    for (int j = 0; j < N; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(x[j][i])::"memory");
}

// Shared memory from a multiple of 1024 bytes on, where swizzled tiles must start.
__device__ __forceinline__ bf16* aligned_memory() {
    extern __shared__ uint4 memory[];
    return (bf16*)(((u64)memory + 1023) / 1024 * 1024);
}
