// One block per row, and a thread takes eight columns at a time: a row's bits depend on the row alone.

// Normalises x, or with ADD x + addend. `rows` lists the rows of x and addend that are taken; 0: all in order. Where
// the addend is a split-K product not yet summed, `addend` is 0 and parts [n_parts, rows, width] are its partial sums.
// Rows of `out` are `pitch` apart.
template <class S, bool ADD>
__device__ __forceinline__ void forward(const S* x, const S* addend, const float* parts, int n_parts,
                                        const u32* rows, const S* weight, S* sum, S* out, int pitch, float* inv_rms,
                                        int width, float eps) {
    launch_dependents();
    bool whole = is_whole(width), fits = width <= 8 * blockDim.x, is_there = 8 * threadIdx.x < width;
    size_t to = (size_t)blockIdx.x * width, of = rows ? (size_t)rows[blockIdx.x] * width : to;
    const S* from = ADD ? sum + to : x + of;
    float v[8], w[8], squares = 0.0f;
    if (fits && is_there) load8(weight, 8 * threadIdx.x, width, whole, w);
    wait_for_previous_kernel();
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        load8(x + of, at, width, whole, v);
        if (ADD) {
            float d[8];
            if (!parts) load8(addend + of, at, width, whole, d);
            for (int p = 0; p < n_parts; ++p) {
                float part[8];
                load8(parts + (size_t)p * gridDim.x * width + of, at, width, whole, part);
#pragma unroll
                for (int i = 0; i < 8; ++i) d[i] = p == 0 ? part[i] : d[i] + part[i];
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = widen(round_to<S>(v[i] + widen(round_to<S>(d[i]))));
            store8(sum + to, at, width, whole, v);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares);
    }
    float inv = 1.0f / sqrtf(block_sum(squares) / (float)width + eps);
    if (threadIdx.x == 0) inv_rms[blockIdx.x] = inv;
    for (int at = 8 * threadIdx.x; at < width; at += 8 * blockDim.x) {
        // A thread with eight columns in all still has them in registers.
        if (!fits) {
            load8(from, at, width, whole, v);
            load8(weight, at, width, whole, w);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = v[i] * inv * w[i];
        store8(out + (size_t)blockIdx.x * pitch, at, width, whole, v);
    }
}

// A block takes consecutive rows and has a thread for every eight columns, which keeps the sum of its columns of
// d_weight. The loads of the next row are issued before the current row is summed. column_sums_add adds up `parts`
// [blocks, width] in order.
template <class S, bool ADD>
__device__ __forceinline__ void backward(const S* x, const S* weight, const float* inv_rms, const S* d_out, S* d_x,
                                         float* parts, int rows, int width) {
    bool whole = is_whole(width), is_there = 8 * threadIdx.x < width;
    int at = 8 * threadIdx.x;
    float part[8] = {};
    Eight<S> w = {}, next_x = {}, next_d = {}, next_to = {};
    if (is_there) w = fetch8(weight, at, width, whole);
    int per_block = (rows + gridDim.x - 1) / gridDim.x;
    int first = blockIdx.x * per_block, end = min(rows, first + per_block);
    auto fetch = [&](int r) {
        if (!is_there || r >= end) return;
        next_x = fetch8(x + (size_t)r * width, at, width, whole);
        next_d = fetch8(d_out + (size_t)r * width, at, width, whole);
        if (ADD) next_to = fetch8(d_x + (size_t)r * width, at, width, whole);
    };
    fetch(first);
    for (int r = first; r < end; ++r) {
        float inv = inv_rms[r], dot = 0.0f, v[8], d[8], to[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            v[i] = widen_at(next_x, i), d[i] = widen_at(next_d, i), to[i] = widen_at(next_to, i);
            part[i] = fmaf(d[i], v[i] * inv, part[i]);
            d[i] *= widen_at(w, i);
            dot = fmaf(d[i], v[i], dot);
        }
        fetch(r + 1);
        float projection = block_sum(dot) * inv * inv * inv / (float)width;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float g = fmaf(-v[i], projection, d[i] * inv);
            to[i] = ADD ? to[i] + g : g;
        }
        if (is_there) store8(d_x + (size_t)r * width, at, width, whole, to);
    }
    if (is_there) store8(parts + (size_t)blockIdx.x * width, at, width, whole, part);
}

// A half-layer whose result is normed: sum = stream + norm(product), and normed = norm(sum), or sum where `next_weight` is 0.
// Where the product is split-K and not yet summed, parts [n_parts, rows, width] are its partial sums, and `product` is written.
// Rows of `normed` are `pitch` apart. A thread has eight columns.
template <class S> struct ResultArgs {
    S* product;
    const float* parts;
    const S *weight, *stream, *next_weight;
    S *sum, *normed;
    float *inv_rms, *next_inv_rms;
    int n_parts, width, pitch;
    float eps;
};

// The factor 1 / rms of a row.
__device__ __forceinline__ float inverse_rms(const float (&v)[8], int width, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares);
    return 1.0f / sqrtf(block_sum(squares) / (float)width + eps);
}

template <class S> __device__ __forceinline__ void forward_result(const ResultArgs<S>& a) {
    launch_dependents();
    int width = a.width, at = 8 * threadIdx.x;
    bool whole = is_whole(width), is_there = at < width;
    size_t row = (size_t)blockIdx.x * width;
    float v[8] = {}, s[8] = {}, w[8], next[8];
    if (is_there) load8(a.weight, at, width, whole, w);
    if (is_there && a.next_weight) load8(a.next_weight, at, width, whole, next);
    wait_for_previous_kernel();
    if (is_there) {
        load8(a.stream + row, at, width, whole, s);
        if (!a.parts) load8(a.product + row, at, width, whole, v);
        for (int p = 0; p < a.n_parts; ++p) {
            float part[8];
            load8(a.parts + (size_t)p * gridDim.x * width + row, at, width, whole, part);
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = p == 0 ? part[i] : v[i] + part[i];
        }
        if (a.parts) {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = widen(round_to<S>(v[i]));
            store8(a.product + row, at, width, whole, v);
        }
    }
    float inv = inverse_rms(v, width, a.eps);
    if (threadIdx.x == 0) a.inv_rms[blockIdx.x] = inv;
    if (is_there) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = widen(round_to<S>(s[i] + widen(round_to<S>(v[i] * inv * w[i]))));
        store8(a.sum + row, at, width, whole, s);
    }
    if (a.next_weight) {
        float next_inv = inverse_rms(s, width, a.eps);
        if (threadIdx.x == 0) a.next_inv_rms[blockIdx.x] = next_inv;
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = s[i] * next_inv * next[i];
    }
    if (is_there) store8(a.normed + (size_t)blockIdx.x * a.pitch, at, width, whole, s);
}

#define RMSNORM(S)                                                                                                     \
    KERNEL __launch_bounds__(1024)                                                                                     \
        rmsnorm_forward_##S(const S* x, const S* weight, S* out, int pitch, float* inv_rms, int width, float eps) {    \
        forward<S, false>(x, 0, 0, 0, 0, weight, 0, out, pitch, inv_rms, width, eps);                                  \
    }                                                                                                                  \
    KERNEL __launch_bounds__(1024)                                                                                     \
        rmsnorm_forward_add_##S(const S* x, const S* addend, const float* parts, int n_parts, const u32* rows,         \
                                const S* weight, S* sum, S* out, int pitch, float* inv_rms, int width, float eps) {    \
        forward<S, true>(x, addend, parts, n_parts, rows, weight, sum, out, pitch, inv_rms, width, eps);               \
    }                                                                                                                  \
    KERNEL __launch_bounds__(1024)                                                                                     \
        rmsnorm_backward_set_##S(const S* x, const S* weight, const float* inv_rms, const S* d_out, S* d_x,            \
                                 float* parts, int rows, int width) {                                                  \
        backward<S, false>(x, weight, inv_rms, d_out, d_x, parts, rows, width);                                        \
    }                                                                                                                  \
    KERNEL __launch_bounds__(1024)                                                                                     \
        rmsnorm_backward_add_##S(const S* x, const S* weight, const float* inv_rms, const S* d_out, S* d_x,            \
                                 float* parts, int rows, int width) {                                                  \
        backward<S, true>(x, weight, inv_rms, d_out, d_x, parts, rows, width);                                         \
    }                                                                                                                  \
    KERNEL __launch_bounds__(1024) rmsnorm_forward_result_##S(const __grid_constant__ ResultArgs<S> args) {            \
        forward_result(args);                                                                                          \
    }

// Compiled apart, as a GPU stores one or the other.
#ifdef FLOAT_ROWS
RMSNORM(float)
#else
RMSNORM(bf16)
#endif
