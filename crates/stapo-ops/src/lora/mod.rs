//! Low-rank adapters: the term `s (x A^T) B^T` that an adapter adds to a linear layer's product, and its gradients.
//!
//! A linear layer may be several modules stacked (queries, keys and values), each with an adapter of its own. `hidden`
//! `[T, pitch]` has `s x A^T` of the modules side by side, filled up to [`pitch`] columns; only the functions of this
//! module and of `fused::matmul_lora` read it.
//!
//! Law: on the CPU an element of `hidden` is one chain over the inputs, multiplied by s, and an element of y is the chain
//! of the layer's own product (with its bias), continued over the ranks in increasing order. On a Hopper GPU in bf16 an
//! element of `hidden` is the sum of four chains, each over a quarter of the inputs (rounded up to 128), times s, rounded
//! to bf16; the chain over the ranks starts from 0 and is added in f32 to the rounded product, and the sum is rounded once
//! more. Other GPUs take the kernels of `matmul`, with one chain for `hidden`. No result depends on the number of rows
//! or threads. On the CPU the gradients follow the laws of `matmul`; on a Hopper GPU those of the factors are the sums of
//! chains over some hundred tokens each, added in order.

pub(crate) mod cpu;
pub(crate) mod cuda;
mod cuda_plain;
pub(crate) mod small_m;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, Shape, View, ViewMut, Weight, Write, check};

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

/// Columns of `hidden` for the adapters of `n_modules` modules: whole matrix instructions of a GPU, which puts the modules
/// at multiples of 8 columns.
pub fn pitch(n_modules: usize, rank: usize) -> usize {
    (n_modules * rank.next_multiple_of(8)).next_multiple_of(16)
}

/// The adapters of a linear layer: of one rank and one factor s.
pub struct Adapter<'a, T: Float> {
    /// `[n rank, inputs]`: the first factors of n modules, one below the other.
    pub a: &'a Weight<T>,
    /// `[outputs of the module, rank]` each: the second factors.
    pub b: Vec<&'a Weight<T>>,
    /// One for each of the second factors.
    pub modules: &'a [Module],
}

impl<T: Float> Adapter<'_, T> {
    pub(crate) fn scale(&self) -> f64 {
        self.modules[0].scale
    }

    pub(crate) fn rank(&self) -> usize {
        self.modules[0].hidden.len
    }

    pub(crate) fn pitch(&self) -> usize {
        self.modules[0].hidden.of
    }

    fn inputs(&self) -> usize {
        self.a.shape().inputs
    }

    /// Columns of y.
    pub(crate) fn outputs(&self) -> usize {
        self.modules[0].outputs.of
    }

    #[track_caller]
    fn check(&self, op: &str, tokens: usize, hidden: usize) {
        check(op, "second factors", self.b.len(), self.modules.len());
        check(op, "a", self.a.shape().outputs, self.modules.len() * self.rank());
        check(op, "pitch", self.pitch(), pitch(self.modules.len(), self.rank()));
        check(op, "hidden", hidden, tokens * self.pitch());
        for (place, (module, b)) in self.modules.iter().zip(&self.b).enumerate() {
            let Shape { outputs, inputs } = b.shape();
            check(op, "b", outputs, module.outputs.len);
            check(op, "rank", inputs, self.rank());
            check(op, "start of a module", module.hidden.start, place * self.rank());
            let Band { start, len, of } = module.outputs;
            assert!(
                start + len <= of && of == self.outputs(),
                "{op}: columns {start}..{} of {of}",
                start + len
            );
        }
    }
}

/// What the terms of all modules are made from. Shapes: x `[T, inputs]`; hidden `[T, pitch]`, overwritten.
pub fn project<T: Float>(
    device: &Device,
    tokens: usize,
    x: View<'_, T>,
    adapter: &Adapter<'_, T>,
    hidden: ViewMut<'_, T>,
) {
    let op = "lora::project";
    adapter.check(op, tokens, hidden.len());
    check(op, "x", x.len(), tokens * adapter.inputs());
    match device.backend() {
        Backend::Cpu(cpu) => {
            let of = (adapter.scale(), adapter.pitch());
            T::lora_project(cpu, (tokens, adapter.a), x.host(), of, hidden.into_host());
        }
        Backend::Cuda(cuda) if cuda::fits(cuda, adapter) => {
            cuda::project(cuda, tokens, x.cuda(), adapter, hidden.cuda());
        }
        Backend::Cuda(cuda) => cuda_plain::project(cuda, tokens, x.cuda(), adapter, hidden.cuda()),
    }
}

/// Adds every module's term to its columns of y. Shapes: hidden `[T, pitch]`; y `[T, outputs of the layer]`.
pub fn expand<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    hidden: View<'_, T>,
    y: ViewMut<'_, T>,
) {
    let op = "lora::expand";
    adapter.check(op, tokens, hidden.len());
    check(op, "y", y.len(), tokens * adapter.outputs());
    match device.backend() {
        Backend::Cpu(cpu) => {
            let y = y.into_host();
            for (module, b) in adapter.modules.iter().zip(&adapter.b) {
                T::lora_expand(cpu, (tokens, *module), hidden.host(), b, y);
            }
        }
        Backend::Cuda(cuda) if cuda::fits(cuda, adapter) => {
            cuda::expand(cuda, tokens, adapter, hidden.cuda(), cuda::To::Y(y.cuda()));
        }
        Backend::Cuda(cuda) => cuda_plain::expand(cuda, tokens, adapter, hidden.cuda(), y.cuda()),
    }
}

/// The gradient of `x A^T` of all modules: `s d_y B`. Shapes: d_y `[T, outputs of the layer]`; d_hidden `[T, pitch]`,
/// overwritten.
pub fn backward_hidden<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_y: View<'_, T>,
    d_hidden: ViewMut<'_, T>,
) {
    let op = "lora::backward_hidden";
    adapter.check(op, tokens, d_hidden.len());
    check(op, "d_y", d_y.len(), tokens * adapter.outputs());
    match device.backend() {
        Backend::Cpu(cpu) => {
            let d_hidden = d_hidden.into_host();
            for (module, b) in adapter.modules.iter().zip(&adapter.b) {
                T::lora_backward_hidden(cpu, (tokens, *module), d_y.host(), b, d_hidden);
            }
        }
        Backend::Cuda(cuda) if cuda::fits(cuda, adapter) => {
            cuda::backward_hidden(cuda, tokens, adapter, d_y.cuda(), d_hidden.cuda());
        }
        Backend::Cuda(cuda) => {
            cuda_plain::backward_hidden(cuda, tokens, adapter, d_y.cuda(), d_hidden.cuda());
        }
    }
}

/// The gradients of the second factors: `d_b (+)= d_y^T hidden`. Shapes: d_y, hidden as in [`backward_hidden`]; `to` has
/// one for each module, `[outputs of the module, rank]`.
pub fn backward_b<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_y: View<'_, T>,
    hidden: View<'_, T>,
    to: Vec<(ViewMut<'_, T>, Write)>,
) {
    let op = "lora::backward_b";
    adapter.check(op, tokens, hidden.len());
    check(op, "d_y", d_y.len(), tokens * adapter.outputs());
    check(op, "gradients", to.len(), adapter.modules.len());
    for (module, (d_b, _)) in adapter.modules.iter().zip(&to) {
        check(op, "d_b", d_b.len(), module.outputs.len * module.hidden.len);
    }
    match device.backend() {
        Backend::Cpu(cpu) => {
            for (module, (mut d_b, write)) in adapter.modules.iter().zip(to) {
                if write == Write::Set {
                    d_b.fill(T::ZERO);
                }
                T::lora_backward_b(cpu, (tokens, *module), d_y.host(), hidden.host(), d_b.into_host());
            }
        }
        Backend::Cuda(cuda) => {
            let to: Vec<_> = to.iter().map(|(d_b, write)| (d_b.cuda(), *write)).collect();
            if cuda::fits(cuda, adapter) {
                cuda::backward_b(cuda, tokens, adapter, d_y.cuda(), hidden.cuda(), &to);
            } else {
                cuda_plain::backward_b(cuda, tokens, adapter, d_y.cuda(), hidden.cuda(), &to);
            }
        }
    }
}

/// The gradient of the first factors: `d_a (+)= d_hidden^T x`. Shapes: x `[T, inputs]`; d_hidden `[T, pitch]`; d_a
/// `[n rank, inputs]`.
pub fn backward_a<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    (x, d_hidden): (View<'_, T>, View<'_, T>),
    write: Write,
    mut d_a: ViewMut<'_, T>,
) {
    let op = "lora::backward_a";
    adapter.check(op, tokens, d_hidden.len());
    check(op, "x", x.len(), tokens * adapter.inputs());
    check(op, "d_a", d_a.len(), adapter.a.shape().len());
    match device.backend() {
        Backend::Cpu(cpu) => {
            if write == Write::Set {
                d_a.fill(T::ZERO);
            }
            let of = (tokens, adapter.a.shape(), adapter.pitch());
            T::lora_backward_a(cpu, of, x.host(), d_hidden.host(), d_a.into_host());
        }
        Backend::Cuda(cuda) if cuda::fits(cuda, adapter) => {
            cuda::backward_a(cuda, tokens, adapter, (x.cuda(), d_hidden.cuda()), write, d_a.cuda());
        }
        Backend::Cuda(cuda) => {
            cuda_plain::backward_a(cuda, tokens, adapter, (x.cuda(), d_hidden.cuda()), write, d_a.cuda());
        }
    }
}

/// Adds the terms' part to the gradient of x: `d_x += d_hidden A`. Shapes: d_hidden `[T, pitch]`; d_x `[T, inputs]`.
pub fn backward_input<T: Float>(
    device: &Device,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_hidden: View<'_, T>,
    d_x: ViewMut<'_, T>,
) {
    let op = "lora::backward_input";
    adapter.check(op, tokens, d_hidden.len());
    check(op, "d_x", d_x.len(), tokens * adapter.inputs());
    match device.backend() {
        Backend::Cpu(cpu) => {
            let of = (tokens, adapter.pitch());
            T::lora_backward_input(cpu, of, d_hidden.host(), adapter.a, d_x.into_host());
        }
        Backend::Cuda(cuda) if cuda::fits(cuda, adapter) => {
            cuda::backward_input(cuda, tokens, adapter, d_hidden.cuda(), d_x.cuda());
        }
        Backend::Cuda(cuda) => {
            cuda_plain::backward_input(cuda, tokens, adapter, d_hidden.cuda(), d_x.cuda());
        }
    }
}
