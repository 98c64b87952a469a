// Gated DeltaNet row by row, in training and generation alike, for storage in f32 and for widths of heads that the tile does not take.
// One block of threads for each value head of each sequence. Sums over key dimensions are chains in their order.

// Rows between two states that backward keeps while it recomputes them.
#define PLAIN_CHUNK 32

template <class S> struct PlainRows {
    // [T, input_width], [T, conv_width]
    const S *raw, *mixed;
    const S *a_log, *dt_bias;
    Heads h;
    Sequences sequences;
};

// The columns of a value head in the row of a call.
template <class S> struct PlainRow {
    const S *query, *key, *value;
    float beta, decay;
    __device__ __forceinline__ PlainRow(const PlainRows<S>& rows, int row, int head) {
        const Heads& h = rows.h;
        const S* mixed = rows.mixed + (size_t)row * h.conv_width();
        query = mixed + head / h.group() * h.key_dim;
        key = query + h.key_width();
        value = mixed + 2 * h.key_width() + head * h.value_dim;
        Gates gates = gates_of(rows.raw + (size_t)row * h.input_width(), rows.a_log, rows.dt_bias, h, head);
        beta = gates.beta;
        decay = expf(gates.log_decay);
    }
};

// S = decay S + k^T beta (v - decay k S) and the column of q S. A thread has column `at`; `apart` numbers lie between two rows of S.
template <class S>
__device__ __forceinline__ float plain_step(const PlainRow<S>& row, float* state, int apart, int key_dim, int at) {
    float read = 0.0f, out = 0.0f;
    for (int i = 0; i < key_dim; ++i) {
        float decayed = row.decay * state[i * apart + at];
        state[i * apart + at] = decayed;
        read = fmaf(widen(row.key[i]), decayed, read);
    }
    float corrected = row.beta * (widen(row.value[at]) - read);
    for (int i = 0; i < key_dim; ++i) {
        float behind = fmaf(widen(row.key[i]), corrected, state[i * apart + at]);
        state[i * apart + at] = behind;
        out = fmaf(widen(row.query[i]), behind, out);
    }
    return out;
}

// Grid: (value heads, sequences). Shapes: states [slots, value, key_dim, value_dim], or 0 where no earlier call had rows; outputs
// [T, value_width].
template <class S> __device__ __forceinline__ void plain_forward(const PlainRows<S>& rows, float* states, S* outputs) {
    extern __shared__ __align__(16) char memory[];
    float* state = (float*)memory;
    const Heads& h = rows.h;
    int head = blockIdx.x, s = blockIdx.y, first = rows.sequences.offsets[s], end = rows.sequences.offsets[s + 1];
    if (first == end) return;
    size_t len = (size_t)h.key_dim * h.value_dim;
    bool is_begun = rows.sequences.done(s) > 0;
    if (states) states += ((size_t)rows.sequences.slots[s] * h.value + head) * len;
    for (int at = threadIdx.x; at < h.value_dim; at += blockDim.x) {
        for (int i = 0; i < h.key_dim; ++i) state[i * h.value_dim + at] = is_begun ? states[i * h.value_dim + at] : 0.0f;
        for (int r = first; r < end; ++r) {
            PlainRow<S> row(rows, r, head);
            float out = plain_step(row, state, h.value_dim, h.key_dim, at);
            outputs[(size_t)r * h.value_width() + head * h.value_dim + at] = round_to<S>(out);
        }
        for (int i = 0; states && i < h.key_dim; ++i) states[i * h.value_dim + at] = state[i * h.value_dim + at];
    }
}

// d_keyed [2, T, value, key_dim]: the gradients of queries and keys by value head. d_gates [T, 2, value]: those of b and of the log
// decays. Those of values go to d_mixed [T, conv_width]. `borders` holds for each block of threads the states in front of every
// PLAIN_CHUNK rows of its sequence and behind them PLAIN_CHUNK states of one chunk; `n_borders` states are kept for each value head.
template <class S>
__device__ __forceinline__ void plain_backward(const PlainRows<S>& rows, const S* d_outputs, float* borders, int n_borders, S* d_keyed,
                                               float* d_gates, S* d_mixed, int tokens) {
    extern __shared__ __align__(16) char memory[];
    const Heads& h = rows.h;
    int head = blockIdx.x, s = blockIdx.y, begin = rows.sequences.offsets[s], n = (int)rows.sequences.offsets[s + 1] - begin;
    int width = h.value_dim, apart = width + 1;
    size_t len = (size_t)h.key_dim * width;
    float *d_state = (float*)memory, *error = d_state + h.key_dim * apart, *d_read = error + width, *d_out = d_read + width;
    // Borders of earlier sequences come first: at most one for each PLAIN_CHUNK rows and one more.
    borders += ((size_t)head * n_borders + begin / PLAIN_CHUNK + s * (PLAIN_CHUNK + 1)) * len;
    int n_chunks = (n + PLAIN_CHUNK - 1) / PLAIN_CHUNK;
    float* states = borders + n_chunks * len;
    for (int at = threadIdx.x; at < width; at += blockDim.x)
        for (int i = 0; i < h.key_dim; ++i) {
            d_state[i * apart + at] = 0.0f;
            borders[i * width + at] = 0.0f;
        }
    for (int at = threadIdx.x; at < width; at += blockDim.x)
        for (int chunk = 1; chunk < n_chunks; ++chunk) {
            float *from = borders + (chunk - 1) * len, *to = borders + chunk * len;
            for (int i = 0; i < h.key_dim; ++i) to[i * width + at] = from[i * width + at];
            for (int r = (chunk - 1) * PLAIN_CHUNK; r < chunk * PLAIN_CHUNK; ++r)
                plain_step(PlainRow<S>(rows, begin + r, head), to, width, h.key_dim, at);
        }
    for (int chunk = n_chunks - 1; chunk >= 0; --chunk) {
        int first = chunk * PLAIN_CHUNK, end = min(PLAIN_CHUNK, n - first);
        __syncthreads();
        for (int at = threadIdx.x; at < width; at += blockDim.x)
            for (int r = 0; r < end; ++r) {
                float *from = r == 0 ? borders + chunk * len : states + (r - 1) * len, *to = states + r * len;
                for (int i = 0; i < h.key_dim; ++i) to[i * width + at] = from[i * width + at];
                if (r > 0) plain_step(PlainRow<S>(rows, begin + first + r - 1, head), to, width, h.key_dim, at);
            }
        for (int r = end - 1; r >= 0; --r) {
            size_t token = begin + first + r;
            PlainRow<S> row(rows, token, head);
            const float* state = states + r * len;
            float d_beta = 0.0f, d_decay = 0.0f;
            __syncthreads();
            for (int at = threadIdx.x; at < width; at += blockDim.x) {
                float read = 0.0f, d_corrected = 0.0f, d = widen(d_outputs[token * h.value_width() + head * width + at]);
                for (int i = 0; i < h.key_dim; ++i) {
                    float key = widen(row.key[i]), d_behind = fmaf(widen(row.query[i]), d, d_state[i * apart + at]);
                    read = fmaf(key, row.decay * state[i * width + at], read);
                    d_state[i * apart + at] = d_behind;
                    d_corrected = fmaf(key, d_behind, d_corrected);
                }
                float of_value = row.beta * d_corrected, missed = widen(row.value[at]) - read;
                d_mixed[token * h.conv_width() + 2 * h.key_width() + head * width + at] = round_to<S>(of_value);
                d_read[at] = -of_value;
                error[at] = missed;
                d_out[at] = d;
                d_beta = fmaf(d_corrected, missed, d_beta);
            }
            __syncthreads();
            for (int i = threadIdx.x; i < h.key_dim; i += blockDim.x) {
                float key = widen(row.key[i]), d_query = 0.0f, d_key = 0.0f;
                for (int at = 0; at < width; ++at) {
                    float before = state[i * width + at], decayed = row.decay * before, corrected = row.beta * error[at];
                    float d_behind = d_state[i * apart + at], d_decayed = fmaf(key, d_read[at], d_behind);
                    d_query = fmaf(fmaf(key, corrected, decayed), d_out[at], d_query);
                    d_key = fmaf(d_behind, corrected, fmaf(decayed, d_read[at], d_key));
                    d_decay = fmaf(d_decayed, before, d_decay);
                    d_state[i * apart + at] = row.decay * d_decayed;
                }
                size_t to = (token * h.value + head) * h.key_dim + i;
                d_keyed[to] = round_to<S>(d_query);
                d_keyed[(size_t)tokens * h.value * h.key_dim + to] = round_to<S>(d_key);
            }
            d_beta = block_sum(d_beta);
            d_decay = block_sum(d_decay);
            if (threadIdx.x == 0) {
                d_gates[2 * token * h.value + head] = d_beta * row.beta * (1.0f - row.beta);
                d_gates[(2 * token + 1) * h.value + head] = d_decay * row.decay;
            }
        }
    }
}

#define DELTANET_PLAIN(S)                                                                                              \
    KERNEL deltanet_plain_##S(const __grid_constant__ PlainRows<S> rows, float* states, S* outputs) {                  \
        plain_forward(rows, states, outputs);                                                                          \
    }                                                                                                                  \
    KERNEL deltanet_plain_backward_##S(const __grid_constant__ PlainRows<S> rows, const S* d_outputs, float* borders,  \
                                       int n_borders, S* d_keyed, float* d_gates, S* d_mixed, int tokens) {            \
        plain_backward(rows, d_outputs, borders, n_borders, d_keyed, d_gates, d_mixed, tokens);                        \
    }

DELTANET_PLAIN(float)
DELTANET_PLAIN(bf16)
