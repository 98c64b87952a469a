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

// Eight elements as they are stored, loaded ahead of their use. They are kept as words because the compiler gives each
// 16-bit value a register of its own.
template <class S> struct Eight {
    u32 word[2 * sizeof(S)];
};

template <class S> __device__ __forceinline__ Eight<S> fetch8(const S* row, int at, int n, bool whole) {
    Eight<S> x = {};
    if (whole) {
#pragma unroll
        for (int i = 0; i < 2 * (int)sizeof(S); i += 4) {
            uint4 v = *(const uint4*)((const u32*)(row + at) + i);
            x.word[i] = v.x, x.word[i + 1] = v.y, x.word[i + 2] = v.z, x.word[i + 3] = v.w;
        }
    } else {
        float y[8];
        load8(row, at, n, false, y);
#pragma unroll
        for (int i = 0; i < 2 * (int)sizeof(S); ++i)
            x.word[i] = sizeof(S) == 2 ? pack(y[2 * i % 8], y[(2 * i + 1) % 8]) : __float_as_uint(y[i % 8]);
    }
    return x;
}

template <class S> __device__ __forceinline__ float widen_at(const Eight<S>& x, int i) {
    if (sizeof(S) == 4) return __uint_as_float(x.word[i % (2 * sizeof(S))]);
    u32 both = x.word[i / 2];
    return __uint_as_float(i % 2 ? both & 0xffff0000u : both << 16);
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
    }

RMSNORM(float)
RMSNORM(bf16)
