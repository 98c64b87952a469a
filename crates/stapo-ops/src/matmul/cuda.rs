//! cuBLASLt takes column-major matrices. A row-major matrix is the transpose of a column-major one, so `y = x W^T` is
//! computed as `y^T = W x^T`.

use std::sync::Arc;

use super::small_m::{self, Output};
use super::{Dims, Shape};
use crate::Write;
use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{
    Columns, Cuda, ElementType, MatrixProduct, Memory, SPLIT_K_BYTES, Slice, TILE_COLUMNS, add_column_sums,
    parts_for,
};

/// Parts that split-K divides the depth of a product into. An element is the sum of its partial sums, added up in
/// order.
pub(crate) const SPLIT_K: usize = 4;

/// A product with many inputs and few outputs leaves most of a GPU idle when its rows are few, so such a product uses
/// split-K. The choice depends on the shape of the weight alone, never on the number of rows: a row has the same bits
/// in every batch. Logits, in f32, and products with a bias never use split-K.
pub(crate) fn uses_split_k(d: Dims, weight: Slice) -> bool {
    let is_whole = d.inputs.is_multiple_of(128 * SPLIT_K) && d.outputs.is_multiple_of(8);
    let is_long = d.inputs >= 2048 && d.inputs >= 2 * d.outputs;
    is_whole && is_long && weight.kind == ElementType::Bf16
}

pub(crate) fn forward(cuda: &Arc<Cuda>, d: Dims, x: Slice, weight: Slice, bias: Option<Slice>, y: Slice) {
    if bias.is_none() && y.kind == ElementType::Bf16 && uses_split_k(d, weight) {
        for_each_split(cuda, d, (x, weight), 0, |start, n, partials| {
            let y = y.part(start * d.outputs, n * d.outputs);
            let launch = cuda.kernel(&ELEMENTWISE, "sum_of_parts_bf16").arg(partials).arg(y);
            launch.arg(y.len).arg(SPLIT_K).run([y.len.div_ceil(8 * 256), 1], 256, 0);
        });
    } else if bias.is_none() && small_m::fits(Output::Product, cuda, d, x, weight, y) {
        small_m::run(Output::Product, cuda, d, x, weight, y);
    } else {
        cuda.product(&MatrixProduct { bias, ..product(d, x, weight, y) });
    }
}

/// `y = x W^T`.
pub(crate) fn product(d: Dims, x: Slice, weight: Slice, y: Slice) -> MatrixProduct {
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
        n_splits: 1,
        alpha: 1.0,
        placement: None,
    }
}

/// Computes the partial sums of a split-K product, some rows at a time. `each` is given the first row, the number of
/// rows n and memory `[SPLIT_K + n_more, n, outputs]` in f32 that begins with the partial sums. `each` must queue the kernel that reads the partial sums
/// before it returns, because those of the next rows overwrite the memory.
pub(crate) fn for_each_split(
    cuda: &Arc<Cuda>,
    d: Dims,
    (x, weight): (Slice, Slice),
    n_more: usize,
    mut each: impl FnMut(usize, usize, Slice),
) {
    let at_once = SPLIT_K_BYTES / (4 * SPLIT_K * d.outputs);
    assert!(at_once > 0, "matmul::forward: {} outputs of a deep product", d.outputs);
    for start in (0..d.tokens).step_by(at_once) {
        let n = at_once.min(d.tokens - start);
        let x = x.part(start * d.inputs, n * d.inputs);
        let d = Dims { tokens: n, ..d };
        let memory = cuda.split_k_workspace((SPLIT_K + n_more) * n * d.outputs);
        let partials = memory.part(0, SPLIT_K * n * d.outputs);
        let output = Output::SplitK { n_splits: SPLIT_K };
        if small_m::fits(output, cuda, d, x, weight, partials) {
            small_m::run(output, cuda, d, x, weight, partials);
        } else {
            cuda.product(&MatrixProduct { n_splits: SPLIT_K, ..product(d, x, weight, partials) });
        }
        each(start, n, memory);
    }
}

pub(crate) fn backward_input(cuda: &Arc<Cuda>, d: Dims, d_y: Slice, weight: Slice, write: Write, d_x: Slice) {
    cuda.product(&input_gradient(d, d_y, weight, write, d_x));
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
        n_splits: 1,
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
        n_splits: 1,
        alpha: 1.0,
        placement: None,
    }
}

pub(super) fn backward_bias(cuda: &Arc<Cuda>, tokens: usize, outputs: usize, d_y: Slice, d_bias: Slice) {
    let n_parts = parts_for(cuda, tokens).min(64);
    let parts_memory = Memory::scratch(cuda, n_parts * outputs, ElementType::F32);
    let parts = parts_memory.slice();
    let name = format!("column_parts_{}", d_y.name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(d_y).arg(parts).arg(tokens).arg(outputs);
    launch.run([outputs.div_ceil(256), n_parts], 256, 0);
    add_column_sums(cuda, parts, n_parts, d_bias.f32("matmul::backward_bias"));
}

/// The form of a weight of `n_groups` groups of rows for the TMA: columns filled up with zeros to whole tiles, and the
/// rows of each group to multiples of 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Padding {
    pub n_groups: usize,
    pub rows: usize,
    pub columns: usize,
}

impl Padding {
    pub(crate) fn of(shape: Shape, n_groups: usize) -> Self {
        let rows = (shape.outputs / n_groups.max(1)).next_multiple_of(8);
        Self { n_groups, rows, columns: shape.inputs.next_multiple_of(TILE_COLUMNS) }
    }

    pub(crate) fn shape(self) -> Shape {
        Shape { outputs: self.n_groups * self.rows, inputs: self.columns }
    }
}

pub(super) fn pad(cuda: &Arc<Cuda>, shape: Shape, to: Padding, weight: Slice, padded: Slice) {
    let launch = cuda.kernel(&ELEMENTWISE, "pad_groups_bf16").arg(weight).arg(padded).arg(padded.len);
    let launch =
        launch.arg(shape.outputs / to.n_groups.max(1)).arg(to.rows).arg(shape.inputs).arg(to.columns);
    launch.run([padded.len.div_ceil(256), 1], 256, 0);
}
