// Gated DeltaNet in chunks of 64 rows: what the kernels of training, prefill and decode share.
//
// With the log decays g, c the sums of g up to a row, S the state at the chunk's start and D the corrected values:
//     L_ij = beta_i exp(c_i - c_j) (k_i . k_j)  for j < i, else 0
//     D_i  = beta_i (v_i - exp(c_i) k_i S) - sum_{j<i} L_ij D_j
//     o_i  = exp(c_i) q_i S + sum_{j<=i} exp(c_i - c_j) (q_i . k_j) D_j
//     S'   = exp(c_63) S + sum_j k_j^T exp(c_63 - c_j) D_j
// Row i of every term reads rows up to i and S only. So decode (decode.cu) computes one row of a partly filled chunk from S at the
// chunk's start and what was kept of the rows in front, with the operands of every sum in the same order as training (prepare.cu, tile.cu).
//
// The triangular system is solved in blocks of 16 rows: sides R_b = beta (v - exp(c) k S) - sum_{a<b} L_ba D_a over the blocks in front in
// their order, then D_b = T_b R_b with T_b the inverse of the block (I + L_bb). Products take bf16 and sum in f32; L, T, R and D are
// rounded to bf16 before a product reads them. Exponents of hidden pairs are replaced by 0 before exp, because c_i - c_j grows without
// bound for j > i.
//
// Products with the state are transposed: a warp has 16 columns of values, and S^T [16, DIM] stays in its registers from chunk to chunk
// as results of matrix instructions, whose layout is that of the left operand of the next product.

#define CHUNK 64
#define BLOCK 16
#define BLOCKS (CHUNK / BLOCK)
// Elements from one row of a [CHUNK, CHUNK] tile to the next.
#define SQUARE (CHUNK + 8)
// Rows of one value head that are kept between calls: keys, corrected values, and sides of the block in progress.
#define KEPT_ROWS (2 * CHUNK + BLOCK)
// Numbers of one value head that are kept between calls: log decays, and T of the block in progress.
#define KEPT_NUMBERS (CHUNK + BLOCK * BLOCK)

// Numbers of a chunk's rows, and T of the block in progress behind the last row.
struct Gates64 {
    float c[CHUNK], beta[CHUNK];
    // exp(c) and exp(c_63 - c).
    float decay[CHUNK], rest[CHUNK];
    float log_decay[CHUNK];
    float inverse[BLOCK * BLOCK];
};

// The rows of a call and what is kept of their sequences.
struct ChunkArgs {
    // [T, input_width], [T, conv_width]
    const bf16 *raw, *mixed;
    const bf16 *a_log, *dt_bias;
    // [slots, value heads, 2, DIM * DIM / 2] where earlier calls may have computed rows, else 0: see `StatePlanes`.
    u32* states;
    // [slots, value heads, KEPT_ROWS, DIM] and [slots, value heads, KEPT_NUMBERS].
    bf16* kept_rows;
    float* kept_numbers;
    // [chunks, value heads, 2, CHUNK, CHUNK]: -L with T on its diagonal, then the weights of D in the outputs. Blocks above the diagonal
    // hold anything.
    bf16* squares;
    // [chunks, value heads]
    Gates64* gates;
    // For backward, else 0: [chunks, value heads, DIM * DIM / 2], the state in front of each chunk as a left operand with keys as rows, and
    // [T, value_width], the corrected values.
    u32* borders;
    bf16* corrected;
    // [T, value_width]: the outputs; 0 for backward.
    bf16* out;
    Heads h;
    // Blocks of threads that share the columns of a value head, where chunks are taken in order.
    int slices;
    Sequences sequences;
};

// A chunk of a value head. Rows below `first` were kept; rows from `n` on are absent and taken as 0.
struct Chunk {
    int first, n;
    // The row of the call that is row 0 of the chunk; below 0 where that row came earlier.
    long long row;

    __device__ __forceinline__ bool has(int r) const { return r >= first && r < n; }
};

// The rows of a sequence in the call.
struct SequenceRows {
    int begin, n, done;

    __device__ __forceinline__ SequenceRows(const Sequences& sequences, int s)
        : begin(sequences.offsets[s]), n((int)sequences.offsets[s + 1] - begin), done(sequences.done(s)) {}

    // Chunk number `index` of these rows.
    __device__ __forceinline__ Chunk chunk(int index) const {
        int start = done / CHUNK * CHUNK + index * CHUNK;
        return {max(done - start, 0), min(CHUNK, done + n - start), (long long)begin + start - done};
    }
};

// Chunks that the rows of a sequence lie in. Single rows of sequences that go on are decode's, and have none.
__device__ __forceinline__ int n_chunks(const Sequences& sequences, int s) {
    int n = (int)(sequences.offsets[s + 1] - sequences.offsets[s]);
    if (n == 0 || (sequences.contexts && n == 1)) return 0;
    return (sequences.done(s) % CHUNK + n + CHUNK - 1) / CHUNK;
}

// Chunks of all sequences in front of s. All lanes of a warp take part and get the same.
__device__ __forceinline__ int chunks_before(const Sequences& sequences, int s) {
    int n = 0;
    for (int i = threadIdx.x % 32; i < s; i += 32) n += n_chunks(sequences, i);
    return (int)__reduce_add_sync(0xffffffffu, n);
}

// The sequence of chunk `index` of the call, which becomes the chunk's number in the sequence; -1 where there are fewer chunks.
__device__ __forceinline__ int find_chunk(const Sequences& sequences, int* index) {
    for (int start = 0; start < sequences.n; start += 32) {
        int s = start + threadIdx.x % 32, n = s < sequences.n ? n_chunks(sequences, s) : 0, end = n;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            int before = __shfl_up_sync(0xffffffffu, end, step);
            if (threadIdx.x % 32 >= step) end += before;
        }
        u32 is_behind = __ballot_sync(0xffffffffu, end > *index);
        if (is_behind) {
            int lane = __ffs(is_behind) - 1;
            *index -= __shfl_sync(0xffffffffu, end - n, lane);
            return start + lane;
        }
        *index -= __shfl_sync(0xffffffffu, end, 31);
    }
    return -1;
}

// Calls f(register, row within 16, column within 8) for the four elements of a result that a lane holds.
template <class F> __device__ __forceinline__ void for_elements(F f) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 4; ++e) f(e, lane / 4 + e / 2 * 8, lane % 4 * 2 + e % 2);
}

// Two right operands [16, 8] whose columns are rows of a tile: rows row.. and row + 8.., depth from `column` on.
__device__ __forceinline__ void load_by_rows(u32* b, const bf16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix(b, tile + (row + lane % 8 + lane / 16 * 8) * stride + column + lane / 8 % 2 * 8);
}

// Two right operands [16, 8] at (row, column) and (row, column + 8) of a tile.
__device__ __forceinline__ void load_by_columns(u32* b, const bf16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix_transposed(b, tile + (row + lane % 16) * stride + column + lane / 16 * 8);
}

// Where a lane's row of eight of a transposed left operand lies: the operand's rows are columns of the tile, its depth rows.
__device__ __forceinline__ const bf16* transposed_at(const bf16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    return tile + (row + lane % 8 + lane / 16 * 8) * stride + column + lane / 8 % 2 * 8;
}

__device__ __forceinline__ void load_transposed(u32* a, const bf16* tile, int stride, int row, int column) {
    ldmatrix_transposed(a, transposed_at(tile, stride, row, column));
}

__device__ __forceinline__ void store_transposed(const u32* a, bf16* tile, int stride, int row, int column) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     shared_address(transposed_at(tile, stride, row, column))),
                 "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}

// An 8 x 8 matrix of bf16 across a warp, transposed.
__device__ __forceinline__ u32 transpose8(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

template <int N> __device__ __forceinline__ void zero(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i][e] = 0.0f;
}

// results [.., 16 of columns] += a b for both halves of b.
__device__ __forceinline__ void mma_pair(float (*results)[4], const u32* a, const u32* b) {
    mma(results[0], a, b);
    mma(results[1], a, b + 2);
}

// The results of sixteen columns as a left operand.
__device__ __forceinline__ void as_operand(u32* a, const float (*results)[4]) {
    a[0] = pack(results[0][0], results[0][1]);
    a[1] = pack(results[0][2], results[0][3]);
    a[2] = pack(results[1][0], results[1][1]);
    a[3] = pack(results[1][2], results[1][3]);
}

// Multiplies an operand by a factor for each of its sixteen columns, which are rows from `row` on of the chunk.
__device__ __forceinline__ void scale_operand(u32* to, const u32* a, const float* factors, int row, float sign) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        int at = row + half * 8 + threadIdx.x % 4 * 2;
        float even = sign * factors[at], odd = sign * factors[at + 1];
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) to[i] = pack(even * low_half(a[i]), odd * high_half(a[i]));
    }
}

// Two numbers of a state as products read them: bf16, halves rounded away from 0, so that the upper half of an f32 follows from the
// rounded one and the lower half.
__device__ __forceinline__ u32 pack_state(float low, float high) {
    return __byte_perm(__float_as_uint(low) + 0x8000u, __float_as_uint(high) + 0x8000u, 0x7632);
}

// Sixteen values by sixteen keys of a transposed state as a left operand.
__device__ __forceinline__ void state_operand(u32* a, const float (*s)[4]) {
    a[0] = pack_state(s[0][0], s[0][1]);
    a[1] = pack_state(s[0][2], s[0][3]);
    a[2] = pack_state(s[1][0], s[1][1]);
    a[3] = pack_state(s[1][2], s[1][3]);
}

// A kept state: left operands of S^T by sixteen values and sixteen keys, as 16 bytes of each lane. The first plane holds the numbers in
// bf16, all that decode reads until a chunk is full. The second holds the lower halves of the f32 numbers.
struct StatePlanes {
    uint4* rounded;

    __device__ __forceinline__ StatePlanes(u32* states, size_t number) : rounded((uint4*)(states + number * DIM * DIM)) {}
    __device__ __forceinline__ uint4* at(int values, int keys) const {
        return rounded + (values * (DIM / 16) + keys) * 32 + threadIdx.x % 32;
    }
    __device__ __forceinline__ uint4* lower(uint4* at) const { return at + DIM * DIM / 8; }

    static __device__ __forceinline__ float joined(u32 rounded, u32 lower) {
        return __uint_as_float((rounded - (lower >> 15) << 16) | lower);
    }
    static __device__ __forceinline__ void join(float* x, u32 rounded, u32 lower) {
        x[0] = joined(rounded & 0xffffu, lower & 0xffffu);
        x[1] = joined(rounded >> 16, lower >> 16);
    }

    // Columns of values from 16 * values on: s [DIM / 8][4].
    __device__ __forceinline__ void load(float (*s)[4], int values) const {
#pragma unroll
        for (int keys = 0; keys < DIM / 16; ++keys) {
            uint4 *at = this->at(values, keys), x = *at, y = *lower(at);
            join(s[2 * keys], x.x, y.x);
            join(s[2 * keys] + 2, x.y, y.y);
            join(s[2 * keys + 1], x.z, y.z);
            join(s[2 * keys + 1] + 2, x.w, y.w);
        }
    }

    __device__ __forceinline__ void store(const float (*s)[4], int values) const {
#pragma unroll
        for (int keys = 0; keys < DIM / 16; ++keys) {
            uint4* at = this->at(values, keys);
            u32 x[4], y[4];
            state_operand(x, s + 2 * keys);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float* pair = s[2 * keys + i / 2] + i % 2 * 2;
                y[i] = __byte_perm(__float_as_uint(pair[0]), __float_as_uint(pair[1]), 0x5410);
            }
            *at = make_uint4(x[0], x[1], x[2], x[3]);
            *lower(at) = make_uint4(y[0], y[1], y[2], y[3]);
        }
    }
};

// S^T = kept S^T + sum_j exp(c_63 - c_j) D_j^T k_j over a full chunk. d: D^T by blocks as left operands.
__device__ __forceinline__ void advance(float (*s)[4], const u32 (*d)[4], const bf16* keys, const float* rest, float kept) {
#pragma unroll
    for (int i = 0; i < DIM / 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][e] *= kept;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        u32 left[4];
        scale_operand(left, d[b], rest, b * BLOCK, 1.0f);
#pragma unroll
        for (int i = 0; i < DIM / 16; ++i) {
            u32 right[4];
            load_by_columns(right, keys, STRIDE, b * BLOCK, i * 16);
            mma_pair(s + 2 * i, left, right);
        }
    }
}

// Sums of the log decays up to each row, by one warp. A scan: the sum of a row reads the rows in front of it and itself.
__device__ __forceinline__ void cumulate(float* c) {
    int lane = threadIdx.x % 32;
    float low = c[lane], high = c[lane + 32];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        float before_low = __shfl_up_sync(0xffffffffu, low, step), before_high = __shfl_up_sync(0xffffffffu, high, step);
        if (lane >= step) low += before_low, high += before_high;
    }
    c[lane] = low;
    c[lane + 32] = __shfl_sync(0xffffffffu, low, 31) + high;
}

// exp(c_i - c_j), 0 where j is hidden from i.
__device__ __forceinline__ float decay_between(const float* c, int i, int j, bool is_seen) {
    float weight = expf(is_seen ? c[i] - c[j] : 0.0f);
    return is_seen ? weight : 0.0f;
}

__device__ __forceinline__ bf16* kept_rows(const ChunkArgs& a, size_t slot, int head) {
    return a.kept_rows + (slot * a.h.value + head) * KEPT_ROWS * DIM;
}
__device__ __forceinline__ float* kept_numbers(const ChunkArgs& a, size_t slot, int head) {
    return a.kept_numbers + (slot * a.h.value + head) * KEPT_NUMBERS;
}

// Starts the copy of eight numbers; zeros where there are none.
__device__ __forceinline__ void copy8(bf16* to, const bf16* from, bool is_there) { cp_async(shared_address(to), from, is_there); }
