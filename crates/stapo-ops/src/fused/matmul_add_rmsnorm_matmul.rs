//! `matmul_add_rmsnorm::forward`, then a product of the normed rows, or gate and up and their SwiGLU: what lies between the
//! last product of a half-layer and the first of the next. For few rows every block of threads of the second product norms
//! the rows itself: one kernel less on the way.

use super::matmul_add_rmsnorm::{self, Product};
use super::matmul_swiglu::{self, GateUp};
use crate::cuda::Cuda;
use crate::device::Backend;
use crate::matmul::cuda::uses_split_k;
use crate::matmul::few_rows::{self, Norm, Output};
use crate::{Device, Float, View, ViewMut, Weight, check, matmul, rmsnorm, swiglu};

/// `sum = stream + product`, `normed = norm(sum)`. Shapes: stream, sum `[T, D]`; weight `[D]`; `out` is scratch that is left
/// holding anything.
pub struct Normed<'a, T: Float> {
    pub dims: rmsnorm::Dims,
    pub stream: View<'a, T>,
    pub weight: View<'a, T>,
    pub sum: ViewMut<'a, T>,
    pub out: rmsnorm::Out<'a, T>,
}

/// What becomes of `normed W^T`. Shapes: weight `[outputs, D]`.
pub enum Next<'a, T: Float> {
    /// y `[T, outputs]`, overwritten.
    Product { weight: &'a Weight<T>, y: ViewMut<'a, T> },
    /// out `[T, outputs / 2]`, overwritten with the SwiGLU of gate and up; gate_up `[T, outputs]`, scratch that is left
    /// holding anything.
    Swiglu { weight: &'a Weight<T>, gate_up: ViewMut<'a, T>, out: ViewMut<'a, T> },
}

/// Shapes: product as in [`matmul_add_rmsnorm::forward`].
pub fn forward<T: Float>(device: &Device, product: Product<'_, T>, normed: Normed<'_, T>, next: Next<'_, T>) {
    let op = "fused::matmul_add_rmsnorm_matmul";
    let rmsnorm::Dims { tokens, width, .. } = normed.dims;
    let (Next::Product { weight, .. } | Next::Swiglu { weight, .. }) = &next;
    let outputs = weight.shape().outputs;
    check(op, "next weight", weight.shape().inputs, width);
    check(op, "x", product.x.len(), tokens * product.weight.shape().inputs);
    check(op, "weight", product.weight.shape().outputs, width);
    check(op, "product", product.y.len(), tokens * width);
    check(op, "stream", normed.stream.len(), tokens * width);
    check(op, "sum", normed.sum.len(), tokens * width);
    match &next {
        Next::Product { y, .. } => check(op, "y", y.len(), tokens * outputs),
        Next::Swiglu { out, .. } => check(op, "out", out.len(), tokens * outputs / 2),
    }
    if let Backend::Cuda(cuda) = device.backend()
        && tokens <= few_rows::MAX_ROWS
    {
        let pair = pair(&product, &normed, &next);
        if fits(cuda, &pair) {
            return run(cuda, &pair);
        }
    }
    let Normed { dims, stream, weight: norm_weight, sum, out } = normed;
    let rmsnorm::Out { normed: mut rows, inv_rms } = out;
    let to = rmsnorm::Out { normed: rows.reborrow(), inv_rms };
    matmul_add_rmsnorm::forward(device, dims, stream, product, norm_weight, sum, to);
    match next {
        Next::Product { weight, y } => matmul::forward(device, tokens, rows.view(), weight, None, y),
        Next::Swiglu { weight, gate_up, out } => {
            let dims = swiglu::Dims { tokens, width: outputs / 2, gate: swiglu::Gate::Silu };
            let gate_up = (gate_up, GateUp::Dropped);
            matmul_swiglu::forward(device, dims, rows.view(), weight, gate_up, out);
        }
    }
}

/// The two products as kernels for few rows take them.
type Pair = [few_rows::Product; 2];

fn pair<T: Float>(product: &Product<'_, T>, normed: &Normed<'_, T>, next: &Next<'_, T>) -> Pair {
    let tokens = normed.dims.tokens;
    let dims_of = |weight: &Weight<T>| {
        let matmul::Shape { outputs, inputs } = weight.shape();
        matmul::Dims { tokens, inputs, outputs }
    };
    let (dims, weight) = (dims_of(product.weight), product.weight.view().cuda());
    let output = if uses_split_k(dims, weight) { Output::SplitK } else { Output::Product };
    let addend = product.y.cuda();
    let first = few_rows::Product { output, dims, x: product.x.cuda(), norm: None, weight, y: addend };
    let (weight, output, y) = match next {
        Next::Product { weight, y } => (weight, Output::Product, y.cuda()),
        Next::Swiglu { weight, out, .. } => (weight, Output::Swiglu, out.cuda()),
    };
    let norm =
        Norm { addend, sum: normed.sum.cuda(), weight: normed.weight.cuda(), eps: normed.dims.eps as f32 };
    let (dims, weight) = (dims_of(weight), weight.view().cuda());
    [first, few_rows::Product { output, dims, x: normed.stream.cuda(), norm: Some(norm), weight, y }]
}

fn fits(cuda: &Cuda, [first, second]: &Pair) -> bool {
    first.fits(cuda) && second.fits(cuda) && !uses_split_k(second.dims, second.weight)
}

fn run(cuda: &Cuda, [first, second]: &Pair) {
    first.run(cuda);
    second.run(cuda);
}
