//! Adapters on Hopper in bf16, by kernels of their own (`*.cu` in this folder): one launch serves all modules of a layer.

use std::sync::Arc;

use super::Adapter;
use crate::cuda::kernels::LORA;
use crate::cuda::{Cuda, ElementType, Fields, Launch, SPLIT_K_BYTES, Slice, TILE_COLUMNS, TensorMap};
use crate::{Float, Write};

/// Rows of a tile, as in operands.cu.
const ROWS: usize = 64;
/// Most modules of a linear layer, as in modules.cu.
pub(super) const MODULES: usize = 3;
/// Threads of the kernels with a producer warp, as in operands.cu.
const THREADS: usize = 160;
/// Threads of the kernels that update tiles in place, as in operands.cu.
const UPDATERS: usize = 256;
/// Parts of the depth of `x A^T`, as in modules.cu.
const PARTS: usize = 4;
/// The highest rank: what the factors of three modules take of shared memory.
const MAX_RANK: usize = 128;
/// Columns of the outputs that a block of `expand` and of the factors' gradients takes, as in the kernels.
const COLUMNS: usize = 128;

/// Whether the kernels of this file serve the adapter; a function of the GPU and of shapes other than the number of rows.
pub(crate) fn fits<T: Float>(cuda: &Cuda, adapter: &Adapter<'_, T>) -> bool {
    let is_whole = |x: usize| x.is_multiple_of(8);
    cuda.is_hopper()
        && adapter.a.view().cuda().kind == ElementType::Bf16
        && adapter.rank() <= MAX_RANK
        && adapter.modules.len() <= MODULES
        && is_whole(adapter.inputs())
        && is_whole(adapter.outputs())
        && adapter.modules.iter().all(|module| is_whole(module.outputs.start) && is_whole(module.outputs.len))
        && [adapter.a].iter().chain(&adapter.b).all(|factor| is_factor(factor))
}

/// Whether the TMA can read a factor: made by `Weight::factor_zeros`, or of whole tiles by itself.
fn is_factor<T: Float>(factor: &crate::Weight<T>) -> bool {
    let shape = factor.padded().1;
    shape.inputs.is_multiple_of(TILE_COLUMNS) && shape.outputs.is_multiple_of(8)
}

/// Elements of each of the [`PARTS`] parts of the depth.
fn split(inputs: usize) -> usize {
    inputs.div_ceil(PARTS).next_multiple_of(128)
}

/// Columns of `hidden` from one module to the next.
fn apart<T: Float>(adapter: &Adapter<'_, T>) -> usize {
    adapter.rank().next_multiple_of(8)
}

/// The struct `Modules` of modules.cu.
pub(super) fn modules<T: Float>(adapter: &Adapter<'_, T>) -> Fields {
    let (rank, apart) = (adapter.rank(), apart(adapter));
    let numbers = [adapter.modules.len(), rank, apart, rank, adapter.pitch()];
    let outputs = |place: usize| adapter.modules.get(place).unwrap_or(&adapter.modules[0]).outputs;
    let hidden = (0..MODULES).map(|place| if place < adapter.modules.len() { place * apart } else { 0 });
    let starts = (0..MODULES).map(|place| outputs(place).start);
    let lens = (0..MODULES).map(|place| outputs(place).len);
    numbers.into_iter().chain(hidden).chain(starts).chain(lens).fold(Fields::default(), Fields::four_bytes)
}

/// The same struct for all inputs as one module, whose product takes the whole `hidden`.
fn inputs_as_module<T: Float>(adapter: &Adapter<'_, T>) -> Fields {
    let (columns, inputs) = (adapter.modules.len() * apart(adapter), adapter.inputs());
    let numbers = [1, adapter.rank(), apart(adapter), columns, adapter.pitch()];
    let bands = [0, 0, 0, 0, 0, 0, inputs, inputs, inputs];
    numbers.into_iter().chain(bands).fold(Fields::default(), Fields::four_bytes)
}

/// The first factors in tiles of `tile_rows`.
fn map_a<T: Float>(adapter: &Adapter<'_, T>, tile_rows: usize) -> TensorMap {
    let (a, shape) = adapter.a.padded();
    TensorMap::of_columns(a.cuda(), shape.outputs, (0, shape.inputs, shape.inputs), tile_rows)
}

pub(super) fn map_hidden<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, hidden: Slice) -> TensorMap {
    let pitch = adapter.pitch();
    TensorMap::of_columns(hidden, tokens, (0, pitch, pitch), ROWS)
}

/// The columns of each module in y `[T, outputs]`.
fn maps_of_outputs<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, y: Slice) -> Vec<TensorMap> {
    let columns = adapter.modules.iter().map(|module| module.outputs);
    columns.map(|of| TensorMap::of_columns(y, tokens, (of.start, of.len, of.of), ROWS)).collect()
}

pub(super) fn maps_of_b<T: Float>(adapter: &Adapter<'_, T>, tile_rows: usize) -> Vec<TensorMap> {
    let of = |b: &&crate::Weight<T>| {
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
/// rows fill the GPU. No bit depends on the choice.
fn tile_of_projection(tokens: usize, pitch: usize) -> (usize, usize) {
    let n_blocks = |width: usize| PARTS * tokens.div_ceil(ROWS) * pitch.div_ceil(width);
    let few = tiles_of(pitch, &[16, 32, 64, 96]).0;
    let mut tiles = [(96, 4), (64, 5), (32, 8), (16, 8)].into_iter().filter(|(width, _)| *width <= few);
    tiles.find(|(width, _)| n_blocks(*width) >= MULTIPROCESSORS).unwrap_or((16, 8))
}

pub(super) fn project<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    x: Slice,
    adapter: &Adapter<'_, T>,
    hidden: Slice,
) {
    if tokens == 0 {
        return;
    }
    let (width, n_stages) = tile_of_projection(tokens, adapter.pitch());
    let inputs = adapter.inputs();
    let name = format!("lora_project_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_map(&TensorMap::of_columns(x, tokens, (0, inputs, inputs), ROWS));
    let launch = launch.tensor_map(&map_a(adapter, width)).programmatic_launch(true);
    let launch = launch.arg(hidden).arg(tokens).arg(adapter.pitch()).arg(inputs).arg(split(inputs));
    let shared = 2 * n_stages * (ROWS + width) * TILE_COLUMNS + 16 * n_stages + 1024;
    let grid = [PARTS * tokens.div_ceil(ROWS), adapter.pitch().div_ceil(width)];
    launch.arg(adapter.scale() as f32).run(grid, THREADS, shared);
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

/// What becomes of the terms.
#[derive(Clone, Copy)]
pub(crate) enum To {
    /// y `[T, outputs]` in bf16: the terms are added.
    Y(Slice),
    /// y is overwritten with the rounded sum of `partials` `[PARTS, T, outputs]` of a split-K product, and the terms.
    SumOfPartials { partials: Slice, y: Slice },
    /// `[T, outputs]` in f32: the terms alone.
    Terms(Slice),
}

/// As `lora::expand`. With [`To::SumOfPartials`] and [`To::Terms`] the layer is one module.
pub(crate) fn expand<T: Float>(cuda: &Cuda, tokens: usize, adapter: &Adapter<'_, T>, hidden: Slice, to: To) {
    if tokens == 0 {
        return;
    }
    let n_columns: usize = adapter.modules.iter().map(|module| module.outputs.len.div_ceil(COLUMNS)).sum();
    let b = maps_of_b(adapter, COLUMNS);
    let (name, y, numbers) = match to {
        To::Y(y) => ("lora_expand", maps_of_outputs(adapter, tokens, y), None),
        To::SumOfPartials { partials, y } => {
            ("lora_expand_partials", maps_of_outputs(adapter, tokens, y), Some(partials))
        }
        // The kernel has no use for the descriptors of y.
        To::Terms(terms) => ("lora_expand_terms", b.clone(), Some(terms.f32("lora::expand"))),
    };
    let launch = cuda.kernel(&LORA, name).tensor_maps::<MODULES>(&y);
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, hidden));
    let launch = launch.tensor_maps::<MODULES>(&b).arg(numbers);
    run_expand(launch.fields(&modules(adapter)), adapter.rank(), tokens, n_columns);
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
    let inputs = adapter.inputs();
    let launch = cuda.kernel(&LORA, "lora_backward_input");
    let to = TensorMap::of_columns(d_x, tokens, (0, inputs, inputs), ROWS);
    let launch = launch.tensor_maps::<MODULES>(&[to]).tensor_map(&map_hidden(adapter, tokens, d_hidden));
    let launch = launch.tensor_maps::<MODULES>(&[map_a(adapter, ROWS)]).arg(None::<Slice>);
    let depth = adapter.modules.len() * apart(adapter);
    run_expand(launch.fields(&inputs_as_module(adapter)), depth, tokens, inputs.div_ceil(COLUMNS));
}

/// Adds the last arguments of `expand` in forward.cu and runs it.
fn run_expand(launch: Launch<'_>, depth: usize, tokens: usize, n_columns: usize) {
    let n_rows = tokens.div_ceil(ROWS);
    let padded = depth.next_multiple_of(TILE_COLUMNS);
    let stage = ROWS * padded + 2 * ROWS * TILE_COLUMNS;
    let shared = 2 * (COLUMNS * padded + 2 * stage) + 16 + 1024;
    let at_once = rows_at_once(n_rows, n_columns, shared);
    let launch = launch.arg(depth).arg(tokens).arg(at_once).programmatic_launch(true);
    launch.run([n_columns, n_rows.div_ceil(at_once)], UPDATERS, shared);
}

/// Whether [`expand_swiglu`] serves the adapter: gate and up both have one, and the tiles fit shared memory.
pub(crate) fn fits_swiglu<T: Float>(cuda: &Cuda, adapter: &Adapter<'_, T>) -> bool {
    fits(cuda, adapter) && adapter.modules.len() == 2 && adapter.rank() <= 2 * ROWS
}

/// `lora::expand` on gate and up, then `swiglu::forward`. Shapes: gate_up `[T, 2 width]`, written back where `keeps`;
/// out `[T, width]`.
pub(crate) fn expand_swiglu<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    hidden: Slice,
    (gate_up, keeps): (Slice, bool),
    out: Slice,
) {
    if tokens == 0 {
        return;
    }
    let width = adapter.modules[0].outputs.len;
    let n_columns = width.div_ceil(TILE_COLUMNS);
    let n_rows = tokens.div_ceil(ROWS);
    let padded = adapter.rank().next_multiple_of(TILE_COLUMNS);
    let stage = 2 * ROWS * padded + 3 * ROWS * TILE_COLUMNS;
    let shared = 2 * (2 * TILE_COLUMNS * padded + 2 * stage) + 16 + 1024;
    let at_once = rows_at_once(n_rows, n_columns, shared);
    let launch = cuda.kernel(&LORA, "lora_expand_swiglu");
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, gate_up));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, hidden));
    let launch = launch.tensor_maps::<MODULES>(&maps_of_b(adapter, ROWS));
    let launch = launch.tensor_map(&TensorMap::of_columns(out, tokens, (0, width, width), ROWS));
    let launch = launch.fields(&modules(adapter)).arg(tokens).arg(at_once).arg(usize::from(keeps));
    let grid = [n_columns, n_rows.div_ceil(at_once)];
    launch.programmatic_launch(true).run(grid, UPDATERS, shared);
}

/// Pipeline stages of `backward_hidden`, as in backward.cu.
const HIDDEN_STAGES: usize = 6;

pub(super) fn backward_hidden<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_y: Slice,
    d_hidden: Slice,
) {
    if tokens == 0 {
        return;
    }
    let (width, n_tiles) = tiles_of(adapter.rank().next_multiple_of(16), &[16, 32, 64]);
    let name = format!("lora_backward_hidden_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, d_y));
    let launch = launch.tensor_maps::<MODULES>(&maps_of_b(adapter, ROWS)).arg(d_hidden);
    let launch = launch.fields(&modules(adapter)).arg(tokens).arg(adapter.scale() as f32);
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
    let depth = adapter.modules.len() * apart(adapter);
    let halves = |both: Slice| {
        [0, width].map(|start| TensorMap::of_columns(both, tokens, (start, width, 2 * width), ROWS))
    };
    let n_columns = width.div_ceil(COLUMNS);
    let n_rows = tokens.div_ceil(ROWS);
    let padded = depth.next_multiple_of(TILE_COLUMNS);
    let shared = 2 * ((COLUMNS + ROWS) * padded + 6 * ROWS * TILE_COLUMNS) + 8 + 1024;
    let at_once = rows_at_once(n_rows, n_columns, shared);
    let launch = cuda.kernel(&LORA, "lora_backward_swiglu");
    let launch = launch.tensor_map(&TensorMap::of_columns(d_activated, tokens, (0, width, width), ROWS));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, d_hidden)).tensor_map(&map_a(adapter, ROWS));
    let launch = launch.tensor_maps::<MODULES>(&halves(gate_up)).tensor_maps::<MODULES>(&halves(d_gate_up));
    let launch = launch.arg(width).arg(depth).arg(tokens).arg(at_once).programmatic_launch(true);
    launch.run([n_columns, n_rows.div_ceil(at_once)], UPDATERS, shared);
}

/// How a factor's gradient is cut: tokens of a split, and splits. Two blocks find room on a multiprocessor; the fewest
/// splits are taken that fill the GPU to 95 %, or the best there are, of 256 tokens or more each.
fn splits(tokens: usize, n_blocks: usize, split_len: usize) -> (usize, usize) {
    let slots = 2 * MULTIPROCESSORS;
    let most = (SPLIT_K_BYTES / (4 * split_len)).min(tokens.div_ceil(4 * ROWS)).clamp(1, 32);
    let percent = |n_splits: usize| {
        let n = n_splits * n_blocks;
        100 * n / (slots * n.div_ceil(slots))
    };
    let full = (1..=most).find(|n_splits| percent(*n_splits) >= 95);
    let best = || (1..=most).max_by_key(|n_splits| (percent(*n_splits), usize::MAX - n_splits)).unwrap_or(1);
    let per_split = tokens.div_ceil(full.unwrap_or_else(best)).next_multiple_of(ROWS);
    (per_split, tokens.div_ceil(per_split))
}

pub(super) fn backward_b<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_y: Slice,
    hidden: Slice,
    to: &[(Slice, Write)],
) {
    if tokens == 0 {
        return clear(cuda, to);
    }
    let (rank, outputs) = (adapter.rank(), adapter.outputs());
    let (width, _) = tiles_of(rank.next_multiple_of(16), &[16, 32, 64]);
    let n_chunks = rank.div_ceil(width);
    let n_columns: usize = adapter.modules.iter().map(|module| module.outputs.len.div_ceil(COLUMNS)).sum();
    let (per_split, n_splits) = splits(tokens, n_columns * n_chunks, rank * outputs);
    let parts = cuda.split_k_workspace(n_splits * rank * outputs);
    let name = format!("lora_backward_b_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, d_y));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, hidden)).arg(parts);
    let launch = launch.fields(&modules(adapter)).arg(tokens).arg(per_split).arg(outputs);
    let grid = [n_columns, n_splits * n_chunks];
    launch.programmatic_launch(true).run(grid, THREADS, shared_of_factor(width));
    for (module, (d_b, write)) in adapter.modules.iter().zip(to) {
        let of_module = parts.part(module.outputs.start * rank, parts.len - module.outputs.start * rank);
        sum_parts(cuda, of_module, n_splits, rank * outputs, *write, *d_b);
    }
}

pub(super) fn backward_a<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    (x, d_hidden): (Slice, Slice),
    write: Write,
    d_a: Slice,
) {
    if tokens == 0 {
        return clear(cuda, &[(d_a, write)]);
    }
    let (rank, inputs) = (adapter.a.shape().outputs, adapter.inputs());
    let columns = adapter.modules.len() * apart(adapter);
    let (width, _) = tiles_of(adapter.pitch(), &[16, 32, 64, 96]);
    let n_chunks = columns.div_ceil(width);
    let n_columns = inputs.div_ceil(COLUMNS);
    let (per_split, n_splits) = splits(tokens, n_columns * n_chunks, rank * inputs);
    let parts = cuda.split_k_workspace(n_splits * rank * inputs);
    let name = format!("lora_backward_a_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let map_x = TensorMap::of_columns(x, tokens, (0, inputs, inputs), ROWS);
    let launch = launch.tensor_maps::<MODULES>(&[map_x]);
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, d_hidden)).arg(parts);
    let launch = launch.fields(&inputs_as_module(adapter)).arg(tokens).arg(per_split).arg(inputs);
    let grid = [n_columns, n_splits * n_chunks];
    launch.programmatic_launch(true).run(grid, THREADS, shared_of_factor(width));
    sum_parts(cuda, parts, n_splits, rank * inputs, write, d_a);
}

/// Shared memory of `backward_factor` in backward.cu.
fn shared_of_factor(width: usize) -> usize {
    let n_stages = if width > 64 { 3 } else { 4 };
    2 * n_stages * (2 + width.div_ceil(64)) * ROWS * TILE_COLUMNS + 16 * n_stages + 1024
}

fn sum_parts(cuda: &Cuda, parts: Slice, n_splits: usize, stride: usize, write: Write, to: Slice) {
    let to = to.f32("lora: gradients");
    let launch =
        cuda.kernel(&LORA, "lora_sum_parts").arg(parts).arg(to).arg(to.len).arg(n_splits).arg(stride);
    let launch = launch.arg(usize::from(write == Write::Add)).programmatic_launch(true);
    launch.run([to.len.div_ceil(256), 1], 256, 0);
}

/// The gradients of a batch without tokens.
pub(super) fn clear(cuda: &Arc<Cuda>, to: &[(Slice, Write)]) {
    for (gradient, _) in to.iter().filter(|(_, write)| *write == Write::Set) {
        cuda.fill(*gradient, 0.0f32);
    }
}
