//! Products of few rows (a small M), as decode has them, by the kernels of small_m.cu: on Hopper, for bf16 and whole
//! tiles.

use super::Dims;
use crate::cuda::kernels::MATMUL_SMALL_M;
use crate::cuda::{Cuda, ElementType, Slice, TensorMap};
use crate::swiglu::Gate;

/// The most rows, as in small_m.cu.
pub(crate) const MAX_ROWS: usize = 64;
/// Depth that a pipeline stage holds, as in small_m.cu.
const STEP: usize = 128;
/// Threads of a block, as in small_m.cu.
pub(crate) const THREADS: usize = 192;

/// What becomes of `x W^T`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// y `[T, outputs]` in bf16.
    Product,
    /// y `[n_splits, T, outputs]` in f32: the partial sum of each part of the depth.
    SplitK { n_splits: usize },
    /// y `[T, outputs / 2]` in bf16: `swiglu` of gate and up, whose weights are stacked.
    Gated(Gate),
}

/// How a kernel divides its work.
#[derive(Clone, Copy)]
pub(crate) struct Tiling {
    name: &'static str,
    /// Columns of y that a block computes.
    pub columns: usize,
    /// Weight matrices that a block multiplies with at once.
    n_matrices: usize,
    /// Pipeline stages of x and of the weights.
    stages: (usize, usize),
}

const fn tiling(name: &'static str, columns: usize, n_matrices: usize, stages: (usize, usize)) -> Tiling {
    Tiling { name, columns, n_matrices, stages }
}

/// By rising number of columns.
const PRODUCT: [Tiling; 4] = [
    tiling("product_small_m_16", 16, 1, (5, 8)),
    tiling("product_small_m_32", 32, 1, (5, 6)),
    tiling("product_small_m_48", 48, 1, (4, 5)),
    tiling("product_small_m_64", 64, 1, (4, 4)),
];
const SPLIT_K: Tiling = tiling("product_small_m_split_k", 64, 1, (4, 4));
const SWIGLU: Tiling = tiling("swiglu_small_m_48", 48, 2, (3, 4));
const GEGLU: Tiling = tiling("geglu_small_m_48", 48, 2, (3, 4));

impl Tiling {
    /// The stages' tiles, two mbarriers for each stage, and room to align the tiles to 1024 bytes.
    pub fn shared_bytes(self) -> usize {
        let (x, w) = self.stages;
        2 * STEP * (x * MAX_ROWS + w * self.n_matrices * self.columns) + 16 * (x + w) + 1024
    }
}

impl Output {
    /// `None` for a product with so many outputs that cuBLASLt fills the GPU as well.
    pub fn tiling(self, cuda: &Cuda, d: Dims) -> Option<Tiling> {
        let n_blocks = cuda.gpu.multiprocessors as usize;
        match self {
            Output::Product => PRODUCT.into_iter().find(|t| d.outputs.div_ceil(t.columns) <= n_blocks),
            Output::SplitK { .. } => Some(SPLIT_K),
            Output::Gated(Gate::Silu) => Some(SWIGLU),
            Output::Gated(Gate::GeluTanh) => Some(GEGLU),
        }
    }

    /// The element type of y. [`Output::Product`] does not fit a y in f32, such as logits.
    fn kind(self) -> ElementType {
        match self {
            Output::SplitK { .. } => ElementType::F32,
            Output::Product | Output::Gated(_) => ElementType::Bf16,
        }
    }

    /// Columns of y.
    pub fn width(self, d: Dims) -> usize {
        match self {
            Output::Gated(_) => d.outputs / 2,
            Output::Product | Output::SplitK { .. } => d.outputs,
        }
    }
}

/// Whether [`run`] may be called with the same arguments.
pub(crate) fn fits(output: Output, cuda: &Cuda, d: Dims, x: Slice, weight: Slice, y: Slice) -> bool {
    (1..=MAX_ROWS).contains(&d.tokens)
        && fits_tiles(output, cuda, d, x, weight, y)
        && output.tiling(cuda, d).is_some()
}

/// Whether kernels that copy and multiply whole tiles take the operands, of whatever number of rows.
pub(crate) fn fits_tiles(output: Output, cuda: &Cuda, d: Dims, x: Slice, weight: Slice, y: Slice) -> bool {
    let is_whole = d.inputs.is_multiple_of(STEP)
        && d.outputs.is_multiple_of(8)
        && output.width(d).is_multiple_of(8)
        && y.address.is_multiple_of(16)
        && x.len == d.tokens * d.inputs
        && weight.len == d.outputs * d.inputs;
    cuda.is_hopper()
        && is_whole
        && y.kind == output.kind()
        && TensorMap::fits(x, d.inputs)
        && TensorMap::fits(weight, d.inputs)
}

/// Shapes: x `[T, inputs]`; weight `[outputs, inputs]`; y as [`Output`] says, overwritten.
pub(crate) fn run(output: Output, cuda: &Cuda, d: Dims, x: Slice, weight: Slice, y: Slice) {
    let tiling = output.tiling(cuda, d).expect("small_m::run: a product that fits");
    let n_splits = if let Output::SplitK { n_splits } = output { n_splits } else { 1 };
    let width = output.width(d);
    let launch = cuda.kernel(&MATMUL_SMALL_M, tiling.name);
    let launch = launch.tensor_map(&TensorMap::new(x, d.tokens, d.inputs, d.tokens.next_multiple_of(8)));
    let launch = launch.tensor_map(&TensorMap::new(weight, d.outputs, d.inputs, tiling.columns));
    let launch = launch.arg(y).arg(d.tokens).arg(width).arg(d.inputs).programmatic_launch(true);
    launch.run([width.div_ceil(tiling.columns), n_splits], THREADS, tiling.shared_bytes());
}
