//! Packed and paged attention on a GPU: matrix instructions in bf16, plain loops in f32.

use std::sync::Arc;

use super::paged::{self, CacheDims};
use super::{Dims, Heads};
use crate::cuda::kernels::{
    ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_HOPPER, ATTENTION_DECODE_HOPPER, ATTENTION_HOPPER,
    ATTENTION_PAGED, ATTENTION_PLAIN, ELEMENTWISE, Source,
};
use crate::cuda::{Cuda, Kind, Map, Memory, Slice};
use crate::rope::{HeadNorm, Table};
use crate::{Float, View, ViewMut};

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

/// Whether Hopper's matrix instruction is used. Training and generation must agree on it: their bits do then.
fn is_hopper(cuda: &Cuda, kind: Kind, heads: Heads) -> bool {
    cuda.is_hopper() && kind == Kind::Bf16 && [64, 128].contains(&heads.dim)
}

/// Bytes of swizzled tiles of `rows` rows together, which start at a multiple of 1024.
fn swizzled_bytes(heads: Heads, rows: usize) -> usize {
    2 * rows * heads.dim + 1024
}

/// Blocks that are enough for every sequence's tokens times `per_token` in pieces of `height`.
fn n_pieces(tokens: usize, per_token: usize, sequences: usize, height: usize) -> usize {
    tokens * per_token / height + sequences
}

pub(super) fn forward(cuda: &Cuda, d: Dims, qkv: Slice, offsets: Slice, out: Slice, lse: Slice) {
    let (op, heads, kind) = ("attention::forward", d.heads, qkv.kind);
    let is_hopper = is_hopper(cuda, kind, heads);
    let suffix = if is_hopper { "hopper_bf16" } else { out.same(qkv, op).name() };
    let name = format!("attention_forward_{suffix}");
    let source = source(kind, heads, if is_hopper { &ATTENTION_HOPPER } else { &ATTENTION });
    let launch = cuda.kernel(source, &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).arg(offsets).arg(out).arg(lse.f32(op));
    let launch = launch.arg(d.sequences).arg(heads.query).arg(heads.kv);
    let pieces = [heads.query, n_pieces(d.tokens, 1, d.sequences, ROWS)];
    if kind != Kind::Bf16 {
        launch.run([d.tokens, heads.query], 32, 0);
    } else if is_hopper {
        launch.run(pieces, 256, swizzled_bytes(heads, ROWS + 4 * KEYS));
    } else {
        launch.run(pieces, 128, tile_bytes(heads, ROWS + 4 * KEYS));
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
    let is_hopper = is_hopper(cuda, kind, heads);
    let source =
        source(kind, heads, if is_hopper { &ATTENTION_BACKWARD_HOPPER } else { &ATTENTION_BACKWARD });
    let pull_memory = Memory::scratch(cuda, d.tokens * heads.query, Kind::F32);
    let pull = pull_memory.slice();
    let name = format!("attention_delta_{}", kind.name());
    let launch =
        cuda.kernel(source, &name).head_dim(heads.dim).arg(out).arg(d_out).arg(pull).arg(heads.query);
    launch.run([d.tokens, 1], 128, 0);
    let suffix = if is_hopper { "hopper_bf16" } else { kind.name() };
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
        let tiles = swizzled_bytes(heads, 2 * ROWS + 4 * KEYS);
        launch(&queries).run([heads.query, pieces], 256, tiles);
        launch(&keys).run([heads.kv, pieces], 256, tiles + 4 * 4 * KEYS);
    } else {
        launch(&queries).run([heads.query, pieces], 128, tile_bytes(heads, 2 * ROWS + 4 * 32));
        launch(&keys).run([heads.kv, pieces], 256, tile_bytes(heads, 2 * ROWS + 4 * 64) + 4 * 4 * 64);
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

pub(super) fn copy_blocks(cuda: &Cuda, pairs: Slice, cache: Slice, len: usize) {
    // Block sizes are multiples of 16.
    let (n_pieces, n_blocks) = (len * cache.kind.n_bytes() / 16, cache.len / len.max(1));
    let launch = cuda.kernel(&ELEMENTWISE, "copy_blocks").arg(pairs).arg(cache).arg(n_pieces).arg(n_blocks);
    launch.run([pairs.len / 2, 1], 256, 0);
}

/// What a call over a paged cache reads and writes beside its rows: see `paged::forward`.
pub(super) struct Call {
    dims: paged::Dims,
    cache_dims: CacheDims,
    pub(super) slots: Slice,
    pub(super) cache: (Slice, Slice),
    offsets: Slice,
    contexts: Slice,
    tables: Slice,
    groups: Option<Slice>,
    out: Slice,
}

/// How queries and keys are rotated: see `rope::forward`.
pub(super) struct Rotation {
    positions: Slice,
    cos: Slice,
    sin: Slice,
    norm: Option<(Slice, Slice, f32)>,
}

impl Rotation {
    pub(super) fn new<T: Float>(
        table: &Table<T>,
        positions: View<'_, u32>,
        norm: Option<HeadNorm<'_, T>>,
    ) -> Self {
        let weights =
            |norm: HeadNorm<'_, T>| (norm.query_weight.cuda(), norm.key_weight.cuda(), norm.eps as f32);
        let (cos, sin) = (table.cos.view().cuda(), table.sin.view().cuda());
        Self { positions: positions.cuda(), cos, sin, norm: norm.map(weights) }
    }
}

impl Call {
    pub(super) fn new<T: Float>(
        dims: paged::Dims,
        slots: View<'_, u32>,
        cache: &paged::Cache<T>,
        sequences: paged::Sequences<'_>,
        out: &ViewMut<'_, T>,
    ) -> Self {
        let paged::Sequences { offsets, contexts, tables, groups } = sequences;
        Self {
            dims,
            cache_dims: cache.dims(),
            slots: slots.cuda(),
            cache: (cache.keys.view().cuda(), cache.values.view().cuda()),
            offsets: offsets.cuda(),
            contexts: contexts.cuda(),
            tables: tables.cuda(),
            groups: groups.map(|groups| groups.cuda()),
            out: out.cuda(),
        }
    }

    /// One token of each sequence, rotated if it is not yet, its key and value stored on the way. False: not for this device
    /// or these heads, and nothing was done.
    pub(super) fn decode(&self, cuda: &Cuda, qkv: Slice, rotation: Option<&Rotation>) -> bool {
        let (op, heads, (keys, values)) = ("attention::paged::forward", self.dims.heads, self.cache);
        let is_mapped = Map::takes(keys, heads.dim) && Map::takes(values, heads.dim);
        let fits = is_hopper(cuda, qkv.kind, heads) && heads.group() <= paged::GROUPED_ROWS && is_mapped;
        let Some(groups) = self.groups.filter(|_| fits) else { return false };
        let block_size = self.cache_dims.block_size;
        let map = |cache: Slice| Map::new(cache, cache.len / heads.dim, heads.dim, block_size.min(KEYS));
        let launch =
            cuda.kernel(&ATTENTION_DECODE_HOPPER, "attention_decode_hopper_bf16").head_dim(heads.dim);
        let launch = launch.map(&map(keys)).map(&map(values)).arg(keys.same(qkv, op)).arg(values).arg(qkv);
        let norm = rotation.and_then(|rotation| rotation.norm);
        let launch = launch.arg(rotation.map(|t| t.positions)).arg(rotation.map(|t| t.cos.f32(op)));
        let launch = launch.arg(rotation.map(|t| t.sin)).arg(norm.map(|(query, _, _)| query.same(qkv, op)));
        let launch = launch.arg(norm.map(|(_, key, _)| key)).arg(norm.map_or(0.0, |(_, _, eps)| eps));
        let launch = launch.arg(self.slots).arg(self.contexts).arg(self.tables).arg(groups);
        let launch =
            launch.arg(self.out.same(qkv, op)).arg(self.dims.table_width).arg(heads.query).arg(heads.kv);
        // Three tiles of keys or values, queries, and weights of 64 keys.
        let shared = swizzled_bytes(heads, paged::GROUPED_ROWS + 3 * KEYS) + 2 * paged::GROUPED_ROWS * KEYS;
        // Where rows are still to be rotated, a product stands in front, and no kernel that writes to the cache.
        let launch = launch.arg(block_size.ilog2() as usize).early(rotation.is_some());
        launch.run([heads.kv, groups.len / 3], 160, shared);
        true
    }

    /// Any number of tokens of each sequence, whose keys and values are stored.
    pub(super) fn attend(&self, cuda: &Cuda, qkv: Slice) {
        let (op, d, (keys, values)) = ("attention::paged::forward", self.dims, self.cache);
        let (heads, kind) = (d.heads, qkv.kind);
        let is_hopper = is_hopper(cuda, kind, heads);
        let suffix = if is_hopper { "hopper_bf16" } else { self.out.same(qkv, op).same(keys, op).name() };
        let name = format!("attention_paged_{suffix}");
        // Block sizes are powers of 2, and the kernels of matrix instructions shift.
        let block_size = self.cache_dims.block_size;
        let shift = if kind == Kind::Bf16 { block_size.ilog2() as usize } else { block_size };
        let source = source(kind, heads, if is_hopper { &ATTENTION_HOPPER } else { &ATTENTION_PAGED });
        let launch = cuda.kernel(source, &name).head_dim(heads.dim).arg(qkv).arg(keys).arg(values);
        let launch = launch.arg(self.offsets).arg(self.contexts).arg(self.tables).arg(self.out);
        let launch = launch.arg(d.sequences).arg(d.table_width).arg(heads.query).arg(heads.kv).arg(shift);
        // Query rows of a block: the height of the matrix instruction.
        let height = if is_hopper { 64 } else { 16 };
        let pieces = [heads.kv, n_pieces(d.tokens, heads.group(), d.sequences, height)];
        if kind != Kind::Bf16 {
            launch.run([d.tokens, heads.query], 32, 0);
        } else if is_hopper {
            launch.run(pieces, 128, swizzled_bytes(heads, height + 2 * KEYS));
        } else {
            launch.run(pieces, 128, tile_bytes(heads, height + 2 * KEYS));
        }
    }
}
