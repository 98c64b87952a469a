//! The one door for every product of a layer: training, prefill and decode call these methods, and whatever a linear
//! layer has beside its matrix is handled here.

use super::arena::{HalfEntry, Hidden, HiddenBackward};
use super::gradient::Gradient;
use super::lora::weight_of_first_factor;
use super::weights::{Adapter, Linear, Parameter};
use stapo_ops::fused::{matmul_add_rmsnorm, matmul_swiglu};
use stapo_ops::{Device, Float, Shape, View, ViewMut, Write, lora, matmul, rmsnorm, swiglu};

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
    /// `y = x W^T + b`, and the terms of the adapters. Shapes: x `[n_rows, inputs]`; y `[n_rows, outputs]`.
    pub fn forward(
        &self,
        device: &Device,
        n_rows: usize,
        x: View<'_, T>,
        mut y: ViewMut<'_, T>,
        hidden: Hidden<'_, T>,
    ) {
        let bias = self.bias.as_ref().map(Parameter::view);
        matmul::forward(device, n_rows, x, self.weight.matrix(), bias, y.reborrow());
        if let Some((adapter, hidden)) = self.adapter.as_ref().zip(hidden) {
            adapter.add_terms(device, n_rows, x, hidden, y);
        }
    }

    /// Whether `forward` is more than one product.
    fn is_plain(&self, hidden: &Hidden<'_, T>) -> bool {
        self.bias.is_none() && (self.adapter.is_none() || hidden.is_none())
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
        hidden: Hidden<'_, T>,
    ) {
        if !self.is_plain(&hidden) {
            self.forward(device, dims.tokens, x, gate_up.reborrow(), hidden);
            return swiglu::forward(device, dims, gate_up.into_view(), out);
        }
        matmul_swiglu::forward(device, dims, x, self.weight.matrix(), gate_up, out);
    }

    /// `exit.stream = stream + x W^T + b`, `exit.normed = norm(exit.stream)`. Shape: x `[n_rows, inputs]`.
    pub fn forward_residual_norm(
        &self,
        device: &Device,
        x: View<'_, T>,
        to: ResidualNorm<'_, T>,
        hidden: Hidden<'_, T>,
    ) {
        let ResidualNorm { dims, stream, mut addend, norm_weight, exit } = to;
        let out = rmsnorm::Out { normed: exit.normed, inv_rms: exit.inv_rms };
        if !self.is_plain(&hidden) {
            self.forward(device, dims.tokens, x, addend.reborrow(), hidden);
            let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
            return rmsnorm::forward_add(device, dims, residual, norm_weight, exit.stream, out);
        }
        let product = matmul_add_rmsnorm::Product { x, weight: self.weight.matrix(), y: addend };
        matmul_add_rmsnorm::forward(device, dims, stream, product, norm_weight, exit.stream, out);
    }

    /// Sets `d_x` and adds to the gradients of weight, bias and adapters, where these are trained. Shapes: x, d_x
    /// `[n_rows, inputs]`; d_y `[n_rows, outputs]`.
    pub fn backward(
        &self,
        device: &Device,
        n_rows: usize,
        (x, d_y): (View<'_, T>, View<'_, T>),
        mut d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'_, T>>,
    ) {
        let weight = self.weight.matrix();
        let Shape { outputs, inputs } = weight.shape();
        if let Some(Some(d_bias)) = &mut gradient.bias {
            matmul::backward_bias(device, n_rows, outputs, d_y, d_bias.sum_mut());
        }
        matmul::backward_input(device, n_rows, d_y, weight, Write::Set, d_x.reborrow());
        if let Some(d_weight) = &mut gradient.weight {
            let dims = matmul::Dims { tokens: n_rows, inputs, outputs };
            let (d_weight, write) = d_weight.writable();
            matmul::backward_weight(device, dims, x, d_y, write, d_weight);
        }
        if let Some((adapter, gradient)) = self.adapter.as_ref().zip(gradient.adapter.as_mut()) {
            let memory = hidden.expect("a policy with adapters has memory for their backward");
            adapter.backward(device, n_rows, (x, d_y), d_x, gradient, memory);
        }
    }
}

impl<T: Float> Linear<Parameter<T>> {
    /// Adds `s B A` to `values`, where these are the weight `name` of a module with an adapter. Sums in f64.
    pub fn merge_into(&self, name: &str, values: &mut [T]) {
        let Some(Adapter { a, b, modules }) = &self.adapter else { return };
        let is_of_name = |factor: &str| weight_of_first_factor(factor).is_some_and(|weight| weight == name);
        let mut factors = a.tensors().zip(b).zip(modules);
        let found = factors.find(|(((spec, _), _), _)| is_of_name(&spec.name));
        let Some((((spec, a), b), module)) = found else { return };
        let (rank, inputs) = (spec.shape[0], spec.shape[1]);
        let (a, b) = (a.to_vec(), b.view().to_vec());
        for (row, b) in values.chunks_exact_mut(inputs).zip(b.chunks_exact(rank)) {
            for (column, value) in row.iter_mut().enumerate() {
                let product = |k: usize| b[k].to_f64() * a[k * inputs + column].to_f64();
                let sum: f64 = (0..rank).map(product).sum();
                *value = T::from_f64(value.to_f64() + module.scale * sum);
            }
        }
    }
}

impl<T: Float> Adapter<Parameter<T>> {
    /// What the terms of all modules are made from, in the first part of `memory`.
    fn project<'a>(
        &self,
        device: &Device,
        n_rows: usize,
        x: View<'_, T>,
        memory: ViewMut<'a, T>,
    ) -> View<'a, T> {
        let a = self.a.matrix();
        let mut hidden = memory.into_range(0..n_rows * a.shape().outputs);
        lora::project(device, n_rows, x, a, self.modules[0].scale, hidden.reborrow());
        hidden.into_view()
    }

    /// Adds the modules' terms to y. Shapes: x `[n_rows, inputs]`; y `[n_rows, outputs]`.
    fn add_terms(
        &self,
        device: &Device,
        n_rows: usize,
        x: View<'_, T>,
        memory: ViewMut<'_, T>,
        mut y: ViewMut<'_, T>,
    ) {
        let hidden = self.project(device, n_rows, x, memory);
        for (module, b) in self.modules.iter().zip(&self.b) {
            lora::expand(device, n_rows, *module, hidden, b.matrix(), y.reborrow());
        }
    }

    /// Adds the terms' part to d_x and adds to the gradients of the factors. `x A^T`, which forward does not keep, is
    /// computed once more.
    fn backward(
        &self,
        device: &Device,
        n_rows: usize,
        (x, d_y): (View<'_, T>, View<'_, T>),
        d_x: ViewMut<'_, T>,
        gradient: &mut Adapter<Option<Gradient<T>>>,
        memory: HiddenBackward<'_, T>,
    ) {
        let a = self.a.matrix();
        let Shape { outputs: width, inputs } = a.shape();
        let hidden = self.project(device, n_rows, x, memory.hidden);
        let mut d_hidden = memory.d_hidden.into_range(0..n_rows * width);
        for ((module, b), d_b) in self.modules.iter().zip(&self.b).zip(&mut gradient.b) {
            let d = d_hidden.reborrow();
            lora::backward_hidden(device, n_rows, *module, d_y, b.matrix(), d);
            if let Some(d_b) = d_b {
                let (d_b, write) = d_b.writable();
                lora::backward_b(device, n_rows, *module, d_y, hidden, write, d_b);
            }
        }
        let d_hidden = d_hidden.into_view();
        if let Some(d_a) = &mut gradient.a {
            let dims = matmul::Dims { tokens: n_rows, inputs, outputs: width };
            let (d_a, write) = d_a.writable();
            matmul::backward_weight(device, dims, x, d_hidden, write, d_a);
        }
        matmul::backward_input(device, n_rows, d_hidden, a, Write::Add, d_x);
    }
}
