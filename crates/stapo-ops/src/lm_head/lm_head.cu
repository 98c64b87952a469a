// Grid: rows of a chunk of logits [rows, row_pitch(vocab)].

KERNEL __launch_bounds__(1024)
lm_head_score(const float* logits, const u32* targets, float* logp, float* entropy, float* collision, float* lse,
              int n_best, u32* best_ids, float* best_logp, int vocab, float inv_temperature) {
    size_t r = blockIdx.x;
    const float* row = logits + r * row_pitch(vocab);
    Stats s = row_stats(row, vocab, inv_temperature);
    float ln_sum = logf(s.sum);
    if (threadIdx.x == 0) {
        if (targets[r] >= vocab) __trap();
        logp[r] = logp_of(row[targets[r]], inv_temperature, s, ln_sum);
        entropy[r] = ln_sum - s.weighted / s.sum;
        collision[r] = s.squares / (s.sum * s.sum);
        lse[r] = s.top + ln_sum;
    }
    if (n_best > 0)
        row_best(row, vocab, inv_temperature, s, ln_sum, n_best, best_ids + r * n_best, best_logp + r * n_best);
}

// The logits from `first` on: those behind the last whole eight of a vocabulary. Grid: rows; a warp has a logit. Rows of the weight
// are `pitch` apart.
KERNEL lm_head_last_logits(const bf16* hidden, const bf16* weight, float* logits, int width, int pitch, int first,
                           int vocab) {
    int column = first + threadIdx.x / 32;
    const bf16 *x = hidden + (size_t)blockIdx.x * width, *w = weight + (size_t)column * pitch;
    float sum = 0.0f;
    for (int i = threadIdx.x % 32; i < width; i += 32) sum = fmaf(widen(x[i]), widen(w[i]), sum);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) logits[blockIdx.x * row_pitch(vocab) + column] = sum;
}

// d = (d_logp (1[v = target] - p) - d_entropy p (ln p + H)) / temperature, then times the slope of the rule that made products
// logits: `factor` (1 - (z / softcap)^2). Null pointers stand for a d_logp of 1 and a d_entropy of 0. The gradient of a row, elements
// of S one after another, overwrites the row from its beginning. Grid: rows. A block stores eight elements a thread only after all
// its threads have loaded these and the next eight, so nothing is overwritten before it is read.
template <class S>
__device__ __forceinline__ void gradient(float* logits, const u32* targets, const float* lse, const float* entropy,
                                         const float* d_logp, const float* d_entropy, int vocab, float inv_temperature,
                                         float softcap, float factor) {
    size_t r = blockIdx.x;
    float* row = logits + r * row_pitch(vocab);
    float of_logp = d_logp ? d_logp[r] : 1.0f, of_entropy = d_entropy ? d_entropy[r] : 0.0f;
    float constant = -(fmaf(of_entropy, entropy[r], of_logp) * inv_temperature);
    float slope = -(of_entropy * inv_temperature), shift = lse[r], next[8];
    int target = targets[r], at = 8 * threadIdx.x, step = 8 * blockDim.x;
    if (at < vocab) load8(row, at, vocab, true, next);
    for (int first = 0; first < vocab; first += step, at += step) {
        float z[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) z[i] = next[i];
        if (at + step < vocab) load8(row, at + step, vocab, true, next);
        if (at < vocab) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float ln_p = fmaf(z[i], inv_temperature, -shift);
                float p = expf(ln_p);
                float d = p * fmaf(slope, ln_p < FLOOR ? FLOOR : ln_p, constant);
                if (at + i == target) d += of_logp * inv_temperature;
                float t = softcap != 0.0f ? z[i] / softcap : 0.0f;
                z[i] = widen(round_to<S>(d)) * (factor * (1.0f - t * t));
            }
        }
        __syncthreads();
        if (at < vocab) store8((S*)row, at, vocab, true, z);
    }
}

#define GRADIENT(S)                                                                                                    \
    KERNEL __launch_bounds__(1024)                                                                                     \
    lm_head_gradient_##S(float* logits, const u32* targets, const float* lse, const float* entropy,                    \
                         const float* d_logp, const float* d_entropy, int vocab, float inv_temperature, float softcap, \
                         float factor) {                                                                               \
        gradient<S>(logits, targets, lse, entropy, d_logp, d_entropy, vocab, inv_temperature, softcap, factor);        \
    }

GRADIENT(float)
GRADIENT(bf16)

// Rows [width] times a number each. Grid: (parts of a row, rows).
template <class S> __device__ __forceinline__ void scale_row(const float* by, S* x, int width) {
    size_t r = blockIdx.y;
    int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= width) return;
    bool whole = is_whole(width);
    float v[8];
    load8(x + r * width, at, width, whole, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] *= by[r];
    store8(x + r * width, at, width, whole, v);
}

KERNEL lm_head_scale_rows_float(const float* by, float* x, int width) { scale_row(by, x, width); }
KERNEL lm_head_scale_rows_bf16(const float* by, bf16* x, int width) { scale_row(by, x, width); }

// Products become logits: times `factor`, then capped where `softcap` is not 0. Eight elements a thread; grid: (columns, rows).
KERNEL lm_head_apply_rule(float* logits, float softcap, float factor, int vocab) {
    int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= vocab) return;
    float* row = logits + blockIdx.y * row_pitch(vocab);
    float x[8];
    load8(row, at, vocab, true, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        x[i] *= factor;
        if (softcap != 0.0f) x[i] = softcap * tanhf(x[i] / softcap);
    }
    store8(row, at, vocab, true, x);
}
