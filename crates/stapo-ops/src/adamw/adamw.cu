// The rule of AdamW, and its step on f32 master weights with f32 moments.

// The numbers of a step: see cuda.rs. `gain1` and `gain2` are 1 - beta1 and 1 - beta2, `decay` multiplies the
// parameter, `rate` is the negative learning rate with the correction of the first moment, `root` that of the root of
// the second.
struct AdamW {
    float grad_scale, beta1, beta2, gain1, gain2, decay, rate, root, eps;
};

// Moves the moments m and v by a gradient and returns the moved parameter.
__device__ __forceinline__ float updated(const AdamW& rule, float grad, float& m, float& v, float param) {
    float scaled = grad * rule.grad_scale;
    m = fmaf(m, rule.beta1, scaled * rule.gain1);
    v = fmaf(v, rule.beta2, scaled * scaled * rule.gain2);
    return fmaf(m / fmaf(sqrtf(v), rule.root, rule.eps), rule.rate, param * rule.decay);
}

// A tensor of an update, whose elements are those of `n` from block `first_block` on. `stored` is the rounded copy that the
// model reads, 0 where the model reads the master itself; `decay` takes the place of the rule's.
struct Tensor {
    float* param;
    bf16* stored;
    const float* grad;
    float *m, *v;
    u64 n;
    u32 first_block;
    float decay;
};

// All tensors of an update, eight elements a thread.
KERNEL adamw_step(const Tensor* tensors, int n_tensors, const __grid_constant__ AdamW rule) {
    const Tensor t = entry_of(tensors, n_tensors);
    u64 at = 8 * ((u64)(blockIdx.x - t.first_block) * blockDim.x + threadIdx.x);
    if (at >= t.n) return;
    AdamW own = rule;
    own.decay = t.decay;
    bool whole = at + 8 <= t.n;
    int left = (int)min((u64)8, t.n - at);
    float g[8], p[8], a[8], b[8];
    load8(t.grad + at, 0, left, whole, g);
    load8(t.param + at, 0, left, whole, p);
    load8(t.m + at, 0, left, whole, a);
    load8(t.v + at, 0, left, whole, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) p[i] = updated(own, g[i], a[i], b[i], p[i]);
    store8(t.m + at, 0, left, whole, a);
    store8(t.v + at, 0, left, whole, b);
    store8(t.param + at, 0, left, whole, p);
    if (t.stored) store8(t.stored + at, 0, left, whole, p);
}
