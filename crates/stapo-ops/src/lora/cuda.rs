//! Adapters on Hopper in bf16, by kernels of their own (`*.cu` in this folder): one launch serves all modules of a layer.

use std::sync::Arc;

use super::{Adapter, Band, Join, Module};
use crate::cuda::kernels::LORA;
use crate::cuda::{Cuda, ElementType, Fields, SPLIT_K_BYTES, Slice, TILE_COLUMNS, TensorMap};
use crate::matmul::cuda::{GROUP_ROWS, JoinedFactor};
use crate::{Float, Shape, Weight, Write, matmul};

/// Rows of a tile, as in operands.cu.
const ROWS: usize = 64;
/// Most modules of a linear layer, as in modules.cu.
pub(super) const MODULES: usize = 3;
/// Threads of the kernels with a producer warp, as in operands.cu.
const THREADS: usize = 160;
/// Threads of the kernels that update tiles in place, as in operands.cu.
const UPDATERS: usize = 256;
/// Parts of the depth of `x A^T`, as in modules.cu.
pub(super) const PARTS: usize = 4;
/// The highest rank: what the factors of three modules take of shared memory.
const MAX_RANK: usize = 128;
/// Columns of the outputs that a block of `expand` and of the factors' gradients takes, as in the kernels.
const COLUMNS: usize = 128;

/// Whether the kernels of this file serve the adapter; a function of the GPU and of shapes other than the number of rows.
pub(crate) fn fits<T: Float>(cuda: &Cuda, adapter: &Adapter<'_, T>) -> bool {
    cuda.is_hopper()
        && adapter.a.view().cuda().kind == ElementType::Bf16
        && fits_shape(adapter.inputs(), adapter.modules)
        && [adapter.a].iter().chain(&adapter.b).all(|factor| is_factor(factor))
}

/// Whether the kernels of this file serve adapters of a layer of `inputs`.
pub(super) fn fits_shape(inputs: usize, modules: &[Module]) -> bool {
    let is_whole = |x: usize| x.is_multiple_of(8);
    let are_whole = |of: Band| is_whole(of.start) && is_whole(of.len) && is_whole(of.of);
    modules.len() <= MODULES
        && is_whole(inputs)
        && modules.iter().all(|module| module.hidden.len <= MAX_RANK && are_whole(module.outputs))
}

/// Where a matrix of [`super::pitch`] columns lies: from column `start` on of rows that are `of` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Placed {
    pub slice: Slice,
    pub start: usize,
    pub of: usize,
}

impl Placed {
    /// Columns from `start` on of a matrix with `rows` rows.
    pub(crate) fn new(slice: Slice, rows: usize, start: usize) -> Self {
        Self { slice, start, of: slice.len / rows.max(1) }
    }

    /// The address of the first element.
    fn address(self) -> u64 {
        self.slice.address + (self.start * self.slice.kind.n_bytes()) as u64
    }
}

pub(super) fn join<T: Float>(cuda: &Arc<Cuda>, layers: &[Join<'_, T>]) {
    let mut factors = Vec::new();
    for Join { weight, a, b, modules } in layers {
        let Some(joined) = weight.joined() else { continue };
        let flat = weight.view().cuda();
        let Shape { outputs, inputs } = weight.shape();
        let pitch = flat.len / outputs;
        let last =
            (joined.n_parts - 1) * (inputs / joined.n_parts + joined.columns) + inputs / joined.n_parts;
        for (place, (module, b)) in modules.iter().zip(b).enumerate() {
            let rank = module.hidden.len;
            let at = module.outputs.start * pitch + last + place * rank.next_multiple_of(GROUP_ROWS);
            let to = flat.address + (at * flat.kind.n_bytes()) as u64;
            factors.push(JoinedFactor { factor: b.view().cuda(), columns: rank, to, pitch });
            if weight.joins_gradients() {
                let below = (outputs + place * rank.next_multiple_of(GROUP_ROWS)) * pitch;
                let to = flat.address + (below * flat.kind.n_bytes()) as u64;
                let factor = a.view().cuda().part(place * rank * inputs, rank * inputs);
                factors.push(JoinedFactor { factor, columns: inputs, to, pitch });
            }
        }
    }
    matmul::cuda::join(cuda, &factors);
}

/// Whether the TMA can read a factor: made by `Weight::factor_zeros`, or of whole tiles by itself.
fn is_factor<T: Float>(factor: &Weight<T>) -> bool {
    let shape = factor.padded().1;
    shape.inputs.is_multiple_of(TILE_COLUMNS) && shape.outputs.is_multiple_of(GROUP_ROWS)
}

/// Elements of each of the [`PARTS`] parts of the depth.
fn split(inputs: usize) -> usize {
    inputs.div_ceil(PARTS).next_multiple_of(128)
}

/// Columns of `hidden` from one module to the next.
pub(super) fn module_columns<T: Float>(adapter: &Adapter<'_, T>) -> usize {
    adapter.rank().next_multiple_of(GROUP_ROWS)
}

/// The struct `Modules` of modules.cu.
pub(super) fn modules<T: Float>(adapter: &Adapter<'_, T>) -> Fields {
    let (rank, apart) = (adapter.rank(), module_columns(adapter));
    let numbers = [adapter.modules.len(), rank, apart, rank, adapter.pitch()];
    let outputs = |place: usize| adapter.modules.get(place).unwrap_or(&adapter.modules[0]).outputs;
    let hidden = (0..MODULES).map(|place| if place < adapter.modules.len() { place * apart } else { 0 });
    let starts = (0..MODULES).map(|place| outputs(place).start);
    let lens = (0..MODULES).map(|place| outputs(place).len);
    numbers.into_iter().chain(hidden).chain(starts).chain(lens).fold(Fields::default(), Fields::four_bytes)
}

/// The same struct for all inputs as one module, whose product takes the whole `hidden`.
fn inputs_as_module<T: Float>(adapter: &Adapter<'_, T>) -> Fields {
    let (columns, inputs) = (adapter.modules.len() * module_columns(adapter), adapter.inputs());
    let numbers = [1, adapter.rank(), module_columns(adapter), columns, adapter.pitch()];
    let bands = [0, 0, 0, 0, 0, 0, inputs, inputs, inputs];
    numbers.into_iter().chain(bands).fold(Fields::default(), Fields::four_bytes)
}

/// The first factors in tiles of `tile_rows`.
fn map_a<T: Float>(adapter: &Adapter<'_, T>, tile_rows: usize) -> TensorMap {
    let (a, shape) = adapter.a.padded();
    TensorMap::of_columns(a.cuda(), shape.outputs, (0, shape.inputs, shape.inputs), tile_rows)
}

pub(super) fn map_hidden<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, hidden: Placed) -> TensorMap {
    TensorMap::of_columns(hidden.slice, tokens, (hidden.start, adapter.pitch(), hidden.of), ROWS)
}

/// `hidden` or its gradient as a matrix of its own.
fn apart<T: Float>(adapter: &Adapter<'_, T>, hidden: Slice) -> Placed {
    Placed { slice: hidden, start: 0, of: adapter.pitch() }
}

/// x `[T, inputs]`, whose rows may have further columns behind them.
fn map_x<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, x: Slice) -> TensorMap {
    TensorMap::of_columns(x, tokens, (0, adapter.inputs(), x.len / tokens), ROWS)
}

/// The columns of each module in y `[T, outputs]`, whose rows may have further columns behind them.
fn maps_of_outputs<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, y: Slice) -> Vec<TensorMap> {
    let columns = adapter.modules.iter().map(|module| module.outputs);
    columns.map(|of| TensorMap::of_columns(y, tokens, (of.start, of.len, y.len / tokens), ROWS)).collect()
}

pub(super) fn maps_of_b<T: Float>(adapter: &Adapter<'_, T>, tile_rows: usize) -> Vec<TensorMap> {
    let of = |b: &&Weight<T>| {
        let (rows, shape) = b.padded();
        TensorMap::of_columns(rows.cuda(), shape.outputs, (0, shape.inputs, shape.inputs), tile_rows)
    };
    adapter.b.iter().map(of).collect()
}

/// The narrowest of `widths`, which rise, that takes `columns` in as few tiles as the widest does, and the tiles.
fn tiles_of(columns: usize, widths: &[usize]) -> (usize, usize) {
    let widest = widths[widths.len() - 1];
    let n_tiles = columns.div_ceil(widest);
    let width = widths.iter().find(|width| **width * n_tiles >= columns);
    (*width.unwrap_or(&widest), n_tiles)
}

/// Columns of a tile of `x A^T` and the kernel's pipeline stages: the fewest tiles, or so narrow ones that the blocks of few
/// rows fill the GPU; narrow tiles leave shared memory to a block of the product that follows (see small_m.cu). No bit
/// depends on the choice.
fn tile_of_projection(tokens: usize, pitch: usize) -> (usize, usize) {
    let n_blocks = |width: usize| PARTS * tokens.div_ceil(ROWS) * pitch.div_ceil(width);
    let few = tiles_of(pitch, &[16, 32, 64, 96]).0;
    let mut tiles = [(96, 4), (64, 5), (32, 8), (16, 4)].into_iter().filter(|(width, _)| *width <= few);
    tiles.find(|(width, _)| n_blocks(*width) >= MULTIPROCESSORS).unwrap_or((16, 4))
}

pub(super) fn project<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    x: Slice,
    adapter: &Adapter<'_, T>,
    hidden: Placed,
) {
    if tokens == 0 {
        return;
    }
    let (width, n_stages) = tile_of_projection(tokens, adapter.pitch());
    let inputs = adapter.inputs();
    let name = format!("lora_project_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_map(&map_x(adapter, tokens, x));
    let launch = launch.tensor_map(&map_a(adapter, width)).programmatic_launch(true);
    let launch = launch.arg(hidden.address()).arg(hidden.of).arg(tokens).arg(adapter.pitch()).arg(inputs);
    let launch = launch.arg(split(inputs));
    let shared = 2 * n_stages * (ROWS + width) * TILE_COLUMNS + 16 * n_stages + 1024;
    let grid = [PARTS * tokens.div_ceil(ROWS), adapter.pitch().div_ceil(width)];
    launch.arg(adapter.scale() as f32).most_shared_memory().run(grid, THREADS, shared);
}

/// Multiprocessors of the GPU that work is cut for. Another number costs speed, and cuts that changed with the GPU would
/// change bits.
const MULTIPROCESSORS: usize = 132;
/// Shared memory of a multiprocessor.
const SHARED_BYTES: usize = 228 << 10;

/// How many tiles of rows a block with `shared` bytes takes one after another: what takes the fewest tiles' times, with
/// one more for the block's start, as blocks fill the GPU again and again.
fn rows_at_once(n_rows: usize, n_columns: usize, shared: usize) -> usize {
    let slots = MULTIPROCESSORS * (SHARED_BYTES / (shared + 1024)).max(1);
    let cost = |at_once: &usize| {
        let n_blocks = n_columns * n_rows.div_ceil(*at_once);
        n_blocks.div_ceil(slots) * (at_once + 1)
    };
    (1..=16).min_by_key(cost).unwrap_or(1)
}

pub(super) fn backward_input<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_hidden: Slice,
    d_x: Slice,
) {
    if tokens == 0 {
        return;
    }
    let (width, depth) = (adapter.inputs(), adapter.modules.len() * module_columns(adapter));
    let (n_columns, n_rows) = (width.div_ceil(COLUMNS), tokens.div_ceil(ROWS));
    let padded = depth.next_multiple_of(TILE_COLUMNS);
    let stage = ROWS * padded + 2 * ROWS * TILE_COLUMNS;
    let shared = 2 * (COLUMNS * padded + 2 * stage) + 16 + 1024;
    let at_once = rows_at_once(n_rows, n_columns, shared);
    let launch = cuda.kernel(&LORA, "lora_backward_input");
    let launch = launch.tensor_map(&TensorMap::of_columns(d_x, tokens, (0, width, width), ROWS));
    let d_hidden = map_hidden(adapter, tokens, apart(adapter, d_hidden));
    let launch = launch.tensor_map(&d_hidden).tensor_map(&map_a(adapter, ROWS));
    let launch = launch.arg(width).arg(depth).arg(tokens).arg(at_once).programmatic_launch(true);
    launch.run([n_columns, n_rows.div_ceil(at_once)], UPDATERS, shared);
}

/// Pipeline stages of `backward_hidden`, as in backward.cu.
const HIDDEN_STAGES: usize = 6;

pub(super) fn backward_hidden<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_y: Slice,
    d_hidden: Placed,
) {
    if tokens == 0 {
        return;
    }
    let (width, n_tiles) = tiles_of(adapter.rank().next_multiple_of(16), &[16, 32, 64]);
    let name = format!("lora_backward_hidden_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, d_y));
    let launch = launch.tensor_maps::<MODULES>(&maps_of_b(adapter, ROWS));
    let launch = launch
        .arg(d_hidden.address())
        .arg(d_hidden.of)
        .fields(&modules(adapter))
        .arg(tokens)
        .arg(adapter.scale() as f32);
    let shared = 2 * HIDDEN_STAGES * 2 * ROWS * TILE_COLUMNS + 16 * HIDDEN_STAGES + 1024;
    let grid = [tokens.div_ceil(ROWS), adapter.modules.len() * n_tiles];
    launch.programmatic_launch(true).run(grid, THREADS, shared);
}

/// `lora::backward_input` on the gradient of a SwiGLU's output, then `swiglu::backward`. Shapes: d_activated
/// `[T, width]`, left as it is; gate_up, d_gate_up `[T, 2 width]`, the last overwritten.
pub(crate) fn backward_swiglu<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    (d_hidden, d_activated): (Slice, Slice),
    gate_up: Slice,
    d_gate_up: Slice,
) {
    if tokens == 0 {
        return;
    }
    let width = adapter.inputs();
    let depth = adapter.modules.len() * module_columns(adapter);
    let halves = |both: Slice| {
        let pitch = both.len / tokens;
        [0, width].map(|start| TensorMap::of_columns(both, tokens, (start, width, pitch), ROWS))
    };
    let n_columns = width.div_ceil(COLUMNS);
    let n_rows = tokens.div_ceil(ROWS);
    let padded = depth.next_multiple_of(TILE_COLUMNS);
    let shared = 2 * ((COLUMNS + ROWS) * padded + 6 * ROWS * TILE_COLUMNS) + 8 + 1024;
    let at_once = rows_at_once(n_rows, n_columns, shared);
    let launch = cuda.kernel(&LORA, "lora_backward_swiglu");
    let launch = launch.tensor_map(&TensorMap::of_columns(d_activated, tokens, (0, width, width), ROWS));
    let d_hidden = map_hidden(adapter, tokens, apart(adapter, d_hidden));
    let launch = launch.tensor_map(&d_hidden).tensor_map(&map_a(adapter, ROWS));
    let launch = launch.tensor_maps::<MODULES>(&halves(gate_up)).tensor_maps::<MODULES>(&halves(d_gate_up));
    let launch = launch.arg(width).arg(depth).arg(tokens).arg(at_once).programmatic_launch(true);
    launch.run([n_columns, n_rows.div_ceil(at_once)], UPDATERS, shared);
}

/// How a factor's gradient is cut: tokens of a split, and splits. Two blocks find room on a multiprocessor; the fewest
/// splits are taken that fill the GPU to 95 %, or the best there are, of 256 tokens or more each.
fn splits(tokens: usize, n_blocks: usize, split_len: usize) -> (usize, usize) {
    let slots = 2 * MULTIPROCESSORS;
    // The parts of first and second factors lie beside each other.
    let most = (SPLIT_K_BYTES / 2 / (4 * split_len)).min(tokens.div_ceil(4 * ROWS)).clamp(1, 32);
    let percent = |n_splits: usize| {
        let n = n_splits * n_blocks;
        100 * n / (slots * n.div_ceil(slots))
    };
    let full = (1..=most).find(|n_splits| percent(*n_splits) >= 95);
    let best = || (1..=most).max_by_key(|n_splits| (percent(*n_splits), usize::MAX - n_splits)).unwrap_or(1);
    let per_split = tokens.div_ceil(full.unwrap_or_else(best)).next_multiple_of(ROWS);
    (per_split, tokens.div_ceil(per_split))
}

/// As `lora::backward_factors`: the parts of all gradients, and one kernel that adds them up.
pub(super) fn backward_factors<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    of: &Backward,
    to_b: &[(Slice, Write)],
    to_a: Option<(Slice, Write)>,
) {
    let mut sums = Vec::new();
    let mut at = 0;
    if !to_b.is_empty() {
        let (parts, n_splits) = parts_of_b(cuda, tokens, adapter, of);
        at = parts.len;
        let stride = adapter.rank() * adapter.outputs();
        for (module, (d_b, write)) in adapter.modules.iter().zip(to_b) {
            let start = module.outputs.start * adapter.rank();
            let parts = parts.part(start, parts.len - start);
            sums.push(Sum { parts, n_splits, stride, to: *d_b, write: *write });
        }
    }
    if let Some((d_a, write)) = to_a {
        let (parts, n_splits) = parts_of_a(cuda, tokens, adapter, of, at);
        sums.push(Sum { parts, n_splits, stride: d_a.len, to: d_a, write });
    }
    add_up(cuda, &sums);
}

/// What the gradients of factors are made from.
#[derive(Clone, Copy)]
pub(super) struct Backward {
    pub x: Slice,
    pub d_y: Slice,
    pub hidden: Placed,
    pub d_hidden: Placed,
}

/// The parts of the second factors' gradients, `[n_splits, outputs, rank]`, and n_splits.
fn parts_of_b<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    of: &Backward,
) -> (Slice, usize) {
    let (rank, outputs) = (adapter.rank(), adapter.outputs());
    let (width, _) = tiles_of(rank.next_multiple_of(16), &[16, 32, 64]);
    let n_chunks = rank.div_ceil(width);
    let n_columns: usize = adapter.modules.iter().map(|module| module.outputs.len.div_ceil(COLUMNS)).sum();
    let (per_split, n_splits) = splits(tokens, n_columns * n_chunks, rank * outputs);
    let parts = cuda.split_k_workspace(n_splits * rank * outputs);
    let name = format!("lora_backward_b_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, of.d_y));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, of.hidden)).arg(parts);
    let launch = launch.fields(&modules(adapter)).arg(tokens).arg(per_split).arg(outputs);
    let grid = [n_columns, n_splits * n_chunks];
    launch.programmatic_launch(true).run(grid, THREADS, shared_of_factor(width));
    (parts, n_splits)
}

/// The parts of the first factors' gradient, `[n_splits, n rank, inputs]`, in the workspace from element `at` on, and
/// n_splits.
fn parts_of_a<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    of: &Backward,
    at: usize,
) -> (Slice, usize) {
    let (rank, inputs) = (adapter.a.shape().outputs, adapter.inputs());
    let columns = adapter.modules.len() * module_columns(adapter);
    let (width, _) = tiles_of(adapter.pitch(), &[16, 32, 64, 96]);
    let n_chunks = columns.div_ceil(width);
    let n_columns = inputs.div_ceil(COLUMNS);
    let (per_split, n_splits) = splits(tokens, n_columns * n_chunks, rank * inputs);
    let len = n_splits * rank * inputs;
    let parts = cuda.split_k_workspace(at + len).part(at, len);
    let name = format!("lora_backward_a_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_maps::<MODULES>(&[map_x(adapter, tokens, of.x)]);
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, of.d_hidden)).arg(parts);
    let launch = launch.fields(&inputs_as_module(adapter)).arg(tokens).arg(per_split).arg(inputs);
    let grid = [n_columns, n_splits * n_chunks];
    launch.programmatic_launch(true).run(grid, THREADS, shared_of_factor(width));
    (parts, n_splits)
}

/// Shared memory of `backward_factor` in backward.cu.
fn shared_of_factor(width: usize) -> usize {
    let n_stages = if width > 64 { 3 } else { 4 };
    2 * n_stages * (2 + width.div_ceil(64)) * ROWS * TILE_COLUMNS + 16 * n_stages + 1024
}

/// The parts of one factor's gradient, `stride` numbers each, and where their sum goes.
struct Sum {
    parts: Slice,
    n_splits: usize,
    stride: usize,
    to: Slice,
    write: Write,
}

fn add_up(cuda: &Cuda, sums: &[Sum]) {
    let fields = |fields: Fields, sum: &Sum| {
        let to = sum.to.f32("lora: gradients");
        let fields = fields.eight_bytes(sum.parts).eight_bytes(to).eight_bytes(sum.stride);
        let adds = usize::from(sum.write == Write::Add);
        fields.four_bytes(to.len).four_bytes(sum.n_splits).four_bytes(adds)
    };
    let Some(longest) = sums.iter().map(|sum| sum.to.len).max() else { return };
    let none = Fields::default().eight_bytes(0usize).eight_bytes(0usize).eight_bytes(0usize);
    let none = none.four_bytes(0usize).four_bytes(0usize).four_bytes(0usize);
    let all = sums.iter().fold(Fields::default(), fields);
    let all = (sums.len()..=MODULES).fold(all, |all, _| all.join(&none));
    let launch = cuda.kernel(&LORA, "lora_sum_parts").fields(&all).programmatic_launch(true);
    launch.run([longest.div_ceil(256), sums.len()], 256, 0);
}
