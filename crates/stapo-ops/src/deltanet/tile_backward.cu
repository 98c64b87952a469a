// The way back through the chunks of a value head, from the last to the first. With the gradients dO of the outputs and dS' of the
// state behind a chunk, P and L as in tile.cu, and a = exp(c), z_j = exp(c_63 - c_j):
//     dD   = P^T dO + z K dS',  (I + L)^T Y = dD,  G = beta Y
//     N_ij = exp(c_i - c_j) (dO_i . D_j)  for j <= i,  M_ij = -exp(c_i - c_j) (G_i . D_j)  for j < i
//     dV = G,  dQ = a dO S^T + N K
//     dK = (M K - a G S^T) + (M^T K + N^T Q + z D dS'^T), the first part from keys as rows, the second from keys as columns
//     dS = exp(c_63) dS' + Q^T (a dO) - K^T (a G)
// A row's cumulative decay scales its query and its key as a row, and divides its key as a column, so its gradient is
// q . dq + k . (dk as a row) - k . (dk as a column). The sum of all decays also scales the state. Gradients of b are
// (Y . D) (1 - beta), because D = beta (v - ..).
//
// Products take bf16 and sum in f32.

struct BackwardShared {
    // q, k, d, the state, -L in `weights` and `near`, then M in `weights`.
    Shared forward;
    bf16 d_out[CHUNK * STRIDE];
    // Y, then G.
    bf16 y[CHUNK * STRIDE];
    bf16 d_state[DIM * STRIDE];
    // P, then N.
    bf16 pairs[CHUNK * SQUARE];
    // The gradient of each row's cumulative decay, and what each row adds to that of the sum of all.
    float d_decay[CHUNK];
    float d_total[CHUNK];
};

struct BackwardArgs {
    // As forward ran, with the state in front of each chunk and the corrected values.
    ChunkArgs forward;
    // [T, value_width]
    const bf16* d_outputs;
    // [sequences, value heads, DIM, DIM]
    float* d_states;
    // [2, T, value heads, DIM], [T, 2, value heads] and [T, conv_width], as in plain.cu.
    bf16* d_keyed;
    float* d_gates;
    bf16* d_mixed;
    u64 tokens;
};

// The operand a [16, 16] that is transposed in a tile: its rows are the columns from `column` on, its depth the rows from `row` on.
__device__ __forceinline__ void load_a_transposed(u32* a, const bf16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix_transposed(a, tile + (row + lane % 8 + lane / 16 * 8) * stride + column + lane / 8 % 2 * 8);
}

// result [16, DIM] += a^T [16, depth] b [depth, DIM]: the rows from `first` on of both tiles, columns of a from `column` on.
__device__ __forceinline__ void multiply_transposed(float (*result)[4], const bf16* a, int stride, int column, const bf16* b,
                                                    int first, int depth) {
    for (int k = 0; k < depth; k += 16) {
        u32 left[4];
        load_a_transposed(left, a, stride, first + k, column);
#pragma unroll
        for (int n = 0; n < DIM / 16; ++n) {
            u32 right[4];
            load_b_columns(right, b, first + k, n * 16);
            mma(result[2 * n], left, right);
            mma(result[2 * n + 1], left, right + 2);
        }
    }
}

// result [16, DIM] += a [16, DIM] b^T, rows of a from `row` on, b [DIM, DIM].
__device__ __forceinline__ void multiply_by_transposed(float (*result)[4], const bf16* a, int row, const bf16* b) {
    for (int k = 0; k < DIM; k += 16) {
        u32 left[4];
        load_a(left, a, STRIDE, row, k);
#pragma unroll
        for (int n = 0; n < DIM / 16; ++n) {
            u32 right[4];
            load_b_rows(right, b, n * 16, k);
            mma(result[2 * n], left, right);
            mma(result[2 * n + 1], left, right + 2);
        }
    }
}

// Multiplies each row by factor(row within the chunk).
template <class F> __device__ __forceinline__ void scale_rows(float (*rows)[4], int row, F factor) {
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) for_elements([&](int e, int r, int) { rows[i][e] *= factor(row + r); });
}

// Calls f(row within the chunk, rows . the same row of a tile) for the sixteen rows of a warp.
template <class F> __device__ __forceinline__ void for_dots(float (*rows)[4], const bf16* tile, int row, F f) {
    float dots[2] = {};
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
        for_elements([&](int e, int r, int column) {
            dots[e / 2] = fmaf(rows[i][e], widen(tile[(row + r) * STRIDE + i * 8 + column]), dots[e / 2]);
        });
    // Four neighbouring lanes share a row.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        dots[half] += __shfl_xor_sync(0xffffffffu, dots[half], 1);
        dots[half] += __shfl_xor_sync(0xffffffffu, dots[half], 2);
    }
    int lane = threadIdx.x % 32;
    if (lane % 4 == 0) {
        f(row + lane / 4, dots[0]);
        f(row + lane / 4 + 8, dots[1]);
    }
}

// Weights of the pairs of sixteen rows with the rows up to the end of their block: `sign` times the decay between them times scores.
template <class Seen>
__device__ __forceinline__ void write_pairs(const Shared& s, bf16* pairs, float (*scores)[4], int row, float sign, Seen is_seen) {
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
        for_elements([&](int e, int r, int column) {
            int i = row + r, j = n * 8 + column;
            if (j >= row + BLOCK) return;
            pairs[i * SQUARE + j] = round_to<bf16>(sign * decay_between(s, i, j, is_seen(i, j)) * scores[n][e]);
        });
}

// Y of one block from its right-hand sides less the blocks behind it, each thread a column, from the last row to the first.
__device__ __forceinline__ void solve_block_backward(BackwardShared& s, int row) {
    int column = threadIdx.x;
    if (column >= DIM) return;
    float y[BLOCK];
#pragma unroll
    for (int r = BLOCK - 1; r >= 0; --r) {
        float value = s.forward.sides[r * SIDES + column];
#pragma unroll
        for (int j = BLOCK - 1; j > r; --j) value = fmaf(s.forward.near[(row + j) * BLOCK + r], y[j], value);
        y[r] = value;
        s.y[(row + r) * STRIDE + column] = round_to<bf16>(value);
    }
}

// Y of all rows. Warp w has the right-hand sides of block w.
__device__ __forceinline__ void solve_backward(BackwardShared& s, float (*sides)[4], int row) {
    for (int block = CHUNK - BLOCK; block >= 0; block -= BLOCK) {
        if (row == block) {
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                for_elements([&](int e, int r, int column) { s.forward.sides[r * SIDES + n * 8 + column] = sides[n][e]; });
        }
        __syncthreads();
        solve_block_backward(s, block);
        __syncthreads();
        if (row < block) multiply_transposed(sides, s.forward.weights, SQUARE, row, s.y, block, BLOCK);
    }
}

// A chunk's rows, its state and the gradient of the state behind it. The product of the two in f32 goes to `total`, by thread.
__device__ __forceinline__ float load_backward(BackwardShared& s, const BackwardArgs& a, const Chunk& c, const float* state,
                                               const float* d_state) {
    const Heads& h = a.forward.h;
    for (int i = threadIdx.x; i < CHUNK * DIM / 8; i += THREADS) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8, to = r * STRIDE + column;
        size_t row = c.has(r) ? c.row + r : 0, value = row * h.value_width() + c.head * DIM + column;
        const bf16* query = a.forward.mixed + row * h.conv_width() + c.key_head * DIM + column;
        copy8(s.forward.q + to, query, c.has(r));
        copy8(s.forward.k + to, query + h.key_width(), c.has(r));
        copy8(s.forward.d + to, a.forward.corrected + value, c.has(r));
        copy8(s.d_out + to, a.d_outputs + value, c.has(r));
    }
    load_state(s.forward.state, state);
    load_state(s.d_state, d_state);
    load_gates(s.forward, a.forward, c, 0);
    float total = 0.0f;
    for (int i = threadIdx.x; i < DIM * DIM; i += THREADS) total = fmaf(state[i], d_state[i], total);
    return total;
}

// From dD to Y, and with it the gradients of values and of b. `y` then holds G.
__device__ __forceinline__ void values_backward(BackwardShared& s, const BackwardArgs& a, const Chunk& c, float (*rows)[4], int row) {
    Shared& f = s.forward;
    clear(rows);
    multiply(rows, f.k, STRIDE, row, 0, s.d_state, 0, DIM);
    scale_rows(rows, row, [&](int r) { return expf(f.decay[CHUNK - 1] - f.decay[r]); });
    multiply_transposed(rows, s.pairs, SQUARE, row, s.d_out, row, CHUNK - row);
    solve_backward(s, rows, row);
    const Heads& h = a.forward.h;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
        for_elements([&](int e, int r, int column) { rows[i][e] = widen(s.y[(row + r) * STRIDE + i * 8 + column]); });
    for_dots(rows, f.d, row, [&](int r, float dot) {
        if (c.has(r)) a.d_gates[2 * (c.row + r) * h.value + c.head] = dot * (1.0f - f.beta[r]);
    });
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
        for_elements([&](int e, int r, int column) {
            int at = row + r;
            bf16 g = round_to<bf16>(f.beta[at] * rows[i][e]);
            s.y[at * STRIDE + i * 8 + column] = g;
            if (c.has(at)) a.d_mixed[(c.row + at) * h.conv_width() + 2 * h.key_width() + c.head * DIM + i * 8 + column] = g;
        });
}

// Stores sixteen rows of the gradient of queries (`part` 0) or keys (1).
__device__ __forceinline__ void store_keyed(const BackwardArgs& a, const Chunk& c, float (*rows)[4], int row, int part) {
    int heads = a.forward.h.value;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
        for_elements([&](int e, int r, int column) {
            if (!c.has(row + r)) return;
            size_t at = (size_t)part * a.tokens + c.row + row + r;
            a.d_keyed[(at * heads + c.head) * DIM + i * 8 + column] = round_to<bf16>(rows[i][e]);
        });
}

// The gradients of queries and keys. `pairs` holds N, `weights` M.
__device__ __forceinline__ void keys_backward(BackwardShared& s, const BackwardArgs& a, const Chunk& c, float (*rows)[4], int row) {
    Shared& f = s.forward;
    clear(rows);
    multiply_by_transposed(rows, s.d_out, row, f.state);
    scale_rows(rows, row, [&](int r) { return expf(f.decay[r]); });
    multiply(rows, s.pairs, SQUARE, row, 0, f.k, 0, row + BLOCK);
    for_dots(rows, f.q, row, [&](int r, float dot) { s.d_decay[r] = dot; });
    store_keyed(a, c, rows, row, 0);

    float as_rows[DIM / 8][4];
    clear(as_rows);
    multiply_by_transposed(as_rows, s.y, row, f.state);
    scale_rows(as_rows, row, [&](int r) { return -expf(f.decay[r]); });
    multiply(as_rows, f.weights, SQUARE, row, 0, f.k, 0, row + BLOCK);
    // The same lanes write and read a row's number.
    for_dots(as_rows, f.k, row, [&](int r, float dot) { s.d_decay[r] += dot; });

    clear(rows);
    multiply_by_transposed(rows, f.d, row, s.d_state);
    scale_rows(rows, row, [&](int r) { return expf(f.decay[CHUNK - 1] - f.decay[r]); });
    for_dots(rows, f.k, row, [&](int r, float dot) { s.d_total[r] = dot; });
    multiply_transposed(rows, f.weights, SQUARE, row, f.k, row, CHUNK - row);
    multiply_transposed(rows, s.pairs, SQUARE, row, f.q, row, CHUNK - row);
    for_dots(rows, f.k, row, [&](int r, float dot) { s.d_decay[r] -= dot; });
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows[i][e] += as_rows[i][e];
    store_keyed(a, c, rows, row, 1);
}

// The gradient of the state in front of the chunk, over that of the state behind it. Overwrites the gradients of outputs and G.
__device__ __forceinline__ void state_backward(BackwardShared& s, float (*rows)[4], int row, float* d_state) {
    Shared& f = s.forward;
    for (int i = threadIdx.x; i < CHUNK * DIM; i += THREADS) {
        int r = i / DIM, at = r * STRIDE + i % DIM;
        float factor = expf(f.decay[r]);
        s.d_out[at] = round_to<bf16>(factor * widen(s.d_out[at]));
        s.y[at] = round_to<bf16>(-factor * widen(s.y[at]));
    }
    __syncthreads();
    float kept = expf(f.decay[CHUNK - 1]);
    for (int part = row; part < DIM; part += CHUNK) {
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i)
            for_elements([&](int e, int r, int column) { rows[i][e] = kept * d_state[(part + r) * DIM + i * 8 + column]; });
        multiply_transposed(rows, f.q, STRIDE, part, s.d_out, 0, CHUNK);
        multiply_transposed(rows, f.k, STRIDE, part, s.y, 0, CHUNK);
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i)
            for_elements([&](int e, int r, int column) { d_state[(part + r) * DIM + i * 8 + column] = rows[i][e]; });
    }
}

// The gradients of the log decays: each row's decay is in the sums of all rows behind it.
__device__ __forceinline__ void decays_backward(BackwardShared& s, const BackwardArgs& a, const Chunk& c, float total) {
    if (threadIdx.x != 0) return;
    total *= expf(s.forward.decay[CHUNK - 1]);
    for (int r = 0; r < CHUNK; ++r) total += s.d_total[r];
    for (int r = CHUNK - 1; r >= 0; --r) {
        total += s.d_decay[r];
        if (c.has(r)) a.d_gates[(2 * (c.row + r) + 1) * a.forward.h.value + c.head] = total;
    }
}

__device__ __forceinline__ void chunk_backward(BackwardShared& s, const BackwardArgs& a, const Chunk& c, const float* state,
                                               float* d_state) {
    Shared& f = s.forward;
    int row = threadIdx.x / 32 * BLOCK;
    float total = load_backward(s, a, c, state, d_state);
    __syncthreads();
    cumulate(f.decay);
    // Every warp waits here for the loads and sums of all.
    total = block_sum(total);
    __syncthreads();
    float scores[CHUNK / 8][4], rows[DIM / 8][4];
    score(scores, f.k, f.k, row);
    write_system(f, scores, row);
    score(scores, f.q, f.k, row);
    write_pairs(f, s.pairs, scores, row, 1.0f, [](int i, int j) { return j <= i; });
    __syncthreads();
    values_backward(s, a, c, rows, row);
    __syncthreads();
    score(scores, s.d_out, f.d, row);
    write_pairs(f, s.pairs, scores, row, 1.0f, [](int i, int j) { return j <= i; });
    score(scores, s.y, f.d, row);
    write_pairs(f, f.weights, scores, row, -1.0f, [](int i, int j) { return j < i; });
    __syncthreads();
    keys_backward(s, a, c, rows, row);
    __syncthreads();
    state_backward(s, rows, row, d_state);
    decays_backward(s, a, c, total);
}

// Grid: (value heads, sequences).
KERNEL deltanet_chunks_backward(const __grid_constant__ BackwardArgs a) {
    extern __shared__ __align__(16) char memory[];
    BackwardShared& s = *(BackwardShared*)memory;
    const ChunkArgs& f = a.forward;
    int sequence = blockIdx.y, begin = f.sequences.offsets[sequence], n = (int)f.sequences.offsets[sequence + 1] - begin;
    size_t state_len = DIM * DIM;
    Chunk c;
    c.head = blockIdx.x;
    c.key_head = c.head / f.h.group();
    c.first = 0;
    float* d_state = a.d_states + ((size_t)sequence * f.h.value + c.head) * state_len;
    for (int i = threadIdx.x; i < DIM * DIM; i += THREADS) d_state[i] = 0.0f;
    for (int start = (n - 1) / CHUNK * CHUNK; n > 0 && start >= 0; start -= CHUNK) {
        c.row = begin + start;
        c.n = min(CHUNK, n - start);
        __syncthreads();
        const float* state = f.states + ((state_number(f, sequence) + start / CHUNK) * f.h.value + c.head) * state_len;
        chunk_backward(s, a, c, state, d_state);
    }
}
