//! `rmsnorm::forward` or `rmsnorm::forward_add`, then a product of the normed rows, or gate and up and their SwiGLU. For few
//! rows every block of threads of the product norms the rows itself: one kernel less between two products.

use crate::cuda::{Cuda, Slice};
use crate::device::Backend;
use crate::matmul::cuda::n_chains;
use crate::matmul::few_rows::{self, Norm, Output};
use crate::{Device, Float, View, ViewMut, Weight, check, fused, matmul, rmsnorm, swiglu};

/// The rows that a half-layer begins with. Shapes: stream, addend, sum, normed `[T, D]`; norm_weight `[D]`; inv_rms `[T]`.
pub struct Entry<'a, T: Float> {
    pub dims: rmsnorm::Dims,
    pub stream: View<'a, T>,
    /// What is added to the stream before the norm, and where the sum goes.
    pub addition: Option<(View<'a, T>, ViewMut<'a, T>)>,
    pub norm_weight: View<'a, T>,
    /// Scratch that is left holding anything.
    pub out: rmsnorm::Out<'a, T>,
}

/// Whether so few rows are normed with the product behind the norm, instead of the one in front of it
/// (`matmul_add_rmsnorm`). On Hopper that is one kernel less; on a CPU both ways are the same ops, so tests there take the
/// way of the GPU.
pub fn pays(device: &Device, n_rows: usize) -> bool {
    let is_faster = match device.backend() {
        Backend::Cpu(_) => true,
        Backend::Cuda(cuda) => cuda.is_hopper(),
    };
    is_faster && n_rows <= few_rows::MAX_ROWS
}

/// `y = norm(stream + addend) W^T + bias`. Shapes: weight `[outputs, D]`; bias `[outputs]`; y `[T, outputs]`, overwritten.
pub fn forward<T: Float>(
    device: &Device,
    entry: Entry<'_, T>,
    weight: &Weight<T>,
    bias: Option<View<'_, T>>,
    y: ViewMut<'_, T>,
) {
    let op = "fused::rmsnorm_matmul";
    let matmul::Shape { outputs, inputs } = weight.shape();
    check_entry(op, &entry, inputs);
    check(op, "y", y.len(), entry.dims.tokens * outputs);
    if let Backend::Cuda(cuda) = device.backend()
        && bias.is_none()
    {
        let dims = matmul::Dims { tokens: entry.dims.tokens, inputs, outputs };
        let weight = weight.view().cuda();
        let output = Output::Product { n_chains: n_chains(dims, weight) };
        let product = product(&entry, output, dims, weight, y.cuda());
        if fits(cuda, &product) {
            return run(cuda, &product);
        }
    }
    let tokens = entry.dims.tokens;
    let normed = norm(device, entry);
    matmul::forward(device, tokens, normed, weight, bias, y);
}

/// `out = swiglu(norm(stream + addend) W^T)`. Shapes: weight `[2 width, D]`; gate_up `[T, 2 width]`, scratch that is left
/// holding anything; out `[T, width]`, overwritten.
pub fn forward_swiglu<T: Float>(
    device: &Device,
    entry: Entry<'_, T>,
    weight: &Weight<T>,
    gate_up: ViewMut<'_, T>,
    out: ViewMut<'_, T>,
) {
    let op = "fused::rmsnorm_matmul::forward_swiglu";
    let matmul::Shape { outputs, inputs } = weight.shape();
    check_entry(op, &entry, inputs);
    check(op, "out", out.len(), entry.dims.tokens * outputs / 2);
    let tokens = entry.dims.tokens;
    if let Backend::Cuda(cuda) = device.backend() {
        let dims = matmul::Dims { tokens, inputs, outputs };
        let product = product(&entry, Output::Swiglu, dims, weight.view().cuda(), out.cuda());
        if fits(cuda, &product) {
            return run(cuda, &product);
        }
    }
    let normed = norm(device, entry);
    let dims = swiglu::Dims { tokens, width: outputs / 2 };
    fused::matmul_swiglu::forward(device, dims, normed, weight, gate_up, out);
}

fn check_entry<T: Float>(op: &str, entry: &Entry<'_, T>, inputs: usize) {
    let rmsnorm::Dims { tokens, width, .. } = entry.dims;
    check(op, "inputs", inputs, width);
    check(op, "stream", entry.stream.len(), tokens * width);
    if let Some((addend, sum)) = &entry.addition {
        check(op, "addend", addend.len(), tokens * width);
        check(op, "sum", sum.len(), tokens * width);
    }
    rmsnorm::check_out(op, entry.dims, entry.norm_weight, &entry.out);
}

fn fits(cuda: &Cuda, product: &few_rows::Product) -> bool {
    product.fits(cuda)
}

fn run(cuda: &Cuda, product: &few_rows::Product) {
    product.run(cuda);
}

fn product<T: Float>(
    entry: &Entry<'_, T>,
    output: Output,
    dims: matmul::Dims,
    weight: Slice,
    y: Slice,
) -> few_rows::Product {
    let addition = entry.addition.as_ref().map(|(addend, sum)| (addend.cuda(), sum.cuda()));
    let norm = Norm { addition, weight: entry.norm_weight.cuda(), eps: entry.dims.eps as f32 };
    few_rows::Product { output, dims, x: entry.stream.cuda(), norm: Some(norm), weight, y }
}

/// The normed rows, by themselves.
fn norm<'a, T: Float>(device: &Device, entry: Entry<'a, T>) -> View<'a, T> {
    let Entry { dims, stream, addition, norm_weight, out } = entry;
    let rmsnorm::Out { mut normed, inv_rms } = out;
    let to = rmsnorm::Out { normed: normed.reborrow(), inv_rms };
    match addition {
        Some((addend, sum)) => {
            let residual = rmsnorm::Residual { stream, addend };
            rmsnorm::forward_add(device, dims, residual, norm_weight, sum, to);
        }
        None => rmsnorm::forward(device, dims, stream, norm_weight, to),
    }
    normed.into_view()
}
