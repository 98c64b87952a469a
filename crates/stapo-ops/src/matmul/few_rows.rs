//! Products of few rows with the norm between them, as decode of few sequences has them, by the kernels of few_rows.cu: on
//! Hopper, for bf16 and whole tiles.

use super::Dims;
use super::cuda::SPLIT_K;
use crate::cuda::kernels::MATMUL_FEW_ROWS;
use crate::cuda::{Cuda, ElementType, Fields, Slice, TensorMap};

/// The most rows. The kernels take eight; with more than four, the norm in every block costs more than a separate kernel.
pub(crate) const MAX_ROWS: usize = 4;
/// Depth that a pipeline stage holds, as in small_m.cu.
const STEP: usize = 128;
/// The widest row that a kernel norms, as in few_rows.cu.
const MAX_NORMED: usize = 8192;

/// How a kernel divides its work, as in few_rows.cu.
#[derive(Clone, Copy)]
struct Tiling {
    /// Columns of y that a block computes.
    columns: usize,
    /// Products that a block computes at once: of gate and up, or of the parts of a split-K product.
    n_parts: usize,
    /// Pipeline stages of the weights. More weights ahead compete with the kernel in front.
    n_stages: usize,
    /// Threads of a block without and with a norm.
    threads: (usize, usize),
}

const fn tiling(columns: usize, n_parts: usize, n_stages: usize, threads: (usize, usize)) -> Tiling {
    Tiling { columns, n_parts, n_stages, threads }
}

/// By rising number of columns.
const PRODUCT: [Tiling; 3] =
    [tiling(16, 1, 16, (160, 288)), tiling(32, 1, 8, (160, 288)), tiling(48, 1, 5, (160, 288))];
const SPLIT: [Tiling; 3] = [
    tiling(16, SPLIT_K, 5, (160, 160)),
    tiling(32, SPLIT_K, 3, (288, 288)),
    tiling(48, SPLIT_K, 2, (416, 416)),
];
const SWIGLU: [Tiling; 1] = [tiling(48, 2, 6, (288, 288))];

/// Blocks of one kernel never share a multiprocessor, or another would idle: those that do not norm ask for more than half of
/// the shared memory, those that norm have more than half of the registers. So blocks of two kernels in a row do fit side
/// by side, and the second one loads its first weights while the first one ends.
const SHARED_BYTES: usize = 115_900;
/// The most shared memory of a block, less what the kernels declare themselves.
const MAX_SHARED_BYTES: usize = 220 << 10;

/// What becomes of `x W^T`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// y `[T, outputs]`
    Product,
    /// The same by split-K, for weights that use it.
    SplitK,
    /// y `[T, outputs / 2]`: `swiglu` of gate and up, whose weights are stacked.
    Swiglu,
}

/// x is the residual stream: it becomes `norm(x + addend)`. Shapes: addend `[T, inputs]`; sum `[T, inputs]`, overwritten with
/// `x + addend`; weight `[inputs]`.
#[derive(Clone, Copy)]
pub(crate) struct Norm {
    pub addend: Slice,
    pub sum: Slice,
    pub weight: Slice,
    pub eps: f32,
}

/// A product. Shapes: x `[T, inputs]`; weight `[outputs, inputs]`; y as [`Output`] says, overwritten.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub output: Output,
    pub dims: Dims,
    pub x: Slice,
    /// `None`: x is multiplied as it is. A product with a norm is not [`Output::SplitK`], one without is not
    /// [`Output::Swiglu`].
    pub norm: Option<Norm>,
    pub weight: Slice,
    pub y: Slice,
}

impl Product {
    /// Whether [`Product::run`] may be called.
    pub(crate) fn fits(&self, cuda: &Cuda) -> bool {
        let Dims { tokens, inputs, outputs } = self.dims;
        let is_aligned = |slice: Slice| slice.address.is_multiple_of(16);
        let is_bf16 = |slice: Slice| slice.kind == ElementType::Bf16;
        let is_normed = self.norm.is_none_or(|norm| {
            inputs <= MAX_NORMED && [norm.weight, norm.addend, norm.sum].into_iter().all(is_aligned)
        });
        let n_splits = if self.output == Output::SplitK { SPLIT_K } else { 1 };
        cuda.is_hopper()
            && (1..=MAX_ROWS).contains(&tokens)
            && inputs.is_multiple_of(STEP * n_splits)
            && outputs.is_multiple_of(8)
            && self.width().is_multiple_of(8)
            && [self.x, self.y].into_iter().all(|slice| is_aligned(slice) && is_bf16(slice))
            && is_normed
            && (self.output == Output::Swiglu) <= self.norm.is_some()
            && (self.output == Output::SplitK) <= self.norm.is_none()
            && TensorMap::fits(self.weight, inputs)
            && self.tiling(cuda).is_some_and(|tiling| self.shared_bytes(tiling) <= MAX_SHARED_BYTES)
    }

    pub(crate) fn run(&self, cuda: &Cuda) {
        let tiling = self.tiling(cuda).expect("few_rows::run: a product that fits");
        let columns = tiling.columns;
        let Dims { tokens, inputs, outputs } = self.dims;
        let name = match (self.output, self.norm) {
            (Output::Swiglu, _) => format!("few_rows_norm_swiglu_{columns}"),
            (Output::SplitK, _) => format!("few_rows_split_k_{columns}"),
            (Output::Product, Some(_)) => format!("few_rows_norm_{columns}"),
            (Output::Product, None) => format!("few_rows_{columns}"),
        };
        let args = Fields::default()
            .eight_bytes(self.x)
            .eight_bytes(self.norm.map(|norm| norm.addend))
            .eight_bytes(self.norm.map(|norm| norm.weight))
            .eight_bytes(self.norm.map(|norm| norm.sum))
            .eight_bytes(self.y)
            .four_bytes(self.norm.map_or(0.0, |norm| norm.eps))
            .four_bytes(tokens)
            .four_bytes(inputs)
            .four_bytes(self.width());
        let launch = cuda.kernel(&MATMUL_FEW_ROWS, &name);
        let launch = launch.tensor_map(&TensorMap::new(self.weight, outputs, inputs, columns)).fields(&args);
        let threads = if self.norm.is_some() { tiling.threads.1 } else { tiling.threads.0 };
        let grid = [self.width().div_ceil(columns), 1];
        launch.programmatic_launch(true).run(grid, threads, self.shared_bytes(tiling));
    }

    /// Columns of y.
    fn width(&self) -> usize {
        match self.output {
            Output::Swiglu => self.dims.outputs / 2,
            Output::Product | Output::SplitK => self.dims.outputs,
        }
    }

    /// The least columns a block with which every multiprocessor has one block at most, or the most there are for gate and up
    /// and for split-K. `None` for a product with so many outputs that cuBLASLt fills the GPU as well.
    fn tiling(&self, cuda: &Cuda) -> Option<Tiling> {
        let n_blocks = cuda.gpu.multiprocessors as usize;
        let (tilings, last): (&[Tiling], _) = match self.output {
            Output::Product => (&PRODUCT, None),
            Output::SplitK => (&SPLIT, SPLIT.last()),
            Output::Swiglu => (&SWIGLU, SWIGLU.last()),
        };
        tilings.iter().find(|t| self.width().div_ceil(t.columns) <= n_blocks).or(last).copied()
    }

    /// The tiles with room to align them, and rows of x and of the norm's weights that are 16 bytes longer than they hold.
    fn shared_bytes(&self, tiling: Tiling) -> usize {
        let n_rows = self.dims.tokens + usize::from(self.norm.is_some());
        let tiles = 2 * STEP * tiling.columns * tiling.n_parts * tiling.n_stages;
        let needed = tiles + 1024 + 2 * n_rows * (self.dims.inputs + 8);
        if self.norm.is_some() { needed } else { needed.max(SHARED_BYTES) }
    }
}
