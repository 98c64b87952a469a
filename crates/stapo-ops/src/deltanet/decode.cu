// One row of each sequence, on a partly filled chunk. A block of threads has a value head of a sequence, each warp 32 columns of values.
// Every sum has the operands of prepare.cu and tile.cu in their order. Where rows_tile.cu takes the rows, its work is done here as well.

struct DecodeArgs {
    ChunkArgs chunk;
    // Where rows_tile.cu takes the rows, else 0: weights of the convolution and of the norm, and the last rows, see convolution.cu.
    const bf16 *conv, *norm;
    bf16* carried;
    // [T, value_width], rows `pitch` apart.
    bf16* out;
    int pitch;
    float eps;
};

struct DecodeShared {
    bf16 k[CHUNK * STRIDE];
    // Corrected values, and sides of the block in progress.
    bf16 d[CHUNK * STRIDE];
    bf16 sides[BLOCK * STRIDE];
    // Row 0 is the key, row 1 the query, the others 0.
    bf16 pair[BLOCK * STRIDE];
    // Row 0 is -L of the blocks in front, row 1 the weights of D, row 2 the row of T; the others are 0. Operands from row 2 on read two
    // rows more than sixteen.
    bf16 weights[(BLOCK + 2) * SQUARE];
    // Rows of T in front.
    float inverse[BLOCK * BLOCK];
    // Scores of the key and of the query.
    float scores[2][CHUNK];
    float near[BLOCK];
    float log_decay[CHUNK], c[CHUNK];
    // The row's value and its output, and the norm's weight.
    bf16 value[DIM], out[DIM], norm[DIM];
    float beta;
};

// Loads what was kept of the rows in front of row t.
__device__ __forceinline__ void load_kept(DecodeShared& s, const bf16* rows, const float* numbers, int t) {
    int block = t / BLOCK * BLOCK;
    for (int i = threadIdx.x; i < (block + BLOCK) * DIM / 8; i += DIM) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8, to = r * STRIDE + column;
        if (r != t) copy8(s.k + to, rows + r * DIM + column, r < t);
        copy8(s.d + to, rows + (CHUNK + r) * DIM + column, r < t);
    }
    for (int i = threadIdx.x; i < BLOCK * DIM / 8; i += DIM) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8, to = r * STRIDE + column;
        copy8(s.sides + to, rows + (2 * CHUNK + r) * DIM + column, block + r < t);
        if (r > 1) copy8(s.pair + to, rows, false);
    }
    cp_async_commit();
    for (int i = threadIdx.x; i < (BLOCK + 2) * SQUARE; i += DIM) s.weights[i] = round_to<bf16>(0.0f);
    for (int i = threadIdx.x; i < BLOCK * BLOCK; i += DIM) s.inverse[i] = i / BLOCK < t - block ? numbers[CHUNK + i] : 0.0f;
    if (threadIdx.x < CHUNK && (int)threadIdx.x != t) {
        s.log_decay[threadIdx.x] = (int)threadIdx.x < t ? numbers[threadIdx.x] : 0.0f;
        s.c[threadIdx.x] = s.log_decay[threadIdx.x];
    }
}

// The gates of row t.
__device__ __forceinline__ void load_gates(DecodeShared& s, const ChunkArgs& a, int token, int head, int t) {
    if ((int)threadIdx.x != t) return;
    Gates gates = gates_of(a.raw + (size_t)token * a.h.input_width(), a.a_log, a.dt_bias, a.h, head);
    s.log_decay[t] = s.c[t] = gates.log_decay;
    s.beta = gates.beta;
}

// The query, the key and the value of a row that another kernel has mixed.
__device__ __forceinline__ void load_mixed(DecodeShared& s, const ChunkArgs& a, int token, int head, int t) {
    if (threadIdx.x >= DIM / 8) return;
    int column = threadIdx.x * 8;
    const bf16* row = a.mixed + (size_t)token * a.h.conv_width() + column;
    const bf16* query = row + head / a.h.group() * DIM;
    uint4 key = *(const uint4*)(query + a.h.key_width());
    *(uint4*)(s.pair + STRIDE + column) = *(const uint4*)query;
    *(uint4*)(s.pair + column) = *(uint4*)(s.k + t * STRIDE + column) = key;
    *(uint4*)(s.value + column) = *(const uint4*)(row + 2 * a.h.key_width() + head * DIM);
}

// The query, the key and the value of a row from its input, by two warps at most: some neighbouring lanes have each. The input is kept for
// the rows behind.
__device__ __forceinline__ void mix_row(DecodeShared& s, const DecodeArgs& a, int token, int sequence, int head, int t) {
    if (threadIdx.x >= 64) return;
    const Heads& h = a.chunk.h;
    int part = min((int)threadIdx.x / HEAD_LANES, 2), at = threadIdx.x % HEAD_LANES * 8;
    int column = at + (part == 2 ? 2 * h.key_width() + head * DIM : part * h.key_width() + head / h.group() * DIM);
    ConvRows rows = {a.chunk.raw, a.conv, a.carried, h, a.chunk.sequences};
    Convolution conv(rows, token, sequence, column);
    uint4 x = *(const uint4*)(a.chunk.raw + (size_t)token * h.input_width() + column);
    float sums[8];
    mix_columns(sums, conv, x, part < 2, part == 0);
    if (threadIdx.x >= 3 * HEAD_LANES) return;
    uint4 mixed = pack8(sums);
    if (part == 2) *(uint4*)(s.value + at) = mixed;
    if (part < 2) *(uint4*)(s.pair + (1 - part) * STRIDE + at) = mixed;
    if (part == 1) *(uint4*)(s.k + t * STRIDE + at) = mixed;
    size_t kept = (size_t)a.chunk.sequences.slots[sequence] * TAPS + (a.chunk.sequences.contexts[sequence] - 1) % TAPS;
    *(uint4*)(a.carried + kept * h.conv_width() + column) = x;
}

// The norm of the row's output, by one warp. gate: z, by lane.
__device__ __forceinline__ void norm_row(const DecodeShared& s, const DecodeArgs& a, uint4 gate, int token, int head) {
    int at = threadIdx.x % HEAD_LANES * 8;
    float x[8], z[8], w[8];
    widen8(x, *(const uint4*)(s.out + at));
    widen8(z, gate);
    widen8(w, *(const uint4*)(s.norm + at));
    norm_columns(x, z, w, a.eps);
    if (threadIdx.x < HEAD_LANES) store8_anywhere(a.out + (size_t)token * a.pitch + head * DIM + at, x);
}

// Scores of the key and the query with the keys of all blocks up to that of row t.
__device__ __forceinline__ void score_row(DecodeShared& s, int t) {
    for (int block = threadIdx.x / 32 * BLOCK; block <= t; block += DIM / 32 * BLOCK) {
        float scores[2][4];
        zero(scores);
#pragma unroll
        for (int k = 0; k < DIM; k += 16) {
            u32 left[4], right[4];
            load_a(left, s.pair, STRIDE, 0, k);
            load_by_rows(right, s.k, STRIDE, block, k);
            mma_pair(scores, left, right);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i)
            for_elements([&](int e, int r, int column) {
                if (r < 2) s.scores[r][block + i * 8 + column] = scores[i][e];
            });
    }
}

// The row's weights: -L, those of D, and its row of T, which is kept.
__device__ __forceinline__ void weigh_row(DecodeShared& s, float* numbers, int t) {
    int j = threadIdx.x, block = t / BLOCK * BLOCK;
    if (j <= t) {
        float decay = decay_between(s.c, t, j, true), entry = j < t ? -(s.beta * decay * s.scores[0][j]) : 0.0f;
        if (j >= block)
            s.near[j - block] = entry;
        else
            s.weights[j] = round_to<bf16>(entry);
        s.weights[SQUARE + j] = round_to<bf16>(decay * s.scores[1][j]);
    }
    __syncthreads();
    if (j < BLOCK) {
        int row = t - block;
        float value = row == j ? 1.0f : 0.0f;
        for (int before = 0; before < row; ++before) value = fmaf(s.near[before], s.inverse[before * BLOCK + j], value);
        s.weights[2 * SQUARE + j] = round_to<bf16>(value);
        numbers[CHUNK + row * BLOCK + j] = value;
    }
    if (j == 0) numbers[t] = s.log_decay[t];
    __syncthreads();
}

// The outputs, the corrected values and the sides of a warp's 32 columns from `column` on. state: S^T by sixteen columns and sixteen keys.
__device__ __forceinline__ void decode_columns(DecodeShared& s, const uint4 (*state)[DIM / 16], int column, int t) {
    int lane = threadIdx.x % 32, block = t / BLOCK * BLOCK;
    // Column 0 is of the key, column 1 of the query: the first lane of four has both.
    float rows[2][4], solved[2][4];
    u32 left[4], right[4];
    zero(rows);
    zero(solved);
#pragma unroll
    for (int keys = 0; keys < DIM / 16; ++keys) {
        load_by_rows(right, s.pair, STRIDE, 0, keys * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 x = state[half][keys];
            u32 read[4] = {x.x, x.y, x.z, x.w};
            mma(rows[half], read, right);
        }
    }
    float decay = expf(s.c[t]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float* row = rows[i / 2] + i % 2 * 2;
        row[0] = s.beta * fmaf(-decay, row[0], widen(s.value[column + i * 8 + lane / 4]));
        row[1] *= decay;
    }
    // Adds the products of sixteen rows of a tile, by columns, with what is in `right`.
    auto add = [&](float (*to)[4], const bf16* tile, int row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            load_transposed(left, tile, STRIDE, row, column + half * 16);
            mma(to[half], left, right);
        }
    };
    for (int before = 0; before < block; before += BLOCK) {
        load_by_rows(right, s.weights, SQUARE, 0, before);
        add(rows, s.d, before);
    }
    auto store = [&](bf16* to, const float (*x)[4], int of_query) {
        if (lane % 4 == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) to[column + i * 8 + lane / 4] = round_to<bf16>(x[i / 2][i % 2 * 2 + of_query]);
        }
        __syncwarp();
    };
    store(s.sides + (t - block) * STRIDE, rows, 0);
    load_by_rows(right, s.weights + 2 * SQUARE, SQUARE, 0, 0);
    add(solved, s.sides, 0);
    store(s.d + t * STRIDE, solved, 0);
    load_by_rows(right, s.weights, SQUARE, 0, block);
    add(rows, s.d, block);
    store(s.out, rows, 1);
}

// Grid: (value heads, sequences); DIM threads. Sequences with several rows are those of tile.cu.
KERNEL __launch_bounds__(DIM, 512 / DIM) deltanet_decode(const __grid_constant__ DecodeArgs args) {
    extern __shared__ __align__(16) char memory[];
    DecodeShared& s = *(DecodeShared*)memory;
    const ChunkArgs& a = args.chunk;
    launch_dependents();
    int head = blockIdx.x, sequence = blockIdx.y, token = a.sequences.offsets[sequence];
    if (a.sequences.offsets[sequence + 1] - token != 1) return;
    int done = a.sequences.done(sequence), t = done % CHUNK, warp = threadIdx.x / 32;
    size_t slot = a.sequences.slots[sequence];
    StatePlanes planes(a.states, slot * a.h.value + head);
    uint4 state[2][DIM / 16];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int keys = 0; keys < DIM / 16; ++keys)
            state[half][keys] = done < CHUNK ? make_uint4(0, 0, 0, 0) : *planes.at(2 * warp + half, keys);
    bf16* rows = kept_rows(a, slot, head);
    float* numbers = kept_numbers(a, slot, head);
    load_kept(s, rows, numbers, t);
    if (args.conv && threadIdx.x < DIM / 8) *(uint4*)(s.norm + threadIdx.x * 8) = *(const uint4*)(args.norm + threadIdx.x * 8);
    // Earlier steps wrote what was read so far.
    wait_for_previous_kernel();
    load_gates(s, a, token, head, t);
    const bf16* gates = a.raw + (size_t)token * a.h.input_width() + a.h.conv_width() + head * DIM;
    uint4 gate = args.conv && warp == 0 ? *(const uint4*)(gates + threadIdx.x % HEAD_LANES * 8) : make_uint4(0, 0, 0, 0);
    if (args.conv)
        mix_row(s, args, token, sequence, head, t);
    else
        load_mixed(s, a, token, head, t);
    cp_async_wait<0>();
    __syncthreads();
    cumulate(s.c);
    score_row(s, t);
    __syncthreads();
    weigh_row(s, numbers, t);
    decode_columns(s, state, warp * 32, t);
    __syncthreads();
    if (!args.conv && threadIdx.x < DIM / 8)
        *(uint4*)(a.out + (size_t)token * a.h.value_width() + head * DIM + threadIdx.x * 8) = *(const uint4*)(s.out + threadIdx.x * 8);
    if (args.conv && warp == 0) norm_row(s, args, gate, token, head);
    int lane = threadIdx.x % 32;
    if (t + 1 < CHUNK) {
        // Eight columns of a row for each lane: the key, the corrected value, the side.
        int part = lane / 4, column = warp * 32 + lane % 4 * 8;
        const bf16* from = part == 0 ? s.k + t * STRIDE : part == 1 ? s.d + t * STRIDE : s.sides + t % BLOCK * STRIDE;
        int to = part == 0 ? t : part == 1 ? CHUNK + t : 2 * CHUNK + t % BLOCK;
        if (part < 3) *(uint4*)(rows + to * DIM + column) = *(const uint4*)(from + column);
        return;
    }
    // The last row of a chunk: sums of `cumulate` go to the factors of each row.
    __syncthreads();
    if (threadIdx.x < CHUNK) s.log_decay[threadIdx.x] = expf(s.c[CHUNK - 1] - s.c[threadIdx.x]);
    __syncthreads();
    for (int half = 0; half < 2; ++half) {
        float x[DIM / 8][4];
        zero(x);
        if (done >= CHUNK) planes.load(x, 2 * warp + half);
        u32 d[BLOCKS][4];
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) load_transposed(d[b], s.d, STRIDE, b * BLOCK, warp * 32 + half * 16);
        advance(x, d, s.k, s.log_decay, expf(s.c[CHUNK - 1]));
        planes.store(x, 2 * warp + half);
    }
}
