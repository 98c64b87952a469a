//! Products of at most eight rows, as decode of few sequences has them, by the kernels of few_rows.cu: on Hopper, for bf16
//! and whole tiles. The input may be a residual stream that the kernel norms.

use super::Dims;
use crate::cuda::kernels::MATMUL_SMALL_M;
use crate::cuda::{Cuda, ElementType, Fields, Slice, TensorMap};

/// The most rows, as in few_rows.cu.
pub(crate) const MAX_ROWS: usize = 8;
/// Depth that a pipeline stage holds, as in small_m.cu.
const STEP: usize = 128;
/// Threads of a block, as in few_rows.cu.
const THREADS: usize = 160;
/// The most pipeline stages, as in few_rows.cu.
const MAX_STAGES: usize = 48;
/// The widest row that the kernel norms, as in few_rows.cu.
const MAX_NORMED: usize = 8192;

/// What a block takes of its multiprocessor's 228 KiB of shared memory: so much that two kernels' blocks fit side by
/// side, and the next kernel copies its first weights while this one ends.
const SHARED_BYTES: usize = 110 << 10;
/// The least of it for weights. Where rows leave less, a block takes more.
const MIN_WEIGHT_BYTES: usize = 48 << 10;
/// The most that a block can have, less what the kernel declares itself.
const MAX_SHARED_BYTES: usize = 224 << 10;

/// What becomes of `x W^T`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Output {
    /// y `[T, outputs]`: the sum of the chains over `n_chains` parts of the depth.
    Product { n_chains: usize },
    /// y `[T, outputs / 2]`: `swiglu` of gate and up, whose weights are stacked.
    Swiglu,
}

/// The norm of x.
#[derive(Clone, Copy)]
pub(crate) struct Norm {
    /// What is added to x first, and where the sum goes, `[T, inputs]` each.
    pub addition: Option<(Slice, Slice)>,
    /// `[inputs]`
    pub weight: Slice,
    pub eps: f32,
}

/// A product. Shapes: x `[T, inputs]`; weight `[outputs, inputs]`; y as [`Output`] says, overwritten.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub output: Output,
    pub dims: Dims,
    pub x: Slice,
    /// `None`: x is multiplied as it is.
    pub norm: Option<Norm>,
    pub weight: Slice,
    pub y: Slice,
}

impl Product {
    /// Whether [`Product::run`] may be called.
    pub(crate) fn fits(&self, cuda: &Cuda) -> bool {
        let Dims { tokens, inputs, outputs } = self.dims;
        let is_aligned = |slice: Slice| slice.kind == ElementType::Bf16 && slice.address.is_multiple_of(16);
        let is_normed = self.norm.is_none_or(|norm| {
            let (addend, sum) = norm.addition.unwrap_or((self.x, self.x));
            inputs <= MAX_NORMED && [norm.weight, addend, sum].into_iter().all(is_aligned)
        });
        cuda.is_hopper()
            && (1..=MAX_ROWS).contains(&tokens)
            && inputs.is_multiple_of(STEP * self.n_chains())
            && outputs.is_multiple_of(8)
            && self.width().is_multiple_of(8)
            && is_aligned(self.x)
            && is_aligned(self.y)
            && is_normed
            && TensorMap::fits(self.weight, inputs)
            && self.columns(cuda).is_some_and(|columns| self.shared_bytes(columns) <= MAX_SHARED_BYTES)
    }

    pub(crate) fn run(&self, cuda: &Cuda) {
        let columns = self.columns(cuda).expect("few_rows::run: a product that fits");
        let Dims { tokens, inputs, outputs } = self.dims;
        let norm = self.norm.map_or("", |_| "norm_");
        let swiglu = if self.output == Output::Swiglu { "swiglu_" } else { "" };
        let name = format!("few_rows_{norm}{swiglu}{columns}");
        let addition = self.norm.and_then(|norm| norm.addition);
        let args = Fields::default()
            .eight_bytes(self.x)
            .eight_bytes(addition.map(|(addend, _)| addend))
            .eight_bytes(self.norm.map(|norm| norm.weight))
            .eight_bytes(addition.map(|(_, sum)| sum))
            .eight_bytes(self.y)
            .four_bytes(self.norm.map_or(0.0, |norm| norm.eps))
            .four_bytes(tokens)
            .four_bytes(inputs)
            .four_bytes(self.width())
            .four_bytes(self.n_chains())
            .four_bytes(self.n_stages(columns));
        let launch = cuda.kernel(&MATMUL_SMALL_M, &name);
        let launch = launch.tensor_map(&TensorMap::new(self.weight, outputs, inputs, columns)).fields(&args);
        let n_blocks = self.width().div_ceil(columns);
        launch.programmatic_launch(true).run([n_blocks, 1], THREADS, self.shared_bytes(columns));
    }

    fn n_chains(&self) -> usize {
        match self.output {
            Output::Product { n_chains } => n_chains,
            Output::Swiglu => 1,
        }
    }

    /// Columns of y.
    fn width(&self) -> usize {
        match self.output {
            Output::Product { .. } => self.dims.outputs,
            Output::Swiglu => self.dims.outputs / 2,
        }
    }

    /// Columns of y that a block computes. `None` for a product with so many outputs that cuBLASLt fills the GPU as well.
    fn columns(&self, cuda: &Cuda) -> Option<usize> {
        let n_blocks = cuda.gpu.multiprocessors as usize;
        match self.output {
            Output::Product { .. } => [16, 32, 48].into_iter().find(|n| self.width().div_ceil(*n) <= n_blocks),
            Output::Swiglu => Some(48),
        }
    }

    fn stage_bytes(&self, columns: usize) -> usize {
        let n_matrices = if self.output == Output::Swiglu { 2 } else { 1 };
        2 * STEP * columns * n_matrices
    }

    /// The rows of x and the norm's weights, 16 bytes apart beyond their length, and room to align the tiles.
    fn row_bytes(&self) -> usize {
        let n_rows = self.dims.tokens + usize::from(self.norm.is_some());
        2 * n_rows * (self.dims.inputs + 8) + 1024
    }

    fn n_stages(&self, columns: usize) -> usize {
        let for_weights = SHARED_BYTES.saturating_sub(self.row_bytes()).max(MIN_WEIGHT_BYTES);
        let n_steps = self.dims.inputs / STEP;
        (for_weights / self.stage_bytes(columns)).clamp(1, MAX_STAGES.min(n_steps))
    }

    fn shared_bytes(&self, columns: usize) -> usize {
        self.row_bytes() + self.n_stages(columns) * self.stage_bytes(columns)
    }
}
