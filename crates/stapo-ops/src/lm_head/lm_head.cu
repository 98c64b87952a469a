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

// d = (d_logp (1[v = target] - p) - d_entropy p (ln p + H)) / temperature. Null pointers stand for a d_logp of 1 and a d_entropy
// of 0.
template <class S>
__device__ __forceinline__ void gradient(const float* logits, const u32* targets, const float* lse,
                                         const float* entropy, const float* d_logp, const float* d_entropy, S* d_logits,
                                         int vocab, float inv_temperature) {
    size_t r = blockIdx.y;
    int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= vocab) return;
    float of_logp = d_logp ? d_logp[r] : 1.0f, of_entropy = d_entropy ? d_entropy[r] : 0.0f;
    float constant = -(fmaf(of_entropy, entropy[r], of_logp) * inv_temperature);
    float slope = -(of_entropy * inv_temperature), shift = lse[r], z[8];
    load8(logits + r * row_pitch(vocab), at, vocab, true, z);
    int target = targets[r];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float ln_p = fmaf(z[i], inv_temperature, -shift);
        float p = expf(ln_p);
        z[i] = p * fmaf(slope, ln_p < FLOOR ? FLOOR : ln_p, constant);
        if (at + i == target) z[i] += of_logp * inv_temperature;
    }
    store8(d_logits + r * row_pitch(vocab), at, vocab, true, z);
}

#define GRADIENT(S)                                                                                                    \
    KERNEL lm_head_gradient_##S(const float* logits, const u32* targets, const float* lse, const float* entropy,       \
                                const float* d_logp, const float* d_entropy, S* d_logits, int vocab,                   \
                                float inv_temperature) {                                                               \
        gradient<S>(logits, targets, lse, entropy, d_logp, d_entropy, d_logits, vocab, inv_temperature);               \
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

// The gradient of logits becomes that of the products.
template <class S> __device__ __forceinline__ void rule_slope(const float* logits, S* d_logits, float softcap, float factor, int vocab) {
    int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= vocab) return;
    size_t row = blockIdx.y * row_pitch(vocab);
    float x[8], d[8];
    load8(logits + row, at, vocab, true, x);
    load8(d_logits + row, at, vocab, true, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float t = softcap != 0.0f ? x[i] / softcap : 0.0f;
        d[i] *= factor * (1.0f - t * t);
    }
    store8(d_logits + row, at, vocab, true, d);
}

KERNEL lm_head_rule_slope_float(const float* logits, float* d_logits, float softcap, float factor, int vocab) {
    rule_slope(logits, d_logits, softcap, factor, vocab);
}
KERNEL lm_head_rule_slope_bf16(const float* logits, bf16* d_logits, float softcap, float factor, int vocab) {
    rule_slope(logits, d_logits, softcap, factor, vocab);
}
