// Gated DeltaNet: what happens to each row in front of the recurrence and behind it. A row's bits depend on the row and on the rows
// that the convolution reads, not on the call.

#define LENGTH_EPS 1e-6f

// The inputs of the convolution. `carried` [slots, kernel - 1, conv_width] holds the last rows in front of the call.
template <class S> struct ConvRows {
    const S *raw, *conv, *carried;
    Heads h;
    Sequences sequences;
};

// One row of the convolution.
template <class S> struct ConvRow {
    const S *raw, *conv, *carried;
    // Rows of the sequence in the call in front of this one.
    int done, kernel, conv_width, input_width;

    __device__ __forceinline__ ConvRow(const ConvRows<S>& of, int row)
        : conv(of.conv), carried(0), kernel(of.h.kernel), conv_width(of.h.conv_width()), input_width(of.h.input_width()) {
        int s = of.sequences.of_row(row);
        raw = of.raw + (size_t)row * input_width;
        done = row - (int)of.sequences.offsets[s];
        if (of.carried && of.sequences.done(s) > 0)
            carried = of.carried + (size_t)of.sequences.slots[s] * (kernel - 1) * conv_width;
    }

    // Whether the sequence has a row `lag` rows in front of this one.
    __device__ __forceinline__ bool has(int lag) const { return lag <= done || carried; }

    __device__ __forceinline__ float at(int lag, int column) const {
        if (lag <= done) return widen(raw[column - (long long)lag * input_width]);
        return widen(carried[(size_t)(kernel - 1 + done - lag) * conv_width + column]);
    }

    // The convolution in front of SiLU, the first row first.
    __device__ __forceinline__ float sum(int column) const {
        float sum = 0.0f;
        for (int i = 0; i < kernel; ++i) {
            int lag = kernel - 1 - i;
            if (has(lag)) sum = fmaf(widen(conv[(size_t)column * kernel + i]), at(lag, column), sum);
        }
        return sum;
    }
};

// A block of threads has a row, and each warp a head of queries or keys at a time. Shapes: mixed [T, conv_width]; inv_norms [T, norms].
template <class S> __device__ __forceinline__ void mix(const ConvRows<S>& rows, S* mixed, float* inv_norms) {
    const Heads& h = rows.h;
    ConvRow<S> row(rows, blockIdx.x);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    mixed += (size_t)blockIdx.x * h.conv_width();
    inv_norms += (size_t)blockIdx.x * h.norms();
    for (int head = warp; head < 2 * h.key; head += warps) {
        int start = head * h.key_dim;
        float squares = 0.0f;
        for (int j = lane; j < h.key_dim; j += 32) {
            float x = silu(row.sum(start + j));
            squares = fmaf(x, x, squares);
        }
        float inv = 1.0f / sqrtf(warp_sum(squares) + LENGTH_EPS);
        if (lane == 0) inv_norms[head] = inv;
        float factor = head < h.key ? inv * (1.0f / sqrtf((float)h.key_dim)) : inv;
        for (int j = lane; j < h.key_dim; j += 32) mixed[start + j] = round_to<S>(silu(row.sum(start + j)) * factor);
    }
    for (int j = 2 * h.key_width() + threadIdx.x; j < h.conv_width(); j += blockDim.x)
        mixed[j] = round_to<S>(silu(row.sum(j)));
}

// Replaces the carried rows of each sequence by its last ones. Grid: (columns, sequences).
template <class S>
__device__ __forceinline__ void keep_rows(const S* raw, S* carried, const Heads& h, const Sequences& sequences) {
    int s = blockIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x, width = h.conv_width(), n_kept = h.kernel - 1;
    int end = sequences.offsets[s + 1], n_new = end - (int)sequences.offsets[s];
    if (column >= width || n_new == 0) return;
    bool is_begun = sequences.done(s) > 0;
    S* rows = carried + (size_t)sequences.slots[s] * n_kept * width + column;
    // Row i takes row i + n_new, which lies behind it and still holds what it held before the call.
    for (int i = 0; i < n_kept; ++i) {
        int token = end + i - n_kept;
        S x = round_to<S>(0.0f);
        if (i + n_new >= n_kept)
            x = raw[(size_t)token * h.input_width() + column];
        else if (is_begun)
            x = rows[(size_t)(i + n_new) * width];
        rows[(size_t)i * width] = x;
    }
}

// out = norm(outputs) * silu(z). Shapes: outputs [T, value_width]; rows of `out` are `pitch` apart.
template <class S>
__device__ __forceinline__ void gated_norm(const S* raw, const S* outputs, const S* weight, float* inv_norms, S* out,
                                           int pitch, float eps, const Heads& h) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, dim = h.value_dim;
    size_t row = blockIdx.x;
    for (int head = warp; head < h.value; head += warps) {
        const S *x = outputs + row * h.value_width() + head * dim, *z = raw + row * h.input_width() + h.conv_width() + head * dim;
        float squares = 0.0f;
        for (int j = lane; j < dim; j += 32) squares = fmaf(widen(x[j]), widen(x[j]), squares);
        float inv = 1.0f / sqrtf(warp_sum(squares) / (float)dim + eps);
        if (lane == 0) inv_norms[row * h.norms() + 2 * h.key + head] = inv;
        for (int j = lane; j < dim; j += 32)
            out[row * pitch + head * dim + j] = round_to<S>(widen(x[j]) * inv * widen(weight[j]) * silu(widen(z[j])));
    }
}

// The gradients of z and of the outputs of the recurrence. Rows of `d_raw` are `pitch` apart.
template <class S>
__device__ __forceinline__ void gated_norm_backward(const S* raw, const S* outputs, const S* weight, const float* inv_norms,
                                                    const S* d_out, S* d_outputs, S* d_raw, int pitch, const Heads& h) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, dim = h.value_dim;
    size_t row = blockIdx.x;
    for (int head = warp; head < h.value; head += warps) {
        size_t at = row * h.value_width() + head * dim;
        const S *x = outputs + at, *d = d_out + at, *z = raw + row * h.input_width() + h.conv_width() + head * dim;
        float inv = inv_norms[row * h.norms() + 2 * h.key + head], dot = 0.0f;
        for (int j = lane; j < dim; j += 32) dot = fmaf(widen(d[j]) * silu(widen(z[j])) * widen(weight[j]), widen(x[j]), dot);
        float projection = warp_sum(dot) * inv * inv * inv / (float)dim;
        for (int j = lane; j < dim; j += 32) {
            float gate = widen(z[j]), d_normed = widen(d[j]) * silu(gate) * widen(weight[j]);
            float d_gate = widen(d[j]) * (widen(x[j]) * inv * widen(weight[j])) * silu_slope(gate);
            d_raw[row * pitch + h.conv_width() + head * dim + j] = round_to<S>(d_gate);
            d_outputs[at + j] = round_to<S>(fmaf(-widen(x[j]), projection, d_normed * inv));
        }
    }
}

// The rows that a block of threads sums up: consecutive ones.
struct RowRange {
    int first, end;
    __device__ __forceinline__ RowRange(int rows, int block, int blocks) {
        int per_block = (rows + blocks - 1) / blocks;
        first = block * per_block;
        end = min(rows, first + per_block);
    }
};

// parts [blocks, value_dim]: the gradient of the norm's weight over the rows of a block and their heads in order.
template <class S>
__device__ __forceinline__ void norm_weight_parts(const S* raw, const S* outputs, const float* inv_norms, const S* d_out,
                                                  float* parts, int rows, const Heads& h) {
    RowRange range(rows, blockIdx.x, gridDim.x);
    for (int j = threadIdx.x; j < h.value_dim; j += blockDim.x) {
        float sum = 0.0f;
        for (size_t row = range.first; row < (size_t)range.end; ++row)
            for (int head = 0; head < h.value; ++head) {
                size_t at = row * h.value_width() + head * h.value_dim + j;
                float z = widen(raw[row * h.input_width() + h.conv_width() + head * h.value_dim + j]);
                float inv = inv_norms[row * h.norms() + 2 * h.key + head];
                sum = fmaf(widen(d_out[at]) * silu(z), widen(outputs[at]) * inv, sum);
            }
        parts[(size_t)blockIdx.x * h.value_dim + j] = sum;
    }
}

// The gradients of b and a from d_gates [T, 2, value]: those of b, and those of the log decays. parts [blocks, value] each: the
// gradients of a_log and dt_bias over the rows of a block.
template <class S>
__device__ __forceinline__ void gates_backward(const S* raw, const S* a_log, const S* dt_bias, const float* d_gates, S* d_raw,
                                               int pitch, float* a_log_parts, float* dt_bias_parts, int rows, const Heads& h) {
    RowRange range(rows, blockIdx.x, gridDim.x);
    for (int head = threadIdx.x; head < h.value; head += blockDim.x) {
        float of_a_log = 0.0f, of_dt_bias = 0.0f;
        for (size_t row = range.first; row < (size_t)range.end; ++row) {
            Gates gates = gates_of(raw + row * h.input_width(), a_log, dt_bias, h, head);
            float d_log_decay = d_gates[(2 * row + 1) * h.value + head], d_step = -(d_log_decay * gates.rate * gates.slope);
            of_a_log = fmaf(d_log_decay, gates.log_decay, of_a_log);
            of_dt_bias += d_step;
            S* to = d_raw + row * pitch + h.conv_width() + h.value_width();
            to[head] = round_to<S>(d_gates[2 * row * h.value + head]);
            to[h.value + head] = round_to<S>(d_step);
        }
        a_log_parts[(size_t)blockIdx.x * h.value + head] = of_a_log;
        dt_bias_parts[(size_t)blockIdx.x * h.value + head] = of_dt_bias;
    }
}

// d_mixed [T, conv_width] becomes the gradient of the convolution in front of SiLU. It holds that of values; those of queries and
// keys are in d_keyed [2, T, value, key_dim] and are added in the order of the value heads that share a key head.
template <class S>
__device__ __forceinline__ void mix_backward(const ConvRows<S>& rows, const float* inv_norms, const S* d_keyed, S* d_mixed) {
    const Heads& h = rows.h;
    ConvRow<S> row(rows, blockIdx.x);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    size_t at = blockIdx.x, tokens = gridDim.x;
    d_mixed += at * h.conv_width();
    for (int head = warp; head < 2 * h.key; head += warps) {
        int start = head * h.key_dim, is_key = head >= h.key, first = (head - is_key * h.key) * h.group();
        const S* from = d_keyed + ((is_key * tokens + at) * h.value + first) * h.key_dim;
        auto gradient = [&](int j) {
            float sum = widen(from[j]);
            for (int i = 1; i < h.group(); ++i) sum += widen(from[(size_t)i * h.key_dim + j]);
            return sum;
        };
        float dot = 0.0f, inv = inv_norms[at * h.norms() + head];
        for (int j = lane; j < h.key_dim; j += 32) dot = fmaf(gradient(j), silu(row.sum(start + j)), dot);
        float along = -(warp_sum(dot) * inv * inv), factor = is_key ? inv : inv * (1.0f / sqrtf((float)h.key_dim));
        for (int j = lane; j < h.key_dim; j += 32) {
            float sum = row.sum(start + j), d = fmaf(along, silu(sum), gradient(j)) * factor;
            d_mixed[start + j] = round_to<S>(d * silu_slope(sum));
        }
    }
    for (int j = 2 * h.key_width() + threadIdx.x; j < h.conv_width(); j += blockDim.x)
        d_mixed[j] = round_to<S>(widen(d_mixed[j]) * silu_slope(row.sum(j)));
}

// parts [gridDim.y, conv_width, kernel]: the gradient of the convolution's weight over the rows of a block.
template <class S>
__device__ __forceinline__ void conv_weight_parts(const ConvRows<S>& rows, const S* d_mixed, float* parts, int n_rows) {
    const Heads& h = rows.h;
    int column = blockIdx.x * blockDim.x + threadIdx.x, width = h.conv_width();
    if (column >= width) return;
    RowRange range(n_rows, blockIdx.y, gridDim.y);
    parts += ((size_t)blockIdx.y * width + column) * h.kernel;
    for (int i = 0; i < h.kernel; ++i) {
        int lag = h.kernel - 1 - i;
        float sum = 0.0f;
        for (int r = range.first; r < range.end; ++r) {
            ConvRow<S> row(rows, r);
            if (row.has(lag)) sum = fmaf(widen(d_mixed[(size_t)r * width + column]), row.at(lag, column), sum);
        }
        parts[i] = sum;
    }
}

// The gradient of queries, keys and values in front of the convolution. Grid: (rows, columns); rows of `d_raw` are `pitch` apart.
template <class S>
__device__ __forceinline__ void conv_backward(const S* conv, const S* d_mixed, S* d_raw, int pitch, const Heads& h,
                                              const Sequences& sequences) {
    int row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x, width = h.conv_width();
    if (column >= width) return;
    int end = sequences.offsets[sequences.of_row(row) + 1];
    float sum = 0.0f;
    for (int lag = 0; lag < h.kernel && row + lag < end; ++lag)
        sum = fmaf(widen(conv[(size_t)column * h.kernel + h.kernel - 1 - lag]), widen(d_mixed[(size_t)(row + lag) * width + column]),
                   sum);
    d_raw[(size_t)row * pitch + column] = round_to<S>(sum);
}

#define DELTANET_ROWS(S)                                                                                               \
    KERNEL deltanet_mix_##S(const __grid_constant__ ConvRows<S> rows, S* mixed, float* inv_norms) {                    \
        mix(rows, mixed, inv_norms);                                                                                   \
    }                                                                                                                  \
    KERNEL deltanet_keep_rows_##S(const S* raw, S* carried, const __grid_constant__ Heads h,                           \
                                  const __grid_constant__ Sequences sequences) {                                       \
        keep_rows(raw, carried, h, sequences);                                                                         \
    }                                                                                                                  \
    KERNEL deltanet_norm_##S(const S* raw, const S* outputs, const S* weight, float* inv_norms, S* out, int pitch,     \
                             float eps, const __grid_constant__ Heads h) {                                             \
        gated_norm(raw, outputs, weight, inv_norms, out, pitch, eps, h);                                               \
    }                                                                                                                  \
    KERNEL deltanet_norm_backward_##S(const S* raw, const S* outputs, const S* weight, const float* inv_norms,         \
                                      const S* d_out, S* d_outputs, S* d_raw, int pitch,                               \
                                      const __grid_constant__ Heads h) {                                               \
        gated_norm_backward(raw, outputs, weight, inv_norms, d_out, d_outputs, d_raw, pitch, h);                       \
    }                                                                                                                  \
    KERNEL deltanet_norm_weight_##S(const S* raw, const S* outputs, const float* inv_norms, const S* d_out,            \
                                    float* parts, int rows, const __grid_constant__ Heads h) {                         \
        norm_weight_parts(raw, outputs, inv_norms, d_out, parts, rows, h);                                             \
    }                                                                                                                  \
    KERNEL deltanet_gates_backward_##S(const S* raw, const S* a_log, const S* dt_bias, const float* d_gates, S* d_raw, \
                                       int pitch, float* a_log_parts, float* dt_bias_parts, int rows,                  \
                                       const __grid_constant__ Heads h) {                                              \
        gates_backward(raw, a_log, dt_bias, d_gates, d_raw, pitch, a_log_parts, dt_bias_parts, rows, h);               \
    }                                                                                                                  \
    KERNEL deltanet_mix_backward_##S(const __grid_constant__ ConvRows<S> rows, const float* inv_norms,                 \
                                     const S* d_keyed, S* d_mixed) {                                                   \
        mix_backward(rows, inv_norms, d_keyed, d_mixed);                                                               \
    }                                                                                                                  \
    KERNEL deltanet_conv_weight_##S(const __grid_constant__ ConvRows<S> rows, const S* d_mixed, float* parts,          \
                                    int n_rows) {                                                                      \
        conv_weight_parts(rows, d_mixed, parts, n_rows);                                                               \
    }                                                                                                                  \
    KERNEL deltanet_conv_backward_##S(const S* conv, const S* d_mixed, S* d_raw, int pitch,                            \
                                      const __grid_constant__ Heads h,                                                 \
                                      const __grid_constant__ Sequences sequences) {                                   \
        conv_backward(conv, d_mixed, d_raw, pitch, h, sequences);                                                      \
    }

DELTANET_ROWS(float)
DELTANET_ROWS(bf16)
