// Packed and paged attention with Hopper's matrix instruction. Both kernels run the same loop over steps of 64 keys by
// absolute position with the same instructions, in which a row of the result depends on its own row alone: so both give
// the same bits, whatever rows are beside it.

// Takes the steps from `first` on for 64 rows of a tile of ROWS queries, from `row` on. With SKIPS a step whose keys none of
// the rows sees is not computed; it would change nothing.
template <int ROWS, bool SKIPS, class Feed>
__device__ __forceinline__ void attend(const bf16* queries, int row, const Feed& feed, int first, const LastKeys& last,
                                       const ScoreRule& rule, RowState& rows) {
    SavedRows<DIM / 8> saved;
    float factor = rule.factor();
    for (int from = first / SPLIT_STEPS * SPLIT_STEPS; from < feed.n_steps; from += SPLIT_STEPS) {
        if (from > first) save_rows(saved, rows);
        clear(rows);
        for (int step = max(from, first); step < min(feed.n_steps, from + SPLIT_STEPS); ++step) {
            float s[KEYS / 8][4];
            u32 p[KEYS / 16][4];
            bool is_seen =
                !SKIPS || (step * KEYS <= last.highest && !rule.hides(step * KEYS + KEYS - 1, last.lowest));
            feed.wait_keys();
            if (is_seen) {
                wgmma_fence();
                start_rows_product<ROWS>(s, queries, row, feed.keys_of(step));
                wgmma_wait<0>();
                fence_registers(s);
            }
            feed.keys_are_read(step);
            if (is_seen) {
                apply_rule(s, step * KEYS, last.of_row, rule);
                if (step * KEYS + KEYS > last.lowest) mask_hidden_keys(s, step * KEYS, last.of_row);
                online_softmax_step(s, rows, factor);
                pack_operands(p, s);
            }
            feed.wait_values(step);
            if (is_seen) {
                start_columns_product(rows.o, p, feed.values_of(step));
                wgmma_wait<0>();
                fence_registers(rows.o);
            }
            feed.values_are_read(step);
        }
        end_split_from(from, first, rows, saved, last.of_row, rule);
    }
}

#define ROWS 128
#define THREADS 256

// Grid: (query heads, tiles of 128 tokens); a warpgroup has 64 queries. Shared: queries [128], keys and values [2][64].
KERNEL __launch_bounds__(THREADS, DIM > 128 ? 1 : 2)
attention_forward_hopper_bf16(const bf16* qkv, const __grid_constant__ Packing packing, bf16* out, int out_pitch,
                              float* lse RULE_PARAMETER) {
    RULE_CONSTANT
    bf16* queries = aligned_memory();
    QueryTile t;
    if (!find_query_tile<ROWS>(qkv, packing, &t)) return;
    PackedFeed<SwizzledTile, THREADS> feed(t, queries + ROWS * COLUMNS);
    SwizzledTile::load<ROWS, THREADS>(queries, t.n_rows, t.queries());
    int first_step = rule.first_key(t.first) / KEYS;
    feed.begin(first_step);

    int top_row = threadIdx.x / 128 * 64, row = top_row + warpgroup_row();
    LastKeys last = {{t.first + row, t.first + row + 8}, t.first + top_row, t.first + top_row + 63};
    RowState rows;
    attend<ROWS, true>(queries, top_row, feed, first_step, last, rule, rows);
    store_rows(t, rows, row, packing.query, rule.factor(), rule, out, out_pitch, lse);
}

#define PAGED_ROWS 64
#define PAGED_THREADS 128

// Grid: (kv heads, tiles of 64 rows); a row is a token and one of its group's query heads. Shared: queries, keys and
// values [64] each.
KERNEL __launch_bounds__(PAGED_THREADS)
attention_paged_hopper_bf16(const bf16* qkv, const bf16* keys, const bf16* values, const u32* offsets,
                            const u32* contexts, const u32* tables, bf16* out,
                            const __grid_constant__ PagedShape shape RULE_PARAMETER) {
    RULE_CONSTANT
    __shared__ u32 table[TABLE];
    bf16* queries = aligned_memory();
    PagedTile t;
    if (!find_paged_tile<PAGED_ROWS>(offsets, contexts, tables, shape.sequences, shape.table_width, shape.query,
                                     shape.kv, &t))
        return;
    PagedFeed<SwizzledTile, PAGED_THREADS> feed(t, queries + PAGED_ROWS * COLUMNS, keys, values, shape.block_shift, shape.kv);
    feed.stage_table(table);
    SwizzledTile::load<PAGED_ROWS, PAGED_THREADS>(queries, t.n_rows, t.queries(qkv));
    int first_step = rule.first_key(t.last_key(0)) / KEYS;
    feed.begin(first_step);

    int row = warpgroup_row();
    LastKeys last = {{t.last_key(row), t.last_key(row + 8)}, t.n_keys - (t.n_rows - 1) / t.heads - 1, t.n_keys - 1};
    RowState rows;
    attend<PAGED_ROWS, false>(queries, 0, feed, first_step, last, rule, rows);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        EndedRow ended(rows.reference[h], rows.sum[h], t.head(row + h * 8), rule);
        bf16* to = t.out_row(out, shape.out_pitch, row + h * 8);
        store_row({to, row + h * 8 < t.n_rows, shape.out_pitch % 8 == 0}, rows.o, h, ended.scale());
    }
}
