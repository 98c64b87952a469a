//! cuBLASLt takes column-major matrices. A row-major matrix is the transpose of a column-major one, so `y = x W^T` is
//! computed as `y^T = W x^T`.

use std::sync::Arc;

use super::small_m::{self, Output};
use super::split_k::is_deep;
pub(crate) use super::split_k::{SPLIT_K, uses_split_k};
use super::{Dims, Shape, large_m};
use crate::Write;
use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{
    Columns, Cuda, ElementType, Fields, MatrixProduct, Memory, Placement, SPLIT_K_BYTES, Slice, StridedBatch,
    TILE_COLUMNS, add_column_sums, parts_for, upload_table,
};

pub(crate) fn forward(cuda: &Arc<Cuda>, d: Dims, x: Slice, weight: Slice, bias: Option<Slice>, y: Slice) {
    if bias.is_none() && y.kind == ElementType::Bf16 && uses_split_k(d, weight) {
        DeepProduct { d, x, weight, n_further: 0 }.run(cuda, y);
    } else if bias.is_none() && small_m::fits(Output::Product, cuda, d, x, weight, y) {
        small_m::run(Output::Product, cuda, d, x, weight, y);
    } else {
        forward_one_chain(cuda, d, x, weight, bias, y);
    }
}

/// `y = x W^T + bias` by cuBLASLt, one chain over the depth.
pub(crate) fn forward_one_chain(
    cuda: &Arc<Cuda>,
    d: Dims,
    x: Slice,
    weight: Slice,
    bias: Option<Slice>,
    y: Slice,
) {
    cuda.product(&MatrixProduct { bias, ..product(d, x, weight, y) });
}

/// How the rows of a weight lie. Of a weight that adapters are joined to (`Weight::joined_zeros`), further columns lie after
/// every row, or after each part of it that split-K takes.
struct RowLayout {
    /// Elements from one row to the next.
    pitch: usize,
    /// Parts of a row that have further columns.
    n_parts: usize,
}

impl RowLayout {
    fn for_weight(d: Dims, weight: Slice) -> Self {
        let pitch = weight.len / d.outputs.max(1);
        let is_split = pitch > d.inputs && uses_split_k(d, weight);
        Self { pitch, n_parts: if is_split { SPLIT_K } else { 1 } }
    }
}

/// `y = x W^T`.
pub(crate) fn product(d: Dims, x: Slice, weight: Slice, y: Slice) -> MatrixProduct {
    let strides = [RowLayout::for_weight(d, weight).pitch, x.len / d.tokens.max(1), d.outputs];
    MatrixProduct {
        m: d.outputs,
        n: d.tokens,
        k: d.inputs,
        a: weight,
        transposed_a: true,
        b: x,
        transposed_b: false,
        c: y,
        adds: false,
        bias: None,
        columns: Columns::Tokens,
        batch: None,
        alpha: 1.0,
        placement: Some(Placement { strides, starts: [0; 3] }),
    }
}

/// A product that uses split-K. Shapes: x `[T, inputs]`; weight `[outputs, inputs]`. Where adapters are joined, `n_further`
/// columns lie after each row of x and after each part of a row of the weight, and each part of the depth continues over
/// these: the weight's are 0 but after the last part, where x's are `s x A^T`.
pub(crate) struct DeepProduct {
    pub d: Dims,
    pub x: Slice,
    pub weight: Slice,
    pub n_further: usize,
}

impl DeepProduct {
    fn operands(&self) -> large_m::Operands {
        let Self { d, x, weight, n_further } = *self;
        large_m::Operands { d, x, weight, n_further }
    }

    /// Whether the partial sums stay in registers, and are added up there.
    pub(crate) fn is_one_kernel(&self, cuda: &Cuda, y: Slice) -> bool {
        large_m::pays(large_m::Output::Deep, cuda, &self.operands(), y)
    }

    /// y `[T, outputs]` becomes the rounded sum of the partial sums.
    pub(crate) fn run(&self, cuda: &Arc<Cuda>, y: Slice) {
        if self.is_one_kernel(cuda, y) {
            return large_m::run(large_m::Output::Deep, cuda, &self.operands(), y);
        }
        self.for_each_split(cuda, |start, n, partials| {
            let y = y.part(start * self.d.outputs, n * self.d.outputs);
            let launch = cuda.kernel(&ELEMENTWISE, "sum_of_parts_bf16").arg(partials).arg(y);
            launch.arg(y.len).arg(SPLIT_K).run([y.len.div_ceil(8 * 256), 1], 256, 0);
        });
    }

    /// Computes the partial sums, some rows at a time. `each` is given the first row, the number of rows n and the partial
    /// sums `[SPLIT_K, n, outputs]` in f32. `each` must queue the kernel that reads the partial sums before it returns,
    /// because those of the next rows overwrite the memory.
    pub(crate) fn for_each_split(&self, cuda: &Arc<Cuda>, mut each: impl FnMut(usize, usize, Slice)) {
        let DeepProduct { d, weight, n_further, .. } = *self;
        let at_once = SPLIT_K_BYTES / (4 * SPLIT_K * d.outputs);
        assert!(at_once > 0, "matmul::forward: {} outputs of a deep product", d.outputs);
        let x_pitch = self.x.len / d.tokens.max(1);
        let row = RowLayout::for_weight(d, weight);
        for start in (0..d.tokens).step_by(at_once) {
            let n = at_once.min(d.tokens - start);
            let x = self.x.part(start * x_pitch, n * x_pitch);
            let d = Dims { tokens: n, ..d };
            let partials = cuda.split_k_workspace(SPLIT_K * n * d.outputs);
            let output = Output::SplitK { n_splits: SPLIT_K };
            if n_further == 0 && small_m::fits(output, cuda, d, x, weight, partials) {
                small_m::run(output, cuda, d, x, weight, partials);
            } else {
                let apart = [row.pitch / SPLIT_K, d.inputs / SPLIT_K, n * d.outputs];
                let batch = Some(StridedBatch { n: SPLIT_K, apart });
                let whole = product(d, x, weight, partials);
                cuda.product(&MatrixProduct { k: d.inputs / SPLIT_K + n_further, batch, ..whole });
            }
            each(start, n, partials);
        }
    }
}

pub(crate) fn backward_input(cuda: &Arc<Cuda>, d: Dims, d_y: Slice, weight: Slice, write: Write, d_x: Slice) {
    let RowLayout { pitch, n_parts } = RowLayout::for_weight(d, weight);
    let m = d.inputs / n_parts;
    let batch = (n_parts > 1).then_some(StridedBatch { n: n_parts, apart: [pitch / n_parts, 0, m] });
    let placement = Some(Placement { strides: [pitch, d.outputs, d.inputs], starts: [0; 3] });
    let whole = input_gradient(d, d_y, weight, write, d_x);
    cuda.product(&MatrixProduct { m, batch, placement, ..whole });
}

/// `d_x = d_y W` over the first columns of a matrix `[depth, pitch]`. Shapes: d_y `[T, depth]`; d_x `[T, inputs]`.
pub(crate) fn backward_input_rows(
    cuda: &Arc<Cuda>,
    (tokens, depth): (usize, usize),
    d_y: Slice,
    (matrix, pitch): (Slice, usize),
    d_x: Slice,
) {
    let inputs = d_x.len / tokens.max(1);
    let d = Dims { tokens, inputs, outputs: depth };
    let placement = Some(Placement { strides: [pitch, depth, inputs], starts: [0; 3] });
    cuda.product(&MatrixProduct { placement, ..input_gradient(d, d_y, matrix, Write::Set, d_x) });
}

/// `d_x (+)= d_y W`.
pub(crate) fn input_gradient(d: Dims, d_y: Slice, weight: Slice, write: Write, d_x: Slice) -> MatrixProduct {
    MatrixProduct {
        m: d.inputs,
        n: d.tokens,
        k: d.outputs,
        a: weight,
        transposed_a: false,
        b: d_y,
        transposed_b: false,
        c: d_x,
        adds: write == Write::Add,
        bias: None,
        columns: Columns::Tokens,
        batch: None,
        alpha: 1.0,
        placement: None,
    }
}

pub(crate) fn backward_weight(
    cuda: &Arc<Cuda>,
    d: Dims,
    x: Slice,
    d_y: Slice,
    write: Write,
    d_weight: Slice,
) {
    if d.tokens == 0 {
        if write == Write::Set {
            cuda.fill(d_weight, 0.0f32);
        }
        return;
    }
    cuda.product(&weight_gradient(d, x, d_y, write, d_weight));
}

/// `d_weight (+)= d_y^T x`.
pub(crate) fn weight_gradient(d: Dims, x: Slice, d_y: Slice, write: Write, d_weight: Slice) -> MatrixProduct {
    MatrixProduct {
        m: d.inputs,
        n: d.outputs,
        k: d.tokens,
        a: x,
        transposed_a: false,
        b: d_y,
        transposed_b: true,
        c: d_weight,
        adds: write == Write::Add,
        bias: None,
        columns: Columns::Width,
        batch: None,
        alpha: 1.0,
        placement: None,
    }
}

pub(crate) fn backward_bias(cuda: &Arc<Cuda>, tokens: usize, outputs: usize, d_y: Slice, d_bias: Slice) {
    let n_parts = parts_for(cuda, tokens).min(64);
    let parts_memory = Memory::scratch(cuda, n_parts * outputs, ElementType::F32);
    let parts = parts_memory.slice();
    let name = format!("column_parts_{}", d_y.name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(d_y).arg(parts).arg(tokens).arg(outputs);
    launch.run([outputs.div_ceil(256), n_parts], 256, 0);
    add_column_sums(cuda, parts, n_parts, d_bias.f32("matmul::backward_bias"));
}

/// Rows of a group are filled up to a multiple of this, the depth of a matrix instruction.
pub(crate) const GROUP_ROWS: usize = 16;

/// The form of a weight of `n_groups` groups of rows for the TMA: columns filled up with zeros to whole tiles, and the
/// rows of each group to multiples of [`GROUP_ROWS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Padding {
    pub n_groups: usize,
    pub rows: usize,
    pub columns: usize,
}

impl Padding {
    pub(crate) fn for_shape(shape: Shape, n_groups: usize) -> Self {
        let rows = (shape.outputs / n_groups.max(1)).next_multiple_of(GROUP_ROWS);
        Self { n_groups, rows, columns: shape.inputs.next_multiple_of(TILE_COLUMNS) }
    }

    pub(crate) fn shape(self) -> Shape {
        Shape { outputs: self.n_groups * self.rows, inputs: self.columns }
    }
}

/// A weight and the padded copy that is to be made of it.
pub(super) struct Pad {
    pub shape: Shape,
    pub to: Padding,
    pub weight: Slice,
    pub padded: Slice,
}

/// All in one launch.
pub(super) fn pad(cuda: &Arc<Cuda>, pads: &[Pad]) {
    let mut n_blocks = 0;
    let mut rows = Vec::new();
    for Pad { shape, to, weight, padded } in pads.iter().filter(|pad| pad.padded.len > 0) {
        let row = Fields::default().eight_bytes(*weight).eight_bytes(*padded).eight_bytes(padded.len);
        let row = row.four_bytes(n_blocks).four_bytes(shape.outputs / to.n_groups.max(1));
        rows.push(row.four_bytes(to.rows).four_bytes(shape.inputs).four_bytes(to.columns));
        n_blocks += padded.len.div_ceil(256);
    }
    if n_blocks > 0 {
        let table = upload_table(cuda, &rows);
        let launch = cuda.kernel(&ELEMENTWISE, "pad_groups_bf16").arg(table.slice()).arg(rows.len());
        launch.writes_weights().run([n_blocks, 1], 256, 0);
    }
}

/// Columns that lie after each of `n_parts` equal parts of a weight's row, for what adapters add to the product. A part is a
/// chain of a split-K product; the columns after all but the last are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Joined {
    pub n_parts: usize,
    pub columns: usize,
}

impl Joined {
    /// Of a layer of this shape.
    pub(super) fn for_shape(shape: Shape, columns: usize) -> Self {
        let Shape { outputs, inputs } = shape;
        let is_deep = is_deep(Dims { tokens: 0, inputs, outputs });
        Self { n_parts: if is_deep { SPLIT_K } else { 1 }, columns }
    }

    /// Elements from one row to the next.
    pub(super) fn pitch(self, shape: Shape) -> usize {
        shape.inputs + self.n_parts * self.columns
    }

    /// Rows, with those of first factors.
    pub(super) fn n_rows(self, shape: Shape) -> usize {
        shape.outputs + if self.n_parts == 1 { self.columns } else { 0 }
    }

    /// `to` `[outputs, inputs]` becomes the weight without the further columns.
    pub(super) fn take_out(self, cuda: &Cuda, shape: Shape, weight: Slice, to: Slice) {
        let part = shape.inputs / self.n_parts;
        self.copy(cuda, shape, (weight, part + self.columns), (to, part));
    }

    /// `from` `[outputs, inputs]` becomes the weight, whose further columns are left as they are.
    pub(super) fn put_in(self, cuda: &Cuda, shape: Shape, from: Slice, weight: Slice) {
        let part = shape.inputs / self.n_parts;
        self.copy(cuda, shape, (from, part), (weight, part + self.columns));
    }

    /// Copies every part of every row; each matrix has its parts so many elements apart.
    fn copy(
        self,
        cuda: &Cuda,
        shape: Shape,
        (from, from_apart): (Slice, usize),
        (to, to_apart): (Slice, usize),
    ) {
        let launch =
            cuda.kernel(&ELEMENTWISE, "copy_rows_bf16").arg(from).arg(from_apart).arg(to).arg(to_apart);
        let launch = launch.arg(shape.inputs / self.n_parts).arg(shape.len());
        launch.run([shape.len().div_ceil(256), 1], 256, 0);
    }
}

/// A factor `[.., columns]`, and where it lies in the rows of a weight.
pub(crate) struct JoinedFactor {
    pub factor: Slice,
    pub columns: usize,
    /// The address of the first column in the first row.
    pub to: u64,
    /// Elements from one row of the weight to the next.
    pub pitch: usize,
}

/// Copies factors to the weights that they are joined to, all in one launch.
pub(crate) fn join(cuda: &Arc<Cuda>, factors: &[JoinedFactor]) {
    let mut n_blocks = 0;
    let mut rows = Vec::new();
    for JoinedFactor { factor, columns, to, pitch } in factors.iter().filter(|of| of.factor.len > 0) {
        let row = Fields::default().eight_bytes(*factor).eight_bytes(*to).eight_bytes(factor.len);
        rows.push(row.four_bytes(n_blocks).four_bytes(*columns).four_bytes(*pitch));
        n_blocks += factor.len.div_ceil(256);
    }
    if n_blocks > 0 {
        let table = upload_table(cuda, &rows);
        let launch = cuda.kernel(&ELEMENTWISE, "join_factors_bf16").arg(table.slice()).arg(rows.len());
        launch.writes_weights().run([n_blocks, 1], 256, 0);
    }
}
