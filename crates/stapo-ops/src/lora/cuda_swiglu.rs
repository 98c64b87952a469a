//! SwiGLU of some hundred rows with `x A^T` of the layer that takes it in, by the kernels of forward_swiglu.cu.

use super::Adapter;
use super::cuda::{
    CLUSTERS_AT_ONCE, MOST_SHARED, PARTS, Placed, ROWS, fits, map_a, n_columns, projected, split,
};
use crate::cuda::kernels::LORA;
use crate::cuda::{Cuda, ElementType, Slice, TILE_COLUMNS};
use crate::matmul::small_m;
use crate::swiglu::{Dims, Gate};
use crate::{Float, pitch_of};

/// The most rows: of more, blocks that wait for each other in clusters cost more than they save.
const MAX_ROWS: usize = 512;
/// The highest tile that has a kernel, as in forward_swiglu.cu.
const MAX_HEIGHT: usize = 24;
/// Threads of a block, as in forward_swiglu.cu.
const THREADS: usize = 640;
/// Tiles of x that are handed over together, as in forward_swiglu.cu.
const GROUP_TILES: usize = 4;

/// How a kernel divides its work, as in forward_swiglu.cu.
struct Tiling {
    /// Rows of a cluster's tile in shared memory.
    height: usize,
    /// Those of them that the cluster computes.
    rows: usize,
    shared_bytes: usize,
}

impl Tiling {
    /// As few rows for a cluster as leave all clusters running at once; `None` where they do not fit.
    fn for_shape(tokens: usize, n_columns: usize, inputs: usize) -> Option<Self> {
        let rows = tokens.div_ceil(CLUSTERS_AT_ONCE);
        let height = rows.next_multiple_of(8);
        let n_tiles = split(inputs) / TILE_COLUMNS;
        let n_barriers = n_tiles + n_tiles.div_ceil(GROUP_TILES);
        let bytes = 128 * n_tiles * (n_columns + height) + 4 * height * n_columns + 8 * n_barriers;
        // An instruction reads 64 rows of A's last tile, whatever lies after it.
        let shared_bytes = bytes.max(128 * ((n_tiles - 1) * n_columns + ROWS)) + 1024;
        let has_kernel =
            (small_m::MAX_ROWS + 1..=MAX_ROWS).contains(&tokens) && n_columns <= ROWS && height <= MAX_HEIGHT;
        (has_kernel && shared_bytes <= MOST_SHARED).then_some(Self { height, rows, shared_bytes })
    }
}

/// `swiglu::forward`, and `lora::project` of what it gives, to the same bits. Where no kernel does both, nothing is done and the
/// answer is false. Shapes: gate_up `[T, 2 width]`; out `[T, width]`, possibly with further columns after its rows.
pub(crate) fn forward<T: Float>(
    cuda: &Cuda,
    dims: Dims,
    gate_up: Slice,
    out: Slice,
    adapter: &Adapter<'_, T>,
    hidden: Placed,
) -> bool {
    let Dims { tokens, width, gate } = dims;
    let columns = n_columns(adapter);
    let pitch = pitch_of("lora::cuda_swiglu", "out", out.len, tokens, width);
    let is_whole = |slice: Slice| slice.kind == ElementType::Bf16 && slice.address.is_multiple_of(16);
    let are_whole = pitch.is_multiple_of(8) && is_whole(gate_up) && is_whole(out);
    if gate != Gate::Silu || !are_whole || adapter.inputs() != width || !fits(cuda, adapter) {
        return false;
    }
    let Some(Tiling { height, rows, shared_bytes }) = Tiling::for_shape(tokens, columns, width) else {
        return false;
    };
    let name = format!("lora_swiglu_project_{height}");
    let launch = cuda.kernel(&LORA, &name).arg(gate_up).arg(out).arg(pitch).arg(width);
    let launch = launch.tensor_map(&map_a(adapter, columns)).fields(&projected(adapter, tokens, hidden));
    let launch = launch.arg(rows).arg(split(width)).arg(columns).most_shared_memory();
    launch.programmatic_launch(true).run([PARTS * tokens.div_ceil(rows), 1], THREADS, shared_bytes);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every number of rows that decode has takes one turn of the clusters, and the widest models leave as many to two kernels as do
    /// not fit shared memory.
    #[test]
    fn clusters_run_at_once_and_fit_shared_memory() {
        for (inputs, n_columns, most) in [
            (6144, 32, 512),
            (3072, 64, 512),
            (4864, 32, 512),
            (8960, 32, 480),
            (6144, 64, 240),
            (1928, 16, 512),
        ] {
            for tokens in 1..=600 {
                let tiling = Tiling::for_shape(tokens, n_columns, inputs);
                let has_kernel = tokens > small_m::MAX_ROWS && tokens <= most;
                assert_eq!(tiling.is_some(), has_kernel, "{tokens} rows of {inputs}, {n_columns} columns");
                let Some(Tiling { height, rows, shared_bytes }) = tiling else { continue };
                assert!(tokens.div_ceil(rows) <= CLUSTERS_AT_ONCE && rows <= height && height <= MAX_HEIGHT);
                assert!(shared_bytes <= MOST_SHARED && [8, 16, 24].contains(&height));
            }
        }
        let [rows, n_clusters] =
            Tiling::for_shape(512, 32, 6144).map_or([0; 2], |t| [t.rows, 512_usize.div_ceil(t.rows)]);
        assert_eq!([rows, n_clusters], [18, 29]);
    }
}
