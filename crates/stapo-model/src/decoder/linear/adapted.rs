//! The adapters of linear layers: the terms that they add to a product, and the gradients of their factors.

use super::{Linear, OutputGradient};
use crate::decoder::arena::{Factors, HiddenBackward, Input};
use crate::decoder::gradient::Gradient;
use crate::decoder::lora::weight_of_first_factor;
use crate::decoder::parameter::Parameter;
use crate::decoder::weights::Adapter;
use stapo_ops::fused::matmul_lora;
use stapo_ops::swiglu::Gate;
use stapo_ops::{Device, Float, View, ViewMut, Write, lora};

/// What a product reads besides the weight.
pub(super) enum Operands<'a, T: Float> {
    /// x alone: the linear layer has no adapters, or the pass leaves them out.
    Plain(View<'a, T>),
    /// x with memory for `x A^T`, and the factors.
    Adapted(lora::Input<'a, T>, lora::Adapter<'a, T>),
}

impl<T: Float> Linear<Parameter<T>> {
    pub(super) fn operands<'a>(&'a self, input: Input<'a, T>) -> Operands<'a, T> {
        match (input, &self.adapter) {
            (Input::Adapted(input), Some(adapter)) => Operands::Adapted(input, adapter.factors()),
            (Input::Adapted(lora::Input::Apart { x, .. }) | Input::Plain(x), _) => Operands::Plain(x),
            (Input::Adapted(lora::Input::Joined(rows)), None) => Operands::Plain(rows.into_view()),
        }
    }

    pub(super) fn adapted_product<'a>(
        &'a self,
        device: &Device,
        input: lora::Input<'a, T>,
        adapter: &'a lora::Adapter<'a, T>,
    ) -> matmul_lora::Product<'a, T> {
        matmul_lora::Product { input, weight: self.unpacked(device), bias: self.bias(), adapter }
    }

    /// `x A^T` once more where it lies after x, which was recomputed.
    pub fn project_again(&self, device: &Device, n_rows: usize, input: Input<'_, T>) {
        if let Operands::Adapted(mut input @ lora::Input::Joined(_), adapter) = self.operands(input) {
            lora::project(device, n_rows, &adapter, &mut input);
        }
    }

    /// [`Linear::backward`] of a frozen layer without d_x: adds to the gradients of adapters.
    pub fn backward_factors(
        &self,
        device: &Device,
        n_rows: usize,
        (x, d_y): (View<'_, T>, OutputGradient<'_, T>),
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'_, T>>,
    ) {
        match d_y {
            OutputGradient::Apart(d_y) => {
                self.backward_terms(device, n_rows, (x, d_y), gradient, hidden);
            }
            OutputGradient::Joined { rows, adapter } => {
                adapter.backward_joined(device, n_rows, (x, rows), gradient, hidden);
            }
        }
    }

    /// Adds to the gradients of the factors. Returns the factors and the gradient of `x A^T`, from which the terms' part of
    /// d_x is still to be made; `None` without adapters.
    pub(super) fn backward_terms<'a>(
        &'a self,
        device: &Device,
        n_rows: usize,
        (x, d_y): (View<'_, T>, View<'_, T>),
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'a, T>>,
    ) -> Option<(lora::Adapter<'a, T>, View<'a, T>)> {
        let adapter = self.adapter.as_ref()?;
        let HiddenBackward { hidden, d_hidden, factors } = adapter_memory(hidden);
        let mut d_hidden = d_hidden.into_range(0..n_rows * adapter.modules[0].hidden.of);
        let mut d_output = lora::Input::Apart { x: d_y, hidden: d_hidden.reborrow() };
        adapter.backward(device, n_rows, x, &mut d_output, gradient, (hidden, factors));
        Some((adapter.factors(), d_hidden.into_view()))
    }

    /// Leaves the gradient of the first factor to the op that makes it together with the gradient of SwiGLU, where there
    /// is such an op.
    pub(super) fn without_first_factor<'a>(
        &self,
        device: &Device,
        gate: Gate,
        hidden: Option<HiddenBackward<'a, T>>,
    ) -> Option<HiddenBackward<'a, T>> {
        let makes_first =
            |adapter: &Adapter<_>| matmul_lora::makes_first_factor(device, gate, &adapter.factors());
        let is_made = self.adapter.as_ref().is_some_and(makes_first);
        let factors = if is_made { Factors::Second } else { Factors::Both };
        hidden.map(|hidden| HiddenBackward { factors, ..hidden })
    }

    /// Adds `s B A` to `values`, where these are the weight `name` of a module with an adapter. Sums in f64.
    pub fn merge_into(&self, name: &str, values: &mut [T]) {
        let Some(Adapter { a, b, modules }) = &self.adapter else { return };
        let is_of_name = |factor: &str| weight_of_first_factor(factor).is_some_and(|weight| weight == name);
        let mut factors = a.views().zip(b).zip(modules);
        let found = factors.find(|(((spec, _), _), _)| is_of_name(&spec.name));
        let Some((((spec, a), b), module)) = found else { return };
        let (rank, inputs) = (spec.shape[0], spec.shape[1]);
        let a: Vec<f64> = a.to_vec().iter().map(|value| value.to_f64()).collect();
        let b = b.view().to_vec();
        // A row at a time, so that the rows of A are read in order.
        let mut sums = vec![0.0; inputs];
        for (row, b) in values.chunks_exact_mut(inputs).zip(b.chunks_exact(rank)) {
            sums.fill(0.0);
            for (b, a) in b.iter().zip(a.chunks_exact(inputs)) {
                let b = b.to_f64();
                sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
            }
            for (value, sum) in row.iter_mut().zip(&sums) {
                *value = T::from_f64(value.to_f64() + module.scale * sum);
            }
        }
    }
}

/// Where the op that makes the gradient of SwiGLU adds that of the first factor; `None` if it does not make it.
pub(super) fn first_factor_gradient<'a, T: Float>(
    device: &Device,
    gate: Gate,
    adapter: &lora::Adapter<'_, T>,
    gradient: &'a mut Linear<Option<Gradient<T>>>,
) -> Option<(ViewMut<'a, T>, Write)> {
    let d_a = gradient.adapter.as_mut().and_then(|adapter| adapter.a.as_mut());
    d_a.filter(|_| matmul_lora::makes_first_factor(device, gate, adapter)).map(Gradient::writable)
}

fn adapter_memory<T: Float>(hidden: Option<HiddenBackward<'_, T>>) -> HiddenBackward<'_, T> {
    hidden.expect("a policy with adapters has memory for their backward")
}

impl<T: Float> Adapter<Parameter<T>> {
    /// The factors as ops take them.
    pub(super) fn factors(&self) -> lora::Adapter<'_, T> {
        lora::Adapter {
            a: self.a.matrix(),
            b: self.b.iter().map(Parameter::matrix).collect(),
            modules: &self.modules,
        }
    }

    /// [`Adapter::backward`] with d_y in rows that have room for the gradient of `x A^T`. Returns these rows.
    pub(super) fn backward_joined<'a>(
        &self,
        device: &Device,
        n_rows: usize,
        (x, mut d_y): (View<'_, T>, ViewMut<'a, T>),
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'_, T>>,
    ) -> ViewMut<'a, T> {
        let HiddenBackward { hidden, factors, .. } = adapter_memory(hidden);
        let mut d_output = lora::Input::Joined(d_y.reborrow());
        self.backward(device, n_rows, x, &mut d_output, gradient, (hidden, factors));
        d_y
    }

    /// Adds to the gradients of the factors, or of the second alone. `d_output` has d_y for x, and the gradient of `x A^T` is
    /// written to its hidden; `hidden` is `x A^T`, `None` where it lies after x.
    fn backward(
        &self,
        device: &Device,
        n_rows: usize,
        x: View<'_, T>,
        d_output: &mut lora::Input<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
        (hidden, made): (Option<View<'_, T>>, Factors),
    ) {
        let factors = self.factors();
        let hidden = match hidden {
            Some(hidden) => lora::Hidden::apart(hidden),
            None => lora::Hidden::joined(x, factors.a.shape().inputs),
        };
        lora::backward_hidden(device, n_rows, &factors, d_output);
        let gradient = gradient.adapter.as_mut().expect("gradients have the adapters of the weights");
        let to = lora::FactorGradients {
            b: gradient.b.iter_mut().flatten().map(Gradient::writable).collect(),
            a: gradient.a.as_mut().filter(|_| made == Factors::Both).map(Gradient::writable),
        };
        let d_hidden = d_output.hidden(self.modules[0].outputs.of);
        let backward = lora::Backward { x, d_y: d_output.x(), hidden, d_hidden };
        lora::backward_factors(device, n_rows, &factors, backward, to);
    }
}
