//! Products of one or two rows with the norm between them, as decode of few sequences has them, by the kernels of
//! few_rows.cu: on Hopper, for bf16 and whole tiles.

use super::Dims;
use crate::cuda::kernels::MATMUL_SMALL_M;
use crate::cuda::{Cuda, ElementType, Fields, Slice, TensorMap};

/// The most rows. The kernels take eight; with more than two, the norm in every block costs more than a kernel of its own.
pub(crate) const MAX_ROWS: usize = 2;
/// Depth that a pipeline stage holds, as in small_m.cu.
const STEP: usize = 128;
/// The most pipeline stages, as in few_rows.cu.
const MAX_STAGES: usize = 48;
/// The widest row that a kernel norms, as in few_rows.cu.
const MAX_NORMED: usize = 8192;
/// Columns of y that a block of a split-K product and of gate and up computes.
const SPLIT_K_COLUMNS: usize = 64;
const SWIGLU_COLUMNS: usize = 48;

/// Blocks of one kernel never share a multiprocessor, or another would idle: those that do not norm ask for more than half of
/// the shared memory, those that norm for more than half of the registers by threads that do nothing. So blocks of two
/// kernels in a row do fit side by side, and the second one loads its first weights while the first one ends.
const SHARED_BYTES: usize = 115_900;
const THREADS: usize = 160;
const NORM_THREADS: usize = 352;
/// The most shared memory of a block, less what the kernels declare themselves.
const MAX_SHARED_BYTES: usize = 224 << 10;

/// What becomes of `x W^T`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// y `[T, outputs]` in bf16.
    Product,
    /// y `[n_splits, T, outputs]` in f32: the partial sum of each part of the depth.
    SplitK { n_splits: usize },
    /// y `[T, outputs / 2]` in bf16: `swiglu` of gate and up, whose weights are stacked.
    Swiglu,
}

/// What is added to x before its norm.
#[derive(Clone, Copy)]
pub(crate) enum Addend {
    /// `[T, inputs]`
    Rows(Slice),
    /// The four partial sums of a split-K product, `[4, T, inputs]` in f32. The kernel adds them up and rounds the result.
    SplitK(Slice),
}

/// x is the residual stream: it becomes `norm(x + addend)`. Shapes: sum `[T, inputs]`, overwritten with `x + addend`; weight
/// `[inputs]`.
#[derive(Clone, Copy)]
pub(crate) struct Norm {
    pub addend: Addend,
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
    /// `None`: x is multiplied as it is. Only a product with a norm may be [`Output::Swiglu`].
    pub norm: Option<Norm>,
    pub weight: Slice,
    pub y: Slice,
}

impl Product {
    /// Whether [`Product::run`] may be called.
    pub(crate) fn fits(&self, cuda: &Cuda) -> bool {
        let Dims { tokens, inputs, outputs } = self.dims;
        let is_aligned = |slice: Slice| slice.address.is_multiple_of(16);
        let is_normed = self.norm.is_none_or(|norm| {
            let (Addend::Rows(addend) | Addend::SplitK(addend)) = norm.addend;
            inputs <= MAX_NORMED && [norm.weight, addend, norm.sum].into_iter().all(is_aligned)
        });
        cuda.is_hopper()
            && (1..=MAX_ROWS).contains(&tokens)
            && inputs.is_multiple_of(STEP * self.n_splits())
            && outputs.is_multiple_of(8)
            && self.width().is_multiple_of(8)
            && is_aligned(self.x)
            && self.x.kind == ElementType::Bf16
            && is_aligned(self.y)
            && self.y.kind == self.kind()
            && is_normed
            && TensorMap::fits(self.weight, inputs)
            && self.columns(cuda).is_some_and(|columns| self.shared_bytes(columns) <= MAX_SHARED_BYTES)
    }

    pub(crate) fn run(&self, cuda: &Cuda) {
        let columns = self.columns(cuda).expect("few_rows::run: a product that fits");
        let Dims { tokens, inputs, outputs } = self.dims;
        let name = match (self.output, self.norm) {
            (Output::Swiglu, _) => format!("few_rows_norm_swiglu_{columns}"),
            (Output::SplitK { .. }, _) => format!("few_rows_split_k_{columns}"),
            (Output::Product, Some(_)) => format!("few_rows_norm_{columns}"),
            (Output::Product, None) => format!("few_rows_{columns}"),
        };
        let (addend, partials) = match self.norm.map(|norm| norm.addend) {
            Some(Addend::Rows(addend)) => (Some(addend), None),
            Some(Addend::SplitK(partials)) => (None, Some(partials)),
            None => (None, None),
        };
        let args = Fields::default()
            .eight_bytes(self.x)
            .eight_bytes(addend)
            .eight_bytes(partials)
            .eight_bytes(self.norm.map(|norm| norm.weight))
            .eight_bytes(self.norm.map(|norm| norm.sum))
            .eight_bytes(self.y)
            .four_bytes(self.norm.map_or(0.0, |norm| norm.eps))
            .four_bytes(tokens)
            .four_bytes(self.depth())
            .four_bytes(inputs)
            .four_bytes(self.width())
            .four_bytes(self.n_stages(columns));
        let launch = cuda.kernel(&MATMUL_SMALL_M, &name);
        let launch = launch.tensor_map(&TensorMap::new(self.weight, outputs, inputs, columns)).fields(&args);
        let threads = if self.norm.is_some() { NORM_THREADS } else { THREADS };
        let grid = [self.width().div_ceil(columns), self.n_splits()];
        launch.programmatic_launch(true).run(grid, threads, self.shared_bytes(columns));
    }

    fn n_splits(&self) -> usize {
        if let Output::SplitK { n_splits } = self.output { n_splits } else { 1 }
    }

    /// Depth that a block takes.
    fn depth(&self) -> usize {
        self.dims.inputs / self.n_splits()
    }

    fn kind(&self) -> ElementType {
        match self.output {
            Output::SplitK { .. } => ElementType::F32,
            Output::Product | Output::Swiglu => ElementType::Bf16,
        }
    }

    /// Columns of y.
    fn width(&self) -> usize {
        match self.output {
            Output::Swiglu => self.dims.outputs / 2,
            Output::Product | Output::SplitK { .. } => self.dims.outputs,
        }
    }

    /// Columns of y that a block computes. `None` for a product with so many outputs that cuBLASLt fills the GPU as well.
    fn columns(&self, cuda: &Cuda) -> Option<usize> {
        let n_blocks = cuda.gpu.multiprocessors as usize;
        match self.output {
            Output::Product => [16, 32, 48].into_iter().find(|n| self.width().div_ceil(*n) <= n_blocks),
            Output::SplitK { .. } => Some(SPLIT_K_COLUMNS),
            Output::Swiglu => Some(SWIGLU_COLUMNS),
        }
    }

    fn stage_bytes(&self, columns: usize) -> usize {
        let n_matrices = if self.output == Output::Swiglu { 2 } else { 1 };
        2 * STEP * columns * n_matrices
    }

    /// As many as 64 or 96 KiB hold, as was found best.
    fn n_stages(&self, columns: usize) -> usize {
        let weight_bytes = if self.output == Output::Product { 64 << 10 } else { 96 << 10 };
        (weight_bytes / self.stage_bytes(columns)).clamp(1, MAX_STAGES.min(self.depth() / STEP))
    }

    /// The tiles with room to align them, and rows of x and of the norm's weights that are 16 bytes longer than they hold.
    fn shared_bytes(&self, columns: usize) -> usize {
        let n_rows = self.dims.tokens + usize::from(self.norm.is_some());
        let needed =
            self.n_stages(columns) * self.stage_bytes(columns) + 1024 + 2 * n_rows * (self.depth() + 8);
        if self.norm.is_some() { needed } else { needed.max(SHARED_BYTES) }
    }
}
