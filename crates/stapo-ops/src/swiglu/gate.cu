// The tanh form of GELU is x sigmoid(z) with z = 2 sqrt(2 / pi) (x + 0.044715 x^3): z and its slope.
__device__ __forceinline__ float gelu_argument(float x) { return x * fmaf(0.07135481282731f, x * x, 1.59576912160573f); }
__device__ __forceinline__ float gelu_argument_slope(float x) {
    return fmaf(0.21406443848193f, x * x, 1.59576912160573f);
}

// The gate's activation.
template <bool GELU> __device__ __forceinline__ float activate(float gate) {
    return gate * sigmoid(GELU ? gelu_argument(gate) : gate);
}

