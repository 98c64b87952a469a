// Eight elements a thread. Grid: (a row's columns in blocks of 8 * blockDim.x, rows).

// Rows of `out` are `pitch` apart.
template <class S, bool GELU>
__device__ __forceinline__ void forward(const S* gate_up, S* out, int width, int pitch) {
    launch_dependents();
    int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    wait_for_previous_kernel();
    if (at >= width) return;
    size_t row = blockIdx.y;
    bool whole = is_whole(width);
    float g[8], u[8];
    load8(gate_up + 2 * row * width, at, width, whole, g);
    load8(gate_up + (2 * row + 1) * width, at, width, whole, u);
#pragma unroll
    for (int i = 0; i < 8; ++i) u[i] = activate<GELU>(g[i]) * u[i];
    store8(out + row * pitch, at, width, whole, u);
}

// Rows of `d_gate_up` are `pitch` apart.
template <class S, bool GELU>
__device__ __forceinline__ void backward(const S* gate_up, const S* d_out, S* d_gate_up, int width, int pitch) {
    int at = 8 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= width) return;
    size_t row = blockIdx.y;
    bool whole = is_whole(width);
    float g[8], u[8], d[8];
    load8(gate_up + 2 * row * width, at, width, whole, g);
    load8(gate_up + (2 * row + 1) * width, at, width, whole, u);
    load8(d_out + row * width, at, width, whole, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float s = sigmoid(GELU ? gelu_argument(g[i]) : g[i]), activated = g[i] * s;
        // d silu / d g = sigmoid + silu (1 - sigmoid), and with the slope of the argument for GELU
        float rest = GELU ? (1.0f - s) * gelu_argument_slope(g[i]) : 1.0f - s;
        g[i] = d[i] * u[i] * fmaf(activated, rest, s);
        u[i] = d[i] * activated;
    }
    store8(d_gate_up + row * pitch, at, width, whole, g);
    store8(d_gate_up + row * pitch + width, at, width, whole, u);
}

#define GATED(name, S, GELU)                                                                                           \
    KERNEL name##_forward_##S(const S* gate_up, S* out, int width, int pitch) {                                        \
        forward<S, GELU>(gate_up, out, width, pitch);                                                                  \
    }                                                                                                                  \
    KERNEL name##_backward_##S(const S* gate_up, const S* d_out, S* d_gate_up, int width, int pitch) {                 \
        backward<S, GELU>(gate_up, d_out, d_gate_up, width, pitch);                                                    \
    }

GATED(swiglu, float, false)
GATED(swiglu, bf16, false)
GATED(geglu, float, true)
GATED(geglu, bf16, true)
