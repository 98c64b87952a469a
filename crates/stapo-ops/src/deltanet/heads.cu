// What the kernels of gated DeltaNet share: the columns of their rows, the sequences of a call, and the gates.

// Columns of a row of the input: queries, keys and values, which the convolution runs over, then z, b and a. The rows that the
// recurrence takes in have the columns of the convolution.
struct Heads {
    int key, value, key_dim, value_dim, kernel;
    __device__ __forceinline__ int key_width() const { return key * key_dim; }
    __device__ __forceinline__ int value_width() const { return value * value_dim; }
    __device__ __forceinline__ int conv_width() const { return 2 * key_width() + value_width(); }
    __device__ __forceinline__ int input_width() const { return conv_width() + value_width() + 2 * value; }
    __device__ __forceinline__ int norms() const { return 2 * key + value; }
    __device__ __forceinline__ int group() const { return value / key; }
};

// Sequence s has the rows offsets[s] to offsets[s + 1] of the call. Where earlier calls may have computed rows of it, contexts[s] is
// the number of all its rows so far and slots[s] says where its state lies; else both are 0.
struct Sequences {
    const u32 *offsets, *contexts, *slots;
    int n;

    // Rows of sequence s in front of the call.
    __device__ __forceinline__ int done(int s) const {
        return contexts ? (int)(contexts[s] - (offsets[s + 1] - offsets[s])) : 0;
    }

    // The sequence of a row of the call.
    __device__ __forceinline__ int of_row(u32 row) const {
        int low = 0, high = n;
        while (high - low > 1) {
            int middle = (low + high) / 2;
            if (offsets[middle] <= row)
                low = middle;
            else
                high = middle;
        }
        return low;
    }
};

__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// The derivative of SiLU.
__device__ __forceinline__ float silu_slope(float x) {
    float s = sigmoid(x);
    return fmaf(x * s, 1.0f - s, s);
}

// The gates of one value head in one row.
struct Gates {
    // beta = sigmoid(b), g = -rate softplus(a + dt_bias), slope the derivative of softplus.
    float beta, log_decay, rate, slope;
};

template <class S>
__device__ __forceinline__ Gates gates_of(const S* raw, const S* a_log, const S* dt_bias, const Heads& h, int head) {
    const S* b = raw + h.conv_width() + h.value_width();
    float step = widen(b[h.value + head]) + widen(dt_bias[head]), rate = expf(widen(a_log[head]));
    float softplus = fmaxf(step, 0.0f) + log1pf(expf(-fabsf(step)));
    return {sigmoid(widen(b[head])), -(rate * softplus), rate, sigmoid(step)};
}
