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
/// Parts of the depth of `x A^T`, as in modules.cu.
pub(crate) const PARTS: usize = 4;
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
        && adapter.modules.iter().all(|module| is_whole(module.outputs.start))
        && adapter.b.iter().all(|b| is_whole(b.padded().1))
}

/// Elements of each of the [`PARTS`] parts of the depth.
pub(crate) fn split(inputs: usize) -> usize {
    inputs.div_ceil(PARTS).next_multiple_of(128)
}

/// The struct `Modules` of modules.cu.
pub(super) fn modules<T: Float>(adapter: &Adapter<'_, T>, before: Fields) -> Fields {
    let numbers = [adapter.modules.len(), adapter.rank(), adapter.pitch()];
    let of_module = |place: usize| adapter.modules.get(place).unwrap_or(&adapter.modules[0]);
    let each = |number: fn(&super::Module) -> usize| (0..MODULES).map(move |place| (place, number));
    let bands = each(|module| module.hidden.start)
        .chain(each(|module| module.outputs.start))
        .chain(each(|module| module.outputs.len));
    let all = numbers.into_iter().chain(bands.map(|(place, number)| number(of_module(place))));
    all.fold(before, Fields::four_bytes)
}

/// The same struct for all inputs as one module that takes the whole `hidden`, of which `rank` columns count.
fn inputs_as_module<T: Float>(adapter: &Adapter<'_, T>) -> Fields {
    let (rank, inputs) = (adapter.a.shape().outputs, adapter.inputs());
    let numbers = [1, rank, adapter.pitch(), 0, 0, 0, 0, 0, 0, inputs, inputs, inputs];
    numbers.into_iter().fold(Fields::default(), Fields::four_bytes)
}

fn map_hidden<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, hidden: Slice) -> TensorMap {
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
        let (rows, stride) = b.padded();
        TensorMap::of_columns(rows.cuda(), b.shape().outputs, (0, stride, stride), tile_rows)
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
    let (width, n_tiles) = tiles_of(adapter.pitch(), &[16, 32, 64, 96]);
    let n_stages = [6, 6, 5, 4][[16, 32, 64, 96].iter().position(|w| *w == width).unwrap_or(0)];
    let inputs = adapter.inputs();
    let a = adapter.a.view().cuda();
    let name = format!("lora_project_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_map(&TensorMap::of_columns(x, tokens, (0, inputs, inputs), ROWS));
    let rows_of_a = adapter.a.shape().outputs;
    let launch = launch.tensor_map(&TensorMap::of_columns(a, rows_of_a, (0, inputs, inputs), width));
    let launch = launch.arg(hidden).arg(tokens).arg(adapter.pitch()).arg(inputs).arg(split(inputs));
    let shared = 2 * n_stages * (ROWS + width) * TILE_COLUMNS + 16 * n_stages + 1024;
    launch.arg(adapter.scale() as f32).run([PARTS * tokens.div_ceil(ROWS), n_tiles], THREADS, shared);
}

/// How many tiles of rows a block takes one after another: few enough that the blocks fill the GPU several times.
fn rows_at_once(n_row_tiles: usize, n_column_tiles: usize) -> usize {
    (n_row_tiles * n_column_tiles / 800).clamp(1, 8)
}

/// As `lora::expand`. Where `partials` `[PARTS, T, outputs]` of a split-K product are given, y is overwritten with their
/// sum, rounded, and the term.
pub(crate) fn expand<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    hidden: Slice,
    partials: Option<Slice>,
    y: Slice,
) {
    if tokens == 0 {
        return;
    }
    let rank = adapter.rank();
    let n_columns: usize = adapter.modules.iter().map(|module| module.outputs.len.div_ceil(COLUMNS)).sum();
    let launch = cuda.kernel(&LORA, "lora_expand");
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, y));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, hidden));
    let launch = launch.tensor_maps::<MODULES>(&maps_of_b(adapter, COLUMNS)).arg(partials);
    run_expand(launch.fields(&modules(adapter, Fields::default())), rank, tokens, n_columns);
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
    let rows_of_a = adapter.a.shape().outputs;
    let a = TensorMap::of_columns(adapter.a.view().cuda(), rows_of_a, (0, inputs, inputs), ROWS);
    let launch = cuda.kernel(&LORA, "lora_backward_input");
    let to = TensorMap::of_columns(d_x, tokens, (0, inputs, inputs), ROWS);
    let launch = launch.tensor_maps::<MODULES>(&[to]);
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, d_hidden)).tensor_maps::<MODULES>(&[a]);
    run_expand(launch.fields(&inputs_as_module(adapter)), rows_of_a, tokens, inputs.div_ceil(COLUMNS));
}

/// Adds the last arguments of `expand` in forward.cu and runs it.
fn run_expand(launch: Launch<'_>, depth: usize, tokens: usize, n_columns: usize) {
    let n_rows = tokens.div_ceil(ROWS);
    let at_once = rows_at_once(n_rows, n_columns);
    let padded = depth.next_multiple_of(TILE_COLUMNS);
    let stage = ROWS * padded + 2 * ROWS * TILE_COLUMNS;
    let shared = 2 * (COLUMNS * padded + 2 * stage) + 16 + 1024;
    let launch = launch.arg(depth).arg(tokens).arg(at_once);
    launch.run([n_columns, n_rows.div_ceil(at_once)], 128, shared);
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
    let at_once = rows_at_once(n_rows, n_columns);
    let padded = adapter.rank().next_multiple_of(TILE_COLUMNS);
    let stage = 2 * ROWS * padded + 3 * ROWS * TILE_COLUMNS;
    let shared = 2 * (2 * TILE_COLUMNS * padded + 2 * stage) + 16 + 1024;
    let launch = cuda.kernel(&LORA, "lora_expand_swiglu");
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, gate_up));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, hidden));
    let launch = launch.tensor_maps::<MODULES>(&maps_of_b(adapter, ROWS));
    let launch = launch.tensor_map(&TensorMap::of_columns(out, tokens, (0, width, width), ROWS));
    let launch = launch.fields(&modules(adapter, Fields::default())).arg(tokens).arg(at_once).arg(usize::from(keeps));
    launch.run([n_columns, n_rows.div_ceil(at_once)], 128, shared);
}

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
    const STAGES: usize = 6;
    let (width, n_tiles) = tiles_of(adapter.rank().next_multiple_of(16), &[16, 32, 64]);
    let name = format!("lora_backward_hidden_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, d_y));
    let launch = launch.tensor_maps::<MODULES>(&maps_of_b(adapter, ROWS)).arg(d_hidden);
    let launch = launch.fields(&modules(adapter, Fields::default())).arg(tokens).arg(adapter.scale() as f32);
    let shared = 2 * STAGES * 2 * ROWS * TILE_COLUMNS + 16 * STAGES + 1024;
    launch.run([tokens.div_ceil(ROWS), adapter.modules.len() * n_tiles], THREADS, shared);
}

/// How a factor's gradient is cut: tokens of a split, and splits.
fn splits(tokens: usize, n_blocks: usize, split_len: usize) -> (usize, usize) {
    // Blocks that fill a GPU of 132 multiprocessors three times; each takes 256 tokens or more.
    let wanted = 396usize.div_ceil(n_blocks).min(tokens.div_ceil(4 * ROWS));
    let n_splits = wanted.min(SPLIT_K_BYTES / (4 * split_len)).max(1);
    let per_split = tokens.div_ceil(n_splits).next_multiple_of(ROWS);
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
    let (width, n_chunks) = tiles_of(rank.next_multiple_of(16), &[16, 32, 64]);
    let n_columns: usize = adapter.modules.iter().map(|module| module.outputs.len.div_ceil(COLUMNS)).sum();
    let (per_split, n_splits) = splits(tokens, n_columns * n_chunks, rank * outputs);
    let parts = cuda.split_k_workspace(n_splits * rank * outputs);
    let name = format!("lora_backward_b_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, d_y));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, hidden)).arg(parts);
    let launch = launch.fields(&modules(adapter, Fields::default())).arg(tokens).arg(per_split).arg(outputs);
    launch.run([n_columns, n_splits * n_chunks], THREADS, shared_of_factor(width));
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
    let (width, n_chunks) = tiles_of(adapter.pitch(), &[16, 32, 64, 96]);
    let n_columns = inputs.div_ceil(COLUMNS);
    let (per_split, n_splits) = splits(tokens, n_columns * n_chunks, rank * inputs);
    let parts = cuda.split_k_workspace(n_splits * rank * inputs);
    let name = format!("lora_backward_a_{width}");
    let launch = cuda.kernel(&LORA, &name);
    let map_x = TensorMap::of_columns(x, tokens, (0, inputs, inputs), ROWS);
    let launch = launch.tensor_maps::<MODULES>(&[map_x]);
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, d_hidden)).arg(parts);
    let launch = launch.fields(&inputs_as_module(adapter)).arg(tokens).arg(per_split).arg(inputs);
    launch.run([n_columns, n_splits * n_chunks], THREADS, shared_of_factor(width));
    sum_parts(cuda, parts, n_splits, rank * inputs, write, d_a);
}

/// Shared memory of `backward_factor` in backward.cu.
fn shared_of_factor(width: usize) -> usize {
    let n_stages = if width > 64 { 3 } else { 4 };
    2 * n_stages * (2 + width.div_ceil(64)) * ROWS * TILE_COLUMNS + 16 * n_stages + 1024
}

fn sum_parts(cuda: &Cuda, parts: Slice, n_splits: usize, stride: usize, write: Write, to: Slice) {
    let to = to.f32("lora: gradients");
    let launch = cuda.kernel(&LORA, "lora_sum_parts").arg(parts).arg(to).arg(to.len).arg(n_splits).arg(stride);
    launch.arg(usize::from(write == Write::Add)).run([to.len.div_ceil(256), 1], 256, 0);
}

/// The gradients of a batch without tokens.
pub(super) fn clear(cuda: &Arc<Cuda>, to: &[(Slice, Write)]) {
    for (gradient, _) in to.iter().filter(|(_, write)| *write == Write::Set) {
        cuda.fill(*gradient, 0.0f32);
    }
}
