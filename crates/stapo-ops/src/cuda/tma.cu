// TMA, Hopper's copy engine: copies tiles of matrices into shared memory and counts their bytes at an mbarrier there.

// A TMA descriptor, written by the driver: where a matrix lies and how it is cut into tiles.
struct alignas(64) TensorMap {
    u64 words[16];
};

// A phase of an mbarrier ends when `n` threads have arrived and all announced bytes have been copied. A thread waits
// for the end of a phase by the phase's parity, the first phase having parity 0.
__device__ __forceinline__ void mbarrier_init(u64* barrier, int n) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(n) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(u64* barrier, int n_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(n_bytes)
                 : "memory");
}
__device__ __forceinline__ void mbarrier_wait(u64* barrier, int parity) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// Starts the copy of the tile at (row, column) of a matrix into this block's shared memory.
__device__ __forceinline__ void tma_load_tile(bf16* to, const TensorMap& map, int column, int row, u64* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// Async proxy fence: TMA and wgmma see what ordinary stores wrote before, to shared or global memory.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
