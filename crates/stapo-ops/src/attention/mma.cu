// What the attention kernels share. HEAD_DIM, the width of a head, is given when compiling; tiles in shared memory are
// padded with zeros to DIM columns and have a stride that spreads eight rows over all banks.

#define DIM ((HEAD_DIM + 15) / 16 * 16)
#define STRIDE (DIM + 8)
// Keys per step, by absolute position: training and generation cut the keys in the same places.
#define KEYS 64
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MINUS_INFINITY __int_as_float(0xff800000)

// d += a b: a [16, 16], b [16, 8], bf16; d f32. Each element of d is a function of its row of a and its column of b.
__device__ __forceinline__ void mma(float* d, const u32* a, const u32* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void ldmatrix(u32* r, const bf16* p) { ldmatrix_at(r, shared_address(p)); }

__device__ __forceinline__ void ldmatrix_transposed(u32* r, const bf16* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)) : "memory");
}

// The operand a [16, 16] at (row, column) of a tile.
__device__ __forceinline__ void load_a(u32* a, const bf16* tile, int stride, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix(a, tile + (row + lane % 16) * stride + column + lane / 16 * 8);
}

// Two operands b [16, 8] whose columns are the rows row.. and row + 8.. of a tile: for a product with its transpose.
__device__ __forceinline__ void load_b_rows(u32* b, const bf16* tile, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix(b, tile + (row + lane % 8 + lane / 16 * 8) * STRIDE + column + lane / 8 % 2 * 8);
}

// Two operands b [16, 8] at (row, column) and (row, column + 8) of a tile.
__device__ __forceinline__ void load_b_columns(u32* b, const bf16* tile, int row, int column) {
    int lane = threadIdx.x % 32;
    ldmatrix_transposed(b, tile + (row + lane % 16) * STRIDE + column + lane / 16 * 8);
}

// Sixteen bytes; zeros where `is_there` is false, and then nothing is read.
__device__ __forceinline__ void cp_async(u32 to, const bf16* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// Rows of a matrix, `stride` elements apart.
struct Strided {
    const bf16* base;
    size_t stride;
    __device__ __forceinline__ const bf16* operator()(int r) const { return base + r * stride; }
};

// Starts the copy of `n` rows into a tile of ROWS; `row(r)` is the address of row r. The others become 0. Where the
// threads divide evenly, each keeps to one column and steps down the rows.
template <int ROWS, int THREADS, class Row> __device__ __forceinline__ void load_rows(bf16* tile, int n, Row row) {
    constexpr int CHUNKS = DIM / 8;
    if constexpr (HEAD_DIM == DIM && THREADS % CHUNKS == 0 && ROWS * CHUNKS % THREADS == 0) {
        constexpr int AT_ONCE = THREADS / CHUNKS;
        int r = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * 8;
        u32 to = shared_address(tile + r * STRIDE + column);
#pragma unroll
        for (int k = 0; k < ROWS; k += AT_ONCE)
            cp_async(to + k * STRIDE * 2, row(r + k) + column, r + k < n);
    } else {
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            int r = i / CHUNKS, column = i % CHUNKS * 8;
            bf16* to = tile + r * STRIDE + column;
            bool is_there = r < n && column < HEAD_DIM;
            const bf16* from = row(is_there ? r : 0) + (is_there ? column : 0);
            if (HEAD_DIM % 8 == 0) {
                cp_async(shared_address(to), from, is_there);
            } else {
                for (int k = 0; k < 8; ++k) {
                    bf16 zero = {0};
                    to[k] = is_there && column + k < HEAD_DIM ? from[k] : zero;
                }
            }
        }
    }
}

// Where the keys and values of a sequence lie in a paged cache [blocks, kv heads, 2^shift, HEAD_DIM].
struct Pages {
    const bf16* cache;
    const u32* table;
    int first, shift, kv, kv_head;
    __device__ __forceinline__ const bf16* operator()(int r) const {
        int key = first + r;
        u32 block = table[key >> shift], row = ((block * kv + kv_head) << shift) + (key & ((1 << shift) - 1));
        return cache + (size_t)row * HEAD_DIM;
    }
};

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sixteen keys of one row, of which this lane holds four: the order of a row's sum, the same in both kernels.
__device__ __forceinline__ float sum_of_four(float a, float b, float c, float d) { return (a + b) + (c + d); }

__device__ __forceinline__ float log_sum(float top, float sum, float factor) {
    return (top * factor + log2f(sum)) * LN_2;
}

// A piece of the rows of one sequence: which sequence, the first row within it, and the sequence's rows.
struct WorkTile {
    int sequence, first, rows;
};

// Cuts each sequence's (tokens * per_token) rows into pieces of `height` and finds piece number `index` in the order of
// falling weight, a piece's weight being its place in its sequence: what sees most keys is begun first, whatever sequence
// it belongs to. False: there are fewer pieces.
__device__ __forceinline__ bool find_work_tile(const u32* offsets, int sequences, int per_token, int height, int index,
                                           WorkTile* piece) {
    int lane = threadIdx.x % 32, most = 0;
    auto rows_of = [&](int s) { return s < sequences ? (int)(offsets[s + 1] - offsets[s]) * per_token : 0; };
    for (int s = lane; s < sequences; s += 32) most = max(most, (rows_of(s) + height - 1) / height);
    most = __reduce_max_sync(0xffffffffu, most);
    for (int weight = most; weight > 0; --weight)
        for (int start = 0; start < sequences; start += 32) {
            int rows = rows_of(start + lane);
            u32 holds = __ballot_sync(0xffffffffu, rows > (weight - 1) * height);
            int n = __popc(holds);
            if (index < n) {
                int owner = __fns(holds, 0, index + 1);
                piece->sequence = start + owner;
                piece->rows = __shfl_sync(0xffffffffu, rows, owner);
                piece->first = (weight - 1) * height;
                return true;
            }
            index -= n;
        }
    return false;
}
