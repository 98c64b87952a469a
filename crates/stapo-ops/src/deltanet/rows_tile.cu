// What happens to each row in front of the recurrence in chunks and behind it: rows.cu for bf16, heads of DIM and a convolution over four
// rows. A thread has eight columns of some consecutive rows, and the rows that its convolution reads stay in registers. A row's bits
// depend on the row and on the rows that the convolution reads, not on the call.

// The eight columns and the rows of a thread. Threads behind the last column take the last ones and write nothing.
struct Place {
    int column, first, end, head;
    bool is_there, is_normed;

    __device__ __forceinline__ Place(const Heads& h, int rows, int per_block) {
        column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
        is_there = column < h.conv_width();
        column = min(column, h.conv_width() - 8);
        head = column / DIM;
        is_normed = head < 2 * h.key;
        first = blockIdx.x * per_block;
        end = min(rows, first + per_block);
    }
};

// Rows that are on their way to a thread, which reads what it has copied itself.
#define ROWS_AHEAD 4
#define CONV_THREADS 128

struct RowsAhead {
    uint4 rows[ROWS_AHEAD][CONV_THREADS];

    __device__ __forceinline__ void load(int row, const bf16* from, bool is_there) {
        cp_async(shared_address(&rows[row % ROWS_AHEAD][threadIdx.x]), from, is_there);
    }
    __device__ __forceinline__ uint4 at(int row) const { return rows[row % ROWS_AHEAD][threadIdx.x]; }
};

// Rows of a thread's eight columns, `pitch` apart.
struct ColumnRows {
    const bf16* first;
    int pitch;

    __device__ __forceinline__ const bf16* at(int row) const { return first + (long long)row * pitch; }

    // The gradients of what the recurrence took in. keyed [2, n_rows, value, DIM]: those of queries and keys by value head, here of the
    // first that shares the key head; values [n_rows, conv_width] has those of values.
    static __device__ __forceinline__ ColumnRows gradients(const bf16* keyed, const bf16* values, const Heads& h, const Place& at, int n_rows) {
        int is_key = at.head >= h.key, head = (at.head - is_key * h.key) * h.group();
        if (!at.is_normed) return {values + at.column, h.conv_width()};
        return {keyed + ((size_t)is_key * n_rows * h.value + head) * DIM + at.column % DIM, h.value * DIM};
    }
};

// Shapes: mixed [T, conv_width]; inv_norms [T, norms]. Grid: (rows, columns).
KERNEL deltanet_mix(const __grid_constant__ ConvRows rows, bf16* mixed, float* inv_norms, int n_rows, int per_block) {
    __shared__ RowsAhead ahead;
    const Heads& h = rows.h;
    Place at(h, n_rows, per_block);
    Convolution conv(rows, at.first, rows.sequences.of_row(at.first), at.column);
    ColumnRows inputs = {rows.raw + at.column, h.input_width()};
    auto load = [&](int row) {
        ahead.load(row, inputs.at(min(row, at.end - 1)), row < at.end);
        cp_async_commit();
    };
    for (int row = at.first; row < at.first + ROWS_AHEAD - 1; ++row) load(row);
    for (int row = at.first; row < at.end; ++row) {
        load(row + ROWS_AHEAD - 1);
        cp_async_wait<ROWS_AHEAD - 1>();
        uint4 x = ahead.at(row);
        float sums[8], inv = mix_columns(sums, conv, x, at.is_normed, at.head < h.key);
        if (at.is_there) {
            *(uint4*)(mixed + (size_t)row * h.conv_width() + at.column) = pack8(sums);
            if (at.is_normed && at.column % DIM == 0) inv_norms[(size_t)row * h.norms() + at.head] = inv;
        }
        conv.step(rows, x);
    }
}

// out = norm(outputs) * silu(z). Shapes: outputs [T, value_width]; rows of `out` are `pitch` apart. value_width / 8 threads for each row.
KERNEL deltanet_norm(const bf16* raw, const bf16* outputs, const bf16* weight, float* inv_norms, bf16* out, int pitch, float eps,
                     const __grid_constant__ Heads h) {
    size_t row = blockIdx.x;
    int column = threadIdx.x * 8;
    float x[8], z[8], w[8];
    widen8(x, *(const uint4*)(outputs + row * h.value_width() + column));
    widen8(z, *(const uint4*)(raw + row * h.input_width() + h.conv_width() + column));
    widen8(w, *(const uint4*)(weight + column % DIM));
    float inv = norm_columns(x, z, w, eps);
    if (column % DIM == 0) inv_norms[row * h.norms() + 2 * h.key + column / DIM] = inv;
    store8_anywhere(out + row * pitch + column, x);
}

// The gradients of z and of the outputs of the recurrence, and parts [blocks, DIM] of that of the norm's weight: over the rows of a block,
// then over their heads in order. Rows of `d_raw` are `pitch` apart. value_width / 8 threads.
KERNEL deltanet_norm_backward(const bf16* raw, const bf16* outputs, const bf16* weight, const float* inv_norms, const bf16* d_out,
                              bf16* d_outputs, bf16* d_raw, int pitch, float* parts, int rows, const __grid_constant__ Heads h) {
    extern __shared__ __align__(16) float sums[];
    int column = threadIdx.x * 8, per_block = (rows + gridDim.x - 1) / gridDim.x, end = min(rows, (int)(blockIdx.x + 1) * per_block);
    float w[8], d_weight[8] = {};
    widen8(w, *(const uint4*)(weight + column % DIM));
    for (size_t row = blockIdx.x * per_block; row < (size_t)end; ++row) {
        float x[8], z[8], d[8], dot = 0.0f;
        size_t at = row * h.value_width() + column;
        widen8(x, *(const uint4*)(outputs + at));
        widen8(d, *(const uint4*)(d_out + at));
        widen8(z, *(const uint4*)(raw + row * h.input_width() + h.conv_width() + column));
        float inv = inv_norms[row * h.norms() + 2 * h.key + column / DIM];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float s = fast_sigmoid(z[i]), d_gated = d[i] * (z[i] * s), normed = x[i] * inv;
            d_weight[i] = fmaf(d_gated, normed, d_weight[i]);
            z[i] = d[i] * (normed * w[i]) * fmaf(z[i] * s, 1.0f - s, s);
            d[i] = d_gated * w[i];
            dot = fmaf(d[i], x[i], dot);
        }
        float projection = head_sum(dot) * inv * inv * inv / (float)DIM;
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i] = fmaf(-x[i], projection, d[i] * inv);
        store8_anywhere(d_raw + row * pitch + h.conv_width() + column, z);
        *(uint4*)(d_outputs + at) = pack8(d);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[column + i] = d_weight[i];
    __syncthreads();
    for (int j = threadIdx.x; j < DIM; j += blockDim.x) {
        float sum = sums[j];
        for (int head = 1; head < h.value; ++head) sum += sums[head * DIM + j];
        parts[(size_t)blockIdx.x * DIM + j] = sum;
    }
}

// The gradient of eight columns of the convolution in front of SiLU, in one row, from the input x and the gradients from `from` on, of which
// `first` is loaded, of `group` value heads. Those of a key head are added in the order of the value heads that share it. inv: one over the
// head's length.
__device__ __forceinline__ void gradient_of(float* d, const Heads& h, const Convolution& conv, const Place& at, uint4 x, uint4 first,
                                            const bf16* from, int group, float inv) {
    widen8(d, first);
    for (int i = 1; i < group; ++i) {
        float more[8];
        widen8(more, *(const uint4*)(from + (size_t)i * DIM));
#pragma unroll
        for (int k = 0; k < 8; ++k) d[k] += more[k];
    }
    float sums[8], gates[8], dot = 0.0f;
    conv.sum(sums, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        gates[i] = fast_sigmoid(sums[i]);
        dot = fmaf(d[i], sums[i] * gates[i], dot);
    }
    dot = head_sum(dot);
    if (at.is_normed) {
        float along = -(dot * inv * inv), factor = at.head >= h.key ? inv : inv * (1.0f / sqrtf((float)DIM));
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i] = fmaf(along, sums[i] * gates[i], d[i]) * factor;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] *= fmaf(sums[i] * gates[i], 1.0f - gates[i], gates[i]);
}

// The gradient of queries, keys and values in front of the convolution, and parts [gridDim.x, conv_width, TAPS] of that of its weight.
// Grid: (rows, columns); rows of `d_raw` are `pitch` apart.
KERNEL __launch_bounds__(CONV_THREADS, 3) deltanet_mix_backward(const __grid_constant__ ConvRows rows, const float* inv_norms,
                                                                const bf16* keyed, const bf16* values, bf16* d_raw, int pitch,
                                                                float* parts, int n_rows, int per_block) {
    __shared__ RowsAhead inputs_ahead, gradients_ahead;
    const Heads& h = rows.h;
    Place at(h, n_rows, per_block);
    Convolution conv(rows, at.first, rows.sequences.of_row(at.first), at.column);
    // d_sums[i]: the gradient of the input i rows in front of the last row, as far as known.
    float d_weights[TAPS][8] = {}, d_sums[TAPS - 1][8] = {};
    // Rows behind the last one give to the rows of the block.
    int end = min(n_rows, at.end + TAPS - 1);
    ColumnRows inputs = {rows.raw + at.column, h.input_width()};
    ColumnRows gradients = ColumnRows::gradients(keyed, values, h, at, n_rows);
    int group = at.is_normed ? h.group() : 1, n_norms = h.norms();
    auto load = [&](int row) {
        int of = min(row, end - 1);
        inputs_ahead.load(row, inputs.at(of), row < end);
        gradients_ahead.load(row, gradients.at(of), row < end);
        cp_async_commit();
    };
    for (int row = at.first; row < at.first + ROWS_AHEAD - 1; ++row) load(row);
    const float* next_inv = inv_norms + (size_t)at.first * n_norms + min(at.head, 2 * h.key - 1);
    float inv = *next_inv;
    auto store = [&](int to, const float* d) {
        if (at.is_there && to >= max(at.first, conv.start) && to < at.end) store8_anywhere(d_raw + (size_t)to * pitch + at.column, d);
    };
    auto step = [&](int row, bool is_of_block) {
        load(row + ROWS_AHEAD - 1);
        cp_async_wait<ROWS_AHEAD - 1>();
        uint4 x = inputs_ahead.at(row);
        float d[8], complete[8];
        gradient_of(d, h, conv, at, x, gradients_ahead.at(row), gradients.at(row), group, inv);
        if (row + 1 < end) inv = *(next_inv += n_norms);
#pragma unroll
        for (int tap = 0; is_of_block && tap < TAPS; ++tap) {
            float values_of[8];
            widen8(values_of, tap + 1 < TAPS ? conv.before[tap] : x);
#pragma unroll
            for (int i = 0; i < 8; ++i) d_weights[tap][i] = fmaf(d[i], values_of[i], d_weights[tap][i]);
        }
        // Row - lag takes weight TAPS - 1 - lag. The row three in front is complete; at the end of a sequence, all are.
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            complete[i] = fmaf(conv.weights[0][i], d[i], d_sums[2][i]);
            d_sums[2][i] = fmaf(conv.weights[1][i], d[i], d_sums[1][i]);
            d_sums[1][i] = fmaf(conv.weights[2][i], d[i], d_sums[0][i]);
            d_sums[0][i] = fmaf(conv.weights[3][i], d[i], 0.0f);
        }
        store(row - TAPS + 1, complete);
        if (row + 1 == conv.end) {
#pragma unroll
            for (int lag = 0; lag < TAPS - 1; ++lag) {
                store(row - lag, d_sums[lag]);
#pragma unroll
                for (int i = 0; i < 8; ++i) d_sums[lag][i] = 0.0f;
            }
        }
        conv.step(rows, x);
    };
    for (int row = at.first; row < at.end; ++row) step(row, true);
    for (int row = at.end; row < end; ++row) step(row, false);
    if (!at.is_there) return;
    float4* to = (float4*)(parts + ((size_t)blockIdx.x * h.conv_width() + at.column) * TAPS);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = make_float4(d_weights[0][i], d_weights[1][i], d_weights[2][i], d_weights[3][i]);
}

// Keeps the last rows of each sequence for the convolution of later calls. Grid: (columns, sequences).
KERNEL deltanet_keep_rows(const bf16* raw, bf16* carried, const __grid_constant__ Heads h, const __grid_constant__ Sequences sequences) {
    int s = blockIdx.y, column = (blockIdx.x * blockDim.x + threadIdx.x) * 8, end = sequences.offsets[s + 1];
    if (column >= h.conv_width()) return;
    for (int lag = 1; lag < TAPS && end - lag >= (int)sequences.offsets[s]; ++lag) {
        size_t to = (size_t)sequences.slots[s] * TAPS + (sequences.contexts[s] - lag) % TAPS;
        *(uint4*)(carried + to * h.conv_width() + column) = *(const uint4*)(raw + (size_t)(end - lag) * h.input_width() + column);
    }
}
