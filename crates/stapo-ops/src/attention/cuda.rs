//! Packed attention on a GPU: matrix instructions in bf16, plain loops in f32.

use std::sync::Arc;

use super::{Dims, Saved};
use crate::cuda::kernels::{
    ATTENTION, ATTENTION_BACKWARD, ATTENTION_BACKWARD_PIPELINED_HOPPER,
    ATTENTION_BACKWARD_PIPELINED_HOPPER_RULED, ATTENTION_BACKWARD_RULED, ATTENTION_HOPPER,
    ATTENTION_HOPPER_RULED, ATTENTION_LONG_HOPPER, ATTENTION_LONG_HOPPER_RULED, ATTENTION_PIPELINED_HOPPER,
    ATTENTION_PIPELINED_HOPPER_RULED, ATTENTION_PLAIN, ATTENTION_RULED, ELEMENTWISE, Source,
};
use crate::cuda::{Cuda, ElementType, Fields, Launch, Memory, Slice, TensorMap};
use crate::heads::{Heads, MAX_GPU_DIM, MAX_NARROW_DIM, ScoreRule};
use crate::{Float, matmul, pitch_of};

/// Rows of a work tile: queries in forward and in the gradient of the queries, keys in the gradient of keys and values.
const ROWS: usize = 128;
/// Keys per step: KEYS in tiles.cu.
pub(super) const KEYS: usize = 64;
/// Mean tokens of a sequence from which on `forward_pipelined` is the faster kernel. Both give the same bits.
const PIPELINED_TOKENS: usize = 512;
/// Mean tokens of a sequence from which on `forward_pipelined` takes two consumers instead of three. Both give the same bits.
pub(crate) const LONG_TOKENS: usize = 12_288;

/// Bytes of `rows` rows of padded tiles: see DIM in tiles.cu and STRIDE in mma.cu.
pub(super) fn tile_bytes(heads: Heads, rows: usize) -> usize {
    2 * rows * (heads.dim.next_multiple_of(16) + 8)
}

/// The kernels for buffers stored as `kind`: `matrix` for bf16, plain loops for f32.
pub(super) fn source(kind: ElementType, heads: Heads, matrix: &'static Source) -> &'static Source {
    assert!(
        heads.dim <= MAX_GPU_DIM && heads.dim.is_multiple_of(2),
        "attention: heads of {}, on a GPU even and at most {MAX_GPU_DIM}",
        heads.dim
    );
    if kind == ElementType::Bf16 { matrix } else { &ATTENTION_PLAIN }
}

/// The rule of a layer's scores and its sinks, as kernels take them.
#[derive(Clone, Copy)]
pub(super) struct KernelRule {
    pub heads: Heads,
    pub scores: ScoreRule,
    pub sinks: Option<Slice>,
}

impl KernelRule {
    fn is_plain(self) -> bool {
        self.scores.is_plain(self.heads.dim) && self.sinks.is_none()
    }

    /// The kernels for bf16 of a layer with this rule: `plain` take no rule, `ruled` do.
    pub(super) fn choose(self, plain: &'static Source, ruled: &'static Source) -> &'static Source {
        if self.is_plain() { plain } else { ruled }
    }

    /// The last argument of kernels that take the rule: those for f32, and for bf16 those of a rule that is not plain.
    pub(super) fn last_argument(self, launch: Launch<'_>, kind: ElementType) -> Launch<'_> {
        if kind == ElementType::Bf16 && self.is_plain() {
            return launch;
        }
        let Self { heads, scores: rule, sinks } = self;
        // The plain scale has the bits of a division in f32.
        let is_plain = rule.is_plain(heads.dim);
        let scale = if is_plain { 1.0 / (heads.dim as f32).sqrt() } else { rule.scale as f32 };
        let softcap = rule.softcap.unwrap_or(0.0) as f32;
        let sinks =
            sinks.inspect(|sinks| assert!(sinks.kind == kind, "attention: sinks of {:?}", sinks.kind));
        let fields = Fields::default().eight_bytes(sinks).four_bytes(scale).four_bytes(softcap);
        launch.fields(&fields.four_bytes(rule.window.unwrap_or(0)))
    }
}

impl Dims {
    fn kernel_rule(self, sinks: Option<Slice>) -> KernelRule {
        KernelRule { heads: self.heads, scores: self.rule, sinks }
    }
}

/// Query rows of a work tile of the matrix kernels without Hopper's instruction: see FRAGMENTS in forward.cu and K_PARTS in
/// backward.cu.
fn tile_rows(heads: Heads) -> usize {
    if heads.dim > MAX_NARROW_DIM { ROWS / 2 } else { ROWS }
}

/// Whether the kernels with Hopper's matrix instruction are used. The choice must be the same in training and generation, so
/// that their bits agree.
pub(super) fn is_hopper(cuda: &Cuda, kind: ElementType, heads: Heads, rule: ScoreRule) -> bool {
    let suits = kind == ElementType::Bf16 && [64, 128].contains(&heads.dim) && rule.softcap.is_none();
    suits && cuda.is_hopper()
}

/// Bytes of swizzled tiles of `rows` rows together, with room to align their start to 1024.
pub(super) fn swizzled_bytes(heads: Heads, rows: usize) -> usize {
    2 * rows * heads.dim + 1024
}

/// Thread blocks that are enough for every sequence's tokens times `per_token` rows in work tiles of `height`.
pub(super) fn n_work_tiles(tokens: usize, per_token: usize, sequences: usize, height: usize) -> usize {
    tokens * per_token / height + sequences
}

/// [`super::Inputs`] on a GPU.
#[derive(Clone, Copy)]
pub(super) struct CudaInputs {
    pub qkv: Slice,
    pub sinks: Option<Slice>,
}

pub(super) fn forward(cuda: &Arc<Cuda>, d: Dims, inputs: CudaInputs, offsets: Slice, out: Slice, lse: Slice) {
    let op = "attention::forward";
    let heads = d.heads;
    let qkv = inputs.qkv;
    let rule = d.kernel_rule(inputs.sinks);
    let kind = qkv.kind;
    let is_hopper = is_hopper(cuda, kind, heads, d.rule);
    let is_pipelined = d.tokens >= PIPELINED_TOKENS * d.sequences.max(1);
    if is_hopper && is_pipelined && TensorMap::fits(qkv, heads.qkv_width()) {
        return forward_pipelined(cuda, d, inputs, offsets, out.same(qkv, op), lse.f32(op));
    }
    let suffix = if is_hopper { "hopper_bf16" } else { out.same(qkv, op).name() };
    let name = format!("attention_forward_{suffix}");
    let (plain, ruled) =
        if is_hopper { (&ATTENTION_HOPPER, &ATTENTION_HOPPER_RULED) } else { (&ATTENTION, &ATTENTION_RULED) };
    let source = source(kind, heads, rule.choose(plain, ruled));
    let launch = cuda.kernel(source, &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).arg(offsets).arg(out);
    let is_bf16 = kind == ElementType::Bf16;
    let launch = if is_bf16 { launch.arg(out_pitch(d.tokens, heads, out)) } else { launch };
    let launch = launch.arg(lse.f32(op)).arg(d.sequences).arg(heads.query).arg(heads.kv);
    let launch = rule.last_argument(launch, kind);
    let rows = if is_hopper { ROWS } else { tile_rows(heads) };
    let grid = [heads.query, n_work_tiles(d.tokens, 1, d.sequences, rows)];
    if !is_bf16 {
        launch.run([d.tokens, heads.query], 32, 0);
    } else if is_hopper {
        launch.run(grid, 256, swizzled_bytes(heads, ROWS + 4 * KEYS));
    } else {
        launch.run(grid, 128, tile_bytes(heads, rows + 4 * KEYS));
    }
}

/// Elements from one token to the next of an output, which may have further columns behind its rows.
pub(super) fn out_pitch(tokens: usize, heads: Heads, out: Slice) -> usize {
    pitch_of("attention", "out", out.len, tokens, heads.out_width())
}

/// By the kernel of forward_pipelined_hopper.cu.
fn forward_pipelined(cuda: &Arc<Cuda>, d: Dims, inputs: CudaInputs, offsets: Slice, out: Slice, lse: Slice) {
    let CudaInputs { qkv, sinks } = inputs;
    let rule = d.kernel_rule(sinks);
    let is_long = d.tokens >= LONG_TOKENS * d.sequences.max(1);
    // As in the kernel.
    let (plain, ruled, consumers, stages) = if is_long {
        (&ATTENTION_LONG_HOPPER, &ATTENTION_LONG_HOPPER_RULED, 2, 10)
    } else {
        (&ATTENTION_PIPELINED_HOPPER, &ATTENTION_PIPELINED_HOPPER_RULED, 3, 8)
    };
    let source = rule.choose(plain, ruled);
    let (rows, threads) = (64 * consumers, 128 * consumers + 128);
    let heads = d.heads;
    let map = |tile_rows| TensorMap::new(qkv, d.tokens, heads.qkv_width(), tile_rows);
    let args = Fields::default()
        .eight_bytes(offsets)
        .eight_bytes(out)
        .eight_bytes(lse)
        .eight_bytes(cuda.signal())
        .four_bytes(d.sequences)
        .four_bytes(heads.query)
        .four_bytes(heads.kv)
        .four_bytes(out_pitch(d.tokens, heads, out));
    let launch = cuda.kernel(source, "attention_forward_pipelined_hopper_bf16");
    let launch = launch.head_dim(heads.dim).tensor_map(&map(rows)).tensor_map(&map(KEYS)).fields(&args);
    let launch = rule.last_argument(launch, qkv.kind);
    let n_blocks = cuda.gpu.multiprocessors as usize;
    let launch = launch.programmatic_launch(true);
    launch.run([n_blocks, 1], threads, swizzled_bytes(heads, 2 * rows + stages * KEYS));
}

pub(super) fn backward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    saved: Saved<'_, T>,
    offsets: Slice,
    d_out: Slice,
    d_qkv: Slice,
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
    let inputs = BackwardInputs { qkv, d_out, offsets, lse: lse.f32(op), delta };
    let has_maps = TensorMap::fits(qkv, heads.qkv_width()) && TensorMap::fits(d_out, heads.out_width());
    if is_hopper(cuda, kind, heads, d.rule) && has_maps {
        return backward_pipelined(cuda, d, &inputs, d_qkv);
    }
    let queries = format!("attention_backward_queries_{}", kind.name());
    let keys = format!("attention_backward_keys_{}", kind.name());
    let launch = |name| {
        let launch = cuda.kernel(source, name).head_dim(heads.dim).arg(qkv).arg(d_out).arg(offsets);
        let launch = launch.arg(inputs.lse).arg(delta).arg(d_qkv);
        let launch = launch.arg(d.sequences).arg(heads.query).arg(heads.kv);
        rule.last_argument(launch, kind)
    };
    if kind == ElementType::Bf16 {
        let rows = tile_rows(heads);
        let n_tiles = n_work_tiles(d.tokens, 1, d.sequences, rows);
        launch(&queries).run([heads.query, n_tiles], 128, tile_bytes(heads, 2 * rows + 4 * 32));
        // Of wide heads, keys and values have a block each.
        let shared = tile_bytes(heads, 2 * rows + 4 * 64) + 4 * 4 * 64;
        launch(&keys).run([heads.kv * (ROWS / rows), n_tiles], 2 * rows, shared);
    } else {
        launch(&queries).run([d.tokens, heads.query], 32, 0);
        launch(&keys).run([d.tokens, heads.kv], 32, 0);
    }
}

/// The sum over a head's columns of d_out times out, `[T, query heads]` in f32.
fn delta(cuda: &Arc<Cuda>, d: Dims, out: Slice, d_out: Slice) -> Memory {
    let (heads, kind) = (d.heads, out.kind);
    let matrix = d.kernel_rule(None).choose(&ATTENTION_BACKWARD, &ATTENTION_BACKWARD_RULED);
    let delta = Memory::scratch(cuda, d.tokens * heads.query, ElementType::F32);
    let name = format!("attention_delta_{}", kind.name());
    let launch = cuda.kernel(source(kind, heads, matrix), &name).head_dim(heads.dim).arg(out);
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
    offsets: Slice,
    lse: Slice,
    delta: Slice,
}

/// By the kernels of backward_pipelined_hopper.cu.
fn backward_pipelined(cuda: &Arc<Cuda>, d: Dims, inputs: &BackwardInputs, d_qkv: Slice) {
    // As in the kernel.
    const THREADS: usize = 384;
    const STAGES: usize = 2;
    const ADDERS: usize = 2;
    let heads = d.heads;
    let (plain, ruled) = (&ATTENTION_BACKWARD_PIPELINED_HOPPER, &ATTENTION_BACKWARD_PIPELINED_HOPPER_RULED);
    let rule = d.kernel_rule(None);
    let source = rule.choose(plain, ruled);
    let kind = inputs.qkv.kind;
    // Tiles of 64 queries, of every head.
    let n_query_tiles = n_work_tiles(d.tokens, 1, d.sequences, KEYS);
    let sums = Memory::scratch(cuda, n_query_tiles * heads.query * KEYS * heads.dim, ElementType::F32);
    let turns = Memory::scratch(cuda, 1 + n_query_tiles * heads.query, ElementType::U32);
    cuda.fill(turns.slice(), 0u32);
    let args = Fields::default()
        .eight_bytes(inputs.offsets)
        .eight_bytes(inputs.lse)
        .eight_bytes(inputs.delta)
        .eight_bytes(sums.slice())
        .eight_bytes(turns.slice())
        .eight_bytes(d_qkv)
        .four_bytes(d.sequences)
        .four_bytes(heads.query)
        .four_bytes(heads.kv);
    let map = |matrix, width| TensorMap::new(matrix, d.tokens, width, KEYS);
    let launch = cuda.kernel(source, "attention_backward_pipelined_hopper_bf16").head_dim(heads.dim);
    let launch = launch.tensor_map(&map(inputs.qkv, heads.qkv_width()));
    let launch = launch.tensor_map(&map(inputs.d_out, heads.out_width())).fields(&args);
    let launch = rule.last_argument(launch, kind);
    // Keys and values, queries and d_out of each stage, gradients of scores in bf16, and of queries in f32.
    let tiles = swizzled_bytes(heads, 2 * ROWS + 2 * STAGES * KEYS) + 2 * ROWS * KEYS;
    let shared = tiles + 4 * ADDERS * KEYS * heads.dim;
    launch.run([heads.kv * n_work_tiles(d.tokens, 1, d.sequences, ROWS), 1], THREADS, shared);
    let launch = cuda.kernel(source, "attention_backward_store_queries_bf16").head_dim(heads.dim);
    let launch = launch.arg(sums.slice()).arg(inputs.offsets).arg(d_qkv);
    let launch = launch.arg(d.sequences).arg(heads.query).arg(heads.kv);
    rule.last_argument(launch, kind).run([heads.query, n_query_tiles], 256, 0);
}
