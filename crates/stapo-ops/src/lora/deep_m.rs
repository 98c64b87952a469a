//! Split-K products of some hundred rows with joined adapters, by the kernel of deep_m.cu, which computes `x A^T` too.

use std::sync::Arc;

use super::cuda::{Layer, MULTIPROCESSORS, PARTS, Placed, map_a, n_columns, projected, split};
use crate::Float;
use crate::cuda::kernels::LORA_MIDDLE_M;
use crate::cuda::{Cuda, Slice, TILE_COLUMNS, TensorMap};
use crate::matmul::Dims;
use crate::matmul::small_m::Output;

/// The most rows: of more, a kernel for `x A^T` takes a small part of the time.
pub(crate) const MAX_ROWS: usize = 512;
/// Rows and columns of a tile, as in deep_m.cu.
const TILE: [usize; 2] = [128, 256];
/// Blocks of a cluster, as in deep_m.cu.
const SHARING: usize = 2;
/// Rows of the first factor that a block multiplies, as in deep_m.cu.
const RANKS: usize = 8;
/// Threads of a block, as in deep_m.cu.
const THREADS: usize = 288;
/// The stages' tiles, eight mbarriers, and room to align the tiles to 1024 bytes.
const SHARED_BYTES: usize = 2 * 4 * (TILE[0] + TILE[1] + RANKS) * TILE_COLUMNS + 8 * 8 + 1024;

/// Tiles of rows, and tiles of columns for each part of the depth.
fn grid(d: Dims) -> [usize; 2] {
    [d.tokens.div_ceil(TILE[0]).next_multiple_of(SHARING), PARTS * d.outputs.div_ceil(TILE[1])]
}

/// Whether blocks run all at once, and use three quarters of the multiprocessors' time: where they do not, the library's product
/// is the faster one.
fn fills(d: Dims) -> bool {
    let [rows, columns] = grid(d);
    rows * columns <= MULTIPROCESSORS
        && 4 * PARTS * d.tokens * d.outputs >= 3 * MULTIPROCESSORS * TILE[0] * TILE[1]
}

/// Whether [`run`] may be called with the same arguments; the layer fits tiles.
pub(super) fn fits<T: Float>(layer: &Layer<'_, T>, output: Output) -> bool {
    let (d, columns) = (layer.d, n_columns(layer.adapter));
    output == Output::SplitK { n_splits: PARTS }
        && d.tokens <= MAX_ROWS
        && d.inputs == PARTS * split(d.inputs)
        && layer.adapter.pitch() == TILE_COLUMNS
        && columns <= RANKS * d.outputs.div_ceil(TILE[1])
        && fills(d)
}

/// Elements in f32 behind the partial sums, for those of `x A^T`.
pub(crate) fn n_further<T: Float>(layer: &Layer<'_, T>) -> usize {
    PARTS * layer.d.tokens * n_columns(layer.adapter)
}

/// `lora::project` and the product, in one kernel. Shape: partials `[PARTS, T, outputs]`, the first part of the memory for partial
/// sums, which has room for [`n_further`] more.
pub(super) fn run<T: Float>(layer: &Layer<'_, T>, cuda: &Arc<Cuda>, partials: Slice) {
    let Layer { d, x, weight, adapter } = layer;
    let memory = cuda.split_k_workspace(partials.len + n_further(layer));
    let sums = memory.part(partials.len, n_further(layer));
    let flat = weight.view().cuda();
    let (x_pitch, w_pitch) = (x.len / d.tokens, flat.len / d.outputs);
    let map_x = TensorMap::of_columns(*x, d.tokens, (0, x_pitch, x_pitch), TILE[0]);
    let map_w = TensorMap::of_columns(flat, d.outputs, (0, w_pitch, w_pitch), TILE[1] / SHARING);
    let launch = cuda.kernel(&LORA_MIDDLE_M, "lora_deep_m").tensor_map(&map_x).tensor_map(&map_w);
    let launch = launch.arg(partials).arg(d.tokens).arg(d.outputs).arg(adapter.pitch());
    let projection = projected(adapter, d.tokens, Placed::new(*x, d.tokens, d.inputs));
    let projection =
        projection.four_bytes(d.inputs).four_bytes(split(d.inputs)).four_bytes(n_columns(adapter));
    let launch = launch.tensor_map(&map_a(adapter, RANKS)).fields(&projection).arg(sums).arg(cuda.signal());
    launch.programmatic_launch(true).run(grid(*d), THREADS, SHARED_BYTES);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Down of Qwen3-1.7B: 512 rows take 128 multiprocessors, 256 rows half of them.
    #[test]
    fn blocks_run_all_at_once_and_fill_the_multiprocessors() {
        let down = |tokens, outputs| {
            let d = Dims { tokens, inputs: 6144, outputs };
            fills(d).then(|| grid(d))
        };
        assert_eq!(down(512, 2048), Some([4, 32]));
        assert_eq!(down(400, 2048), Some([4, 32]));
        assert_eq!([down(385, 2048), down(256, 2048), down(512, 4096), down(512, 1024)], [None; 4]);
        const { assert!(SHARED_BYTES <= 232_448) };
    }
}
