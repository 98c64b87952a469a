//! Low-rank adapters: the term `s (x A^T) B^T` that an adapter adds to a linear layer's product, and its gradients.
//!
//! A linear layer may be several modules stacked (queries, keys and values), each with an adapter of its own. `hidden`
//! `[T, n rank]` has the modules side by side, all of them made by one product: `s x A^T` on the CPU, `x A^T` on a GPU,
//! where the products that read it multiply by s. Only the functions of this module read it.
//!
//! Law: an element of `hidden` is an element of `matmul::forward`, on the CPU then multiplied by s. On the CPU an element
//! of y is the chain of the layer's own product (with its bias), continued over the ranks in increasing order; on a GPU
//! the chain over the ranks starts from 0, is multiplied by s and added to y in f32, and the sum is rounded once. No
//! result depends on the number of rows or threads. The gradients follow the laws of `matmul`.

pub(crate) mod cpu;
pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, Shape, View, ViewMut, Weight, Write, check, matmul};

/// Some neighbouring columns of a matrix with `of` columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Band {
    pub start: usize,
    pub len: usize,
    pub of: usize,
}

/// One module of a linear layer: where it lies, and the factor s of its adapter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Module {
    pub scale: f64,
    /// Of `hidden`; as many columns as the adapter has ranks.
    pub hidden: Band,
    /// Of y.
    pub outputs: Band,
}

/// What the terms of all modules are made from. Shapes: x `[T, inputs]`; a `[n rank, inputs]`; hidden `[T, n rank]`,
/// overwritten.
pub fn project<T: Float>(
    device: &Device,
    tokens: usize,
    x: View<'_, T>,
    a: &Weight<T>,
    scale: f64,
    hidden: ViewMut<'_, T>,
) {
    let op = "lora::project";
    let Shape { outputs, inputs } = a.shape();
    check(op, "x", x.len(), tokens * inputs);
    check(op, "hidden", hidden.len(), tokens * outputs);
    match device.backend() {
        Backend::Cpu(cpu) => T::lora_project(cpu, (tokens, a), x.host(), scale, hidden.into_host()),
        Backend::Cuda(cuda) => {
            let dims = matmul::Dims { tokens, inputs, outputs };
            matmul::cuda::forward(cuda, dims, x.cuda(), a.view().cuda(), None, hidden.cuda());
        }
    }
}

/// Adds a module's term to its columns of y. Shapes: hidden `[T, n rank]`; b `[outputs of the module, rank]`; y
/// `[T, outputs of the layer]`.
pub fn expand<T: Float>(
    device: &Device,
    tokens: usize,
    module: Module,
    hidden: View<'_, T>,
    b: &Weight<T>,
    y: ViewMut<'_, T>,
) {
    check_module("lora::expand", tokens, module, b, (hidden.len(), y.len()));
    match device.backend() {
        Backend::Cpu(cpu) => T::lora_expand(cpu, (tokens, module), hidden.host(), b, y.into_host()),
        Backend::Cuda(cuda) => cuda::expand(cuda, tokens, module, hidden.cuda(), b, y.cuda()),
    }
}

/// The gradient of a module's columns of `x A^T`: `s d_y B`. Shapes as in [`expand`]; d_hidden like hidden, whose columns
/// of the module are overwritten.
pub fn backward_hidden<T: Float>(
    device: &Device,
    tokens: usize,
    module: Module,
    d_y: View<'_, T>,
    b: &Weight<T>,
    d_hidden: ViewMut<'_, T>,
) {
    check_module("lora::backward_hidden", tokens, module, b, (d_hidden.len(), d_y.len()));
    match device.backend() {
        Backend::Cpu(cpu) => {
            T::lora_backward_hidden(cpu, (tokens, module), d_y.host(), b, d_hidden.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::backward_hidden(cuda, tokens, module, d_y.cuda(), b, d_hidden.cuda());
        }
    }
}

/// The gradient of a module's second factor: `d_b (+)= s d_y^T (x A^T)`. Shapes as in [`expand`]; d_b
/// `[outputs of the module, rank]`.
pub fn backward_b<T: Float>(
    device: &Device,
    tokens: usize,
    module: Module,
    d_y: View<'_, T>,
    hidden: View<'_, T>,
    write: Write,
    mut d_b: ViewMut<'_, T>,
) {
    let op = "lora::backward_b";
    check(op, "hidden", hidden.len(), tokens * module.hidden.of);
    check(op, "d_y", d_y.len(), tokens * module.outputs.of);
    check(op, "d_b", d_b.len(), module.outputs.len * module.hidden.len);
    match device.backend() {
        Backend::Cpu(cpu) => {
            if write == Write::Set {
                d_b.fill(T::ZERO);
            }
            T::lora_backward_b(cpu, (tokens, module), d_y.host(), hidden.host(), d_b.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda::backward_b(cuda, tokens, module, d_y.cuda(), hidden.cuda(), write, d_b.cuda());
        }
    }
}

#[track_caller]
fn check_module<T: Float>(
    op: &str,
    tokens: usize,
    module: Module,
    b: &Weight<T>,
    (hidden, outputs): (usize, usize),
) {
    check(op, "hidden", hidden, tokens * module.hidden.of);
    check(op, "y", outputs, tokens * module.outputs.of);
    check(op, "b", b.shape().outputs, module.outputs.len);
    check(op, "rank", b.shape().inputs, module.hidden.len);
    for Band { start, len, of } in [module.hidden, module.outputs] {
        assert!(start + len <= of, "{op}: columns {start}..{} of {of}", start + len);
    }
}
