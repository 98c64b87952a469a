// The chunks of a sequence in their order: corrected values, outputs and states. A block of threads has some columns of one value head
// of one sequence, and each of its first warps sixteen of them. The other warps load the chunks ahead.

// Chunks in shared memory at once: the one in progress, and those on their way.
#define STAGES (DIM > 64 ? 3 : 2)

// The most threads of a block: warps for all columns of a head, and four that load.
#define SEQUENTIAL_THREADS (2 * DIM + 128)
// Registers of the threads that compute and of those that load. Narrow heads need no division of them.
#define COMPUTE_REGISTERS 232
#define LOAD_REGISTERS 40

// The inputs of one chunk.
struct Stage {
    bf16 q[CHUNK * STRIDE];
    bf16 k[CHUNK * STRIDE];
    // -L with T on its diagonal, and the weights of D in the outputs.
    bf16 squares[2][CHUNK * SQUARE];
    // Values; of kept rows, the corrected values, and the sides where the row is in the block in progress. A warp replaces its columns by
    // corrected values and then by outputs. In backward, gradients of outputs, which become Y.
    bf16 values[CHUNK * STRIDE];
    Gates64 gates;
};

// The columns of a block of threads, and of its warps.
struct Columns {
    int head, key_head, start, width, warp;
    // The number of this thread among those that load, below 0 where it computes, and their number.
    int loader, loaders;

    __device__ __forceinline__ Columns(const Heads& h, int slices) {
        width = DIM / slices;
        head = blockIdx.x / slices;
        key_head = head / h.group();
        start = blockIdx.x % slices * width;
        warp = start + threadIdx.x / 32 * 16;
        loader = (int)threadIdx.x - 2 * width;
        loaders = (int)blockDim.x - 2 * width;
    }

    // The same for all threads of a warp. Takes the registers of the thread's task.
    __device__ __forceinline__ bool computes() const {
        bool computes = __shfl_sync(0xffffffffu, loader, 0) < 0;
#if DIM > 64
        if (computes)
            asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COMPUTE_REGISTERS));
        else
            asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOAD_REGISTERS));
#endif
        return computes;
    }
};

// The loops of both kinds of threads over n chunks: `load(i)` starts the copies of chunk i to its stage, `run(i)` computes with it.
template <class Load> __device__ __forceinline__ void load_chunks(int n, Load load) {
    auto start = [&](int i) {
        if (i < n) load(i);
        cp_async_commit();
    };
    for (int i = 0; i < STAGES - 1; ++i) start(i);
    for (int i = 0; i < n; ++i) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        start(i + STAGES - 1);
    }
}

template <class Run> __device__ __forceinline__ void run_chunks(int n, Run run) {
    for (int i = 0; i < n; ++i) {
        __syncthreads();
        run(i);
    }
}

// Starts the copies of keys of a chunk, what `prepare` left of it, rows `values(r)` [DIM], and where outputs are computed queries.
template <class Values>
__device__ __forceinline__ void load_stage(Stage& s, const ChunkArgs& a, const Columns& at, const Chunk& c, const bf16* kept,
                                           size_t number, Values values, bool has_outputs) {
    for (int i = at.loader; i < CHUNK * DIM / 8; i += at.loaders) {
        int r = i / (DIM / 8), column = i % (DIM / 8) * 8, to = r * STRIDE + column;
        bool is_kept = r < c.first;
        const bf16* query = a.mixed + (c.has(r) ? c.row + r : 0) * a.h.conv_width() + at.key_head * DIM + column;
        if (has_outputs) copy8(s.q + to, query, c.has(r));
        copy8(s.k + to, is_kept ? kept + r * DIM + column : query + a.h.key_width(), is_kept || c.has(r));
    }
    for (int i = at.loader; i < CHUNK * at.width / 8; i += at.loaders) {
        int r = i / (at.width / 8), column = at.start + i % (at.width / 8) * 8;
        copy8(s.values + r * STRIDE + column, values(r) + column, r < c.n);
    }
    const bf16* squares = a.squares + (number * a.h.value + at.head) * 2 * CHUNK * CHUNK;
    for (int i = at.loader; i < (has_outputs ? 2 : 1) * CHUNK * CHUNK / 8; i += at.loaders) {
        int r = i % (CHUNK * CHUNK / 8) / (CHUNK / 8), column = i % (CHUNK / 8) * 8, square = i / (CHUNK * CHUNK / 8);
        if (column / BLOCK <= r / BLOCK) copy8(s.squares[square] + r * SQUARE + column, squares + i * 8, true);
    }
    const bf16* gates = (const bf16*)(a.gates + number * a.h.value + at.head);
    for (int i = at.loader; i < (int)(sizeof(Gates64) / 16); i += at.loaders) copy8((bf16*)&s.gates + i * 8, gates + i * 8, true);
}

// The values of a chunk's rows.
struct ValueRows {
    const bf16 *kept, *values;
    Chunk c;
    size_t width;

    __device__ __forceinline__ const bf16* operator()(int r) const {
        if (r >= c.first) return values + (c.has(r) ? c.row + r : 0) * width;
        int sides = c.first / BLOCK * BLOCK;
        return kept + (r < sides ? CHUNK + r : 2 * CHUNK + r - sides) * DIM;
    }
};

// Copies a warp's sixteen columns of the rows that the call has from a tile to rows `width` apart.
__device__ __forceinline__ void store_columns(const bf16* tile, bf16* to, size_t width, const Chunk& c, int column) {
    int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int r = lane / 2; r < CHUNK; r += 16) {
        int at = column + lane % 2 * 8;
        if (c.has(r)) *(uint4*)(to + r * (long long)width + at) = *(const uint4*)(tile + r * STRIDE + at);
    }
    __syncwarp();
}

// of_keys = S^T k^T for all rows. With OUTPUTS of_queries = S^T q^T, else `border` takes the state as a left operand with keys as rows.
template <bool OUTPUTS>
__device__ __forceinline__ void read_state(const Stage& s, float (*state)[4], float (*of_keys)[4], float (*of_queries)[4], uint4* border) {
#pragma unroll
    for (int keys = 0; keys < DIM / 16; ++keys) {
        u32 left[4];
        state_operand(left, state + 2 * keys);
        if (!OUTPUTS)
            border[keys * (DIM / 16) * 32] =
                make_uint4(transpose8(left[0]), transpose8(left[2]), transpose8(left[1]), transpose8(left[3]));
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
            u32 right[4];
            load_by_rows(right, s.k, STRIDE, b * BLOCK, keys * 16);
            mma_pair(of_keys + 2 * b, left, right);
            if (!OUTPUTS) continue;
            load_by_rows(right, s.q, STRIDE, b * BLOCK, keys * 16);
            mma_pair(of_queries + 2 * b, left, right);
        }
    }
}

// The sides of a block, without the blocks in front, from S^T k^T in `rows`.
__device__ __forceinline__ void write_sides(Stage& s, float (*rows)[4], int block, int column) {
    u32 values[4];
    load_transposed(values, s.values, STRIDE, block, column);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            int r = block + i * 8 + threadIdx.x % 4 * 2 + e % 2;
            u32 pair = values[2 * i + e / 2];
            float value = e % 2 ? high_half(pair) : low_half(pair);
            rows[i][e] = s.gates.beta[r] * fmaf(-s.gates.decay[r], rows[i][e], value);
        }
}

// D^T of all rows by blocks, from S^T k^T in `rows`. Sides of the block in progress behind the last row go to `kept_sides`.
__device__ __forceinline__ void solve(Stage& s, u32 (*d)[4], float (*rows)[4], int column, const Chunk& c, bf16* kept_sides) {
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
        int block = b * BLOCK;
        if (block + BLOCK <= c.first) {
            load_transposed(d[b], s.values, STRIDE, block, column);
            continue;
        }
        float (*sides)[4] = rows + 2 * b;
        u32 kept[4], left[4], right[4];
        load_transposed(kept, s.values, STRIDE, block, column);
        write_sides(s, sides, block, column);
#pragma unroll
        for (int before = 0; before < b; ++before) {
            load_by_rows(right, s.squares[0], SQUARE, block, before * BLOCK);
            mma_pair(sides, d[before], right);
        }
        if (block < c.first) {
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    u32 pair = kept[2 * i + e / 2];
                    bool is_kept = block + i * 8 + threadIdx.x % 4 * 2 + e % 2 < c.first;
                    if (is_kept) sides[i][e] = e % 2 ? high_half(pair) : low_half(pair);
                }
        }
        as_operand(left, sides);
        if (kept_sides && c.n / BLOCK == b) {
            store_transposed(left, s.values, STRIDE, block, column);
            Chunk of_block = {max(c.first - block, 0), c.n - block, 0};
            store_columns(s.values + block * STRIDE, kept_sides, DIM, of_block, column);
        }
        float solved[2][4];
        zero(solved);
        load_by_rows(right, s.squares[0], SQUARE, block, block);
        mma_pair(solved, left, right);
        as_operand(d[b], solved);
    }
}

// One chunk, and the state behind it if it is full. With OUTPUTS it gives outputs, else what backward needs.
template <bool OUTPUTS>
__device__ __forceinline__ void run_chunk(Stage& s, const ChunkArgs& a, const Columns& at, const Chunk& c, size_t number, bf16* kept,
                                          float (*state)[4]) {
    float rows[CHUNK / 8][4], outputs[CHUNK / 8][4];
    u32 d[BLOCKS][4];
    zero(rows);
    zero(outputs);
    uint4* border = (uint4*)(a.borders + (number * a.h.value + at.head) * DIM * DIM / 2) + at.warp / 16 * 32 + threadIdx.x % 32;
    read_state<OUTPUTS>(s, state, rows, outputs, border);
    solve(s, d, rows, at.warp, c, kept ? kept + 2 * CHUNK * DIM : 0);
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) store_transposed(d[b], s.values, STRIDE, b * BLOCK, at.warp);
    long long values = c.row * a.h.value_width() + at.head * DIM;
    if (!OUTPUTS) store_columns(s.values, a.corrected + values, a.h.value_width(), c, at.warp);
    if (kept && c.n < CHUNK) store_columns(s.values, kept + CHUNK * DIM, DIM, c, at.warp);
    if (OUTPUTS) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
            for (int i = 2 * b; i < 2 * b + 2; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) outputs[i][e] *= s.gates.decay[i * 8 + threadIdx.x % 4 * 2 + e % 2];
#pragma unroll
            for (int before = 0; before <= b; ++before) {
                u32 right[4];
                load_by_rows(right, s.squares[1], SQUARE, b * BLOCK, before * BLOCK);
                mma_pair(outputs + 2 * b, d[before], right);
            }
            u32 rounded[4];
            as_operand(rounded, outputs + 2 * b);
            __syncwarp();
            store_transposed(rounded, s.values, STRIDE, b * BLOCK, at.warp);
        }
        store_columns(s.values, a.out + values, a.h.value_width(), c, at.warp);
    }
    if (c.n == CHUNK) advance(state, d, s.k, s.gates.rest, s.gates.decay[CHUNK - 1]);
}

// Grid: (value heads and slices of their columns, sequences).
KERNEL __launch_bounds__(SEQUENTIAL_THREADS) deltanet_chunks(const __grid_constant__ ChunkArgs a) {
    extern __shared__ __align__(16) char memory[];
    Stage* stages = (Stage*)memory;
    int sequence = blockIdx.y, n = n_chunks(a.sequences, sequence);
    if (n == 0) return;
    Columns at(a.h, a.slices);
    SequenceRows of_call(a.sequences, sequence);
    size_t slot = a.states ? a.sequences.slots[sequence] : 0, number = chunks_before(a.sequences, sequence);
    bf16* kept = a.states ? kept_rows(a, slot, at.head) : 0;
    StatePlanes planes(a.states, slot * a.h.value + at.head);
    if (!at.computes()) {
        return load_chunks(n, [&](int index) {
            Chunk c = of_call.chunk(index);
            const bf16* values = a.mixed + 2 * a.h.key_width() + at.head * DIM;
            ValueRows rows = {kept, values, c, (size_t)a.h.conv_width()};
            load_stage(stages[index % STAGES], a, at, c, kept, number + index, rows, a.out);
        });
    }
    float state[DIM / 8][4];
    zero(state);
    if (a.states && of_call.done >= CHUNK) planes.load(state, at.warp / 16);
    bool is_changed = false;
    run_chunks(n, [&](int index) {
        Chunk c = of_call.chunk(index);
        if (a.out) run_chunk<true>(stages[index % STAGES], a, at, c, number + index, kept, state);
        if (!a.out) run_chunk<false>(stages[index % STAGES], a, at, c, number + index, kept, state);
        is_changed |= c.n == CHUNK;
    });
    // Nobody reads the state of a sequence in its first chunk: it is 0.
    if (a.states && is_changed) planes.store(state, at.warp / 16);
}
