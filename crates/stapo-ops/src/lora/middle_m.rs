//! Products of some hundred rows with joined adapters, by the kernels of middle_m.cu, which compute `x A^T` too.

use std::sync::Arc;

use super::cuda::{Layer, MULTIPROCESSORS, Placed, map_a, n_columns, projected, split};
use crate::Float;
use crate::cuda::kernels::LORA_MIDDLE_M;
use crate::cuda::{Cuda, Slice, TILE_COLUMNS, TensorMap};
use crate::matmul::Dims;
use crate::matmul::small_m::Output;

/// The most rows. For more the library's products leave fewer multiprocessors without work.
const MAX_ROWS: usize = 512;
/// Rows of a tile, as in middle_m.cu.
const ROWS: usize = 128;
/// Threads of a block, as in middle_m.cu.
const THREADS: usize = 288;
/// Columns of `x A^T` that a block computes, as in middle_m.cu.
const PROJECTED: [usize; 3] = [32, 64, 96];

/// How a kernel divides its work, as in middle_m.cu.
#[derive(Clone, Copy)]
struct Tiling {
    name: &'static str,
    columns: usize,
    stages: usize,
    /// Blocks of a cluster.
    sharing: usize,
}

/// By rising number of columns.
const PRODUCT: [Tiling; 3] = [
    Tiling { name: "lora_middle_m_64", columns: 64, stages: 6, sharing: 1 },
    Tiling { name: "lora_middle_m_128", columns: 128, stages: 5, sharing: 1 },
    Tiling { name: "lora_middle_m_192", columns: 192, stages: 4, sharing: 2 },
];
const SPLIT_K: Tiling = Tiling { name: "lora_middle_m_split_k", columns: 256, stages: 4, sharing: 1 };

impl Tiling {
    /// `None` for a SwiGLU: a kernel of its own computes it in less time than the end of each block would take.
    fn of(output: Output, d: Dims) -> Option<Self> {
        let in_one_wave = || PRODUCT.into_iter().find(|tiling| tiling.n_blocks(output, d) <= MULTIPROCESSORS);
        match output {
            Output::Product => Some(in_one_wave().unwrap_or(PRODUCT[PRODUCT.len() - 1])),
            Output::SplitK { .. } => Some(SPLIT_K),
            Output::Swiglu => None,
        }
    }

    fn n_row_tiles(self, d: Dims) -> usize {
        d.tokens.div_ceil(ROWS).next_multiple_of(self.sharing)
    }

    /// One block for each tile, and one for `x A^T` of each tile of rows.
    fn n_blocks(self, output: Output, d: Dims) -> usize {
        let n_splits = if let Output::SplitK { n_splits } = output { n_splits } else { 1 };
        self.n_row_tiles(d) * (1 + d.outputs.div_ceil(self.columns) * n_splits)
    }

    /// The blocks of a product go on to other columns where there are more tiles than multiprocessors.
    fn grid(self, output: Output, d: Dims) -> [usize; 2] {
        let n_rows = self.n_row_tiles(d);
        let n_columns = self.n_blocks(output, d) / n_rows;
        let at_once = if output == Output::Product { MULTIPROCESSORS / n_rows } else { n_columns };
        [n_rows, n_columns.min(at_once)]
    }

    /// The stages' tiles, 32 mbarriers, results on their way to y, and room to align the tiles to 1024 bytes.
    fn shared_bytes(self, output: Output) -> usize {
        let staged = if output == Output::Product { 2 * ROWS * (self.columns + 8) } else { 0 };
        2 * self.stages * (ROWS + self.columns) * TILE_COLUMNS + 8 * 32 + staged + 1024
    }
}

/// Whether [`run`] may be called with the same arguments; the layer fits tiles. Not where blocks would leave a quarter of the
/// multiprocessors without work.
pub(super) fn fits<T: Float>(layer: &Layer<'_, T>, output: Output) -> bool {
    layer.d.tokens <= MAX_ROWS
        && n_columns(layer.adapter) <= PROJECTED[PROJECTED.len() - 1]
        && Tiling::of(output, layer.d)
            .is_some_and(|tiling| 4 * tiling.n_blocks(output, layer.d) >= 3 * MULTIPROCESSORS)
}

/// `lora::project` and the product, in one kernel.
pub(super) fn run<T: Float>(layer: &Layer<'_, T>, output: Output, cuda: &Arc<Cuda>, y: Slice) {
    let Layer { d, x, weight, adapter } = layer;
    let tiling = Tiling::of(output, *d).expect("lora::middle_m: a product that fits");
    let columns = n_columns(adapter);
    let of_a = PROJECTED.into_iter().find(|n| columns <= *n).expect("lora::middle_m: ranks that fit");
    let flat = weight.view().cuda();
    let (x_pitch, w_pitch) = (x.len / d.tokens, flat.len / d.outputs);
    let map_x = TensorMap::of_columns(*x, d.tokens, (0, x_pitch, x_pitch), ROWS);
    let map_w =
        TensorMap::of_columns(flat, d.outputs, (0, w_pitch, w_pitch), tiling.columns / tiling.sharing);
    let launch = cuda.kernel(&LORA_MIDDLE_M, tiling.name).tensor_map(&map_x).tensor_map(&map_w);
    let launch = launch.arg(y).arg(d.tokens).arg(d.outputs).arg(adapter.pitch());
    let projection = projected(adapter, d.tokens, Placed::new(*x, d.tokens, d.inputs));
    let projection = projection.four_bytes(d.inputs).four_bytes(split(d.inputs)).four_bytes(columns);
    let launch = launch.tensor_map(&map_a(adapter, of_a)).fields(&projection).arg(cuda.signal());
    let launch = match output {
        Output::SplitK { n_splits } => launch.arg(n_splits),
        Output::Product | Output::Swiglu => launch,
    };
    launch.programmatic_launch(true).run(tiling.grid(output, *d), THREADS, tiling.shared_bytes(output));
}
