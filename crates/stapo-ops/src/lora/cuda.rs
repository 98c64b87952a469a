//! Adapters on Hopper in bf16, by separate kernels (`*.cu` in this folder): one launch serves all modules of a layer.

use std::sync::Arc;

use super::{Adapter, Band, Join, Module};
use crate::cuda::kernels::LORA;
use crate::cuda::{Cuda, ElementType, Fields, MULTIPROCESSORS, Slice, TILE_COLUMNS, TensorMap};
use crate::matmul::Dims;
use crate::matmul::cuda::{GROUP_ROWS, JoinedFactor};
use crate::matmul::small_m::MAX_ROWS;
use crate::{Float, Shape, Weight, matmul};

/// Rows of a tile, as in operands.cu.
pub(super) const ROWS: usize = 64;
/// Most modules of a linear layer, as in operands.cu.
pub(super) const MODULES: usize = 3;
/// Threads of the kernels with a producer warp, as in operands.cu.
pub(super) const THREADS: usize = 160;
/// Parts of the depth of `x A^T`, as in operands.cu.
const PARTS: usize = 4;
/// The highest rank: what the factors of three modules take of shared memory.
const MAX_RANK: usize = 128;

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

/// A layer with joined adapters at work. Shape: x `[T, inputs + pitch]`, with room for `x A^T` after its rows.
pub(crate) struct Layer<'a, T: Float> {
    pub d: Dims,
    pub x: Slice,
    pub weight: &'a Weight<T>,
    pub adapter: &'a Adapter<'a, T>,
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
    pub(super) fn address(self) -> u64 {
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
pub(super) fn split(inputs: usize) -> usize {
    inputs.div_ceil(PARTS).next_multiple_of(128)
}

/// Columns of `hidden` from one module to the next.
pub(super) fn module_columns<T: Float>(adapter: &Adapter<'_, T>) -> usize {
    adapter.rank().next_multiple_of(GROUP_ROWS)
}

/// The first factors in tiles of `tile_rows`.
pub(super) fn map_a<T: Float>(adapter: &Adapter<'_, T>, tile_rows: usize) -> TensorMap {
    let (a, shape) = adapter.a.padded();
    TensorMap::of_columns(a.cuda(), shape.outputs, (0, shape.inputs, shape.inputs), tile_rows)
}

pub(super) fn map_hidden<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, hidden: Placed) -> TensorMap {
    TensorMap::of_columns(hidden.slice, tokens, (hidden.start, adapter.pitch(), hidden.of), ROWS)
}

/// The narrowest of `widths`, which rise, that takes `columns` in as few tiles as the widest does, and the tiles.
pub(super) fn tiles_of(columns: usize, widths: &[usize]) -> (usize, usize) {
    let widest = widths[widths.len() - 1];
    let n_tiles = columns.div_ceil(widest);
    let width = widths.iter().find(|width| **width * n_tiles >= columns);
    (*width.unwrap_or(&widest), n_tiles)
}

/// Clusters of [`PARTS`] blocks that run at once where a multiprocessor has one block: some multiprocessors have no partner.
const CLUSTERS_AT_ONCE: usize = 30;
/// Shared memory that a block can have on Hopper.
const MOST_SHARED: usize = 227 << 10;
/// Shared memory that any product of small_m.cu leaves on a multiprocessor.
const SHARED_BESIDE_PRODUCT: usize = 78 << 10;

/// How a kernel of `x A^T` divides its work, as in forward.cu.
struct Projection {
    name: String,
    rows: usize,
    columns: usize,
    /// Whether the kernel gets the columns as an argument.
    takes_columns: bool,
    /// Blocks that share the depth.
    parts: usize,
    shared_bytes: usize,
}

impl Projection {
    /// Tiles that are fetched at once, where they fit; else tiles by way of a ring, of many rows without clusters. No bit depends
    /// on the choice.
    fn for_shape(tokens: usize, n_columns: usize, inputs: usize) -> Self {
        let at_once = || Self::at_once(tokens, n_columns, split(inputs).div_ceil(TILE_COLUMNS));
        let n_rows = tokens.div_ceil(ROWS);
        if 4 * n_rows >= 3 * MULTIPROCESSORS {
            let (columns, _) = tiles_of(n_columns, &[32, 64, 96]);
            let stages =
                [(32, 8), (64, 6), (96, 5)].into_iter().find(|of| of.0 == columns).map_or(5, |of| of.1);
            return Self { parts: 1, ..Self::ring(&format!("rows_{columns}"), columns, stages) };
        }
        at_once().unwrap_or_else(|| match tokens {
            _ if PARTS * n_rows * n_columns.div_ceil(64) >= MULTIPROCESSORS => Self::ring("ring_64", 64, 5),
            0..=MAX_ROWS => Self::ring("ring_few", 16, 4),
            _ => Self::ring("ring_16", 16, 8),
        })
    }

    fn ring(name: &str, columns: usize, stages: usize) -> Self {
        let shared_bytes = 2 * stages * (ROWS + columns) * TILE_COLUMNS + 16 * stages + 1024;
        let name = format!("lora_project_{name}");
        Self { name, rows: ROWS, columns, takes_columns: false, parts: PARTS, shared_bytes }
    }

    /// Tiles of `n_steps` steps over a part of the depth, of as many rows and columns as leave all clusters running at once, and
    /// of few rows leave room to a block of the product that runs at the same time (small_m.cu).
    fn at_once(tokens: usize, n_columns: usize, n_steps: usize) -> Option<Self> {
        let is_few = tokens <= MAX_ROWS;
        let heights: &[usize] = if is_few { &[16, 8] } else { &[32, 24, 16] };
        let n_tiles = n_columns.div_ceil(ROWS)..=n_columns.div_ceil(GROUP_ROWS);
        let tiles = heights.iter().flat_map(|rows| n_tiles.clone().map(move |n_tiles| (*rows, n_tiles)));
        tiles
            .map(|(rows, n_tiles)| {
                let columns = n_columns.div_ceil(n_tiles).next_multiple_of(GROUP_ROWS);
                let bytes = 128 * n_steps * (columns + rows) + 4 * rows * columns + 8 * n_steps;
                // An instruction reads 64 rows of the last tile, whatever lies after it.
                let shared_bytes = bytes.max(128 * ((n_steps - 1) * columns + ROWS)) + 1024;
                let name = format!("lora_project_{rows}");
                Self { name, rows, columns, takes_columns: true, parts: PARTS, shared_bytes }
            })
            .find(|tile| {
                let n_clusters = tokens.div_ceil(tile.rows) * n_columns.div_ceil(tile.columns);
                let n_blocks = MOST_SHARED / (tile.shared_bytes + 1024);
                if is_few {
                    tile.shared_bytes <= SHARED_BESIDE_PRODUCT
                } else {
                    n_clusters <= CLUSTERS_AT_ONCE * n_blocks
                }
            })
    }
}

/// How kernels of few rows that run at the same time signal to each other, see signals.cu.
#[derive(Clone, Copy)]
pub(super) struct Signals {
    /// The address of the counts; 0: no kernel waits for them.
    pub counts: u64,
    /// Blocks of the product.
    pub n_multiplying: usize,
}

impl Signals {
    const NONE: Self = Self { counts: 0, n_multiplying: 0 };

    /// The struct of signals.cu.
    fn fields(self, n_projecting: usize) -> Fields {
        let fields = Fields::default().eight_bytes(self.counts);
        fields.four_bytes(n_projecting).four_bytes(self.n_multiplying)
    }
}

/// Returns the signals for the product that runs at the same time.
pub(super) fn project<T: Float>(
    cuda: &Cuda,
    tokens: usize,
    x: Slice,
    adapter: &Adapter<'_, T>,
    hidden: Placed,
    signals: Option<Signals>,
) -> Fields {
    let (columns, inputs) = (n_columns(adapter), adapter.inputs());
    let tiling = Projection::for_shape(tokens, columns, inputs);
    let grid = [tiling.parts * tokens.div_ceil(tiling.rows), columns.div_ceil(tiling.columns)];
    let fields = signals.unwrap_or(Signals::NONE).fields(grid[0] * grid[1]);
    if tokens == 0 {
        return fields;
    }
    let map_x = TensorMap::of_columns(x, tokens, (0, inputs, x.len / tokens), tiling.rows);
    let launch =
        cuda.kernel(&LORA, &tiling.name).tensor_map(&map_x).tensor_map(&map_a(adapter, tiling.columns));
    let launch = launch.fields(&projected(adapter, tokens, hidden)).arg(inputs).arg(split(inputs));
    let launch = if tiling.takes_columns { launch.arg(tiling.columns) } else { launch };
    let launch = match (signals, tiling.parts) {
        (_, PARTS) => launch.fields(&fields).most_shared_memory(),
        (None, _) => launch,
        (Some(_), _) => panic!("lora::project: signals of {tokens} rows"),
    };
    launch.programmatic_launch(true).run(grid, THREADS, tiling.shared_bytes);
    fields
}

/// Rows of the first factors as the kernels read them.
pub(super) fn n_columns<T: Float>(adapter: &Adapter<'_, T>) -> usize {
    adapter.modules.len() * module_columns(adapter)
}

/// The struct `Projected` of forward.cu.
pub(super) fn projected<T: Float>(adapter: &Adapter<'_, T>, tokens: usize, hidden: Placed) -> Fields {
    let fields = Fields::default().eight_bytes(hidden.address()).four_bytes(hidden.of).four_bytes(tokens);
    fields.four_bytes(adapter.pitch()).four_bytes(adapter.scale() as f32)
}
