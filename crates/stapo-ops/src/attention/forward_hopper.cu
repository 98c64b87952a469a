// Attention of few tokens over a paged cache with Hopper's matrix instruction, in the steps of forward_pipelined_hopper.cu: 64 keys
// by absolute position with the same instructions, in which a row of the result depends on its own row alone. So both give the
// same bits, whatever rows are beside it.

#define ROWS 64
#define THREADS 128

// Takes the steps from `first` on for a tile of queries. `last_key` are those of the thread's two rows, `lowest` that of all rows.
template <class Feed>
__device__ __forceinline__ void attend(const bf16* queries, const Feed& feed, int first, const int (&last_key)[2],
                                       int lowest, const ScoreRule& rule, RowState& rows) {
    SavedRows<DIM / 8> saved;
    float factor = rule.factor();
    for (int from = first / SPLIT_STEPS * SPLIT_STEPS; from < feed.n_steps; from += SPLIT_STEPS) {
        if (from > first) save_rows(saved, rows);
        clear(rows);
        for (int step = max(from, first); step < min(feed.n_steps, from + SPLIT_STEPS); ++step) {
            float s[KEYS / 8][4];
            u32 p[KEYS / 16][4];
            feed.wait_keys();
            wgmma_fence();
            start_rows_product<ROWS>(s, queries, 0, feed.keys_of(step));
            wgmma_wait<0>();
            fence_registers(s);
            feed.keys_are_read(step);
            apply_rule(s, step * KEYS, last_key, rule);
            if (step * KEYS + KEYS > lowest) mask_hidden_keys(s, step * KEYS, last_key);
            online_softmax_step(s, rows, factor);
            pack_operands(p, s);
            feed.wait_values(step);
            start_columns_product(rows.o, p, feed.values_of(step));
            wgmma_wait<0>();
            fence_registers(rows.o);
            feed.values_are_read(step);
        }
        end_split_from(from, first, rows, saved, last_key, rule);
    }
}

// Grid: (kv heads, tiles of 64 rows); a row is a token and one of its group's query heads. Shared: queries, keys and
// values [64] each.
KERNEL __launch_bounds__(THREADS)
attention_paged_hopper_bf16(const bf16* qkv, const bf16* keys, const bf16* values, const u32* offsets,
                            const u32* contexts, const u32* tables, bf16* out,
                            const __grid_constant__ PagedShape shape RULE_PARAMETER) {
    RULE_CONSTANT
    __shared__ u32 table[TABLE];
    bf16* queries = aligned_memory();
    PagedTile t;
    if (!find_paged_tile<ROWS>(offsets, contexts, tables, shape.sequences, shape.table_width, shape.query,
                                     shape.kv, &t))
        return;
    PagedFeed<SwizzledTile, THREADS> feed(t, queries + ROWS * COLUMNS, keys, values, shape.block_shift, shape.kv);
    feed.stage_table(table);
    SwizzledTile::load<ROWS, THREADS>(queries, t.n_rows, t.queries(qkv));
    int first_step = rule.first_key(t.last_key(0)) / KEYS;
    feed.begin(first_step);

    int row = warpgroup_row();
    int last_key[2] = {t.last_key(row), t.last_key(row + 8)};
    RowState rows;
    attend(queries, feed, first_step, last_key, t.n_keys - (t.n_rows - 1) / t.heads - 1, rule, rows);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        EndedRow ended(rows.reference[h], rows.sum[h], t.head(row + h * 8), rule);
        bf16* to = t.out_row(out, shape.out_pitch, row + h * 8);
        store_row({to, row + h * 8 < t.n_rows, shape.out_pitch % 8 == 0}, rows.o, h, ended.scale());
    }
}
