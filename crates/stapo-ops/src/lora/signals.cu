// How lora_project and the product of few rows behind it tell each other what is ready, by counts in device memory: to read a
// count takes less time than to wait for the end of a kernel. Both are programmatic launches, and lora_project lets the product
// start at once. So whoever waits for a count runs beside blocks that have all started and that wait for kernels before them
// alone: nothing can wait for ever. The last block to leave a count clears it, for the next launch that is given it.

__device__ __forceinline__ void tell(u32* count) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

__device__ __forceinline__ void wait_for_count(const u32* count, u32 n) {
    u32 now;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(count) : "memory");
    } while (now < n);
    fence_async_proxy();
}

// Called once by each of `n` readers when it needs the count no more. The count of those that have left lies behind it.
__device__ __forceinline__ void leave(u32* count, u32 n) {
    if (atomicInc(count + 1, n - 1) == n - 1) *count = 0;
}

struct Signals {
    // [0]: 1 when x is complete; [2]: blocks of lora_project that have written hidden. 0: nobody waits for them.
    u32* counts;
    // Blocks of lora_project, and of the product.
    int n_projecting, n_multiplying;

    // By one thread of each block of lora_project, which may read x then.
    __device__ __forceinline__ void wait_for_x() const {
        wait_for_previous_kernel();
        if (counts && blockIdx.x == 0 && blockIdx.y == 0) tell(counts);
    }
    // By all threads of a block of lora_project.
    __device__ __forceinline__ void tell_hidden() const {
        if (!counts) return;
        __syncthreads();
        if (threadIdx.x == 0) tell(counts + 2);
    }
};
