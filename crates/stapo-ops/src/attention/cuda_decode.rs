//! Decode on Hopper: one token of each sequence, rotated in the kernel where it is not rotated yet, whose key and value are
//! stored on the way.

use super::cache::GROUPED_ROWS;
use super::cuda::{KEYS, is_hopper, out_pitch, swizzled_bytes};
use super::cuda_paged::PagedCall;
use crate::cuda::kernels::{ATTENTION_DECODE_HOPPER, ATTENTION_DECODE_HOPPER_RULED};
use crate::cuda::{Cuda, Fields, Slice};
use crate::heads::{Heads, MAX_NARROW_DIM};

/// Threads of a block, as in decode_hopper.cu.
const THREADS: usize = 160;

/// How queries and keys are rotated: see `rope::forward`.
pub(crate) struct Rotation {
    pub positions: Slice,
    pub cos: Slice,
    pub sin: Slice,
    /// The weights of the query and the key norm, and eps.
    pub norm: Option<(Slice, Slice, f32)>,
}

/// Whether [`run`] may be called with the same arguments: sequences come in groups, and device, type and heads suit the
/// kernel.
pub(crate) fn fits(cuda: &Cuda, call: &PagedCall, qkv: Slice) -> bool {
    let heads = call.dims.heads;
    call.groups.is_some_and(|groups| groups.max_members * heads.group() <= GROUPED_ROWS)
        && is_hopper(cuda, qkv.kind, heads)
        && call.has_cache_maps()
}

/// Pipeline stages of a block, as decode_hopper.cu has kernels for. A block alone on its multiprocessor, or one of two, has
/// more of them in flight.
fn n_stages(cuda: &Cuda, heads: Heads, rows: usize, n_blocks: usize) -> usize {
    let per_multiprocessor = n_blocks.div_ceil(cuda.gpu.multiprocessors as usize);
    let is_wide = heads.dim > MAX_NARROW_DIM;
    match per_multiprocessor {
        _ if rows > 8 => 3,
        // Shared memory holds six stages of wide heads.
        0 | 1 if is_wide => 6,
        0 | 1 => 8,
        2 if !is_wide => 6,
        _ => 3,
    }
}

/// Which kernel runs in front of the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum InFront {
    /// One that writes rows, and nothing to the cache.
    Rows,
    Any,
}

/// Shapes as in `paged::forward`; qkv is not rotated yet where there is a rotation.
pub(crate) fn run(cuda: &Cuda, call: &PagedCall, qkv: Slice, rotation: Option<&Rotation>, in_front: InFront) {
    let op = "attention::paged::forward";
    let heads = call.dims.heads;
    let (keys, values) = call.cache;
    let groups = call.groups.expect("cuda_decode::run: a call that fits");
    let block_size = call.cache_dims.block_size;
    let [key_map, value_map] = call.cache_maps();
    // Query rows that the kernel has room for.
    let rows = if groups.max_members * heads.group() <= 8 { 8 } else { GROUPED_ROWS };
    let n_blocks = heads.kv * groups.list.len / 4;
    let stages = n_stages(cuda, heads, rows, n_blocks);
    let name = format!("attention_decode_{rows}_{stages}_hopper_bf16");
    let rule = call.rule();
    let source = rule.choose(&ATTENTION_DECODE_HOPPER, &ATTENTION_DECODE_HOPPER_RULED);
    let launch = cuda.kernel(source, &name).head_dim(heads.dim);
    let norm = rotation.and_then(|rotation| rotation.norm);
    let args = Fields::default()
        .eight_bytes(keys.same(qkv, op))
        .eight_bytes(values)
        .eight_bytes(qkv)
        .eight_bytes(rotation.map(|rotation| rotation.positions))
        .eight_bytes(rotation.map(|rotation| rotation.cos.f32(op)))
        .eight_bytes(rotation.map(|rotation| rotation.sin))
        .eight_bytes(norm.map(|(query, _, _)| query.same(qkv, op)))
        .eight_bytes(norm.map(|(_, key, _)| key))
        .eight_bytes(call.slots)
        .eight_bytes(call.contexts)
        .eight_bytes(call.tables)
        .eight_bytes(groups.list)
        .eight_bytes(groups.first_partials)
        .eight_bytes(groups.partials)
        .eight_bytes(call.out.same(qkv, op))
        .four_bytes(norm.map_or(0.0, |(_, _, eps)| eps))
        .four_bytes(call.dims.table_width)
        .four_bytes(heads.query)
        .four_bytes(heads.kv)
        .four_bytes(block_size.ilog2() as usize)
        .four_bytes(out_pitch(call.dims.tokens, heads, call.out));
    // Stages of keys or values, queries, and weights of 64 keys for two steps.
    let shared = swizzled_bytes(heads, rows + stages * KEYS) + 2 * 2 * rows * KEYS;
    // The kernel reads keys before it waits for the kernel in front of it, which must not write to the cache.
    let launch = launch.tensor_map(&key_map).tensor_map(&value_map).fields(&args);
    let launch = rule.last_argument(launch, qkv.kind);
    launch.programmatic_launch(in_front == InFront::Rows).run(
        [heads.kv, groups.list.len / 4],
        THREADS,
        shared,
    );
    if let Some(partials) = groups.partials {
        let launch = cuda.kernel(source, "attention_combine_splits_bf16").head_dim(heads.dim);
        let launch = launch.arg(partials).arg(groups.first_partials).arg(call.contexts).arg(call.out);
        let launch = launch.arg(out_pitch(call.dims.tokens, heads, call.out));
        let launch = rule.last_argument(launch.arg(heads.query), qkv.kind).programmatic_launch(true);
        launch.run([heads.query, call.dims.sequences], heads.dim, 0);
    }
}
