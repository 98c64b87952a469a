//! `matmul::forward` with the weights of gate and up stacked, then `swiglu::forward`.

use crate::device::Backend;
use crate::matmul::small_m::{self, Output};
use crate::{Device, Float, View, ViewMut, Weight, check, matmul, pitch_of, swiglu};

/// `out = swiglu(x W^T)`. Shapes: x `[T, D]`; weight `[2 width, D]`; gate_up `[T, 2 width]`, scratch that is left
/// holding anything; out `[T, width]`, overwritten, on a GPU possibly with further columns after each row.
pub fn forward<T: Float>(
    device: &Device,
    dims: swiglu::Dims,
    x: View<'_, T>,
    weight: &Weight<T>,
    mut gate_up: ViewMut<'_, T>,
    out: ViewMut<'_, T>,
) {
    let op = "fused::matmul_swiglu";
    let matmul::Shape { outputs, inputs } = weight.shape();
    check(op, "weight", outputs, 2 * dims.width);
    check(op, "x", x.len(), dims.tokens * inputs);
    let is_packed = pitch_of(op, "out", out.len(), dims.tokens, dims.width) == dims.width;
    if let Backend::Cuda(cuda) = device.backend()
        && is_packed
    {
        let product = matmul::Dims { tokens: dims.tokens, inputs, outputs };
        let (weight, output) = (weight.view().cuda(), Output::Gated(dims.gate));
        if small_m::fits(output, cuda, product, x.cuda(), weight, out.cuda()) {
            return small_m::run(output, cuda, product, x.cuda(), weight, out.cuda());
        }
    }
    matmul::forward(device, dims.tokens, x, weight, None, gate_up.reborrow());
    swiglu::forward(device, dims, gate_up.into_view(), out);
}
