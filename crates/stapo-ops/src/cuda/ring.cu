// A ring of STAGES tiles of SIZE elements in shared memory. A producer thread fills a stage by TMA and the full
// mbarrier counts the bytes; the WARPS consumer warps arrive at the empty mbarrier when they have read the stage.
template <int STAGES, int SIZE, int WARPS = 4> struct Ring {
    bf16* tiles;
    u64 *full, *empty;

    __device__ __forceinline__ void init() const {
        for (int s = 0; s < STAGES; ++s) mbarrier_init(full + s, 1), mbarrier_init(empty + s, WARPS);
    }
    static __device__ __forceinline__ int offset(int step) { return step % STAGES * SIZE; }
    __device__ __forceinline__ bf16* tile(int step) const { return tiles + offset(step); }
    // The producer's half: waits until the stage is empty and announces how many elements come.
    __device__ __forceinline__ u64* begin_fill(int step, int n = SIZE) const {
        int s = step % STAGES;
        if (step >= STAGES) mbarrier_wait(empty + s, (step / STAGES - 1) % 2);
        mbarrier_arrive_expect_bytes(full + s, 2 * n);
        return full + s;
    }
    // The consumers' half; one lane of a warp arrives.
    __device__ __forceinline__ void wait_full(int step) const {
        mbarrier_wait(full + step % STAGES, step / STAGES % 2);
    }
    __device__ __forceinline__ void arrive_empty(int step) const { mbarrier_arrive(empty + step % STAGES); }
};
