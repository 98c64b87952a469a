//! Packed attention on a GPU: matrix instructions in bf16, plain loops in f32.

use std::sync::Arc;

use super::{Dims, Sequences};
use crate::cuda::kernels::{
    ATTENTION, ATTENTION_LONG_HOPPER, ATTENTION_LONG_HOPPER_RULED, ATTENTION_LONG_PAIRED_HOPPER,
    ATTENTION_PIPELINED_HOPPER, ATTENTION_PIPELINED_HOPPER_RULED, ATTENTION_PLAIN, ATTENTION_RULED,
    ATTENTION_SHORT_HOPPER, ATTENTION_SHORT_HOPPER_RULED, ELEMENTWISE, Source,
};
use crate::cuda::{Cuda, ElementType, Fields, Launch, Slice, TILE_COLUMNS, TensorMap};
use crate::heads::{Heads, MAX_GPU_DIM, MAX_NARROW_DIM, ScoreRule};
use crate::{Float, pitch_of};

/// Rows of a work tile: queries in forward and in the gradient of the queries, keys in the gradient of keys and values.
pub(super) const ROWS: usize = 128;
/// Keys per step: KEYS in tiles.cu.
pub(super) const KEYS: usize = 64;
/// Heads whose forward kernels, in training and generation alike, use Hopper's matrix instruction.
const HOPPER_DIMS: [usize; 4] = [64, 96, 128, 256];
/// Below this mean number of keys of a sequence, tiles of 192 queries would be left half empty: the pipelined kernel takes two
/// consumers instead of three, where it can with two heads that share their keys. All give the same bits.
pub(crate) const SHORT_TOKENS: usize = 512;
/// From this number on it takes two consumers too, whose registers hold the results of earlier splits.
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
    pub(super) fn kernel_rule(self, sinks: Option<Slice>) -> KernelRule {
        KernelRule { heads: self.heads, scores: self.rule, sinks }
    }
}

/// Query rows of a work tile of the matrix kernels without Hopper's instruction: see FRAGMENTS in forward.cu and K_PARTS in
/// backward.cu.
pub(super) fn tile_rows(heads: Heads) -> usize {
    if heads.dim > MAX_NARROW_DIM { ROWS / 2 } else { ROWS }
}

/// Whether forward kernels with Hopper's matrix instruction are used. The choice must be the same in training and generation, so
/// that their bits agree.
pub(super) fn is_hopper(cuda: &Cuda, kind: ElementType, heads: Heads) -> bool {
    kind == ElementType::Bf16 && HOPPER_DIMS.contains(&heads.dim) && cuda.is_hopper()
}

/// Columns of a row of swizzled tiles: COLUMNS in hopper.cu.
pub(super) fn swizzled_columns(heads: Heads) -> usize {
    heads.dim.next_multiple_of(TILE_COLUMNS)
}

/// Bytes of swizzled tiles of `rows` rows together, with room to align their start to 1024.
pub(super) fn swizzled_bytes(heads: Heads, rows: usize) -> usize {
    2 * rows * swizzled_columns(heads) + 1024
}

/// Whether the TMA can read heads from `rows`, whose last columns may be less than those of a tile.
pub(super) fn has_map(rows: Slice, width: usize) -> bool {
    rows.kind == ElementType::Bf16 && rows.address.is_multiple_of(16) && width.is_multiple_of(8)
}

/// Rows of heads `[n, width]` in tiles of `tile_rows`.
pub(super) fn map(rows: Slice, n: usize, width: usize, tile_rows: usize) -> TensorMap {
    TensorMap::of_columns(rows, n, (0, width, width), tile_rows)
}

/// How forward_feed_hopper.cu is compiled: with SHORT_SEQUENCES, with neither, with LONG_SEQUENCES, with that and PAIRED_BLOCKS.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Short,
    Usual,
    Long,
    LongPaired,
}

/// As forward_feed_hopper.cu has it for a width of heads: warpgroups that multiply, stages of keys or values, and buffers of
/// queries.
#[derive(Clone, Copy)]
pub(super) struct Pipeline {
    pub form: Form,
    consumers: usize,
    stages: usize,
    buffers: usize,
}

impl Pipeline {
    /// For sequences of `mean_keys` keys. All give the same bits.
    pub(super) fn new(rule: KernelRule, mean_keys: usize) -> Self {
        let heads = rule.heads;
        let is_wide = heads.dim > MAX_NARROW_DIM;
        let has_pairs = heads.group().is_multiple_of(2);
        let form = match mean_keys {
            ..SHORT_TOKENS if has_pairs => Form::Short,
            SHORT_TOKENS..LONG_TOKENS => Form::Usual,
            _ if is_wide => Form::Usual,
            // Each block of a pair copies one of two parts of a tile.
            _ if has_pairs && swizzled_columns(heads) == 2 * TILE_COLUMNS && rule.is_plain() => {
                Form::LongPaired
            }
            _ => Form::Long,
        };
        let (consumers, stages, buffers) = match form {
            _ if is_wide => (2, 5, 1),
            Form::Usual => (3, 8, 2),
            Form::Short | Form::Long | Form::LongPaired => (2, 10, 2),
        };
        Self { form, consumers, stages, buffers }
    }

    /// Starts the kernel, which takes tile after tile on every multiprocessor.
    pub(super) fn run(self, cuda: &Cuda, heads: Heads, launch: Launch<'_>) {
        let shared = swizzled_bytes(heads, (self.buffers * self.consumers + self.stages) * KEYS);
        let n = cuda.gpu.multiprocessors as usize;
        let n_blocks = if self.form == Form::LongPaired { n / 2 * 2 } else { n };
        launch.programmatic_launch(true).run([n_blocks, 1], 128 * self.consumers + 128, shared);
    }
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
    pub(super) n_keys: usize,
    key_width: usize,
    pub(super) n_before: usize,
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
    pub(super) fn fields(self, d: Dims) -> Fields {
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
    pub(super) fn first_key(self, d: Dims, rows: Slice) -> Slice {
        let start = (self.n_before * d.heads.dim).min(rows.len);
        rows.part(start, rows.len - start)
    }

    /// Whether the TMA can read the keys.
    pub(super) fn fit_maps(self) -> bool {
        has_map(self.keys, self.key_width)
    }

    /// Keys or values in tiles of `tile_rows`.
    pub(super) fn key_map(self, tile_rows: usize) -> TensorMap {
        map(self.keys, self.n_keys, self.key_width, tile_rows)
    }

    /// Thread blocks that are enough for every sequence's queries in tiles of `height`, a multiple of a step of keys.
    pub(super) fn n_query_tiles(self, d: Dims, height: usize) -> usize {
        d.tokens / height + self.n_partial_tiles * d.sequences
    }

    /// The same for its keys.
    pub(super) fn n_key_tiles(self, d: Dims, height: usize) -> usize {
        n_work_tiles(self.n_keys, 1, d.sequences, height)
    }

    /// Keys of a sequence in the mean.
    fn mean_keys(self, d: Dims) -> usize {
        self.n_keys / d.sequences.max(1)
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
    if is_hopper(cuda, kind, heads) {
        return forward_pipelined(cuda, d, inputs, sequences, out.same(qkv, op), lse.f32(op));
    }
    let name = format!("attention_forward_{}", out.same(qkv, op).name());
    let source = source(kind, heads, rule.choose(&ATTENTION, &ATTENTION_RULED));
    let launch = cuda.kernel(source, &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).fields(&sequences.fields(d)).arg(out);
    let is_bf16 = kind == ElementType::Bf16;
    let launch = if is_bf16 { launch.arg(out_pitch(d.tokens, heads, out)) } else { launch };
    let launch = rule.last_argument(launch.arg(lse.f32(op)), kind);
    if is_bf16 {
        let rows = tile_rows(heads);
        let grid = [heads.query, sequences.n_query_tiles(d, rows)];
        launch.run(grid, 128, tile_bytes(heads, rows + 4 * KEYS));
    } else {
        launch.run([d.tokens, heads.query], 32, 0);
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
    if d.tokens == 0 {
        return;
    }
    let CudaInputs { qkv, sinks } = inputs;
    let rule = d.kernel_rule(sinks);
    let heads = d.heads;
    let has_maps = has_map(qkv, heads.qkv_width()) && sequences.fit_maps();
    assert!(has_maps, "attention::forward: rows that do not begin at multiples of 16 bytes");
    let pipeline = Pipeline::new(rule, sequences.mean_keys(d));
    let (plain, ruled) = match pipeline.form {
        Form::Short => (&ATTENTION_SHORT_HOPPER, &ATTENTION_SHORT_HOPPER_RULED),
        Form::Usual => (&ATTENTION_PIPELINED_HOPPER, &ATTENTION_PIPELINED_HOPPER_RULED),
        Form::Long => (&ATTENTION_LONG_HOPPER, &ATTENTION_LONG_HOPPER_RULED),
        Form::LongPaired => (&ATTENTION_LONG_PAIRED_HOPPER, &ATTENTION_LONG_HOPPER_RULED),
    };
    let source = rule.choose(plain, ruled);
    let args = sequences
        .fields(d)
        .eight_bytes(out)
        .eight_bytes(lse)
        .eight_bytes(cuda.signal())
        .four_bytes(out_pitch(d.tokens, heads, out))
        .four_bytes(sequences.n_before);
    let launch = cuda.kernel(source, "attention_forward_pipelined_hopper_bf16").head_dim(heads.dim);
    let launch = launch.tensor_map(&map(qkv, d.tokens, heads.qkv_width(), KEYS));
    let launch = launch.tensor_map(&sequences.key_map(KEYS)).fields(&args);
    pipeline.run(cuda, heads, rule.last_argument(launch, qkv.kind));
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
