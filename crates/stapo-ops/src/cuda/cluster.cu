// What the blocks of a cluster share: barriers, copies by the TMA to all of them.

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() { cluster_arrive(), cluster_wait(); }

// Arrives at an mbarrier of another block of the cluster. The default semantics are those of a block: nothing but the copies
// that the mbarrier counts is shared.
__device__ __forceinline__ void mbarrier_arrive_at(u64* barrier, int block) {
    u32 address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(barrier)), "r"(block));
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
}

// tma_load_tile to the same place in the first `n` blocks of the cluster; each counts the bytes at its own mbarrier.
__device__ __forceinline__ void tma_load_tile_to_all(bf16* to, const TensorMap& map, int column, int row, u64* barrier,
                                                     int n) {
    u16 blocks = (u16)((1 << n) - 1);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(blocks)
        : "memory");
}
