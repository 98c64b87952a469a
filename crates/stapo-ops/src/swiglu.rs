//! `out = silu(gate) * up`, or with the tanh form of GELU for silu, with gate and up side by side in one row: `gate_up[t] = [gate | up]`, the output of one
//! product with the weights of gate and up stacked.

pub(crate) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    pub tokens: usize,
    pub width: usize,
    pub gate: Gate,
}

/// The activation of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `x sigmoid(x)`
    Silu,
    /// The tanh form of GELU: `x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

/// Shapes: gate_up `[T, 2 width]`; out `[T, width]`, on a GPU possibly with further columns after each row, which are left
/// as they are.
pub fn forward<T: Float>(device: &Device, dims: Dims, gate_up: View<'_, T>, out: ViewMut<'_, T>) {
    check("swiglu::forward", "gate_up", gate_up.len(), 2 * dims.tokens * dims.width);
    pitch_of("swiglu::forward", "out", out.len(), dims.tokens, dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => T::swiglu_forward(cpu, dims, gate_up.host(), out.into_host()),
        Backend::Cuda(cuda) => cuda::forward(cuda, dims, gate_up.cuda(), out.cuda()),
    }
}

/// Shapes: d_out `[T, width]`; gate_up, d_gate_up `[T, 2 width]`, the latter overwritten, on a GPU possibly with further columns
/// after its rows.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    gate_up: View<'_, T>,
    d_out: View<'_, T>,
    d_gate_up: ViewMut<'_, T>,
) {
    check("swiglu::backward", "gate_up", gate_up.len(), 2 * dims.tokens * dims.width);
    check("swiglu::backward", "d_out", d_out.len(), dims.tokens * dims.width);
    pitch_of("swiglu::backward", "d_gate_up", d_gate_up.len(), dims.tokens, 2 * dims.width);
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::swiglu_backward(cpu, dims, gate_up.host(), d_out.host(), d_gate_up.into_host());
        }
        Backend::Cuda(cuda) => cuda::backward(cuda, dims, gate_up.cuda(), d_out.cuda(), d_gate_up.cuda()),
    }
}
