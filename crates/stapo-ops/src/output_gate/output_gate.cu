// The gate on attention's outputs. Grid: (rows, columns in blocks); n columns in all.

#define COLUMN (blockIdx.y * blockDim.x + threadIdx.x)

// Where column j of [queries | rest] or of the gates lies in a row of projections, whose queries [heads, dim] are each followed by
// their gates.
__device__ __forceinline__ int query_column(int j, int dim) { return j / dim * 2 * dim + j % dim; }

// projected [rows, query + width] becomes qkv [rows, width] and gate [rows, query].
template <class S>
__device__ __forceinline__ void divide(const S* projected, S* qkv, S* gate, int dim, int query, int width) {
    int j = COLUMN;
    size_t row = blockIdx.x;
    projected += row * (query + width);
    if (j < query) {
        qkv[row * width + j] = projected[query_column(j, dim)];
        gate[row * query + j] = projected[query_column(j, dim) + dim];
    } else if (j < width) {
        qkv[row * width + j] = projected[query + j];
    }
}

// The inverse; rows of `projected` are `pitch` apart.
template <class S>
__device__ __forceinline__ void join(const S* qkv, const S* gate, S* projected, int dim, int query, int width, int pitch) {
    int j = COLUMN;
    size_t row = blockIdx.x;
    projected += row * pitch;
    if (j < query) {
        projected[query_column(j, dim)] = qkv[row * width + j];
        projected[query_column(j, dim) + dim] = gate[row * query + j];
    } else if (j < width) {
        projected[query + j] = qkv[row * width + j];
    }
}

// Rows of `out` are `pitch` apart.
template <class S> __device__ __forceinline__ void forward(const S* attended, const S* gate, S* out, int width, int pitch) {
    int j = COLUMN;
    size_t at = (size_t)blockIdx.x * width + j;
    if (j < width) out[(size_t)blockIdx.x * pitch + j] = round_to<S>(widen(attended[at]) * sigmoid(widen(gate[at])));
}

template <class S>
__device__ __forceinline__ void backward(const S* attended, const S* gate, const S* d_out, S* d_attended, S* d_gate, int width) {
    int j = COLUMN;
    size_t at = (size_t)blockIdx.x * width + j;
    if (j >= width) return;
    float s = sigmoid(widen(gate[at])), d = widen(d_out[at]) * s;
    d_attended[at] = round_to<S>(d);
    d_gate[at] = round_to<S>(d * widen(attended[at]) * (1.0f - s));
}

#define OUTPUT_GATE(S)                                                                                                 \
    KERNEL output_gate_divide_##S(const S* projected, S* qkv, S* gate, int dim, int query, int width) {                \
        divide(projected, qkv, gate, dim, query, width);                                                               \
    }                                                                                                                  \
    KERNEL output_gate_join_##S(const S* qkv, const S* gate, S* projected, int dim, int query, int width, int pitch) { \
        join(qkv, gate, projected, dim, query, width, pitch);                                                          \
    }                                                                                                                  \
    KERNEL output_gate_forward_##S(const S* attended, const S* gate, S* out, int width, int pitch) {                   \
        forward(attended, gate, out, width, pitch);                                                                    \
    }                                                                                                                  \
    KERNEL output_gate_backward_##S(const S* attended, const S* gate, const S* d_out, S* d_attended, S* d_gate,        \
                                    int width) {                                                                       \
        backward(attended, gate, d_out, d_attended, d_gate, width);                                                    \
    }

OUTPUT_GATE(float)
OUTPUT_GATE(bf16)
