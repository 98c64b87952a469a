// What a chunk needs besides the state at its start: decays, the system with the inverses of its blocks, and the weights of outputs. All
// chunks at once.

#define PREPARE_THREADS 128

struct PrepareShared {
    bf16 q[CHUNK * STRIDE];
    bf16 k[CHUNK * STRIDE];
    // -L with T on its diagonal, and the weights of D in the outputs.
    bf16 squares[2][CHUNK * SQUARE];
    // -L within the blocks on the diagonal.
    float near[CHUNK * BLOCK];
    Gates64 gates;
};

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
        for (int n = 0; n < BLOCKS; ++n) {
            if (n * BLOCK > row) break;
            u32 right[4];
            load_by_rows(right, keys, STRIDE, n * BLOCK, k);
            mma_pair(result + 2 * n, left, right);
        }
    }
}

// Queries of the rows that the call has, and keys of all rows.
__device__ __forceinline__ void load_pairs(PrepareShared& s, const ChunkArgs& a, const Chunk& c, size_t slot, int key_head) {
    for (int i = threadIdx.x; i < CHUNK * DIM / 8; i += PREPARE_THREADS) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8, to = r * STRIDE + column;
        bool is_kept = r < c.first;
        const bf16* query = a.mixed + (c.has(r) ? c.row + r : 0) * a.h.conv_width() + key_head * DIM + column;
        const bf16* key = is_kept ? kept_rows(a, slot, key_head * a.h.group()) + r * DIM + column : query + a.h.key_width();
        copy8(s.q + to, query, c.has(r));
        copy8(s.k + to, key, is_kept || c.has(r));
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// Log decays and beta of a chunk's rows, and the sums of the decays.
__device__ __forceinline__ void prepare_gates(Gates64& g, const ChunkArgs& a, const Chunk& c, const float* kept, int head) {
    int r = threadIdx.x;
    if (r < CHUNK) {
        Gates gates = {0.0f, 0.0f, 0.0f, 0.0f};
        if (c.has(r)) gates = gates_of(a.raw + (c.row + r) * a.h.input_width(), a.a_log, a.dt_bias, a.h, head);
        g.log_decay[r] = r < c.first ? kept[r] : gates.log_decay;
        g.c[r] = g.log_decay[r];
        g.beta[r] = gates.beta;
    }
    __syncthreads();
    if (r < 32) cumulate(g.c);
    __syncthreads();
    if (r < CHUNK) {
        g.decay[r] = expf(g.c[r]);
        g.rest[r] = expf(g.c[CHUNK - 1] - g.c[r]);
    }
}

// -L, in f32 within the blocks on the diagonal, and the weights of D, two columns at a time. Blocks above the diagonal are not written.
__device__ __forceinline__ void write_squares(PrepareShared& s, float (*keys)[4], float (*queries)[4], int row) {
    const float* c = s.gates.c;
#pragma unroll
    for (int n = 0; n < CHUNK / 8; ++n) {
        int block = n * 8 / BLOCK * BLOCK;
        if (block > row) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            int i = row + threadIdx.x % 32 / 4 + half * 8, j = n * 8 + threadIdx.x % 4 * 2;
            float entries[2], weights[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float decay = decay_between(c, i, j + e, j + e <= i);
                entries[e] = j + e < i ? -(s.gates.beta[i] * decay * keys[n][2 * half + e]) : 0.0f;
                weights[e] = decay * queries[n][2 * half + e];
            }
            if (block == row)
                *(float2*)(s.near + i * BLOCK + j - row) = make_float2(entries[0], entries[1]);
            else
                *(u32*)(s.squares[0] + i * SQUARE + j) = pack(entries[0], entries[1]);
            *(u32*)(s.squares[1] + i * SQUARE + j) = pack(weights[0], weights[1]);
        }
    }
}

// T of the block from `row` on, a lane for each column, row after row. Rows of T below `first` were kept.
__device__ __forceinline__ void invert(PrepareShared& s, const float* kept, int row, const Chunk& c) {
    int column = threadIdx.x % 32;
    if (column >= BLOCK) return;
    float t[BLOCK];
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) {
        float value = r == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < r; ++j) value = fmaf(s.near[(row + r) * BLOCK + j], t[j], value);
        if (row + r < c.first && row + BLOCK > c.first) value = kept[CHUNK + r * BLOCK + column];
        t[r] = value;
        s.squares[0][(row + r) * SQUARE + row + column] = round_to<bf16>(value);
        if (c.n / BLOCK * BLOCK == row) s.gates.inverse[r * BLOCK + column] = value;
    }
}

// Grid: (chunks, key heads); blocks behind the last chunk do nothing.
KERNEL __launch_bounds__(PREPARE_THREADS, 3) deltanet_prepare(const __grid_constant__ ChunkArgs a) {
    extern __shared__ __align__(16) char memory[];
    PrepareShared& s = *(PrepareShared*)memory;
    int index = blockIdx.x, sequence = find_chunk(a.sequences, &index);
    if (sequence < 0) return;
    Chunk c = SequenceRows(a.sequences, sequence).chunk(index);
    size_t slot = a.kept_rows ? a.sequences.slots[sequence] : 0;
    int row = threadIdx.x / 32 * BLOCK;
    load_pairs(s, a, c, slot, blockIdx.y);
    __syncthreads();
    float keys[CHUNK / 8][4], queries[CHUNK / 8][4];
    score(keys, s.k, s.k, row);
    score(queries, s.q, s.k, row);
    for (int head = blockIdx.y * a.h.group(); head < ((int)blockIdx.y + 1) * a.h.group(); ++head) {
        const float* kept = a.kept_numbers ? kept_numbers(a, slot, head) : 0;
        prepare_gates(s.gates, a, c, kept, head);
        write_squares(s, keys, queries, row);
        __syncwarp();
        invert(s, kept, row, c);
        __syncthreads();
        size_t to = (size_t)blockIdx.x * a.h.value + head;
        for (int i = threadIdx.x; i < 2 * CHUNK * CHUNK / 8; i += PREPARE_THREADS) {
            int r = i % (CHUNK * CHUNK / 8) / (CHUNK / 8), column = i % (CHUNK / 8) * 8, square = i / (CHUNK * CHUNK / 8);
            if (column / BLOCK <= r / BLOCK)
                ((uint4*)(a.squares + to * 2 * CHUNK * CHUNK))[i] = *(const uint4*)(s.squares[square] + r * SQUARE + column);
        }
        for (int i = threadIdx.x; i < (int)(sizeof(Gates64) / 16); i += PREPARE_THREADS)
            ((uint4*)(a.gates + to))[i] = ((const uint4*)&s.gates)[i];
        __syncthreads();
    }
}

// Keeps keys, log decays and T of the chunk that a sequence ends in the midst of. Grid: (value heads, sequences).
KERNEL deltanet_keep_chunk(const __grid_constant__ ChunkArgs a) {
    int sequence = blockIdx.y, head = blockIdx.x, n = n_chunks(a.sequences, sequence);
    if (n == 0) return;
    Chunk c = SequenceRows(a.sequences, sequence).chunk(n - 1);
    if (c.n == CHUNK) return;
    size_t slot = a.sequences.slots[sequence];
    bf16* rows = kept_rows(a, slot, head);
    float* numbers = kept_numbers(a, slot, head);
    const bf16* keys = a.mixed + a.h.key_width() + head / a.h.group() * DIM;
    const Gates64& gates = a.gates[(size_t)(chunks_before(a.sequences, sequence) + n - 1) * a.h.value + head];
    for (int i = threadIdx.x; i < CHUNK * DIM / 8; i += blockDim.x) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8;
        if (c.has(r)) *(uint4*)(rows + r * DIM + column) = *(const uint4*)(keys + (c.row + r) * a.h.conv_width() + column);
    }
    for (int i = threadIdx.x; i < KEPT_NUMBERS; i += blockDim.x)
        numbers[i] = i < CHUNK ? gates.log_decay[i] : gates.inverse[i - CHUNK];
}
