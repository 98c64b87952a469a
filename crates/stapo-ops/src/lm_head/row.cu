// One row of f32 logits in one block: its statistics and its best tokens. lm_head.cu and sampling.cu both use this
// file, so that scoring and generation report the same bits.

// Stands for the logarithm of a probability of 0 in products with that probability: 0 times minus infinity is NaN.
#define FLOOR (-1e30f)
#define MINUS_INFINITY __int_as_float(0xff800000)

// Elements from one row of logits to the next, so that every row begins at a multiple of 16 bytes; what is behind the vocabulary
// counts for nothing.
__device__ __forceinline__ size_t row_pitch(int vocab) { return (vocab + 7) / 8 * 8; }

// Of z = logit / temperature: the largest, and relative to it the sums of e^z, e^z z and e^2z.
struct Stats {
    float top, sum, weighted, squares;
};

// The same numbers relative to a larger top.
__device__ __forceinline__ Stats lifted(Stats s, float top) {
    if (s.sum == 0.0f || s.top == top) {
        s.top = top;
        return s;
    }
    float below = s.top - top, factor = expf(below);
    s.weighted = factor * fmaf(s.sum, below, s.weighted);
    s.sum *= factor;
    s.squares *= factor * factor;
    s.top = top;
    return s;
}

__device__ __forceinline__ Stats joined(Stats a, Stats b) {
    float top = fmaxf(a.top, b.top);
    a = lifted(a, top), b = lifted(b, top);
    a.sum += b.sum, a.weighted += b.weighted, a.squares += b.squares;
    return a;
}

// The warps that share a row, whatever blocks they belong to.
#define ROW_WARPS 32

// What warp `warp` of a row's warps finds: it takes the stretches `warp`, `warp` + ROW_WARPS, .. of 256 logits each.
// `each(stretch, top, sum)` is called by each lane for each stretch, with the lane's largest z so far and the sum of
// the lane's e^z of this stretch relative to it.
template <class Each>
__device__ __forceinline__ Stats warp_stats(const float* logits, int vocab, float inv_temperature, int warp,
                                            Each each) {
    Stats s = {MINUS_INFINITY, 0.0f, 0.0f, 0.0f};
    // The next stretch's logits are loaded before the current ones are summed.
    int first = warp * 256 + 8 * (threadIdx.x % 32);
    float next[8];
    if (first < vocab) load8(logits, first, vocab, true, next);
    for (int start = warp * 256; start < vocab; start += 256 * ROW_WARPS) {
        int at = start + 8 * (threadIdx.x % 32), then = at + 256 * ROW_WARPS;
        float z[8], top = MINUS_INFINITY, part = 0.0f;
        if (at >= vocab) {
            each(start / 256, s.top, part);
            continue;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            z[i] = at + i < vocab ? next[i] * inv_temperature : MINUS_INFINITY;
            top = fmaxf(top, z[i]);
        }
        if (then < vocab) load8(logits, then, vocab, true, next);
        if (top > s.top) s = lifted(s, top);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float below = z[i] - s.top;
            // Minus infinity becomes FLOOR; NaN stays NaN.
            below = below < FLOOR ? FLOOR : below;
            float e = expf(below);
            s.sum += e;
            part += e;
            s.weighted = fmaf(e, below, s.weighted);
            s.squares = fmaf(e, e, s.squares);
        }
        each(start / 256, s.top, part);
    }
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        Stats other;
        other.top = __shfl_xor_sync(0xffffffffu, s.top, step);
        other.sum = __shfl_xor_sync(0xffffffffu, s.sum, step);
        other.weighted = __shfl_xor_sync(0xffffffffu, s.weighted, step);
        other.squares = __shfl_xor_sync(0xffffffffu, s.squares, step);
        s = joined(s, other);
    }
    return s;
}

__device__ __forceinline__ Stats joined_in_order(const Stats* warps) {
    Stats s = warps[0];
    for (int i = 1; i < ROW_WARPS; ++i) s = joined(s, warps[i]);
    return s;
}

// Of a row, by a block of ROW_WARPS warps: `each` as in warp_stats.
template <class Each>
__device__ __forceinline__ Stats row_stats(const float* logits, int vocab, float inv_temperature, Each each) {
    __shared__ Stats warps[ROW_WARPS];
    Stats s = warp_stats(logits, vocab, inv_temperature, threadIdx.x / 32, each);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = s;
    __syncthreads();
    return joined_in_order(warps);
}

__device__ __forceinline__ Stats row_stats(const float* logits, int vocab, float inv_temperature) {
    return row_stats(logits, vocab, inv_temperature, [](int, float, float) {});
}

__device__ __forceinline__ float logp_of(float logit, float inv_temperature, Stats s, float ln_sum) {
    return logit * inv_temperature - s.top - ln_sum;
}

// Among equals the lower id comes first.
struct Candidate {
    float logit;
    u32 id;
};

__device__ __forceinline__ bool is_before(Candidate a, Candidate b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The best of this thread's tokens that come after `last`.
__device__ __forceinline__ Candidate next_best(const float* logits, int vocab, Candidate last) {
    Candidate best = {MINUS_INFINITY, 0xffffffffu};
    for (int at = threadIdx.x; at < vocab; at += blockDim.x) {
        Candidate c = {logits[at], (u32)at};
        if (is_before(last, c) && is_before(c, best)) best = c;
    }
    return best;
}

__device__ __forceinline__ Candidate block_best(Candidate c) {
    __shared__ Candidate warps[32];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) {
        Candidate other;
        other.logit = __shfl_xor_sync(0xffffffffu, c.logit, step);
        other.id = __shfl_xor_sync(0xffffffffu, c.id, step);
        if (is_before(other, c)) c = other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = c;
    __syncthreads();
    c = warps[0];
    for (int i = 1; i < (int)blockDim.x / 32; ++i)
        if (is_before(warps[i], c)) c = warps[i];
    return c;
}

// The n most probable tokens, best first. Each thread keeps the best of its tokens not yet taken; after a token is
// taken, only its thread looks for the next.
__device__ __forceinline__ void row_best(const float* logits, int vocab, float inv_temperature, Stats s, float ln_sum,
                                         int n, u32* ids, float* logp) {
    Candidate first = {__int_as_float(0x7f800000), 0u};
    Candidate own = next_best(logits, vocab, first);
    for (int k = 0; k < n; ++k) {
        Candidate best = block_best(own);
        if (threadIdx.x == 0) {
            ids[k] = best.id;
            logp[k] = best.id == 0xffffffffu ? MINUS_INFINITY : logp_of(best.logit, inv_temperature, s, ln_sum);
        }
        if (best.id != 0xffffffffu && best.id % blockDim.x == threadIdx.x) own = next_best(logits, vocab, best);
    }
}
