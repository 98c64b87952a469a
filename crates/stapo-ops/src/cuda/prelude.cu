// What every kernel file starts with: storage types, rows eight elements at a time, sums in a fixed order. No header of
// the CUDA toolkit is included. Sources are compiled with --fmad=false: a fused multiply-add stands only where it is
// written, so that the same source gives the same bits in every kernel it is inlined into.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Storage of weights and activations; arithmetic is in f32.
struct alignas(2) bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

// Two f32 as bf16, rounded to nearest even, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// The two bf16 of a word.
__device__ __forceinline__ float low_half(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high_half(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// An f32 as it is stored; bf16 is rounded to nearest even.
template <class S> __device__ __forceinline__ S round_to(float x);
template <> __device__ __forceinline__ float round_to<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 round_to<bf16>(float x) {
    bf16 y;
    y.bits = (u16)pack(x, 0.0f);
    return y;
}

// Eight elements of a row of n from `at` on; elements past the end are 0. `whole`: rows are multiples of 8 and aligned.
__device__ __forceinline__ void load8(const bf16* row, int at, int n, bool whole, float* x) {
    if (whole) {
        uint4 v = *(const uint4*)(row + at);
        u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = __uint_as_float(w[i] << 16);
            x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = at + i < n ? widen(row[at + i]) : 0.0f;
    }
}

__device__ __forceinline__ void load8(const float* row, int at, int n, bool whole, float* x) {
    if (whole) {
        float4 a = *(const float4*)(row + at), b = *(const float4*)(row + at + 4);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = at + i < n ? row[at + i] : 0.0f;
    }
}

__device__ __forceinline__ void store8(bf16* row, int at, int n, bool whole, const float* x) {
    if (whole) {
        *(uint4*)(row + at) = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (at + i < n) row[at + i] = round_to<bf16>(x[i]);
    }
}

__device__ __forceinline__ void store8(float* row, int at, int n, bool whole, const float* x) {
    if (whole) {
        *(float4*)(row + at) = make_float4(x[0], x[1], x[2], x[3]);
        *(float4*)(row + at + 4) = make_float4(x[4], x[5], x[6], x[7]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (at + i < n) row[at + i] = x[i];
    }
}

__device__ __forceinline__ bool is_whole(int width) { return width % 8 == 0; }

// Sums over a warp by a butterfly of shuffles: every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

// Sums over a block: each warp by warp_sum, then the warps' sums in order. Every thread gets the same bits.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float sums[32];
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    float total = sums[0];
    for (int i = 1; i < (int)blockDim.x / 32; ++i) total += sums[i];
    return total;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The address in shared memory that instructions such as ldmatrix take.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ldmatrix_at(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// Programmatic dependent launch. A kernel launched with it may start before the kernel in front of it has ended; after
// this wait all that the kernel in front wrote is visible. In other launches the wait returns at once.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Allows the next kernel to start, if it is launched with programmatic dependent launch.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#define KERNEL extern "C" __global__ void

// The entry of a table that a block works on: the last whose first block is not behind it.
template <class E> __device__ __forceinline__ E entry_of(const E* table, int n) {
    int low = 0;
    for (int high = n - 1; low < high;) {
        int middle = (low + high + 1) / 2;
        if (table[middle].first_block <= blockIdx.x) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return table[low];
}
