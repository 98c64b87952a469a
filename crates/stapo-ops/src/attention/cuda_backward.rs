//! The gradients of packed attention on a GPU.

use std::sync::Arc;

use super::cuda::{
    CudaSequences, KEYS, ROWS, has_map, map, out_pitch, source, swizzled_bytes, swizzled_columns, tile_bytes,
    tile_rows,
};
use super::{Dims, Saved};
use crate::cuda::kernels::{
    ATTENTION_BACKWARD, ATTENTION_BACKWARD_PIPELINED_HOPPER, ATTENTION_BACKWARD_PIPELINED_HOPPER_RULED,
    ATTENTION_BACKWARD_RULED, ATTENTION_BACKWARD_WIDE_HOPPER, ATTENTION_BACKWARD_WIDE_HOPPER_RULED,
    ATTENTION_DELTA, ELEMENTWISE, Source,
};
use crate::cuda::{Cuda, ElementType, Fields, Launch, Memory, Slice};
use crate::heads::{Heads, MAX_NARROW_DIM, ScoreRule};
use crate::{Float, matmul};

/// Heads whose backward kernels use Hopper's matrix instruction.
const HOPPER_BACKWARD_DIMS: [usize; 4] = [64, 96, 128, 256];

/// Whether kernels with Hopper's matrix instruction are used. Those of narrow heads take no softcap.
fn is_hopper(cuda: &Cuda, kind: ElementType, heads: Heads, rule: ScoreRule) -> bool {
    let takes_rule = heads.dim > MAX_NARROW_DIM || rule.softcap.is_none();
    kind == ElementType::Bf16 && HOPPER_BACKWARD_DIMS.contains(&heads.dim) && takes_rule && cuda.is_hopper()
}

/// `to` are the gradients of qkv, and of keys that lie apart.
pub(super) fn backward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    saved: Saved<'_, T>,
    sequences: CudaSequences,
    d_out: Slice,
    (d_qkv, d_keys): (Slice, Option<Slice>),
) {
    let op = "attention::backward";
    let heads = d.heads;
    let qkv = saved.qkv.cuda();
    let out = saved.out.cuda();
    let lse = saved.lse.cuda();
    let kind = d_qkv.same(qkv, op).same(out, op).same(d_out, op).kind;
    // Sinks are in the sums that forward kept, and enter backward by these alone.
    let rule = d.kernel_rule(None);
    let source = source(kind, heads, rule.choose(&ATTENTION_BACKWARD, &ATTENTION_BACKWARD_RULED));
    let delta_memory = delta(cuda, d, out, d_out);
    let delta = delta_memory.slice();
    let d_keys = sequences.first_key(d, d_keys.map_or(d_qkv, |d_keys| d_keys.same(qkv, op)));
    let inputs = BackwardInputs { qkv, d_out, sequences, lse: lse.f32(op), delta };
    let has_maps = has_map(qkv, heads.qkv_width()) && has_map(d_out, heads.out_width());
    if is_hopper(cuda, kind, heads, d.rule) && has_maps && sequences.fit_maps() {
        let by_width = if heads.dim > MAX_NARROW_DIM { backward_wide } else { backward_pipelined };
        return by_width(cuda, d, &inputs, (d_qkv, d_keys));
    }
    let queries = format!("attention_backward_queries_{}", kind.name());
    let keys = format!("attention_backward_keys_{}", kind.name());
    let launch = |name, to| {
        let launch = cuda.kernel(source, name).head_dim(heads.dim).arg(qkv).arg(d_out);
        let launch = launch.fields(&sequences.fields(d)).arg(inputs.lse).arg(delta).arg(to);
        rule.last_argument(launch, kind)
    };
    if kind == ElementType::Bf16 {
        let rows = tile_rows(heads);
        let grid = [heads.query, sequences.n_query_tiles(d, rows)];
        launch(&queries, d_qkv).run(grid, 128, tile_bytes(heads, 2 * rows + 4 * 32));
        // Of wide heads, keys and values have a block each.
        let shared = tile_bytes(heads, 2 * rows + 4 * 64) + 4 * 4 * 64;
        let grid = [heads.kv * (ROWS / rows), sequences.n_key_tiles(d, rows)];
        launch(&keys, d_keys).run(grid, 2 * rows, shared);
    } else {
        launch(&queries, d_qkv).run([d.tokens, heads.query], 32, 0);
        launch(&keys, d_keys).run([sequences.n_keys, heads.kv], 32, 0);
    }
}

/// The sum over a head's columns of d_out times out, `[T, query heads]` in f32.
fn delta(cuda: &Arc<Cuda>, d: Dims, out: Slice, d_out: Slice) -> Memory {
    let (heads, kind) = (d.heads, out.kind);
    let delta = Memory::scratch(cuda, d.tokens * heads.query, ElementType::F32);
    let name = format!("attention_delta_{}", kind.name());
    let launch = cuda.kernel(source(kind, heads, &ATTENTION_DELTA), &name).head_dim(heads.dim).arg(out);
    let is_bf16 = kind == ElementType::Bf16;
    let launch = if is_bf16 { launch.arg(out_pitch(d.tokens, heads, out)) } else { launch };
    launch.arg(d_out).arg(delta.slice()).arg(heads.query).run([d.tokens, 1], 128, 0);
    delta
}

/// See `sinks::backward`.
pub(super) fn backward_sinks<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    saved: Saved<'_, T>,
    sinks: Slice,
    d_out: Slice,
    d_sinks: Slice,
) {
    let op = "attention::sinks::backward";
    let query = d.heads.query;
    let terms = delta(cuda, d, saved.out.cuda().same(d_out, op).same(sinks, op), d_out);
    let name = format!("attention_sink_terms_{}", sinks.name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(sinks).arg(saved.lse.cuda().f32(op)).arg(terms.slice());
    let n = d.tokens * query;
    launch.arg(query).arg(n).run([n.div_ceil(256), 1], 256, 0);
    matmul::cuda::backward_bias(cuda, d.tokens, query, terms.slice(), d_sinks);
}

struct BackwardInputs {
    qkv: Slice,
    d_out: Slice,
    sequences: CudaSequences,
    lse: Slice,
    delta: Slice,
}

impl BackwardInputs {
    /// A kernel of `source` with the arguments that all those with Hopper's matrix instruction begin with: see
    /// backward_feed_hopper.cu. `d_keys` is the gradient of the first key and of what follows.
    fn launch<'a>(
        &self,
        cuda: &'a Arc<Cuda>,
        (source, name): (&'static Source, &'a str),
        d: Dims,
        d_keys: Slice,
    ) -> Launch<'a> {
        let map = |matrix, width| map(matrix, d.tokens, width, KEYS);
        let args = self.sequences.fields(d).eight_bytes(self.lse).eight_bytes(self.delta);
        let args = args.eight_bytes(d_keys).four_bytes(self.sequences.n_before).four_bytes(heads_together(d));
        let launch = cuda.kernel(source, name).head_dim(d.heads.dim);
        let launch = launch.tensor_map(&map(self.qkv, d.heads.qkv_width()));
        let launch = launch.tensor_map(&self.sequences.key_map(KEYS));
        launch.tensor_map(&map(self.d_out, d.heads.out_width())).fields(&args)
    }
}

/// Key/value heads whose blocks run together in backward: with the sequences about a quarter of a GPU's multiprocessors.
fn heads_together(d: Dims) -> usize {
    const PAIRS: usize = 32;
    let most = (PAIRS / d.sequences.max(1)).clamp(1, d.heads.kv);
    (1..=most).rev().find(|n| d.heads.kv.is_multiple_of(*n)).unwrap_or(1)
}

/// Threads of the kernels that [`BackwardInputs::launch`] begins.
const BACKWARD_THREADS: usize = 384;

/// By the kernels of backward_pipelined_hopper.cu. `d_keys` is the gradient of the first key and of what follows.
fn backward_pipelined(cuda: &Arc<Cuda>, d: Dims, inputs: &BackwardInputs, (d_qkv, d_keys): (Slice, Slice)) {
    // As in the kernel.
    const STAGES: usize = 2;
    const ADDERS: usize = 2;
    let heads = d.heads;
    let sequences = inputs.sequences;
    let (plain, ruled) = (&ATTENTION_BACKWARD_PIPELINED_HOPPER, &ATTENTION_BACKWARD_PIPELINED_HOPPER_RULED);
    let rule = d.kernel_rule(None);
    let source = rule.choose(plain, ruled);
    let kind = inputs.qkv.kind;
    // Tiles of 64 queries, of every head.
    let n_query_tiles = sequences.n_query_tiles(d, KEYS);
    let tile = KEYS * swizzled_columns(heads);
    let sums = Memory::scratch(cuda, n_query_tiles * heads.query * tile, ElementType::F32);
    let turns = Memory::scratch(cuda, 1 + n_query_tiles * heads.query, ElementType::U32);
    cuda.fill(turns.slice(), 0u32);
    let launch = inputs.launch(cuda, (source, "attention_backward_pipelined_hopper_bf16"), d, d_keys);
    let launch = launch.fields(&Fields::default().eight_bytes(sums.slice()).eight_bytes(turns.slice()));
    let launch = rule.last_argument(launch, kind);
    // Keys and values, queries and d_out of each stage, gradients of scores in bf16, and of queries in f32.
    let tiles = swizzled_bytes(heads, 2 * ROWS + 2 * STAGES * KEYS) + 2 * ROWS * KEYS;
    let n_blocks = heads.kv * sequences.n_key_tiles(d, ROWS);
    launch.run([n_blocks, 1], BACKWARD_THREADS, tiles + 4 * ADDERS * tile);
    let launch = cuda.kernel(source, "attention_backward_store_queries_bf16").head_dim(heads.dim);
    let launch = launch.arg(sums.slice()).fields(&sequences.fields(d)).arg(d_qkv);
    rule.last_argument(launch, kind).run([heads.query, n_query_tiles], 256, 0);
}

/// By the kernels of backward_wide_hopper.cu, as [`backward_pipelined`].
fn backward_wide(cuda: &Arc<Cuda>, d: Dims, inputs: &BackwardInputs, (d_qkv, d_keys): (Slice, Slice)) {
    let heads = d.heads;
    let rule = d.kernel_rule(None);
    let source = rule.choose(&ATTENTION_BACKWARD_WIDE_HOPPER, &ATTENTION_BACKWARD_WIDE_HOPPER_RULED);
    let kind = inputs.qkv.kind;
    // Queries and d_out, two tiles of keys and one of values.
    let launch = inputs.launch(cuda, (source, "attention_backward_queries_wide_hopper_bf16"), d, d_keys);
    let launch = rule.last_argument(launch.arg(d_qkv), kind);
    let grid = [heads.query, inputs.sequences.n_query_tiles(d, ROWS)];
    launch.run(grid, BACKWARD_THREADS, swizzled_bytes(heads, 2 * ROWS + 3 * KEYS));
    // Keys and values, two stages of queries and d_out, and two of weights in f32.
    let launch = inputs.launch(cuda, (source, "attention_backward_keys_wide_hopper_bf16"), d, d_keys);
    let n_blocks = heads.kv * inputs.sequences.n_key_tiles(d, KEYS);
    let shared = swizzled_bytes(heads, 6 * KEYS) + 2 * 4 * KEYS * KEYS;
    rule.last_argument(launch, kind).run([n_blocks, 1], BACKWARD_THREADS, shared);
}
