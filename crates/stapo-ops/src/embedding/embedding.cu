// One block per token. An id outside the table traps before anything is read.

template <class S>
__device__ __forceinline__ void forward(const u32* ids, const S* table, S* out, int vocab, int width) {
    u32 id = ids[blockIdx.x];
    if (id >= vocab) __trap();
    bool whole = is_whole(width);
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        float x[8];
        load8(table + (size_t)id * width, at, width, whole, x);
        store8(out + (size_t)blockIdx.x * width, at, width, whole, x);
    }
}

// The block of an id's first token adds the rows of all tokens with that id, in order; the blocks of the other tokens
// return at once. Sums are f32, whatever d_table stores. Without `apart` a sum goes on from d_table. With `apart` it starts from
// zero, is kept there, and is then added to d_table.
template <class S, class D>
__device__ __forceinline__ void backward(const u32* ids, const S* d_out, D* apart, D* d_table, int tokens, int vocab,
                                         int width) {
    __shared__ int found[256];
    __shared__ int n_found;
    int first = blockIdx.x;
    u32 id = ids[first];
    if (id >= vocab) __trap();
    bool seen = false;
    for (int t = threadIdx.x; t < first; t += blockDim.x) seen |= ids[t] == id;
    if (__syncthreads_or(seen)) return;
    bool whole = is_whole(width);
    size_t row = (size_t)id * width;
    for (int base = 0; base < width; base += 8 * blockDim.x) {
        int at = base + 8 * threadIdx.x;
        bool has_columns = at < width;
        float sum[8] = {};
        if (has_columns && !apart) load8(d_table + row, at, width, whole, sum);
        for (int start = first; start < tokens; start += blockDim.x) {
            // The tokens with this id among the next blockDim.x, in order.
            int t = start + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
            u32 same = __ballot_sync(0xffffffffu, t < tokens && ids[t] == id);
            __shared__ u32 masks[8];
            if (lane == 0) masks[warp] = same;
            __syncthreads();
            if (threadIdx.x == 0) {
                int n = 0;
                for (int w = 0; w < 8; ++w)
                    for (u32 mask = masks[w]; mask; mask &= mask - 1) found[n++] = start + 32 * w + __ffs(mask) - 1;
                n_found = n;
            }
            __syncthreads();
            for (int k = 0; has_columns && k < n_found; ++k) {
                float x[8];
                load8(d_out + (size_t)found[k] * width, at, width, whole, x);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[i] += x[i];
            }
            __syncthreads();
        }
        if (has_columns && apart) {
            float before[8];
            store8(apart + row, at, width, whole, sum);
            load8(d_table + row, at, width, whole, before);
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] += before[i];
        }
        if (has_columns) store8(d_table + row, at, width, whole, sum);
    }
}

#define GATHER(S)                                                                                                      \
    KERNEL embedding_forward_##S(const u32* ids, const S* table, S* out, int vocab, int width) {                       \
        forward<S>(ids, table, out, vocab, width);                                                                     \
    }
#define SCATTER(S, D)                                                                                                  \
    KERNEL embedding_backward_##S##_##D(const u32* ids, const S* d_out, D* d_table, int tokens, int vocab,             \
                                        int width) {                                                                   \
        backward<S, D>(ids, d_out, nullptr, d_table, tokens, vocab, width);                                            \
    }
#define SCATTER_APART(S)                                                                                               \
    KERNEL embedding_backward_apart_##S(const u32* ids, const S* d_out, float* apart, float* d_table, int tokens,      \
                                        int vocab, int width) {                                                        \
        backward<S, float>(ids, d_out, apart, d_table, tokens, vocab, width);                                          \
    }

GATHER(float)
GATHER(bf16)
SCATTER(float, float)
SCATTER(bf16, bf16)
SCATTER(bf16, float)
SCATTER_APART(float)
SCATTER_APART(bf16)
