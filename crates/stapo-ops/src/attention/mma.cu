// The matrix instruction of Ampere and later, for one warp, and the tiles in shared memory that it reads.

// Elements from one row of a tile to the next: eight rows are spread over all banks.
#define STRIDE (DIM + 8)

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
                 : "r"(shared_address(p))
                 : "memory");
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

// Tiles [rows, DIM] with a stride of STRIDE.
struct PaddedTile {
    static constexpr int WIDTH = STRIDE;

    // Ordinary loads read what cp.async wrote without a fence.
    static __device__ __forceinline__ void fence() {}

    // Starts the copy of `n` rows of a row source into a tile of ROWS; the other rows become 0. Where the threads
    // divide evenly, each keeps to one column and steps down the rows.
    template <int ROWS, int THREADS, class Row>
    static __device__ __forceinline__ void load(bf16* tile, int n, Row row) {
        constexpr int CHUNKS = DIM / 8;
        if constexpr (HEAD_DIM == DIM && THREADS % CHUNKS == 0 && ROWS * CHUNKS % THREADS == 0) {
            constexpr int AT_ONCE = THREADS / CHUNKS;
            int r = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * 8;
            u32 to = shared_address(tile + r * STRIDE + column);
#pragma unroll
            for (int k = 0; k < ROWS; k += AT_ONCE) cp_async(to + k * STRIDE * 2, row(r + k) + column, r + k < n);
        } else {
            for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
                int r = i / CHUNKS, column = i % CHUNKS * 8;
                bool is_there = r < n && column < HEAD_DIM;
                const bf16* from = row(is_there ? r : 0) + (is_there ? column : 0);
                load_chunk(tile + r * STRIDE + column, from, is_there ? HEAD_DIM - column : 0);
            }
        }
    }

    // Eight elements, those from `n` on 0. cp.async needs aligned rows: others are copied one element at a time.
    static __device__ __forceinline__ void load_chunk(bf16* to, const bf16* from, int n) {
        if (HEAD_DIM % 8 == 0) {
            cp_async(shared_address(to), from, n > 0);
        } else {
            for (int k = 0; k < 8; ++k) {
                bf16 zero = {0};
                to[k] = k < n ? from[k] : zero;
            }
        }
    }
};
