//! Packed and paged attention on a GPU: matrix instructions in bf16, plain loops in f32.

use std::sync::Arc;

use super::paged::{self, CacheDims};
use super::{Dims, Heads};
use crate::cuda::kernels::{
    ATTENTION, ATTENTION_BACKWARD, ATTENTION_HOPPER, ATTENTION_PAGED, ATTENTION_PLAIN, Source,
};
use crate::cuda::{Cuda, Kind, Memory, Slice};

/// Queries of a block in forward, and of the queries' gradient; keys of a block in the keys' gradient.
const ROWS: usize = 128;
/// Keys per step: KEYS in mma.cu.
const KEYS: usize = 64;
const MAX_DIM: usize = 128;

/// Bytes of `rows` rows of a tile: see DIM and STRIDE in mma.cu.
fn tile_bytes(heads: Heads, rows: usize) -> usize {
    2 * rows * (heads.dim.next_multiple_of(16) + 8)
}

/// The kernels for buffers stored as `kind`, and how they are named.
fn source(kind: Kind, heads: Heads, matrix: &'static Source) -> &'static Source {
    assert!(
        heads.dim <= MAX_DIM && heads.dim.is_multiple_of(2),
        "attention: heads of {}, on a GPU even and at most {MAX_DIM}",
        heads.dim
    );
    if kind == Kind::Bf16 { matrix } else { &ATTENTION_PLAIN }
}

/// Blocks that are enough for every sequence's tokens times `per_token` in pieces of `height`.
fn n_pieces(tokens: usize, per_token: usize, sequences: usize, height: usize) -> usize {
    tokens * per_token / height + sequences
}

pub(super) fn forward(cuda: &Cuda, d: Dims, qkv: Slice, offsets: Slice, out: Slice, lse: Slice) {
    let (op, heads) = ("attention::forward", d.heads);
    let name = format!("attention_forward_{}", out.same(qkv, op).name());
    let launch = cuda.kernel(source(qkv.kind, heads, &ATTENTION), &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).arg(offsets).arg(out).arg(lse.f32(op));
    let launch = launch.arg(d.sequences).arg(heads.query).arg(heads.kv);
    if qkv.kind == Kind::Bf16 {
        let grid = [n_pieces(d.tokens, 1, d.sequences, ROWS), heads.query];
        launch.run(grid, 128, tile_bytes(heads, ROWS + 4 * KEYS));
    } else {
        launch.run([d.tokens, heads.query], 32, 0);
    }
}

/// What forward left.
pub(super) struct Saved {
    pub qkv: Slice,
    pub out: Slice,
    pub lse: Slice,
    pub d_out: Slice,
}

pub(super) fn backward(cuda: &Arc<Cuda>, d: Dims, saved: Saved, offsets: Slice, d_qkv: Slice) {
    let (op, heads, Saved { qkv, out, lse, d_out }) = ("attention::backward", d.heads, saved);
    let kind = d_qkv.same(qkv, op).same(out, op).same(d_out, op).kind;
    let is_hopper = cuda.is_hopper() && [64, 128].contains(&heads.dim);
    let source = source(kind, heads, if is_hopper { &ATTENTION_HOPPER } else { &ATTENTION_BACKWARD });
    let pull_memory = Memory::scratch(cuda, d.tokens * heads.query, Kind::F32);
    let pull = pull_memory.slice();
    let name = format!("attention_pull_{}", kind.name());
    let launch =
        cuda.kernel(source, &name).head_dim(heads.dim).arg(out).arg(d_out).arg(pull).arg(heads.query);
    launch.run([d.tokens, 1], 128, 0);
    let suffix = if is_hopper && kind == Kind::Bf16 { "hopper_bf16" } else { kind.name() };
    let queries = format!("attention_backward_queries_{suffix}");
    let keys = format!("attention_backward_keys_{suffix}");
    let launch = |name| {
        let launch = cuda.kernel(source, name).head_dim(heads.dim).arg(qkv).arg(d_out).arg(offsets);
        let launch = launch.arg(lse.f32(op)).arg(pull).arg(d_qkv);
        launch.arg(d.sequences).arg(heads.query).arg(heads.kv)
    };
    let pieces = n_pieces(d.tokens, 1, d.sequences, ROWS);
    if kind != Kind::Bf16 {
        launch(&queries).run([d.tokens, heads.query], 32, 0);
        launch(&keys).run([d.tokens, heads.kv], 32, 0);
    } else if is_hopper {
        // Two tiles of 128 rows, four of 64; a start at a multiple of 1024.
        let tiles = 2 * heads.dim * (2 * ROWS + 4 * 64) + 1024;
        launch(&queries).run([pieces, heads.query], 256, tiles);
        launch(&keys).run([pieces, heads.kv], 256, tiles + 4 * 4 * 64);
    } else {
        launch(&queries).run([pieces, heads.query], 128, tile_bytes(heads, 2 * ROWS + 4 * 32));
        launch(&keys).run([pieces, heads.kv], 256, tile_bytes(heads, 2 * ROWS + 4 * 64) + 4 * 4 * 64);
    }
}

/// Cache: keys and values `[blocks, kv_heads, block_size, head_dim]`.
pub(super) fn store(
    cuda: &Cuda,
    tokens: usize,
    heads: Heads,
    cache: CacheDims,
    qkv: Slice,
    slots: Slice,
    (keys, values): (Slice, Slice),
) {
    let name = format!("attention_store_{}", keys.same(qkv, "attention::paged::store").name());
    let launch = cuda.kernel(source(qkv.kind, heads, &ATTENTION_PAGED), &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).arg(slots).arg(keys).arg(values).arg(heads.query).arg(heads.kv);
    launch.arg(cache.block_size).arg(cache.blocks * cache.block_size).run([tokens, 1], 128, 0);
}

/// Where the sequences of a call lie: see `paged::Sequences`.
pub(super) struct Sequences {
    pub offsets: Slice,
    pub contexts: Slice,
    pub tables: Slice,
}

pub(super) fn paged(
    cuda: &Cuda,
    d: paged::Dims,
    cache: CacheDims,
    qkv: Slice,
    (keys, values): (Slice, Slice),
    sequences: &Sequences,
    out: Slice,
) {
    let (op, heads) = ("attention::paged::forward", d.heads);
    let name = format!("attention_paged_{}", out.same(qkv, op).same(keys, op).name());
    let launch = cuda.kernel(source(qkv.kind, heads, &ATTENTION_PAGED), &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).arg(keys).arg(values);
    let launch = launch.arg(sequences.offsets).arg(sequences.contexts).arg(sequences.tables).arg(out);
    let launch =
        launch.arg(d.sequences).arg(d.table_width).arg(heads.query).arg(heads.kv).arg(cache.block_size);
    if qkv.kind == Kind::Bf16 {
        let grid = [n_pieces(d.tokens, heads.group(), d.sequences, 16), heads.kv];
        launch.run(grid, 128, tile_bytes(heads, 16 + 2 * KEYS));
    } else {
        launch.run([d.tokens, heads.query], 32, 0);
    }
}
