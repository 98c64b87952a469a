// Packed sequences, forward: a block has 128 queries of one head, a warp 32 of them as two fragments of 16 rows. Of heads wider
// than 128 a warp has one fragment, so that the outputs fit into its registers. paged.cu takes the same steps in the same
// order.

#define FRAGMENTS (DIM > 128 ? 1 : 2)
#define ROWS (64 * FRAGMENTS)
#define THREADS 128

// s = q k^T for the warp's queries from `row` on.
__device__ __forceinline__ void multiply_qk(float (&s)[FRAGMENTS][KEYS / 8][4], const bf16* queries, int row,
                                            const bf16* keys) {
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) clear(s[m]);
#pragma unroll
    for (int c = 0; c < DIM; c += 16) {
        u32 a[FRAGMENTS][4];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) load_a(a[m], queries, STRIDE, row + m * 16, c);
#pragma unroll
        for (int j = 0; j < KEYS / 8; j += 2) {
            u32 b[4];
            load_b_rows(b, keys, j * 8, c);
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) {
                mma(s[m][j], a[m], b);
                mma(s[m][j + 1], a[m], b + 2);
            }
        }
    }
}

// o += p v.
__device__ __forceinline__ void multiply_pv(RowState (&rows)[FRAGMENTS], const u32 (&p)[FRAGMENTS][KEYS / 16][4],
                                            const bf16* values) {
#pragma unroll
    for (int c = 0; c < KEYS / 16; ++c)
#pragma unroll
        for (int j = 0; j < DIM / 8; j += 2) {
            u32 b[4];
            load_b_columns(b, values, c * 16, j * 8);
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) {
                mma(rows[m].o[j], p[m][c], b);
                mma(rows[m].o[j + 1], p[m][c], b + 2);
            }
        }
}

// Grid: (query heads, tiles of ROWS tokens). Shared: queries [ROWS], keys and values [2][64].
KERNEL __launch_bounds__(THREADS, 2)
attention_forward_bf16(const bf16* qkv, const __grid_constant__ Packing packing, bf16* out, int out_pitch,
                       float* lse RULE_PARAMETER) {
    RULE_CONSTANT
    extern __shared__ uint4 memory[];
    bf16* queries = (bf16*)memory;
    QueryTile t;
    if (!find_query_tile<ROWS>(qkv, packing, &t)) return;
    PackedFeed<PaddedTile, THREADS> feed(t, queries + ROWS * STRIDE);
    PaddedTile::load<ROWS, THREADS>(queries, t.n_rows, t.queries());
    int first_step = rule.first_key(t.first) / KEYS;
    feed.begin(first_step);

    int warp_row = threadIdx.x / 32 * (16 * FRAGMENTS);
    float factor = rule.factor();
    RowState rows[FRAGMENTS];
    SavedRows<DIM / 8> saved[FRAGMENTS];
    int last_key[FRAGMENTS][2];
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
        clear(rows[m]);
        last_key[m][0] = t.first + warp_row + m * 16 + fragment_row(0);
        last_key[m][1] = last_key[m][0] + 8;
    }
    for (int step = first_step; step < feed.n_steps; ++step) {
        float s[FRAGMENTS][KEYS / 8][4];
        u32 p[FRAGMENTS][KEYS / 16][4];
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) begin_step(step, first_step, rows[m], saved[m], last_key[m], rule);
        feed.wait_keys();
        multiply_qk(s, queries, warp_row, feed.keys_of(step));
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) apply_rule(s[m], step * KEYS, last_key[m], rule);
        if (step * KEYS + KEYS > t.first + warp_row) {
#pragma unroll
            for (int m = 0; m < FRAGMENTS; ++m) mask_hidden_keys(s[m], step * KEYS, last_key[m]);
        }
#pragma unroll
        for (int m = 0; m < FRAGMENTS; ++m) {
            online_softmax_step(s[m], rows[m], factor);
            pack_operands(p[m], s[m]);
        }
        feed.wait_values(step);
        multiply_pv(rows, p, feed.values_of(step));
    }
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m) {
        end_steps(feed.n_steps, first_step, rows[m], saved[m], last_key[m], rule);
        store_rows(t, rows[m], warp_row + m * 16 + fragment_row(0), packing.query, factor, rule, out, out_pitch, lse);
    }
}
