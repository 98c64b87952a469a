//! Linear layers: `y = x W^T (+ bias)`, and both gradients.
//!
//! Law: an element of y is one chain of fused multiply-adds over the inputs in increasing order, starting from 0, the
//! bias added last; on a GPU a deep product uses split-K and is the sum of four such chains (see cuda.rs). An element
//! of d_x is one chain over the outputs. An element of d_weight is one chain over the tokens, continuing from the value
//! already there, or from 0. No result depends on the number of rows or threads.

pub(crate) mod cpu;
pub(crate) mod cuda;
pub(crate) mod few_rows;
pub(crate) mod large_m;
pub(crate) mod small_m;
mod split_k;
#[cfg(test)]
mod tests;
mod weight;

pub use weight::{Shape, Weight, WeightRows};

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, Write, check};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    pub tokens: usize,
    pub inputs: usize,
    pub outputs: usize,
}

/// Shapes: x `[T, inputs]`; weight `[outputs, inputs]`; bias `[outputs]`; y `[T, outputs]`, overwritten.
pub fn forward<T: Float>(
    device: &Device,
    tokens: usize,
    x: View<'_, T>,
    weight: &Weight<T>,
    bias: Option<View<'_, T>>,
    y: ViewMut<'_, T>,
) {
    let Shape { outputs, inputs } = weight.shape();
    check("matmul::forward", "x", x.len(), tokens * inputs);
    check("matmul::forward", "y", y.len(), tokens * outputs);
    if let Some(bias) = bias {
        check("matmul::forward", "bias", bias.len(), outputs);
    }
    let dims = Dims { tokens, inputs, outputs };
    match device.backend() {
        Backend::Cpu(cpu) => {
            let bias = bias.map(|bias| bias.host());
            T::matmul_forward(cpu, dims, x.host(), weight.panels().host(), bias, y.into_host());
        }
        Backend::Cuda(cuda) => {
            let bias = bias.map(|bias| bias.cuda());
            cuda::forward(cuda, dims, x.cuda(), weight.view().cuda(), bias, y.cuda());
        }
    }
}

/// `d_x (+)= d_y W`. Shapes: d_y `[T, outputs]`; d_x `[T, inputs]`.
pub fn backward_input<T: Float>(
    device: &Device,
    tokens: usize,
    d_y: View<'_, T>,
    weight: &Weight<T>,
    write: Write,
    d_x: ViewMut<'_, T>,
) {
    let Shape { outputs, inputs } = weight.shape();
    check("matmul::backward_input", "d_y", d_y.len(), tokens * outputs);
    check("matmul::backward_input", "d_x", d_x.len(), tokens * inputs);
    let dims = Dims { tokens, inputs, outputs };
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::matmul_backward_input(cpu, dims, d_y.host(), weight.view().host(), write, d_x.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::backward_input(cuda, dims, d_y.cuda(), weight.view().cuda(), write, d_x.cuda());
        }
    }
}

/// `d_weight (+)= d_y^T x`. Shapes: x `[T, inputs]`; d_y `[T, outputs]`; d_weight `[outputs, inputs]`.
pub fn backward_weight<T: Float>(
    device: &Device,
    dims: Dims,
    x: View<'_, T>,
    d_y: View<'_, T>,
    write: Write,
    mut d_weight: ViewMut<'_, T>,
) {
    let Dims { tokens, inputs, outputs } = dims;
    check("matmul::backward_weight", "x", x.len(), tokens * inputs);
    check("matmul::backward_weight", "d_y", d_y.len(), tokens * outputs);
    check("matmul::backward_weight", "d_weight", d_weight.len(), outputs * inputs);
    match device.backend() {
        Backend::Cpu(cpu) => {
            if write == Write::Set {
                d_weight.fill(T::ZERO);
            }
            T::matmul_backward_weight(cpu, dims, x.host(), d_y.host(), d_weight.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::backward_weight(cuda, dims, x.cuda(), d_y.cuda(), write, d_weight.cuda());
        }
    }
}

/// `d_bias += sum over tokens of d_y`. Shapes: d_y `[T, outputs]`; d_bias `[outputs]`.
pub fn backward_bias<T: Float>(
    device: &Device,
    tokens: usize,
    outputs: usize,
    d_y: View<'_, T>,
    d_bias: ViewMut<'_, T>,
) {
    check("matmul::backward_bias", "d_y", d_y.len(), tokens * outputs);
    check("matmul::backward_bias", "d_bias", d_bias.len(), outputs);
    match device.backend() {
        Backend::Cpu(cpu) => T::matmul_backward_bias(cpu, outputs, d_y.host(), d_bias.into_host()),
        Backend::Cuda(cuda) => cuda::backward_bias(cuda, tokens, outputs, d_y.cuda(), d_bias.cuda()),
    }
}
