//! `matmul::forward` with the weights of gate and up stacked, then `swiglu::forward`.

use crate::device::Backend;
use crate::matmul::{large_m, small_m};
use crate::{Device, Float, View, ViewMut, Weight, check, matmul, pitch_of, swiglu};

/// Whether gate and up are read after their SwiGLU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateUp {
    Kept,
    /// Left holding anything.
    Dropped,
}

/// `out = swiglu(x W^T)`. Shapes: x `[T, D]`; weight `[2 width, D]`; gate_up `[T, 2 width]`; out `[T, width]`, overwritten, on a
/// GPU possibly with further columns behind each row.
pub fn forward<T: Float>(
    device: &Device,
    dims: swiglu::Dims,
    x: View<'_, T>,
    weight: &Weight<T>,
    (mut gate_up, kept): (ViewMut<'_, T>, GateUp),
    out: ViewMut<'_, T>,
) {
    let op = "fused::matmul_swiglu";
    let matmul::Shape { outputs, inputs } = weight.shape();
    check(op, "weight", outputs, 2 * dims.width);
    check(op, "x", x.len(), dims.tokens * inputs);
    check(op, "gate_up", gate_up.len(), dims.tokens * outputs);
    let is_packed = pitch_of(op, "out", out.len(), dims.tokens, dims.width) == dims.width;
    if let Backend::Cuda(cuda) = device.backend()
        && is_packed
    {
        let d = matmul::Dims { tokens: dims.tokens, inputs, outputs };
        let (x, weight, out) = (x.cuda(), weight.view().cuda(), out.cuda());
        let few = small_m::Output::Gated(dims.gate);
        if kept == GateUp::Dropped && small_m::fits(few, cuda, d, x, weight, out) {
            return small_m::run(few, cuda, d, x, weight, out);
        }
        let kept = (kept == GateUp::Kept).then(|| gate_up.cuda());
        let many = large_m::Output::Gated { gate: dims.gate, kept };
        let operands = large_m::Operands { d, x, weight, n_further: 0 };
        if large_m::pays(many, cuda, &operands, out) {
            return large_m::run(many, cuda, &operands, out);
        }
    }
    matmul::forward(device, dims.tokens, x, weight, None, gate_up.reborrow());
    swiglu::forward(device, dims, gate_up.into_view(), out);
}
