//! Packed attention on a GPU: matrix instructions in bf16, plain loops in f32.

use std::sync::Arc;

use super::{Dims, Saved, Sequences};
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

/// [`Sequences`] on a GPU.
#[derive(Clone, Copy)]
pub(super) struct CudaSequences {
    offsets: Slice,
    key_offsets: Slice,
    /// `[n_keys, key_width]`: what holds the keys and values, which begin after `n_before` heads of a row.
    keys: Slice,
    n_keys: usize,
    key_width: usize,
    n_before: usize,
    /// Tiles of a sequence's queries that may not be full: with keys apart, the first as well as the last.
    n_partial_tiles: usize,
}

impl CudaSequences {
    pub(super) fn new<T: Float>(d: Dims, qkv: Slice, sequences: &Sequences<'_, T>) -> Self {
        let offsets = sequences.offsets.cuda();
        match sequences.keys {
            None => Self {
                offsets,
                key_offsets: offsets,
                keys: qkv,
                n_keys: d.tokens,
                key_width: d.heads.qkv_width(),
                n_before: d.heads.query,
                n_partial_tiles: 1,
            },
            Some(keys) => Self {
                offsets,
                key_offsets: keys.offsets.cuda(),
                keys: keys.rows.cuda().same(qkv, "attention"),
                n_keys: keys.n_rows(d.heads),
                key_width: 2 * d.heads.kv * d.heads.dim,
                n_before: 0,
                n_partial_tiles: 2,
            },
        }
    }

    /// `Packing` of tiles.cu and plain.cu.
    fn fields(self, d: Dims) -> Fields {
        Fields::default()
            .eight_bytes(self.offsets)
            .eight_bytes(self.key_offsets)
            .eight_bytes(self.first_key(d, self.keys))
            .four_bytes(self.key_width)
            .four_bytes(d.sequences)
            .four_bytes(d.heads.query)
            .four_bytes(d.heads.kv)
    }

    /// From the first key on, of `rows` that lie like the keys.
    fn first_key(self, d: Dims, rows: Slice) -> Slice {
        let start = (self.n_before * d.heads.dim).min(rows.len);
        rows.part(start, rows.len - start)
    }

    /// Whether the TMA can read the keys.
    fn fit_maps(self) -> bool {
        TensorMap::fits(self.keys, self.key_width)
    }

    /// Keys or values in tiles of `tile_rows`.
    fn key_map(self, tile_rows: usize) -> TensorMap {
        TensorMap::new(self.keys, self.n_keys, self.key_width, tile_rows)
    }

    /// Thread blocks that are enough for every sequence's queries in tiles of `height`, a multiple of a step of keys.
    fn n_query_tiles(self, d: Dims, height: usize) -> usize {
        d.tokens / height + self.n_partial_tiles * d.sequences
    }

    /// The same for its keys.
    fn n_key_tiles(self, d: Dims, height: usize) -> usize {
        n_work_tiles(self.n_keys, 1, d.sequences, height)
    }

    /// Whether sequences have `n` keys or more in the mean.
    fn have_mean_length(self, d: Dims, n: usize) -> bool {
        self.n_keys >= n * d.sequences.max(1)
    }
}

pub(super) fn forward(
    cuda: &Arc<Cuda>,
    d: Dims,
    inputs: CudaInputs,
    sequences: CudaSequences,
    out: Slice,
    lse: Slice,
) {
    let op = "attention::forward";
    let heads = d.heads;
    let qkv = inputs.qkv;
    let rule = d.kernel_rule(inputs.sinks);
    let kind = qkv.kind;
    let is_hopper = is_hopper(cuda, kind, heads, d.rule);
    let is_pipelined = sequences.have_mean_length(d, PIPELINED_TOKENS);
    let has_maps = TensorMap::fits(qkv, heads.qkv_width()) && sequences.fit_maps();
    if is_hopper && is_pipelined && has_maps {
        return forward_pipelined(cuda, d, inputs, sequences, out.same(qkv, op), lse.f32(op));
    }
    let suffix = if is_hopper { "hopper_bf16" } else { out.same(qkv, op).name() };
    let name = format!("attention_forward_{suffix}");
    let (plain, ruled) =
        if is_hopper { (&ATTENTION_HOPPER, &ATTENTION_HOPPER_RULED) } else { (&ATTENTION, &ATTENTION_RULED) };
    let source = source(kind, heads, rule.choose(plain, ruled));
    let launch = cuda.kernel(source, &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).fields(&sequences.fields(d)).arg(out);
    let is_bf16 = kind == ElementType::Bf16;
    let launch = if is_bf16 { launch.arg(out_pitch(d.tokens, heads, out)) } else { launch };
    let launch = rule.last_argument(launch.arg(lse.f32(op)), kind);
    let rows = if is_hopper { ROWS } else { tile_rows(heads) };
    let grid = [heads.query, sequences.n_query_tiles(d, rows)];
    if !is_bf16 {
        launch.run([d.tokens, heads.query], 32, 0);
    } else if is_hopper {
        launch.run(grid, 256, swizzled_bytes(heads, ROWS + 4 * KEYS));
    } else {
        launch.run(grid, 128, tile_bytes(heads, rows + 4 * KEYS));
    }
}

/// Elements from one token to the next of an output, which may have further columns after its rows.
pub(super) fn out_pitch(tokens: usize, heads: Heads, out: Slice) -> usize {
    pitch_of("attention", "out", out.len, tokens, heads.out_width())
}

/// By the kernel of forward_pipelined_hopper.cu.
fn forward_pipelined(
    cuda: &Arc<Cuda>,
    d: Dims,
    inputs: CudaInputs,
    sequences: CudaSequences,
    out: Slice,
    lse: Slice,
) {
    let CudaInputs { qkv, sinks } = inputs;
    let rule = d.kernel_rule(sinks);
    let is_long = sequences.have_mean_length(d, LONG_TOKENS);
    // As in the kernel.
    let (plain, ruled, consumers, stages) = if is_long {
        (&ATTENTION_LONG_HOPPER, &ATTENTION_LONG_HOPPER_RULED, 2, 10)
    } else {
        (&ATTENTION_PIPELINED_HOPPER, &ATTENTION_PIPELINED_HOPPER_RULED, 3, 8)
    };
    let source = rule.choose(plain, ruled);
    let (rows, threads) = (64 * consumers, 128 * consumers + 128);
    let heads = d.heads;
    let args = sequences
        .fields(d)
        .eight_bytes(out)
        .eight_bytes(lse)
        .eight_bytes(cuda.signal())
        .four_bytes(out_pitch(d.tokens, heads, out))
        .four_bytes(sequences.n_before);
    let launch = cuda.kernel(source, "attention_forward_pipelined_hopper_bf16").head_dim(heads.dim);
    let launch = launch.tensor_map(&TensorMap::new(qkv, d.tokens, heads.qkv_width(), rows));
    let launch = launch.tensor_map(&sequences.key_map(KEYS)).fields(&args);
    let launch = rule.last_argument(launch, qkv.kind);
    let n_blocks = cuda.gpu.multiprocessors as usize;
    let launch = launch.programmatic_launch(true);
    launch.run([n_blocks, 1], threads, swizzled_bytes(heads, 2 * rows + stages * KEYS));
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
    let has_maps = TensorMap::fits(qkv, heads.qkv_width()) && TensorMap::fits(d_out, heads.out_width());
    if is_hopper(cuda, kind, heads, d.rule) && has_maps && sequences.fit_maps() {
        return backward_pipelined(cuda, d, &inputs, (d_qkv, d_keys));
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
    let matrix = d.kernel_rule(None).choose(&ATTENTION_BACKWARD, &ATTENTION_BACKWARD_RULED);
    let delta = Memory::scratch(cuda, d.tokens * heads.query, ElementType::F32);
    let name = format!("attention_delta_{}", kind.name());
    let launch = cuda.kernel(source(kind, heads, matrix), &name).head_dim(heads.dim).arg(out);
    let is_bf16 = kind == ElementType::Bf16;
    let launch = if is_bf16 { launch.arg(out_pitch(d.tokens, heads, out)) } else { launch };
    launch.arg(d_out).arg(delta.slice()).arg(heads.query).run([d.tokens, 1], 128, 0);
    delta
}

/// See `key_copies::forward`.
pub(super) fn copy_keys(cuda: &Cuda, heads: Heads, rows: Slice, qkv: Slice, keys: Slice) {
    let (width, before) = (2 * heads.kv * heads.dim, heads.query * heads.dim);
    let name = format!("attention_copy_keys_{}", keys.same(qkv, "attention::key_copies").name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(rows).arg(qkv).arg(keys);
    launch.arg(width).arg(before).arg(heads.qkv_width()).run([rows.len, 1], 128, 0);
}

/// See `key_copies::backward`.
pub(super) fn add_key_copies(
    cuda: &Cuda,
    heads: Heads,
    (starts, list): (Slice, Slice),
    d_keys: Slice,
    d_qkv: Slice,
) {
    let (width, before) = (2 * heads.kv * heads.dim, heads.query * heads.dim);
    let name = format!("attention_add_key_copies_{}", d_keys.same(d_qkv, "attention::key_copies").name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(starts).arg(list).arg(d_keys).arg(d_qkv);
    launch.arg(width).arg(before).arg(heads.qkv_width()).run([starts.len - 1, 1], 128, 0);
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

/// By the kernels of backward_pipelined_hopper.cu. `d_keys` is the gradient of the first key and of what follows.
fn backward_pipelined(cuda: &Arc<Cuda>, d: Dims, inputs: &BackwardInputs, (d_qkv, d_keys): (Slice, Slice)) {
    // As in the kernel.
    const THREADS: usize = 384;
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
    let sums = Memory::scratch(cuda, n_query_tiles * heads.query * KEYS * heads.dim, ElementType::F32);
    let turns = Memory::scratch(cuda, 1 + n_query_tiles * heads.query, ElementType::U32);
    cuda.fill(turns.slice(), 0u32);
    let args = sequences
        .fields(d)
        .eight_bytes(inputs.lse)
        .eight_bytes(inputs.delta)
        .eight_bytes(sums.slice())
        .eight_bytes(turns.slice())
        .eight_bytes(d_keys)
        .four_bytes(sequences.n_before);
    let map = |matrix, width| TensorMap::new(matrix, d.tokens, width, KEYS);
    let launch = cuda.kernel(source, "attention_backward_pipelined_hopper_bf16").head_dim(heads.dim);
    let launch = launch.tensor_map(&map(inputs.qkv, heads.qkv_width())).tensor_map(&sequences.key_map(KEYS));
    let launch = launch.tensor_map(&map(inputs.d_out, heads.out_width())).fields(&args);
    let launch = rule.last_argument(launch, kind);
    // Keys and values, queries and d_out of each stage, gradients of scores in bf16, and of queries in f32.
    let tiles = swizzled_bytes(heads, 2 * ROWS + 2 * STAGES * KEYS) + 2 * ROWS * KEYS;
    let shared = tiles + 4 * ADDERS * KEYS * heads.dim;
    launch.run([heads.kv * sequences.n_key_tiles(d, ROWS), 1], THREADS, shared);
    let launch = cuda.kernel(source, "attention_backward_store_queries_bf16").head_dim(heads.dim);
    let launch = launch.arg(sums.slice()).fields(&sequences.fields(d)).arg(d_qkv);
    rule.last_argument(launch, kind).run([heads.query, n_query_tiles], 256, 0);
}
