//! Root-mean-square normalisation: `out = x / sqrt(mean(x^2) + eps) * weight`.
//!
//! Law: the sum over a row takes sixteen lanes (lane j the elements j, j+16, ..) and a fixed tree; d_weight is one
//! chain over the tokens, continuing from the value already there.

pub(crate) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, Weight, Write, check, embedding, matmul, residual};
use cuda::{Addition, Delta};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dims {
    pub tokens: usize,
    pub width: usize,
    pub eps: f64,
}

/// Shapes: x, out `[T, D]`; weight `[D]`; inv_rms `[T]`, kept for backward.
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    x: View<'_, T>,
    weight: View<'_, T>,
    out: ViewMut<'_, T>,
    inv_rms: ViewMut<'_, T>,
) {
    check_shapes("rmsnorm::forward", dims, weight, &inv_rms, [("x", x.len()), ("out", out.len())]);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let (out, inv_rms) = (out.into_host(), inv_rms.into_host());
            cpu::forward(cpu, dims, x.host(), None, weight.host(), out, inv_rms);
        }
        Backend::Cuda(cuda) => {
            cuda::forward(cuda, dims, x.cuda(), None, weight.cuda(), out.cuda(), inv_rms.cuda());
        }
    }
}

/// The residual addition and the norm in one pass: `sum = x + delta`, `out = norm(sum)`.
/// Shapes: x, delta, sum, out `[T, D]`; weight `[D]`; inv_rms `[T]`. Backward's x is `sum`.
pub fn forward_add<T: Float>(
    device: &Device,
    dims: Dims,
    x: View<'_, T>,
    delta: View<'_, T>,
    weight: View<'_, T>,
    sum: ViewMut<'_, T>,
    out: ViewMut<'_, T>,
    inv_rms: ViewMut<'_, T>,
) {
    let rows = [("x", x.len()), ("delta", delta.len()), ("sum", sum.len()), ("out", out.len())];
    check_shapes("rmsnorm::forward_add", dims, weight, &inv_rms, rows);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let add = Some((delta.host(), sum.into_host()));
            let (out, inv_rms) = (out.into_host(), inv_rms.into_host());
            cpu::forward(cpu, dims, x.host(), add, weight.host(), out, inv_rms);
        }
        Backend::Cuda(cuda) => {
            let add = Some(Addition { delta: Delta::Rows(delta.cuda()), rows: None, sum: sum.cuda() });
            cuda::forward(cuda, dims, x.cuda(), add, weight.cuda(), out.cuda(), inv_rms.cuda());
        }
    }
}

/// [`matmul::forward`] and [`forward_add`], bit for bit, for a caller who needs nothing in between: `sum = x + factor M^T`.
/// Shapes: factor `[T, inputs]`; matrix `[D, inputs]`; delta `[T, D]`, left holding anything; the others as there.
pub fn forward_add_product<T: Float>(
    device: &Device,
    dims: Dims,
    x: View<'_, T>,
    (factor, matrix): (View<'_, T>, &Weight<T>),
    mut delta: ViewMut<'_, T>,
    weight: View<'_, T>,
    sum: ViewMut<'_, T>,
    out: ViewMut<'_, T>,
    inv_rms: ViewMut<'_, T>,
) {
    if let Backend::Cuda(cuda) = device.backend() {
        let (op, shape) = ("rmsnorm::forward_add_product", matrix.shape());
        check(op, "factor", factor.len(), dims.tokens * shape.inputs);
        check(op, "matrix", shape.outputs, dims.width);
        let rows = [("x", x.len()), ("sum", sum.len()), ("out", out.len())];
        check_shapes(op, dims, weight, &inv_rms, rows);
        let (product, to) = ((factor.cuda(), matrix.view().cuda()), (sum.cuda(), out.cuda(), inv_rms.cuda()));
        if cuda::forward_add_product(cuda, dims, x.cuda(), product, weight.cuda(), to) {
            return;
        }
    }
    matmul::forward(device, dims.tokens, factor, matrix, None, delta.reborrow());
    forward_add(device, dims, x, delta.into_view(), weight, sum, out, inv_rms);
}

/// As [`forward_add`], of some of the rows: `rows` `[T]` are rows of x and delta, `[n, D]` both.
pub fn forward_add_rows<T: Float>(
    device: &Device,
    dims: Dims,
    rows: View<'_, u32>,
    x: View<'_, T>,
    delta: View<'_, T>,
    weight: View<'_, T>,
    mut sum: ViewMut<'_, T>,
    mut out: ViewMut<'_, T>,
    inv_rms: ViewMut<'_, T>,
) {
    let op = "rmsnorm::forward_add_rows";
    check(op, "rows", rows.len(), dims.tokens);
    check(op, "delta", delta.len(), x.len());
    check_shapes(op, dims, weight, &inv_rms, [("sum", sum.len()), ("out", out.len())]);
    if let Backend::Cuda(cuda) = device.backend() {
        let delta = Delta::Rows(delta.cuda());
        let add = Some(Addition { delta, rows: Some(rows.cuda()), sum: sum.cuda() });
        cuda::forward(cuda, dims, x.cuda(), add, weight.cuda(), out.cuda(), inv_rms.cuda());
        return;
    }
    let vocab = x.len() / dims.width.max(1);
    let gather = embedding::Dims { tokens: dims.tokens, vocab, width: dims.width };
    embedding::forward(device, gather, rows, x, sum.reborrow());
    embedding::forward(device, gather, rows, delta, out.reborrow());
    residual::add(device, sum.reborrow(), out.view());
    forward(device, dims, sum.into_view(), weight, out, inv_rms);
}

/// `rows`: buffers `[T, D]` and their lengths.
#[track_caller]
fn check_shapes<T: Float, const N: usize>(
    op: &str,
    dims: Dims,
    weight: View<'_, T>,
    inv_rms: &ViewMut<'_, T>,
    rows: [(&str, usize); N],
) {
    for (name, len) in rows {
        check(op, name, len, dims.tokens * dims.width);
    }
    check(op, "weight", weight.len(), dims.width);
    check(op, "inv_rms", inv_rms.len(), dims.tokens);
}

/// Shapes: x, d_out, d_x `[T, D]`; weight, d_weight `[D]`; inv_rms `[T]`. Adds into d_weight; sets d_x or adds to it
/// (the residual's gradient is already there) as `write` says.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    x: View<'_, T>,
    weight: View<'_, T>,
    inv_rms: View<'_, T>,
    d_out: View<'_, T>,
    write: Write,
    d_x: ViewMut<'_, T>,
    d_weight: ViewMut<'_, T>,
) {
    check("rmsnorm::backward", "x", x.len(), dims.tokens * dims.width);
    check("rmsnorm::backward", "weight", weight.len(), dims.width);
    check("rmsnorm::backward", "inv_rms", inv_rms.len(), dims.tokens);
    check("rmsnorm::backward", "d_out", d_out.len(), dims.tokens * dims.width);
    check("rmsnorm::backward", "d_x", d_x.len(), dims.tokens * dims.width);
    check("rmsnorm::backward", "d_weight", d_weight.len(), dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let (x, inv_rms, d_out) = (x.host(), inv_rms.host(), d_out.host());
            cpu::backward_input(cpu, dims, x, weight.host(), inv_rms, d_out, write, d_x.into_host());
            cpu::backward_weight(cpu, dims, x, inv_rms, d_out, d_weight.into_host());
        }
        Backend::Cuda(cuda) => {
            let saved = (x.cuda(), weight.cuda(), inv_rms.cuda());
            cuda::backward(cuda, dims, saved, d_out.cuda(), write, d_x.cuda(), d_weight.cuda());
        }
    }
}
