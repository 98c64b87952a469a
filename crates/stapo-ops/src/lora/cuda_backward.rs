//! The gradients of adapters on Hopper in bf16, by the kernels of backward.cu and backward_swiglu.cu.

use super::Adapter;
use std::sync::Arc;

use super::cuda::{MODULES, Placed, ROWS, THREADS, fits, map_a, map_hidden, module_columns, tiles_of};
use crate::cuda::kernels::LORA_BACKWARD;
use crate::cuda::{Cuda, Fields, MULTIPROCESSORS, SPLIT_K_BYTES, Slice, TILE_COLUMNS, TensorMap};
use crate::{Float, Weight, Write};

/// Threads of the kernels that update tiles in place, as in operands.cu.
const UPDATERS: usize = 256;
/// Columns that a block takes, as in the kernels.
const COLUMNS: usize = 128;
/// Blocks that share the tokens of a factor's gradient, as in backward.cu.
const SPLITS: usize = 8;
/// The highest rank of the factors whose gradients are made together with SwiGLU's, as in backward_swiglu.cu.
const MAX_SWIGLU_RANK: usize = 32;

/// The struct `Modules` of operands.cu.
fn modules<T: Float>(adapter: &Adapter<'_, T>) -> Fields {
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

/// `hidden` or its gradient as a separate matrix.
fn apart<T: Float>(adapter: &Adapter<'_, T>, hidden: Slice) -> Placed {
    Placed { slice: hidden, start: 0, of: adapter.pitch() }
}

/// x `[T, inputs]`, whose rows may have further columns after them.
fn map_x<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, x: Slice) -> TensorMap {
    TensorMap::of_columns(x, tokens, (0, adapter.inputs(), x.len / tokens), ROWS)
}

/// The columns of each module in y `[T, outputs]`, whose rows may have further columns after them.
fn maps_of_outputs<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, y: Slice) -> Vec<TensorMap> {
    let columns = adapter.modules.iter().map(|module| module.outputs);
    columns.map(|of| TensorMap::of_columns(y, tokens, (of.start, of.len, y.len / tokens), ROWS)).collect()
}

pub(super) fn maps_of_b<T: Float>(adapter: &Adapter<'_, T>, tile_rows: usize) -> Vec<TensorMap> {
    let columns_of = |b: &&Weight<T>| {
        let (rows, shape) = b.padded();
        TensorMap::of_columns(rows.cuda(), shape.outputs, (0, shape.inputs, shape.inputs), tile_rows)
    };
    adapter.b.iter().map(columns_of).collect()
}

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
    let launch = cuda.kernel(&LORA_BACKWARD, "lora_backward_input");
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
    let launch = cuda.kernel(&LORA_BACKWARD, &name);
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

/// Whether [`backward_swiglu`] makes the gradient of the adapter's first factor.
pub(crate) fn makes_first_factor<T: Float>(cuda: &Cuda, adapter: &Adapter<'_, T>) -> bool {
    fits(cuda, adapter) && adapter.modules.len() == 1 && adapter.rank() <= MAX_SWIGLU_RANK
}

/// `lora::backward_input` on the gradient of a SwiGLU's output, then `swiglu::backward`, and the gradient of the first
/// factor. Shapes: d_activated `[T, width]`, left as it is; gate_up, d_gate_up `[T, 2 width]`, the last overwritten.
pub(crate) fn backward_swiglu<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    (d_hidden, d_activated): (Slice, Slice),
    gate_up: Slice,
    d_gate_up: Slice,
    d_a: Option<(Slice, Write)>,
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
    // The parts of the factor's gradient must find room.
    let n_parts = d_a.map_or(n_rows, |(to, _)| SPLIT_K_BYTES / (4 * to.len));
    let at_once = rows_at_once(n_rows, n_columns, shared).max(n_rows.div_ceil(n_parts));
    let n_groups = n_rows.div_ceil(at_once);
    let name = if d_a.is_some() { "lora_backward_swiglu_factor" } else { "lora_backward_swiglu" };
    let launch = cuda.kernel(&LORA_BACKWARD, name);
    let launch = launch.tensor_map(&TensorMap::of_columns(d_activated, tokens, (0, width, width), ROWS));
    let d_hidden = map_hidden(adapter, tokens, apart(adapter, d_hidden));
    let launch = launch.tensor_map(&d_hidden).tensor_map(&map_a(adapter, ROWS));
    let launch = launch.tensor_maps::<MODULES>(&halves(gate_up)).tensor_maps::<MODULES>(&halves(d_gate_up));
    let parts = cuda.split_k_workspace(n_groups * d_a.map_or(0, |(to, _)| to.len));
    let launch = match d_a {
        Some(_) => launch.fields(&Fields::default().eight_bytes(parts).four_bytes(adapter.rank())),
        None => launch,
    };
    let launch = launch.arg(width).arg(depth).arg(tokens).arg(at_once).programmatic_launch(true);
    launch.run([n_columns, n_groups], UPDATERS, shared);
    if let Some((to, write)) = d_a {
        let launch = cuda.kernel(&LORA_BACKWARD, "lora_sum_parts").arg(parts).arg(to.f32(GRADIENTS));
        let launch = launch.arg(to.len).arg(n_groups).arg(adds(write)).programmatic_launch(true);
        launch.run([to.len.div_ceil(256), 1], 256, 0);
    }
}

const GRADIENTS: &str = "lora: gradients";

fn adds(write: Write) -> usize {
    usize::from(write == Write::Add)
}

/// What the gradients of factors are made from.
#[derive(Clone, Copy)]
pub(super) struct Backward {
    pub x: Slice,
    pub d_y: Slice,
    pub hidden: Placed,
    pub d_hidden: Placed,
}

/// As `lora::backward_factors`, all in one launch.
pub(super) fn backward_factors<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    of: &Backward,
    to_b: &[(Slice, Write)],
    to_a: Option<(Slice, Write)>,
) {
    let columns = adapter.modules.len() * module_columns(adapter);
    let width_b = if adapter.rank() <= 32 { 32 } else { 64 };
    let width_a = tiles_of(columns, &[width_b, 64, 96]).0;
    let tiles = |outputs: usize| outputs.div_ceil(COLUMNS);
    let tiles_b: usize = adapter.modules.iter().map(|module| tiles(module.outputs.len)).sum();
    let n_of_b = if to_b.is_empty() { 0 } else { tiles_b * adapter.rank().div_ceil(width_b) };
    let n_of_a = if to_a.is_some() { tiles(adapter.inputs()) * columns.div_ceil(width_a) } else { 0 };
    let name = format!("lora_backward_factors_{width_b}_{width_a}");
    let launch = cuda.kernel(&LORA_BACKWARD, &name);
    let launch = launch.tensor_maps::<MODULES>(&maps_of_outputs(adapter, tokens, of.d_y));
    let launch = launch.tensor_map(&map_hidden(adapter, tokens, of.hidden)).fields(&modules(adapter));
    let launch = launch.tensor_maps::<MODULES>(&[map_x(adapter, tokens, of.x)]);
    let launch =
        launch.tensor_map(&map_hidden(adapter, tokens, of.d_hidden)).fields(&inputs_as_module(adapter));
    let launch = launch.fields(&gradients(to_b, to_a));
    let per_split = tokens.div_ceil(SPLITS).next_multiple_of(ROWS);
    let launch = launch.arg(n_of_b).arg(tokens).arg(per_split).programmatic_launch(true);
    let shared = 2 * 3 * (2 + width_a.div_ceil(TILE_COLUMNS)) * ROWS * TILE_COLUMNS + 16 * 3 + 1024;
    launch.run([SPLITS, n_of_b + n_of_a], THREADS, shared);
}

/// The struct `Gradients` of backward.cu.
fn gradients(to_b: &[(Slice, Write)], to_a: Option<(Slice, Write)>) -> Fields {
    let all = (0..MODULES).map(|place| to_b.get(place).copied()).chain([to_a]);
    let address =
        |fields: Fields, to: Option<(Slice, Write)>| fields.eight_bytes(to.map(|to| to.0.f32(GRADIENTS)));
    let fields = all.clone().fold(Fields::default(), address);
    all.fold(fields, |fields, to| fields.four_bytes(to.map_or(0, |to| adds(to.1))))
}
