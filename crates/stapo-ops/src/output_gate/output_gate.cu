// The gate on attention's outputs. Grid: (rows, columns in blocks). A thread has EACH columns: eight where heads and rows are whole
// eights, else one.

#define COLUMN ((blockIdx.y * blockDim.x + threadIdx.x) * EACH)

// In decode these kernels run between others that use programmatic dependent launch.
#define BETWEEN_KERNELS  \
    launch_dependents(); \
    wait_for_previous_kernel();

// Where column j of [queries | rest] or of the gates lies in a row of projections, whose queries [heads, dim] are each followed by
// their gates.
__device__ __forceinline__ int query_column(int j, int dim) { return j / dim * 2 * dim + j % dim; }

template <int EACH, class S> __device__ __forceinline__ void copy_columns(S* to, const S* from) {
    float x[8];
    load8(from, 0, EACH, EACH == 8, x);
    store8(to, 0, EACH, EACH == 8, x);
}

// projected [rows, query + width] becomes qkv [rows, width] and gate [rows, query].
template <int EACH, class S>
__device__ __forceinline__ void divide(const S* projected, S* qkv, S* gate, int dim, int query, int width) {
    BETWEEN_KERNELS
    int j = COLUMN;
    size_t row = blockIdx.x;
    projected += row * (query + width);
    if (j < query) {
        copy_columns<EACH>(qkv + row * width + j, projected + query_column(j, dim));
        copy_columns<EACH>(gate + row * query + j, projected + query_column(j, dim) + dim);
    } else if (j < width) {
        copy_columns<EACH>(qkv + row * width + j, projected + query + j);
    }
}

// The inverse; rows of `projected` are `pitch` apart.
template <int EACH, class S>
__device__ __forceinline__ void join(const S* qkv, const S* gate, S* projected, int dim, int query, int width, int pitch) {
    int j = COLUMN;
    size_t row = blockIdx.x;
    projected += row * pitch;
    if (j < query) {
        copy_columns<EACH>(projected + query_column(j, dim), qkv + row * width + j);
        copy_columns<EACH>(projected + query_column(j, dim) + dim, gate + row * query + j);
    } else if (j < width) {
        copy_columns<EACH>(projected + query + j, qkv + row * width + j);
    }
}

// Rows of `out` are `pitch` apart.
template <int EACH, class S>
__device__ __forceinline__ void forward(const S* attended, const S* gate, S* out, int width, int pitch) {
    BETWEEN_KERNELS
    int j = COLUMN;
    size_t at = (size_t)blockIdx.x * width + j;
    if (j >= width) return;
    float x[8], z[8];
    load8(attended + at, 0, EACH, EACH == 8, x);
    load8(gate + at, 0, EACH, EACH == 8, z);
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] *= sigmoid(z[i]);
    store8(out + (size_t)blockIdx.x * pitch + j, 0, EACH, EACH == 8, x);
}

template <int EACH, class S>
__device__ __forceinline__ void backward(const S* attended, const S* gate, const S* d_out, S* d_attended, S* d_gate, int width) {
    int j = COLUMN;
    size_t at = (size_t)blockIdx.x * width + j;
    if (j >= width) return;
    float x[8], z[8], d[8];
    load8(attended + at, 0, EACH, EACH == 8, x);
    load8(gate + at, 0, EACH, EACH == 8, z);
    load8(d_out + at, 0, EACH, EACH == 8, d);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        float s = sigmoid(z[i]);
        d[i] *= s;
        z[i] = d[i] * x[i] * (1.0f - s);
    }
    store8(d_attended + at, 0, EACH, EACH == 8, d);
    store8(d_gate + at, 0, EACH, EACH == 8, z);
}

#define OUTPUT_GATE(S, EACH)                                                                                                    \
    KERNEL output_gate_divide_##S##_##EACH(const S* projected, S* qkv, S* gate, int dim, int query, int width) {                \
        divide<EACH>(projected, qkv, gate, dim, query, width);                                                                  \
    }                                                                                                                           \
    KERNEL output_gate_join_##S##_##EACH(const S* qkv, const S* gate, S* projected, int dim, int query, int width, int pitch) { \
        join<EACH>(qkv, gate, projected, dim, query, width, pitch);                                                             \
    }                                                                                                                           \
    KERNEL output_gate_forward_##S##_##EACH(const S* attended, const S* gate, S* out, int width, int pitch) {                   \
        forward<EACH>(attended, gate, out, width, pitch);                                                                       \
    }                                                                                                                           \
    KERNEL output_gate_backward_##S##_##EACH(const S* attended, const S* gate, const S* d_out, S* d_attended, S* d_gate,        \
                                             int width) {                                                                       \
        backward<EACH>(attended, gate, d_out, d_attended, d_gate, width);                                                       \
    }

OUTPUT_GATE(float, 1)
OUTPUT_GATE(float, 8)
OUTPUT_GATE(bf16, 1)
OUTPUT_GATE(bf16, 8)
