// Gated DeltaNet in chunks of 64 rows: the tile that training, prefill and decode share.
//
// With the log decays g, c the sums of g up to a row, S the state at the chunk's start and D the corrected values:
//     L_ij = beta_i exp(c_i - c_j) (k_i . k_j)  for j < i, else 0
//     D_i  = beta_i (v_i - exp(c_i) k_i S) - sum_{j<i} L_ij D_j
//     o_i  = exp(c_i) q_i S + sum_{j<=i} exp(c_i - c_j) (q_i . k_j) D_j
//     S'   = exp(c_63) S + sum_j k_j^T exp(c_63 - c_j) D_j
// Row i of every term reads rows up to i and S only, and D is rounded to bf16 before another row reads it. So decode is this tile
// on a partly filled chunk: it reads S at the chunk's start and the rows of k and D that were kept, and computes the rows behind.
//
// Products take bf16 and sum in f32. The triangular system is solved in blocks of 16 rows: blocks in front by products in
// their order, rows within the block by a chain over the rows in front. Exponents of hidden pairs are replaced by 0 before exp,
// because c_i - c_j grows without bound for j > i.

#define CHUNK 64
#define BLOCK 16
#define THREADS 128
// Elements from one row of a [CHUNK, CHUNK] tile to the next.
#define SQUARE (CHUNK + 8)
// Elements from one row of the right-hand sides of a block to the next.
#define SIDES (DIM + 4)

struct Shared {
    bf16 q[CHUNK * STRIDE];
    bf16 k[CHUNK * STRIDE];
    // The corrected values.
    bf16 d[CHUNK * STRIDE];
    bf16 state[DIM * STRIDE];
    // -L of the blocks below the diagonal, then the weights of D in the outputs.
    bf16 weights[CHUNK * SQUARE];
    // -L within the blocks on the diagonal.
    float near[CHUNK * BLOCK];
    float sides[BLOCK * SIDES];
    float decay[CHUNK];
    float beta[CHUNK];
};

// Calls f(register, row within 16, column within 8) for the four elements of a result that a lane holds.
template <class F> __device__ __forceinline__ void for_elements(F f) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) f(e, lane / 4 + e / 2 * 8, lane % 4 * 2 + e % 2);
}

// result [16, DIM] += a [16, depth] b [depth, DIM], a at (row, column) of a tile, b the rows from `first` on of another.
__device__ __forceinline__ void multiply(float (*result)[4], const bf16* a, int stride, int row, int column, const bf16* b,
                                         int first, int depth) {
    for (int k = 0; k < depth; k += 16) {
        u32 left[4];
        load_a(left, a, stride, row, column + k);
#pragma unroll
        for (int n = 0; n < DIM / 16; ++n) {
            u32 right[4];
            load_b_columns(right, b, first + k, n * 16);
            mma(result[2 * n], left, right);
            mma(result[2 * n + 1], left, right + 2);
        }
    }
}

// Scores of 16 rows of `a` from `row` on with all keys up to the end of their block: result [16, row + 16].
__device__ __forceinline__ void score(float (*result)[4], const bf16* a, const bf16* keys, int row) {
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) result[n][e] = 0.0f;
    for (int k = 0; k < DIM; k += 16) {
        u32 left[4];
        load_a(left, a, STRIDE, row, k);
#pragma unroll
        for (int n = 0; n < CHUNK / 16; ++n) {
            if (n * 16 > row) break;
            u32 right[4];
            load_b_rows(right, keys, n * 16, k);
            mma(result[2 * n], left, right);
            mma(result[2 * n + 1], left, right + 2);
        }
    }
}

// Sums of the log decays up to each row. A scan: the sum of a row reads the rows in front of it and itself.
__device__ __forceinline__ void cumulate(float* decay) {
    if (threadIdx.x >= 32) return;
    float low = decay[threadIdx.x], high = decay[threadIdx.x + 32];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        float before_low = __shfl_up_sync(0xffffffffu, low, step), before_high = __shfl_up_sync(0xffffffffu, high, step);
        if (threadIdx.x >= step) low += before_low, high += before_high;
    }
    decay[threadIdx.x] = low;
    decay[threadIdx.x + 32] = __shfl_sync(0xffffffffu, low, 31) + high;
}

// exp(c_i - c_j), 0 where j is hidden from i.
__device__ __forceinline__ float decay_between(const Shared& s, int i, int j, bool is_seen) {
    float weight = expf(is_seen ? s.decay[i] - s.decay[j] : 0.0f);
    return is_seen ? weight : 0.0f;
}

// -L: the blocks below the diagonal in bf16, those on it in f32.
__device__ __forceinline__ void write_system(Shared& s, float (*scores)[4], int row) {
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n)
        for_elements([&](int e, int r, int column) {
            int i = row + r, j = n * 8 + column;
            if (j >= row + BLOCK) return;
            float entry = -(s.beta[i] * decay_between(s, i, j, j < i) * scores[n][e]);
            if (j >= row)
                s.near[i * BLOCK + j - row] = entry;
            else
                s.weights[i * SQUARE + j] = round_to<bf16>(entry);
        });
}

// The rows of D of one block, each thread a column, from the right-hand sides less the blocks in front. Rows below `first` were
// kept and are in place.
__device__ __forceinline__ void solve_block(Shared& s, int row, int first) {
    int column = threadIdx.x;
    if (column >= DIM) return;
    float d[BLOCK];
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) {
        bf16* to = s.d + (row + r) * STRIDE + column;
        if (row + r >= first) {
            float value = s.sides[r * SIDES + column];
#pragma unroll
            for (int j = 0; j < r; ++j) value = fmaf(s.near[(row + r) * BLOCK + j], d[j], value);
            *to = round_to<bf16>(value);
        }
        d[r] = widen(*to);
    }
}

// D of all rows. Warp w has the right-hand sides of block w.
__device__ __forceinline__ void solve(Shared& s, float (*sides)[4], int row, int first) {
    for (int block = 0; block < CHUNK; block += BLOCK) {
        if (row == block) {
#pragma unroll
            for (int n = 0; n < DIM / 8; ++n)
                for_elements([&](int e, int r, int column) { s.sides[r * SIDES + n * 8 + column] = sides[n][e]; });
        }
        __syncthreads();
        solve_block(s, block, first);
        __syncthreads();
        if (row > block) multiply(sides, s.weights, SQUARE, row, block, s.d, block, BLOCK);
    }
}

__device__ __forceinline__ void clear(float (*rows)[4]) {
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) rows[i][e] = 0.0f;
}

// rows [16, DIM] = exp(c) q S + the weighted sum of D over the keys that each row sees.
__device__ __forceinline__ void attend(Shared& s, float (*scores)[4], float (*rows)[4], int row) {
    score(scores, s.q, s.k, row);
#pragma unroll
    for (int i = 0; i < CHUNK / 8; ++i)
        for_elements([&](int e, int r, int column) {
            int at = row + r, j = i * 8 + column;
            if (j >= row + BLOCK) return;
            s.weights[at * SQUARE + j] = round_to<bf16>(decay_between(s, at, j, j <= at) * scores[i][e]);
        });
    __syncwarp();
    clear(rows);
    multiply(rows, s.q, STRIDE, row, 0, s.state, 0, DIM);
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i) for_elements([&](int e, int r, int) { rows[i][e] *= expf(s.decay[row + r]); });
    multiply(rows, s.weights, SQUARE, row, 0, s.d, 0, row + BLOCK);
}

// The state behind a full chunk. Overwrites D with its decayed form.
__device__ __forceinline__ void advance(Shared& s, float (*rows)[4], int row, const float* state, float* next) {
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * DIM; i += THREADS) {
        bf16* d = s.d + i / DIM * STRIDE + i % DIM;
        *d = round_to<bf16>(expf(s.decay[CHUNK - 1] - s.decay[i / DIM]) * widen(*d));
    }
    __syncthreads();
    float kept = expf(s.decay[CHUNK - 1]);
    int lane = threadIdx.x % 32;
    for (int part = row; part < DIM; part += CHUNK) {
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i)
            for_elements([&](int e, int r, int column) { rows[i][e] = kept * state[(part + r) * DIM + i * 8 + column]; });
        for (int at = 0; at < CHUNK; at += 16) {
            // The operand [16 key dimensions, 16 rows] from keys that lie by rows.
            u32 left[4];
            ldmatrix_transposed(left, s.k + (at + lane % 8 + lane / 16 * 8) * STRIDE + part + lane / 8 % 2 * 8);
#pragma unroll
            for (int i = 0; i < DIM / 16; ++i) {
                u32 right[4];
                load_b_columns(right, s.d, at, i * 16);
                mma(rows[2 * i], left, right);
                mma(rows[2 * i + 1], left, right + 2);
            }
        }
#pragma unroll
        for (int i = 0; i < DIM / 8; ++i)
            for_elements([&](int e, int r, int column) { next[(part + r) * DIM + i * 8 + column] = rows[i][e]; });
    }
}

// The rows of a call and what is kept of their sequences.
struct ChunkArgs {
    // [T, input_width], [T, conv_width]
    const bf16 *raw, *mixed;
    const bf16 *a_log, *dt_bias;
    // [.., value heads, DIM, DIM]: of each slot where earlier calls may have computed rows, of each sequence, or, with `corrected`, of
    // each chunk, those of sequence s from number offsets[s] / CHUNK + s on.
    float* states;
    // Of the chunk that a sequence is in the midst of: keys and corrected values [slots, value heads, CHUNK, DIM], log decays [slots,
    // value heads, CHUNK].
    bf16 *kept_keys, *kept_values;
    float* kept_decays;
    // [T, value_width] each: the corrected values, for backward, and the outputs. Either may be 0.
    bf16 *corrected, *out;
    Heads h;
    Sequences sequences;
};

// Where the state in front of a sequence's first row in the call lies, among those of one value head.
__device__ __forceinline__ size_t state_number(const ChunkArgs& a, int sequence) {
    if (a.sequences.contexts) return a.sequences.slots[sequence];
    return a.corrected ? a.sequences.offsets[sequence] / CHUNK + sequence : sequence;
}

// A chunk of a value head. Rows below `first` were kept; rows from `n` on are absent and taken as 0.
struct Chunk {
    int head, key_head, first, n;
    // The row of the call that is row 0 of the chunk; below 0 where that row came earlier.
    long long row;

    __device__ __forceinline__ bool has(int r) const { return r >= first && r < n; }
};

__device__ __forceinline__ void copy8(bf16* to, const bf16* from, bool is_there) {
    uint4 zero = {0, 0, 0, 0};
    *(uint4*)to = is_there ? *(const uint4*)from : zero;
}

// Queries and keys of the rows that the call has, and kept keys and corrected values; other rows are 0.
__device__ __forceinline__ void load_rows(Shared& s, const ChunkArgs& a, const Chunk& c, size_t slot) {
    size_t kept = (slot * a.h.value + c.head) * CHUNK * DIM;
    for (int i = threadIdx.x; i < CHUNK * DIM / 8; i += THREADS) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8, to = r * STRIDE + column;
        bool is_kept = r < c.first;
        size_t row = c.has(r) ? c.row + r : 0;
        const bf16* query = a.mixed + row * a.h.conv_width() + c.key_head * DIM + column;
        size_t before = is_kept ? kept + r * DIM + column : 0;
        copy8(s.q + to, query, c.has(r));
        copy8(s.k + to, is_kept ? a.kept_keys + before : query + a.h.key_width(), is_kept || c.has(r));
        copy8(s.d + to, is_kept ? a.kept_values + before : query, is_kept);
    }
}

// The state as products read it.
__device__ __forceinline__ void load_state(bf16* to, const float* state) {
    for (int i = threadIdx.x; i < DIM * DIM; i += THREADS) to[i / DIM * STRIDE + i % DIM] = round_to<bf16>(state[i]);
}

// Log decays and beta of a chunk's rows; the sums of the decays come with `cumulate`.
__device__ __forceinline__ void load_gates(Shared& s, const ChunkArgs& a, const Chunk& c, size_t slot) {
    int r = threadIdx.x;
    if (r >= CHUNK) return;
    s.decay[r] = r < c.first ? a.kept_decays[(slot * a.h.value + c.head) * CHUNK + r] : 0.0f;
    s.beta[r] = 0.0f;
    if (!c.has(r)) return;
    Gates gates = gates_of(a.raw + (c.row + r) * a.h.input_width(), a.a_log, a.dt_bias, a.h, c.head);
    s.decay[r] = gates.log_decay;
    s.beta[r] = gates.beta;
    if (a.kept_decays) a.kept_decays[(slot * a.h.value + c.head) * CHUNK + r] = gates.log_decay;
}

// Keeps the rows of a chunk that later calls go on in.
__device__ __forceinline__ void keep_chunk(const Shared& s, const ChunkArgs& a, const Chunk& c, size_t slot) {
    size_t kept = (slot * a.h.value + c.head) * CHUNK * DIM;
    for (int i = threadIdx.x; i < CHUNK * DIM / 8; i += THREADS) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8;
        if (!c.has(r)) continue;
        *(uint4*)(a.kept_keys + kept + r * DIM + column) = *(const uint4*)(s.k + r * STRIDE + column);
        *(uint4*)(a.kept_values + kept + r * DIM + column) = *(const uint4*)(s.d + r * STRIDE + column);
    }
}

// The right-hand sides beta (v - exp(c) k S) of the rows that the call has.
__device__ __forceinline__ void write_sides(const Shared& s, const ChunkArgs& a, const Chunk& c, float (*rows)[4], int row) {
    clear(rows);
    multiply(rows, s.k, STRIDE, row, 0, s.state, 0, DIM);
    const bf16* values = a.mixed + 2 * a.h.key_width() + c.head * DIM;
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
        for_elements([&](int e, int r, int column) {
            int at = row + r;
            float value = c.has(at) ? widen(values[(c.row + at) * a.h.conv_width() + i * 8 + column]) : 0.0f;
            rows[i][e] = s.beta[at] * fmaf(-expf(s.decay[at]), rows[i][e], value);
        });
}

// One chunk; the state behind it goes to `next` if it is full.
__device__ __forceinline__ void run_chunk(Shared& s, const ChunkArgs& a, const Chunk& c, size_t slot, const float* state,
                                          float* next) {
    int row = threadIdx.x / 32 * BLOCK;
    load_rows(s, a, c, slot);
    load_state(s.state, state);
    load_gates(s, a, c, slot);
    __syncthreads();
    cumulate(s.decay);
    __syncthreads();
    float scores[CHUNK / 8][4], rows[DIM / 8][4];
    score(scores, s.k, s.k, row);
    write_system(s, scores, row);
    write_sides(s, a, c, rows, row);
    __syncthreads();
    solve(s, rows, row, c.first);
    attend(s, scores, rows, row);
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
        for_elements([&](int e, int r, int column) {
            int at = row + r;
            if (!c.has(at)) return;
            size_t to = (c.row + at) * a.h.value_width() + c.head * DIM + i * 8 + column;
            if (a.out) a.out[to] = round_to<bf16>(rows[i][e]);
            if (a.corrected) a.corrected[to] = s.d[at * STRIDE + i * 8 + column];
        });
    if (c.n == CHUNK && next)
        advance(s, rows, row, state, next);
    else if (a.kept_keys)
        keep_chunk(s, a, c, slot);
}

// Runs the rows of each sequence through the tile, from the chunk on that they begin in. Grid: (value heads, sequences).
KERNEL deltanet_chunks(const __grid_constant__ ChunkArgs a) {
    extern __shared__ __align__(16) char memory[];
    Shared& s = *(Shared*)memory;
    int sequence = blockIdx.y, begin = a.sequences.offsets[sequence], n = (int)a.sequences.offsets[sequence + 1] - begin;
    if (n == 0) return;
    int done = a.sequences.done(sequence), end = done + n;
    size_t slot = state_number(a, sequence), state_len = DIM * DIM;
    bool is_by_chunk = a.corrected;
    Chunk c;
    c.head = blockIdx.x;
    c.key_head = c.head / a.h.group();
    float* state = a.states + (slot * a.h.value + c.head) * state_len;
    if (done == 0)
        for (int i = threadIdx.x; i < DIM * DIM; i += THREADS) state[i] = 0.0f;
    for (int start = done / CHUNK * CHUNK; start < end; start += CHUNK) {
        c.row = (long long)begin + start - done;
        c.first = max(done - start, 0);
        c.n = min(CHUNK, end - start);
        __syncthreads();
        // Only training by chunks keeps every state, and needs none behind the last row.
        bool is_last = is_by_chunk && start + CHUNK >= end;
        float* next = is_last ? 0 : is_by_chunk ? state + a.h.value * state_len : state;
        run_chunk(s, a, c, slot, state, next);
        if (next) state = next;
    }
}
