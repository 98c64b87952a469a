//! `out = silu(gate) * up`, with gate and up side by side in one row: `gate_up[t] = [gate | up]`, the output of one
//! matrix product with the two weights stacked.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, Weight, check, matmul};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    pub tokens: usize,
    pub width: usize,
}

/// Shapes: gate_up `[T, 2 width]`; out `[T, width]`.
pub fn forward<T: Float>(device: &Device, dims: Dims, gate_up: View<'_, T>, out: ViewMut<'_, T>) {
    check("swiglu::forward", "gate_up", gate_up.len(), 2 * dims.tokens * dims.width);
    check("swiglu::forward", "out", out.len(), dims.tokens * dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => cpu::forward(cpu, dims, gate_up.host(), out.into_host()),
        Backend::Cuda(cuda) => cuda::forward(cuda, dims, gate_up.cuda(), out.cuda()),
    }
}

/// `out = swiglu(x W^T)`, bit for bit the product and [`forward`], for a caller who needs nothing in between. Shapes: x
/// `[T, D]`; weight `[2 width, D]`; gate_up `[T, 2 width]`, left holding anything; out `[T, width]`.
pub fn of_product<T: Float>(
    device: &Device,
    dims: Dims,
    x: View<'_, T>,
    weight: &Weight<T>,
    mut gate_up: ViewMut<'_, T>,
    out: ViewMut<'_, T>,
) {
    if let Backend::Cuda(cuda) = device.backend() {
        let op = "swiglu::of_product";
        let matmul::Shape { outputs, inputs } = weight.shape();
        check(op, "weight", outputs, 2 * dims.width);
        check(op, "x", x.len(), dims.tokens * inputs);
        check(op, "out", out.len(), dims.tokens * dims.width);
        let d = matmul::Dims { tokens: dims.tokens, inputs, outputs };
        if matmul::narrow::swiglu(cuda, d, x.cuda(), weight.view().cuda(), out.cuda()) {
            return;
        }
    }
    matmul::forward(device, dims.tokens, x, weight, None, gate_up.reborrow());
    forward(device, dims, gate_up.into_view(), out);
}

/// Shapes: d_out `[T, width]`; gate_up, d_gate_up `[T, 2 width]`, the latter overwritten.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    gate_up: View<'_, T>,
    d_out: View<'_, T>,
    d_gate_up: ViewMut<'_, T>,
) {
    check("swiglu::backward", "gate_up", gate_up.len(), 2 * dims.tokens * dims.width);
    check("swiglu::backward", "d_out", d_out.len(), dims.tokens * dims.width);
    check("swiglu::backward", "d_gate_up", d_gate_up.len(), 2 * dims.tokens * dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => cpu::backward(cpu, dims, gate_up.host(), d_out.host(), d_gate_up.into_host()),
        Backend::Cuda(cuda) => cuda::backward(cuda, dims, gate_up.cuda(), d_out.cuda(), d_gate_up.cuda()),
    }
}
