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
    // What the convolution of eight columns reads besides the row itself: weights, then the rows in front, the earliest first.
    bf16 taps[3 * HEAD_LANES][8 * (2 * TAPS - 1)];
    float beta;
};

// Numbers that were kept of the rows in front, in registers while they are on their way.
struct KeptNumbers {
    float log_decay, inverse[BLOCK * BLOCK / DIM];

    __device__ __forceinline__ KeptNumbers(const float* numbers, int t) {
        log_decay = (int)threadIdx.x < t ? numbers[threadIdx.x] : 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK * BLOCK / DIM; ++i) inverse[i] = numbers[CHUNK + i * DIM + threadIdx.x];
    }

    __device__ __forceinline__ void store(DecodeShared& s, int t) const {
        if (threadIdx.x < CHUNK && (int)threadIdx.x != t) s.log_decay[threadIdx.x] = s.c[threadIdx.x] = log_decay;
#pragma unroll
        for (int i = 0; i < BLOCK * BLOCK / DIM; ++i) s.inverse[i * DIM + threadIdx.x] = inverse[i];
    }
};

// Starts the copies of the rows that were kept in front of row t, and clears what no row fills.
__device__ __forceinline__ void load_kept(DecodeShared& s, const bf16* rows, int t) {
    int block = t / BLOCK * BLOCK, first = threadIdx.x / HEAD_LANES, column = threadIdx.x % HEAD_LANES * 8;
    const bf16* from = rows + column;
    for (int r = first; r < block + BLOCK; r += 8) {
        if (r != t) copy8(s.k + r * STRIDE + column, from + r * DIM, r < t);
        copy8(s.d + r * STRIDE + column, from + (CHUNK + r) * DIM, r < t);
    }
#pragma unroll
    for (int r = first; r < BLOCK; r += 8) {
        copy8(s.sides + r * STRIDE + column, from + (2 * CHUNK + r) * DIM, block + r < t);
        if (r > 1) *(uint4*)(s.pair + r * STRIDE + column) = make_uint4(0, 0, 0, 0);
    }
    for (int i = threadIdx.x * 8; i < (BLOCK + 2) * SQUARE; i += DIM * 8) *(uint4*)(s.weights + i) = make_uint4(0, 0, 0, 0);
}

// The gates of row t, by a thread that mixes no columns.
__device__ __forceinline__ void load_gates(DecodeShared& s, const ChunkArgs& a, int token, int head, int t) {
    if (threadIdx.x != DIM - 1) return;
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

// The query, the key and the value of a row from its input: HEAD_LANES neighbouring lanes have each.
struct MixedColumns {
    int part, at, column;

    __device__ __forceinline__ MixedColumns(const DecodeArgs& a, int head) {
        const Heads& h = a.chunk.h;
        part = min((int)threadIdx.x / HEAD_LANES, 2), at = threadIdx.x % HEAD_LANES * 8;
        column = at + (part == 2 ? 2 * h.key_width() + head * DIM : part * h.key_width() + head / h.group() * DIM);
    }

    // Starts the copies of what the convolution reads besides the row itself; each thread reads what it has copied.
    __device__ __forceinline__ void load(DecodeShared& s, const DecodeArgs& a, size_t slot, int done) const {
        if (threadIdx.x >= 3 * HEAD_LANES) return;
        bf16* to = s.taps[threadIdx.x];
#pragma unroll
        for (int i = 0; i < TAPS; ++i) copy8(to + 8 * i, a.conv + (size_t)column * TAPS + 8 * i, true);
#pragma unroll
        for (int lag = TAPS - 1; lag > 0; --lag)
            copy8(to + 8 * (2 * TAPS - 1 - lag), row_of(a, slot, max(done - lag, 0)), lag <= done);
    }

    // Where the row at a position of its sequence is kept.
    __device__ __forceinline__ bf16* row_of(const DecodeArgs& a, size_t slot, int position) const {
        return a.carried + (slot * TAPS + position % TAPS) * a.chunk.h.conv_width() + column;
    }

    // The row itself, by whole warps, because their lanes exchange sums in `mix`.
    __device__ __forceinline__ uint4 input(const DecodeArgs& a, int token) const {
        const bf16* row = a.chunk.raw + (size_t)token * a.chunk.h.input_width();
        return threadIdx.x < 64 ? *(const uint4*)(row + column) : make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ void mix(DecodeShared& s, const DecodeArgs& a, size_t slot, int done, uint4 x) const {
        if (threadIdx.x >= 64) return;
        float sums[8];
        mix_columns(sums, Convolution((const uint4*)s.taps[min((int)threadIdx.x, 3 * HEAD_LANES - 1)]), x, part < 2, part == 0);
        if (threadIdx.x >= 3 * HEAD_LANES) return;
        uint4 mixed = pack8(sums);
        if (part == 2) *(uint4*)(s.value + at) = mixed;
        if (part < 2) *(uint4*)(s.pair + (1 - part) * STRIDE + at) = mixed;
        if (part == 1) *(uint4*)(s.k + done % CHUNK * STRIDE + at) = mixed;
        *(uint4*)row_of(a, slot, done) = x;
    }
};

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
#pragma unroll
        for (int before = 0; before < BLOCK - 1; ++before)
            if (before < row) value = fmaf(s.near[before], s.inverse[before * BLOCK + j], value);
        s.weights[2 * SQUARE + j] = round_to<bf16>(value);
        numbers[CHUNK + row * BLOCK + j] = value;
    }
    if (j == 0) numbers[t] = s.log_decay[t];
    __syncthreads();
}

// S^T of the key and of the query, in columns 0 and 1 of `rows`: the first lane of four has both. state: S^T by sixteen columns of
// values and sixteen keys.
__device__ __forceinline__ void read_pair(const DecodeShared& s, const uint4 (*state)[DIM / 16], float (&rows)[2][4]) {
    zero(rows);
#pragma unroll
    for (int keys = 0; keys < DIM / 16; ++keys) {
        u32 right[4];
        load_by_rows(right, s.pair, STRIDE, 0, keys * 16);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 x = state[half][keys];
            u32 read[4] = {x.x, x.y, x.z, x.w};
            mma(rows[half], read, right);
        }
    }
}

// The outputs, the corrected values and the sides of a warp's 32 columns from `column` on, from what `read_pair` left in `rows`.
__device__ __forceinline__ void decode_columns(DecodeShared& s, float (&rows)[2][4], int column, int t) {
    int lane = threadIdx.x % 32, block = t / BLOCK * BLOCK;
    float solved[2][4];
    u32 left[4], right[4];
    zero(solved);
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
    int head = blockIdx.x, sequence = blockIdx.y, warp = threadIdx.x / 32;
    u32 token = a.sequences.offsets[sequence], end = a.sequences.offsets[sequence + 1];
    u32 context = a.sequences.contexts[sequence], slot = a.sequences.slots[sequence];
    // The last two hold for every sequence: asked here, all four numbers are loaded at once.
    if (!((end - token == 1) & (context > 0) & (slot != ~0u))) return;
    int done = (int)context - 1, t = done % CHUNK;
    StatePlanes planes(a.states, (size_t)slot * a.h.value + head);
    uint4 state[2][DIM / 16];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int keys = 0; keys < DIM / 16; ++keys)
            state[half][keys] = done < CHUNK ? make_uint4(0, 0, 0, 0) : *planes.at(2 * warp + half, keys);
    bf16* rows = kept_rows(a, slot, head);
    float* numbers = kept_numbers(a, slot, head);
    MixedColumns columns(args, head);
    if (args.conv) {
        columns.load(s, args, slot, done);
        if (threadIdx.x < HEAD_LANES) copy8(s.norm + threadIdx.x * 8, args.norm + threadIdx.x * 8, true);
    }
    cp_async_commit();
    // Earlier steps wrote what was read so far, and the rest of what was kept, which comes while the row is mixed.
    wait_for_previous_kernel();
    const bf16* gates = a.raw + (size_t)token * a.h.input_width() + a.h.conv_width() + head * DIM;
    uint4 x = make_uint4(0, 0, 0, 0), gate = x;
    if (args.conv) x = columns.input(args, token);
    if (args.conv && warp == 0) gate = *(const uint4*)(gates + threadIdx.x % HEAD_LANES * 8);
    load_kept(s, rows, t);
    cp_async_commit();
    KeptNumbers kept(numbers, t);
    load_gates(s, a, token, head, t);
    cp_async_wait<1>();
    if (args.conv)
        columns.mix(s, args, slot, done, x);
    else
        load_mixed(s, a, token, head, t);
    kept.store(s, t);
    cp_async_wait<0>();
    __syncthreads();
    float products[2][4];
    read_pair(s, state, products);
    score_row(s, t);
    if (warp == DIM / 32 - 1) cumulate(s.c);
    __syncthreads();
    weigh_row(s, numbers, t);
    decode_columns(s, products, warp * 32, t);
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
