// The way back through the chunks. With the gradients dO of the outputs and dS' of the state behind a chunk, P the weights of D in the
// outputs, L as in chunk.cu, and a = exp(c), z_j = exp(c_63 - c_j):
//     dD   = P^T dO + z K dS',  (I + L)^T Y = dD,  G = beta Y
//     dS   = exp(c_63) dS' + Q^T (a dO) - K^T (a G)
//     N_ij = exp(c_i - c_j) (dO_i . D_j)  for j <= i,  M_ij = -exp(c_i - c_j) (G_i . D_j)  for j < i
//     dV = G,  dQ = a dO S^T + N K
//     dK = (M K - a G S^T) + (M^T K + N^T Q + z D dS'^T), the first part from keys as rows, the second from keys as columns
// A row's cumulative decay scales its query and its key as a row, and divides its key as a column, so its gradient is
// q . dq + k . (dk as a row) - k . (dk as a column). The sum of all decays also scales the state. Gradients of b are
// (Y . D) (1 - beta), because D = beta (v - ..).
//
// Y and the gradients of states need the chunks in order, from the last to the first: `deltanet_states_backward`, in whose registers dS
// stays. All else is computed for all chunks at once: `deltanet_rows_backward`. Products take bf16 and sum in f32.

struct BackwardArgs {
    // As forward ran, with the state in front of each chunk and the corrected values.
    ChunkArgs forward;
    // [T, value_width] each
    const bf16* d_outputs;
    bf16* y;
    // As `borders` of ChunkArgs: the gradient of the state behind each chunk.
    u32* d_borders;
    // [2, T, value heads, DIM], [T, 2, value heads] and [T, conv_width], as in plain.cu.
    bf16* d_keyed;
    float* d_gates;
    bf16* d_mixed;
    u64 tokens;
};

// Rows of gradients of outputs.
struct OutputRows {
    const bf16* rows;
    Chunk c;
    size_t width;
    __device__ __forceinline__ const bf16* operator()(int r) const { return rows + (c.has(r) ? c.row + r : 0) * width; }
};

// dD^T by columns of rows: `rows` holds dS'^T K^T, d_out the gradients of outputs as left operands by blocks.
__device__ __forceinline__ void values_backward(const Stage& s, float (*rows)[4], const u32 (*d_out)[4]) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
        for (int i = 2 * b; i < 2 * b + 2; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) rows[i][e] *= s.gates.rest[i * 8 + threadIdx.x % 4 * 2 + e % 2];
#pragma unroll
        for (int behind = b; behind < BLOCKS; ++behind) {
            u32 right[4];
            load_by_columns(right, s.squares[1], SQUARE, behind * BLOCK, b * BLOCK);
            mma_pair(rows + 2 * b, d_out[behind], right);
        }
    }
}

// Y^T by blocks from dD^T in `rows`, from the last block to the first.
__device__ __forceinline__ void solve_backward(const Stage& s, u32 (*y)[4], float (*rows)[4]) {
#pragma unroll
    for (int b = BLOCKS - 1; b >= 0; --b) {
        u32 left[4], right[4];
#pragma unroll
        for (int behind = BLOCKS - 1; behind > b; --behind) {
            load_by_columns(right, s.squares[0], SQUARE, behind * BLOCK, b * BLOCK);
            mma_pair(rows + 2 * b, y[behind], right);
        }
        as_operand(left, rows + 2 * b);
        float solved[2][4];
        zero(solved);
        load_by_columns(right, s.squares[0], SQUARE, b * BLOCK, b * BLOCK);
        mma_pair(solved, left, right);
        as_operand(y[b], solved);
    }
}

// d_state += (factors x)^T rows, x^T by blocks as left operands.
__device__ __forceinline__ void add_products(float (*d_state)[4], const u32 (*x)[4], const float* factors, float sign, const bf16* rows) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        u32 left[4];
        scale_operand(left, x[b], factors, b * BLOCK, sign);
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
            u32 right[4];
            load_by_columns(right, rows, STRIDE, b * BLOCK, i * 16);
            mma_pair(d_state + 2 * i, left, right);
        }
    }
}

__device__ __forceinline__ void chunk_backward(Stage& s, const BackwardArgs& a, const Columns& at, const Chunk& c, size_t number,
                                               float (*d_state)[4]) {
    const Heads& h = a.forward.h;
    float rows[CHUNK / 8][4];
    u32 d_out[BLOCKS][4], y[BLOCKS][4];
    zero(rows);
    uint4* border = (uint4*)(a.d_borders + (number * h.value + at.head) * DIM * DIM / 2) + at.warp / 16 * 32 + threadIdx.x % 32;
    read_state<false>(s, d_state, rows, rows, border);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) load_transposed(d_out[b], s.values, STRIDE, b * BLOCK, at.warp);
    values_backward(s, rows, d_out);
    solve_backward(s, y, rows);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) store_transposed(y[b], s.values, STRIDE, b * BLOCK, at.warp);
    store_columns(s.values, a.y + c.row * h.value_width() + at.head * DIM, h.value_width(), c, at.warp);
    float kept = s.gates.decay[CHUNK - 1];
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) d_state[i][e] *= kept;
    add_products(d_state, d_out, s.gates.decay, 1.0f, s.q);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) scale_operand(y[b], y[b], s.gates.beta, b * BLOCK, 1.0f);
    add_products(d_state, y, s.gates.decay, -1.0f, s.k);
}

// Grid: (value heads and slices of their columns, sequences).
KERNEL __launch_bounds__(SEQUENTIAL_THREADS) deltanet_states_backward(const __grid_constant__ BackwardArgs a) {
    extern __shared__ __align__(16) char memory[];
    Stage* stages = (Stage*)memory;
    const ChunkArgs& f = a.forward;
    int sequence = blockIdx.y, n = n_chunks(f.sequences, sequence);
    if (n == 0) return;
    Columns at(f.h, f.slices);
    SequenceRows of_call(f.sequences, sequence);
    size_t number = chunks_before(f.sequences, sequence);
    // From the last chunk to the first.
    if (!at.computes()) {
        return load_chunks(n, [&](int i) {
            int index = n - 1 - i;
            Chunk c = of_call.chunk(index);
            OutputRows rows = {a.d_outputs + at.head * DIM, c, (size_t)f.h.value_width()};
            load_stage(stages[i % STAGES], f, at, c, 0, number + index, rows, true);
        });
    }
    float d_state[DIM / 8][4];
    zero(d_state);
    run_chunks(n, [&](int i) {
        int index = n - 1 - i;
        chunk_backward(stages[i % STAGES], a, at, of_call.chunk(index), number + index, d_state);
    });
}

// Threads of a block for one chunk: each warp has sixteen key dimensions.
#define ROWS_THREADS (DIM * 2)

struct RowsShared {
    bf16 q[CHUNK * STRIDE];
    bf16 k[CHUNK * STRIDE];
    bf16 d[CHUNK * STRIDE];
    // Y, then G.
    bf16 g[CHUNK * STRIDE];
    bf16 d_out[CHUNK * STRIDE];
    // N and M.
    bf16 pairs[2][CHUNK * SQUARE];
    float c[CHUNK], beta[CHUNK], decay[CHUNK], rest[CHUNK];
    // Parts of each warp: gradients of the cumulative decay of each row, and what each row adds to that of the sum of all decays.
    float d_decay[DIM / 16][CHUNK], d_total[DIM / 16][CHUNK];
};

__device__ __forceinline__ void load_rows_backward(RowsShared& s, const BackwardArgs& a, const Chunk& c, int head, size_t number) {
    const ChunkArgs& f = a.forward;
    for (int i = threadIdx.x; i < CHUNK * DIM / 8; i += ROWS_THREADS) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8, to = r * STRIDE + column;
        size_t row = c.has(r) ? c.row + r : 0, value = row * f.h.value_width() + head * DIM + column;
        const bf16* query = f.mixed + row * f.h.conv_width() + head / f.h.group() * DIM + column;
        copy8(s.q + to, query, c.has(r));
        copy8(s.k + to, query + f.h.key_width(), c.has(r));
        copy8(s.d + to, f.corrected + value, c.has(r));
        copy8(s.g + to, a.y + value, c.has(r));
        copy8(s.d_out + to, a.d_outputs + value, c.has(r));
    }
    cp_async_commit();
    if (threadIdx.x < CHUNK) {
        const Gates64& gates = f.gates[number * f.h.value + head];
        s.c[threadIdx.x] = gates.c[threadIdx.x];
        s.beta[threadIdx.x] = gates.beta[threadIdx.x];
        s.decay[threadIdx.x] = gates.decay[threadIdx.x];
        s.rest[threadIdx.x] = gates.rest[threadIdx.x];
    }
    cp_async_wait<0>();
    __syncthreads();
}

// Y becomes G, the gradient of values; its products with D are those of b. Some neighbouring threads share a row.
__device__ __forceinline__ void gate_rows(RowsShared& s, const BackwardArgs& a, const Chunk& c, int head) {
    constexpr int PER_ROW = ROWS_THREADS / CHUNK, WIDTH = DIM / PER_ROW;
    const Heads& h = a.forward.h;
    int r = threadIdx.x / PER_ROW, part = threadIdx.x % PER_ROW;
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < WIDTH / 8; ++i) {
        // Neighbouring threads read neighbouring words.
        int column = (i * PER_ROW + part) * 8;
        float y[8], d[8];
        load8(s.g + r * STRIDE, column, DIM, true, y);
        load8(s.d + r * STRIDE, column, DIM, true, d);
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            dot = fmaf(y[k], d[k], dot);
            y[k] *= s.beta[r];
        }
        store8(s.g + r * STRIDE, column, DIM, true, y);
        if (c.has(r)) store8(a.d_mixed + (c.row + r) * h.conv_width() + 2 * h.key_width() + head * DIM, column, DIM, true, y);
    }
#pragma unroll
    for (int step = 1; step < PER_ROW; step *= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
    if (part == 0 && c.has(r)) a.d_gates[2 * (c.row + r) * h.value + head] = dot * (1.0f - s.beta[r]);
}

// N from gradients of outputs, M from G.
__device__ __forceinline__ void write_pairs(RowsShared& s) {
    int warp = threadIdx.x / 32, row = warp % BLOCKS * BLOCK;
    for (int which = warp / BLOCKS; which < 2; which += ROWS_THREADS / 32 / BLOCKS) {
        float scores[CHUNK / 8][4];
        score(scores, which ? s.g : s.d_out, s.d, row);
#pragma unroll
        for (int n = 0; n < CHUNK / 8; ++n)
            for_elements([&](int e, int r, int column) {
                int i = row + r, j = n * 8 + column;
                if (j >= row + BLOCK) return;
                float weight = decay_between(s.c, i, j, which ? j < i : j <= i) * scores[n][e];
                s.pairs[which][i * SQUARE + j] = round_to<bf16>(which ? -weight : weight);
            });
    }
}

// results [16 keys, rows] += x^T pairs^T, x as left operands by blocks with keys as rows.
__device__ __forceinline__ void add_rows(float (*results)[4], const u32 (*x)[4], const bf16* pairs) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int before = 0; before <= b; ++before) {
            u32 right[4];
            load_by_rows(right, pairs, SQUARE, b * BLOCK, before * BLOCK);
            mma_pair(results + 2 * b, x[before], right);
        }
}

// results [16 keys, rows] += x^T pairs.
__device__ __forceinline__ void add_columns(float (*results)[4], const u32 (*x)[4], const bf16* pairs) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b)
#pragma unroll
        for (int behind = b; behind < BLOCKS; ++behind) {
            u32 right[4];
            load_by_columns(right, pairs, SQUARE, behind * BLOCK, b * BLOCK);
            mma_pair(results + 2 * b, x[behind], right);
        }
}

// results [16 keys, rows] += state rows^T; `state` are left operands with keys as rows.
__device__ __forceinline__ void read_rows(float (*results)[4], const u32* state, const bf16* rows, int values) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        u32 right[4];
        load_by_rows(right, rows, STRIDE, b * BLOCK, values);
        mma_pair(results + 2 * b, state, right);
    }
}

__device__ __forceinline__ void scale_columns(float (*results)[4], const float* factors, float sign) {
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) results[i][e] *= sign * factors[i * 8 + threadIdx.x % 4 * 2 + e % 2];
}

// The part of a lane's two keys in results . x of two rows; x is half of a left operand with keys as rows.
__device__ __forceinline__ void add_dots(float* dots, const float* results, const u32* x, float sign) {
    dots[0] = fmaf(sign * results[0], low_half(x[0]), fmaf(sign * results[2], low_half(x[1]), dots[0]));
    dots[1] = fmaf(sign * results[1], high_half(x[0]), fmaf(sign * results[3], high_half(x[1]), dots[1]));
}

// Sums over the lanes that have the same rows.
__device__ __forceinline__ void store_dots(float* to, float* dots, int i) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) dots[k] += __shfl_xor_sync(0xffffffffu, dots[k], step);
    }
    int lane = threadIdx.x % 32;
    if (lane < 4) *(float2*)(to + i * 8 + lane * 2) = make_float2(dots[0], dots[1]);
}

// dO S^T and G S^T for a warp's sixteen keys. Gives the warp's part of S . dS', by lane. The next states are loaded meanwhile.
__device__ __forceinline__ float read_states(const RowsShared& s, const uint4* state, const uint4* d_state, float (*d_query)[4],
                                             float (*as_rows)[4]) {
    float total = 0.0f;
    uint4 x = state[0], y = d_state[0];
#pragma unroll 2
    for (int values = 0; values < DIM / 16; ++values) {
        u32 left[4] = {x.x, x.y, x.z, x.w}, d_left[4] = {y.x, y.y, y.z, y.w};
        if (values + 1 < DIM / 16) x = state[(values + 1) * 32], y = d_state[(values + 1) * 32];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            total = fmaf(low_half(left[i]), low_half(d_left[i]), fmaf(high_half(left[i]), high_half(d_left[i]), total));
        read_rows(d_query, left, s.d_out, values * 16);
        read_rows(as_rows, left, s.g, values * 16);
    }
    return total;
}

// The gradient of queries from dO S^T, rounded, as left operands by blocks. dots [2] of each eight rows take q . dq.
__device__ __forceinline__ void queries_backward(const RowsShared& s, float (*d_query)[4], const u32 (*keys)[4], u32 (*rounded)[4],
                                                 float (*dots)[2], int warp) {
    scale_columns(d_query, s.decay, 1.0f);
    add_rows(d_query, keys, s.pairs[0]);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        u32 query[4];
        load_transposed(query, s.q, STRIDE, b * BLOCK, warp * 16);
#pragma unroll
        for (int i = 2 * b; i < 2 * b + 2; ++i) add_dots(dots[i], d_query[i], query + i % 2 * 2, 1.0f);
        as_operand(rounded[b], d_query + 2 * b);
    }
}

// The gradient of keys as columns. Their products with keys that the sum of all decays scales go to s.d_total.
__device__ __forceinline__ void columns_backward(RowsShared& s, const uint4* d_state, float (*as_columns)[4], const u32 (*keys)[4],
                                                 int warp) {
    uint4 y = d_state[0];
#pragma unroll 2
    for (int values = 0; values < DIM / 16; ++values) {
        u32 left[4] = {y.x, y.y, y.z, y.w};
        if (values + 1 < DIM / 16) y = d_state[(values + 1) * 32];
        read_rows(as_columns, left, s.d, values * 16);
    }
    scale_columns(as_columns, s.rest, 1.0f);
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i) {
        float dots[2] = {0.0f, 0.0f};
        add_dots(dots, as_columns[i], keys[i / 2] + i % 2 * 2, 1.0f);
        store_dots(s.d_total[warp], dots, i);
    }
    add_columns(as_columns, keys, s.pairs[1]);
    u32 queries[BLOCKS][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) load_transposed(queries[b], s.q, STRIDE, b * BLOCK, warp * 16);
    add_columns(as_columns, queries, s.pairs[0]);
}

// A warp's sixteen keys of the gradients of queries and keys, which replace queries and keys in their tiles. Gives the warp's part of S . dS',
// by lane.
__device__ __forceinline__ float keys_backward(RowsShared& s, const uint4* state, const uint4* d_state) {
    int warp = threadIdx.x / 32;
    float results[CHUNK / 8][4], as_rows[CHUNK / 8][4], dots[CHUNK / 8][2] = {};
    u32 keys[BLOCKS][4], d_query[BLOCKS][4];
    zero(results);
    zero(as_rows);
    float total = read_states(s, state, d_state, results, as_rows);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) load_transposed(keys[b], s.k, STRIDE, b * BLOCK, warp * 16);
    queries_backward(s, results, keys, d_query, dots, warp);
    scale_columns(as_rows, s.decay, -1.0f);
    add_rows(as_rows, keys, s.pairs[1]);
    zero(results);
    columns_backward(s, d_state, results, keys, warp);
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i) {
        add_dots(dots[i], as_rows[i], keys[i / 2] + i % 2 * 2, 1.0f);
        add_dots(dots[i], results[i], keys[i / 2] + i % 2 * 2, -1.0f);
        store_dots(s.d_decay[warp], dots[i], i);
#pragma unroll
        for (int e = 0; e < 4; ++e) as_rows[i][e] += results[i][e];
    }
    // Other warps read other columns of these tiles.
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        as_operand(keys[b], as_rows + 2 * b);
        store_transposed(d_query[b], s.q, STRIDE, b * BLOCK, warp * 16);
        store_transposed(keys[b], s.k, STRIDE, b * BLOCK, warp * 16);
    }
    return total;
}

// The gradients of the log decays, by one warp: each row's decay is in the sums of all rows behind it. total: S . dS'.
__device__ __forceinline__ void decays_backward(RowsShared& s, const BackwardArgs& a, const Chunk& c, int head, float total) {
    int lane = threadIdx.x;
    if (lane >= 32) return;
    float low = 0.0f, high = 0.0f, rest = 0.0f;
    for (int warp = 0; warp < DIM / 16; ++warp) {
        low += s.d_decay[warp][lane];
        high += s.d_decay[warp][lane + 32];
        rest += s.d_total[warp][lane] + s.d_total[warp][lane + 32];
    }
    total = fmaf(total, s.decay[CHUNK - 1], warp_sum(rest));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        float behind_low = __shfl_down_sync(0xffffffffu, low, step), behind_high = __shfl_down_sync(0xffffffffu, high, step);
        if (lane + step < 32) low += behind_low, high += behind_high;
    }
    low += __shfl_sync(0xffffffffu, high, 0);
    float* to = a.d_gates + (2 * c.row + 1) * a.forward.h.value + head;
    if (c.has(lane)) to[2 * lane * a.forward.h.value] = low + total;
    if (c.has(lane + 32)) to[2 * (lane + 32) * a.forward.h.value] = high + total;
}

// Grid: (chunks, value heads); blocks behind the last chunk do nothing.
KERNEL __launch_bounds__(ROWS_THREADS, 2) deltanet_rows_backward(const __grid_constant__ BackwardArgs a) {
    extern __shared__ __align__(16) char memory[];
    RowsShared& s = *(RowsShared*)memory;
    const ChunkArgs& f = a.forward;
    int index = blockIdx.x, sequence = find_chunk(f.sequences, &index), head = blockIdx.y;
    if (sequence < 0) return;
    Chunk c = SequenceRows(f.sequences, sequence).chunk(index);
    load_rows_backward(s, a, c, head, blockIdx.x);
    gate_rows(s, a, c, head);
    __syncthreads();
    write_pairs(s);
    __syncthreads();
    size_t border = ((size_t)blockIdx.x * f.h.value + head) * DIM * DIM / 8 + threadIdx.x / 32 * (DIM / 16) * 32 + threadIdx.x % 32;
    float total = block_sum(keys_backward(s, (const uint4*)f.borders + border, (const uint4*)a.d_borders + border));
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * CHUNK * DIM / 8; i += ROWS_THREADS) {
        int part = i / (CHUNK * DIM / 8), r = i % (CHUNK * DIM / 8) / (DIM / 8), column = i % (DIM / 8) * 8;
        if (!c.has(r)) continue;
        bf16* to = a.d_keyed + ((part * a.tokens + c.row + r) * f.h.value + head) * DIM + column;
        *(uint4*)to = *(const uint4*)((part ? s.k : s.q) + r * STRIDE + column);
    }
    decays_backward(s, a, c, head, total);
}
