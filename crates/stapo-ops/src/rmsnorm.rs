//! Root-mean-square normalisation: `normed = x / sqrt(mean(x^2) + eps) * weight`.
//!
//! Law: the sum over a row takes sixteen lanes (lane j sums the elements j, j+16, ..) and a fixed tree; d_weight is one
//! chain over the tokens, continuing from the value already there.

pub(crate) mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, Write, check, embedding, pitch_of, residual};
use cuda::{Addend, Addition};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dims {
    pub tokens: usize,
    pub width: usize,
    pub eps: f64,
}

/// What a forward writes. Shapes: normed `[T, D]`, on a GPU possibly with further columns after each row, which are left as
/// they are; inv_rms `[T]`, `1 / sqrt(mean(x^2) + eps)`, kept for backward.
pub struct Out<'a, T: Float> {
    pub normed: ViewMut<'a, T>,
    pub inv_rms: ViewMut<'a, T>,
}

/// The residual stream and what is added to it, both `[T, D]`.
#[derive(Clone, Copy)]
pub struct Residual<'a, T: Float> {
    pub stream: View<'a, T>,
    pub addend: View<'a, T>,
}

/// What [`backward`] reads of its forward. Shapes: x `[T, D]`, after [`forward_add`] its `sum`; weight `[D]`; inv_rms
/// `[T]`.
#[derive(Clone, Copy)]
pub struct Saved<'a, T: Float> {
    pub x: View<'a, T>,
    pub weight: View<'a, T>,
    pub inv_rms: View<'a, T>,
}

/// Shapes: x `[T, D]`; weight `[D]`.
pub fn forward<T: Float>(device: &Device, dims: Dims, x: View<'_, T>, weight: View<'_, T>, to: Out<'_, T>) {
    let op = "rmsnorm::forward";
    check(op, "x", x.len(), dims.tokens * dims.width);
    check_out(op, dims, weight, &to);
    match device.backend() {
        Backend::Cpu(cpu) => T::rmsnorm_forward(cpu, dims, x.host(), None, weight.host(), to),
        Backend::Cuda(cuda) => {
            let (normed, inv_rms) = (to.normed.cuda(), to.inv_rms.cuda());
            cuda::forward(cuda, dims, x.cuda(), None, weight.cuda(), normed, inv_rms);
        }
    }
}

/// The residual addition and the norm in one pass: `sum = stream + addend`, `normed = norm(sum)`.
/// Shapes: sum `[T, D]`; weight `[D]`.
pub fn forward_add<T: Float>(
    device: &Device,
    dims: Dims,
    residual: Residual<'_, T>,
    weight: View<'_, T>,
    sum: ViewMut<'_, T>,
    to: Out<'_, T>,
) {
    let op = "rmsnorm::forward_add";
    let Residual { stream, addend } = residual;
    check(op, "stream", stream.len(), dims.tokens * dims.width);
    check(op, "addend", addend.len(), dims.tokens * dims.width);
    check(op, "sum", sum.len(), dims.tokens * dims.width);
    check_out(op, dims, weight, &to);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let add = Some((addend.host(), sum.into_host()));
            T::rmsnorm_forward(cpu, dims, stream.host(), add, weight.host(), to);
        }
        Backend::Cuda(cuda) => {
            let add = Addition { addend: Addend::Rows(addend.cuda()), rows: None, sum: sum.cuda() };
            let (normed, inv_rms) = (to.normed.cuda(), to.inv_rms.cuda());
            cuda::forward(cuda, dims, stream.cuda(), Some(add), weight.cuda(), normed, inv_rms);
        }
    }
}

/// [`forward_add`] of some rows: `rows` `[T]` are row numbers of a residual `[n, D]`.
pub fn forward_add_rows<T: Float>(
    device: &Device,
    dims: Dims,
    rows: View<'_, u32>,
    residual: Residual<'_, T>,
    weight: View<'_, T>,
    mut sum: ViewMut<'_, T>,
    mut to: Out<'_, T>,
) {
    let op = "rmsnorm::forward_add_rows";
    let Residual { stream, addend } = residual;
    check(op, "rows", rows.len(), dims.tokens);
    check(op, "addend", addend.len(), stream.len());
    check(op, "sum", sum.len(), dims.tokens * dims.width);
    check_out(op, dims, weight, &to);
    if let Backend::Cuda(cuda) = device.backend() {
        let addend = Addend::Rows(addend.cuda());
        let add = Addition { addend, rows: Some(rows.cuda()), sum: sum.cuda() };
        let (normed, inv_rms) = (to.normed.cuda(), to.inv_rms.cuda());
        cuda::forward(cuda, dims, stream.cuda(), Some(add), weight.cuda(), normed, inv_rms);
        return;
    }
    let n_rows = stream.len() / dims.width.max(1);
    let gather = embedding::Dims { tokens: dims.tokens, vocab: n_rows, width: dims.width };
    embedding::forward(device, gather, rows, stream, sum.reborrow());
    embedding::forward(device, gather, rows, addend, to.normed.reborrow());
    residual::add(device, sum.reborrow(), to.normed.view());
    forward(device, dims, sum.into_view(), weight, to);
}

#[track_caller]
pub(crate) fn check_out<T: Float>(op: &str, dims: Dims, weight: View<'_, T>, to: &Out<'_, T>) {
    check(op, "weight", weight.len(), dims.width);
    pitch_of(op, "normed", to.normed.len(), dims.tokens, dims.width);
    check(op, "inv_rms", to.inv_rms.len(), dims.tokens);
}

/// Shapes: d_out, d_x `[T, D]`; d_weight `[D]`, `None` for a frozen weight. Adds to d_weight. Sets d_x, or adds to d_x
/// where the gradient of the residual is already there, as `write` says.
pub fn backward<'a, T: Float>(
    device: &Device,
    dims: Dims,
    saved: Saved<'_, T>,
    d_out: View<'_, T>,
    write: Write,
    d_x: ViewMut<'_, T>,
    d_weight: impl Into<Option<ViewMut<'a, T>>>,
) {
    let d_weight = d_weight.into();
    let op = "rmsnorm::backward";
    check(op, "x", saved.x.len(), dims.tokens * dims.width);
    check(op, "weight", saved.weight.len(), dims.width);
    check(op, "inv_rms", saved.inv_rms.len(), dims.tokens);
    check(op, "d_out", d_out.len(), dims.tokens * dims.width);
    check(op, "d_x", d_x.len(), dims.tokens * dims.width);
    if let Some(d_weight) = &d_weight {
        check(op, "d_weight", d_weight.len(), dims.width);
    }
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::rmsnorm_backward_input(cpu, dims, saved, d_out.host(), write, d_x.into_host());
            if let Some(d_weight) = d_weight {
                T::rmsnorm_backward_weight(cpu, dims, saved, d_out.host(), d_weight.into_host());
            }
        }
        Backend::Cuda(cuda) => {
            let d_weight = d_weight.map(|d_weight| d_weight.cuda());
            cuda::backward(cuda, dims, saved, d_out.cuda(), write, d_x.cuda(), d_weight);
        }
    }
}
