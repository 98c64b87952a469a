// Grid: rows of a chunk of logits [rows, vocab].

KERNEL __launch_bounds__(1024)
    lm_head_score(const float* logits, const u32* targets, float* logp, float* entropy, float* collision, float* lse,
                  int n_best, u32* best_ids, float* best_logp, int vocab, float inv_temperature) {
    size_t r = blockIdx.x;
    const float* row = logits + r * vocab;
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

// d = (d_logp (1[v = target] - p) - d_entropy p (ln p + H)) / temperature
template <class S> __device__ __forceinline__ void gradient(const float* logits, const u32* targets, const float* lse,
                                                            const float* entropy, const float* d_logp,
                                                            const float* d_entropy, S* d_logits, int vocab,
                                                            float inv_temperature) {
    size_t r = blockIdx.y;
    int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= vocab) return;
    bool whole = is_whole(vocab);
    float constant = -(fmaf(d_entropy[r], entropy[r], d_logp[r]) * inv_temperature);
    float slope = -(d_entropy[r] * inv_temperature), shift = lse[r], z[8];
    load8(logits + r * vocab, at, vocab, whole, z);
    int target = targets[r];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float ln_p = fmaf(z[i], inv_temperature, -shift);
        float p = expf(ln_p);
        z[i] = p * fmaf(slope, ln_p < FLOOR ? FLOOR : ln_p, constant);
        if (at + i == target) z[i] += d_logp[r] * inv_temperature;
    }
    store8(d_logits + r * vocab, at, vocab, whole, z);
}

#define GRADIENT(S)                                                                                                    \
    KERNEL lm_head_gradient_##S(const float* logits, const u32* targets, const float* lse, const float* entropy,       \
                                const float* d_logp, const float* d_entropy, S* d_logits, int vocab,                   \
                                float inv_temperature) {                                                               \
        gradient<S>(logits, targets, lse, entropy, d_logp, d_entropy, d_logits, vocab, inv_temperature);               \
    }

GRADIENT(float)
GRADIENT(bf16)
