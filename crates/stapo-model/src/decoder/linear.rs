//! The one door for every product of a layer: training, prefill and decode call these methods, and whatever a linear
//! layer has beside its matrix is handled here.

use super::arena::HalfEntry;
use super::gradients::Gradient;
use super::weights::{Linear, Parameter};
use stapo_ops::fused::{matmul_add_rmsnorm, matmul_swiglu};
use stapo_ops::{Device, Float, View, ViewMut, Write, matmul, rmsnorm, swiglu};

/// Where a half-layer's result goes: it is added to the residual stream, and the sum is normed for the next half-layer.
pub struct ResidualNorm<'a, T: Float> {
    pub dims: rmsnorm::Dims,
    /// `[T, D]`: the residual stream.
    pub stream: View<'a, T>,
    /// `[T, D]`: memory for the product; left holding anything.
    pub addend: ViewMut<'a, T>,
    /// `[D]`: the next half-layer's norm.
    pub norm_weight: View<'a, T>,
    pub exit: HalfEntry<'a, T>,
}

impl<T: Float> Linear<Parameter<T>> {
    /// `y = x W^T + b`. Shapes: x `[n_rows, inputs]`; y `[n_rows, outputs]`.
    pub fn forward(&self, device: &Device, n_rows: usize, x: View<'_, T>, y: ViewMut<'_, T>) {
        let bias = self.bias.as_ref().map(Parameter::view);
        matmul::forward(device, n_rows, x, self.weight.matrix(), bias, y);
    }

    /// `swiglu(x W^T + b)` where gate and up are not read afterwards. Shapes: x `[n_rows, inputs]`; gate_up
    /// `[n_rows, outputs]`, left holding anything; out `[n_rows, outputs / 2]`.
    pub fn forward_swiglu(
        &self,
        device: &Device,
        dims: swiglu::Dims,
        x: View<'_, T>,
        mut gate_up: ViewMut<'_, T>,
        out: ViewMut<'_, T>,
    ) {
        if self.bias.is_some() {
            self.forward(device, dims.tokens, x, gate_up.reborrow());
            return swiglu::forward(device, dims, gate_up.into_view(), out);
        }
        matmul_swiglu::forward(device, dims, x, self.weight.matrix(), gate_up, out);
    }

    /// `exit.stream = stream + x W^T + b`, `exit.normed = norm(exit.stream)`. Shape: x `[n_rows, inputs]`.
    pub fn forward_residual_norm(&self, device: &Device, x: View<'_, T>, to: ResidualNorm<'_, T>) {
        let ResidualNorm { dims, stream, mut addend, norm_weight, exit } = to;
        let out = rmsnorm::Out { normed: exit.normed, inv_rms: exit.inv_rms };
        if self.bias.is_some() {
            self.forward(device, dims.tokens, x, addend.reborrow());
            let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
            return rmsnorm::forward_add(device, dims, residual, norm_weight, exit.stream, out);
        }
        let product = matmul_add_rmsnorm::Product { x, weight: self.weight.matrix(), y: addend };
        matmul_add_rmsnorm::forward(device, dims, stream, product, norm_weight, exit.stream, out);
    }

    /// Sets `d_x` and adds to the gradients of weight and bias. Shapes: x, d_x `[n_rows, inputs]`; d_y
    /// `[n_rows, outputs]`.
    pub fn backward(
        &self,
        device: &Device,
        n_rows: usize,
        x: View<'_, T>,
        d_y: View<'_, T>,
        d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Gradient<T>>,
    ) {
        let weight = self.weight.matrix();
        let stapo_ops::Shape { outputs, inputs } = weight.shape();
        if let Some(d_bias) = &mut gradient.bias {
            matmul::backward_bias(device, n_rows, outputs, d_y, d_bias.sum_mut());
        }
        matmul::backward_input(device, n_rows, d_y, weight, Write::Set, d_x);
        let dims = matmul::Dims { tokens: n_rows, inputs, outputs };
        let (d_weight, write) = gradient.weight.writable();
        matmul::backward_weight(device, dims, x, d_y, write, d_weight);
    }
}
