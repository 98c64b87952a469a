//! Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2). Gradients accumulate un-normalised; the
//! update multiplies them by `grad_scale`, the product of `1 / N` and the clip factor.

pub(crate) mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, View, ViewMut, check};

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// The place of the first element in its parameter, where a part of one is updated: stochastic rounding depends on the
    /// places of elements.
    pub first: u64,
    /// The number of this update, counted from 1.
    pub step: u64,
}

/// What an update reads and writes of one tensor. All views have one length.
pub struct Tensor<'a, T: Float> {
    /// The same for all tensors of an update but for `weight_decay` and `first`.
    pub rule: AdamW,
    pub param: ViewMut<'a, T>,
    pub grad: View<'a, T>,
    pub m: ViewMut<'a, T>,
    pub v: ViewMut<'a, T>,
}

/// One update of all elements of all tensors: with `g = grad_scale * grad`, moments `m = b1 m + (1-b1) g`,
/// `v = b2 v + (1-b2) g^2`; `param = param (1 - lr decay) - lr mhat / (sqrt(vhat) + eps)`, `mhat`, `vhat` corrected for
/// bias. The factors are computed in f64 and rounded once. No bit depends on which tensors are updated together.
pub fn step<T: Float>(device: &Device, grad_scale: f64, tensors: Vec<Tensor<'_, T>>) {
    for Tensor { rule, param, grad, m, v } in &tensors {
        assert!(rule.step > 0, "adamw::step: step counts from 1, got 0");
        check("adamw::step", "grad", grad.len(), param.len());
        check("adamw::step", "m", m.len(), param.len());
        check("adamw::step", "v", v.len(), param.len());
    }
    match device.backend() {
        Backend::Cpu(cpu) => {
            for Tensor { rule, param, grad, m, v } in tensors {
                let (param, m, v) = (param.into_host(), m.into_host(), v.into_host());
                T::adamw_step(cpu, rule, grad_scale, param, grad.host(), m, v);
            }
        }
        Backend::Cuda(cuda) => cuda::step(cuda, grad_scale, &tensors),
    }
}

/// The factor that scales a gradient of norm `norm` down to `max_norm`; 1 if the norm is not larger.
pub fn clip_factor(norm: f64, max_norm: f64) -> f64 {
    if norm > max_norm { max_norm / norm } else { 1.0 }
}
