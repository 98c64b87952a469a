//! Few rows through a matrix, as decode has them: small_m.cu, where the chip and the shape allow it.

use super::Dims;
use crate::cuda::kernels::MATMUL_SMALL_M;
use crate::cuda::{Cuda, Kind, Map, Slice};

/// Most rows, the depth of a step, and threads: as in small_m.cu.
pub(crate) const ROWS: usize = 64;
const STEP: usize = 128;
const THREADS: usize = 192;

/// How a kernel cuts its work.
#[derive(Clone, Copy)]
struct Tiling {
    name: &'static str,
    /// Columns of a block; the matrices it multiplies with at once.
    columns: usize,
    matrices: usize,
    /// Steps of x and of weights on the way.
    stages: (usize, usize),
}

const fn tiling(name: &'static str, columns: usize, matrices: usize, stages: (usize, usize)) -> Tiling {
    Tiling { name, columns, matrices, stages }
}

/// By rising number of columns.
const FLAT: [Tiling; 3] = [
    tiling("product_small_m_16", 16, 1, (5, 8)),
    tiling("product_small_m_32", 32, 1, (5, 6)),
    tiling("product_small_m_48", 48, 1, (4, 5)),
];
const DEEP: Tiling = tiling("product_small_m_split_k", 64, 1, (4, 4));
const SWIGLU: Tiling = tiling("swiglu_small_m_48", 48, 2, (3, 4));

impl Tiling {
    /// Tiles from a multiple of 1024 on, and two barriers for each.
    fn shared_bytes(self) -> usize {
        let (x, w) = self.stages;
        2 * STEP * (x * ROWS + w * self.matrices * self.columns) + 16 * (x + w) + 1024
    }

    /// `width`: columns of y.
    fn run(self, cuda: &Cuda, d: Dims, x: Slice, weight: Slice, y: Slice, width: usize, n_chains: usize) {
        let launch = cuda.kernel(&MATMUL_SMALL_M, self.name);
        let launch = launch.map(&Map::new(x, d.tokens, d.inputs, ROWS));
        let launch = launch.map(&Map::new(weight, d.outputs, d.inputs, self.columns));
        let launch = launch.arg(y).arg(d.tokens).arg(width).arg(d.inputs).early(true);
        launch.run([width.div_ceil(self.columns), n_chains], THREADS, self.shared_bytes());
    }
}

/// `kind`: what the kernel writes; logits, for one, are wanted in f32.
fn fits(cuda: &Cuda, d: Dims, x: Slice, weight: Slice, (y, kind): (Slice, Kind)) -> bool {
    let rows = 1..=ROWS;
    let is_whole =
        d.inputs.is_multiple_of(STEP) && d.outputs.is_multiple_of(8) && y.address.is_multiple_of(16);
    cuda.is_hopper()
        && rows.contains(&d.tokens)
        && is_whole
        && y.kind == kind
        && Map::takes(x, d.inputs)
        && Map::takes(weight, d.inputs)
}

/// `y = x W^T`. False: not for this device or shape, and nothing was done.
pub(super) fn product(cuda: &Cuda, d: Dims, x: Slice, weight: Slice, y: Slice) -> bool {
    // One block for each multiprocessor; what would need more of them is wide enough for cuBLASLt.
    let n_blocks = cuda.gpu.multiprocessors as usize;
    let tiling = FLAT.iter().find(|tiling| d.outputs.div_ceil(tiling.columns) <= n_blocks);
    let Some(tiling) = tiling.filter(|_| fits(cuda, d, x, weight, (y, Kind::Bf16))) else { return false };
    tiling.run(cuda, d, x, weight, y, d.outputs, 1);
    true
}

/// The chains of a deep product: parts `[n_chains, T, outputs]`. False: as above.
pub(super) fn chains(cuda: &Cuda, d: Dims, x: Slice, weight: Slice, parts: Slice, n_chains: usize) -> bool {
    let is_there = fits(cuda, d, x, weight, (parts, Kind::F32));
    if is_there {
        DEEP.run(cuda, d, x, weight, parts, d.outputs, n_chains);
    }
    is_there
}

/// Gate and up in one product and their joining: out `[T, outputs / 2]`.
pub(crate) fn swiglu(cuda: &Cuda, d: Dims, x: Slice, weight: Slice, out: Slice) -> bool {
    let width = d.outputs / 2;
    let is_there = fits(cuda, d, x, weight, (out, Kind::Bf16)) && width.is_multiple_of(8);
    if is_there {
        SWIGLU.run(cuda, d, x, weight, out, width, 1);
    }
    is_there
}
