//! Products of some hundred rows with joined adapters, by the kernels of middle_m.cu, which compute `x A^T` too.

use std::cmp::Reverse;
use std::sync::Arc;

use super::cuda::{Layer, Placed, map_a, n_columns, projected, split};
use crate::Float;
use crate::cuda::kernels::LORA_MIDDLE_M;
use crate::cuda::{Cuda, MULTIPROCESSORS, Slice, TILE_COLUMNS, TensorMap};
use crate::matmul::Dims;

/// The most rows: of more, a kernel for `x A^T` takes a small part of the time.
const MAX_ROWS: usize = 512;
/// The most that multiprocessors may leave undone, see [`Tiling::wasted`]: 4 us, which a kernel for `x A^T` takes.
const MOST_WASTED: usize = 48 * 2048;
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
    /// How long a block takes for its columns, in columns of the wider ones: 64 took 9.0 us at a depth of 2048, 128 took 13.2.
    time: usize,
    stages: usize,
    /// Blocks of a cluster.
    sharing: usize,
}

/// By rising number of columns.
const PRODUCT: [Tiling; 3] = [
    Tiling { name: "lora_middle_m_64", columns: 64, time: 80, stages: 6, sharing: 1 },
    Tiling { name: "lora_middle_m_128", columns: 128, time: 128, stages: 5, sharing: 1 },
    Tiling { name: "lora_middle_m_192", columns: 192, time: 192, stages: 4, sharing: 2 },
];

impl Tiling {
    /// The one whose blocks end first.
    fn fastest(d: Dims) -> Self {
        let [first, others @ ..] = PRODUCT;
        let time = |t: Self| (t.time * t.n_in_turn(d), Reverse(t.columns));
        others.into_iter().fold(first, |best, t| if time(t) < time(best) { t } else { best })
    }

    /// Tiles of rows, and tiles of columns.
    fn n_tiles(self, d: Dims) -> [usize; 2] {
        [d.tokens.div_ceil(ROWS).next_multiple_of(self.sharing), d.outputs.div_ceil(self.columns)]
    }

    /// For each tile of rows one block for `x A^T`, and one for each tile of columns; these continue to other columns where there are
    /// more tiles than multiprocessors.
    fn grid(self, d: Dims) -> [usize; 2] {
        let [rows, columns] = self.n_tiles(d);
        [rows, 1 + columns.min((MULTIPROCESSORS / rows).max(2) - 1)]
    }

    /// Tiles that a multiprocessor computes one after the other.
    fn n_in_turn(self, d: Dims) -> usize {
        let ([_, tiles], [_, blocks]) = (self.n_tiles(d), self.grid(d));
        tiles.div_ceil(blocks - 1)
    }

    /// What multiprocessors without work could have multiplied meanwhile, in columns of 128 rows times depth.
    fn wasted(self, d: Dims) -> usize {
        let spread = d.outputs * d.inputs * d.tokens / (ROWS * MULTIPROCESSORS);
        (self.columns * self.n_in_turn(d) * d.inputs).saturating_sub(spread)
    }

    /// The stages' tiles, 32 mbarriers, results on their way to y, and room to align the tiles to 1024 bytes.
    fn shared_bytes(self) -> usize {
        2 * self.stages * (ROWS + self.columns) * TILE_COLUMNS + 8 * 32 + 2 * ROWS * (self.columns + 8) + 1024
    }
}

/// Whether [`run`] may be called with the same arguments; the layer fits tiles. Not where its blocks take so much longer than the
/// library's that this costs more than a kernel for `x A^T`.
pub(super) fn fits<T: Float>(layer: &Layer<'_, T>) -> bool {
    layer.d.tokens <= MAX_ROWS
        && n_columns(layer.adapter) <= PROJECTED[PROJECTED.len() - 1]
        && Tiling::fastest(layer.d).wasted(layer.d) <= MOST_WASTED
}

/// `lora::project` and the product, in one kernel.
pub(super) fn run<T: Float>(layer: &Layer<'_, T>, cuda: &Arc<Cuda>, y: Slice) {
    let Layer { d, x, weight, adapter } = layer;
    let tiling = Tiling::fastest(*d);
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
    launch.programmatic_launch(true).run(tiling.grid(*d), THREADS, tiling.shared_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At the shapes of Qwen3-1.7B each product takes the tiling that was measured to be the fastest, and gate and up of 384
    /// rows, whose tiles fill the multiprocessors one and a half times, are left to the library.
    #[test]
    fn tilings_are_those_that_were_measured() {
        let tiling = |tokens, outputs| {
            let d = Dims { tokens, inputs: 2048, outputs };
            let tiling = Tiling::fastest(d);
            (tiling.columns, tiling.grid(d), tiling.wasted(d) <= MOST_WASTED)
        };
        assert_eq!(tiling(512, 4096), (128, [4, 33], true));
        assert_eq!(tiling(512, 2048), (64, [4, 33], true));
        assert_eq!(tiling(512, 12288), (192, [4, 33], true));
        let (columns, _, fits) = tiling(384, 12288);
        assert_eq!((columns, fits), (192, false));
        for outputs in [64, 2048, 4096, 12288] {
            for tokens in 1..=MAX_ROWS {
                let d = Dims { tokens, inputs: 2048, outputs };
                let [rows, blocks] = Tiling::fastest(d).grid(d);
                assert!(rows * ROWS >= tokens && rows * blocks <= MULTIPROCESSORS, "{tokens} {outputs}");
                assert!(Tiling::fastest(d).shared_bytes() <= 232_448);
            }
        }
    }
}
