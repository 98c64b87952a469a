//! The one door for every product of a layer: training, prefill and decode call these methods, and whatever a linear
//! layer has beside its matrix is handled here.

use super::arena::{Factors, HalfEntry, HiddenBackward, Input};
use super::gradient::Gradient;
use super::lora::weight_of_first_factor;
use super::parameter::Parameter;
use super::weights::{Adapter, Linear};
use stapo_ops::fused::matmul_add_rmsnorm_matmul::{self, Next, Normed};
use stapo_ops::fused::matmul_lora::{self, DownGradient, GateUp};
use stapo_ops::fused::{matmul_add_rmsnorm, matmul_swiglu};
use stapo_ops::{Device, Float, Shape, View, ViewMut, Weight, Write, lora, matmul, rmsnorm, swiglu};

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

/// Where the product of normed rows goes.
pub enum NextRows<'a, T: Float> {
    /// `[T, outputs]`
    Product(ViewMut<'a, T>),
    /// `[T, 2 F]`, left holding anything, and the SwiGLU of it, `[T, F]`.
    Swiglu { gate_up: ViewMut<'a, T>, out: ViewMut<'a, T> },
}

/// Where gate and up and their SwiGLU go.
pub struct Activation<'a, T: Float> {
    pub dims: swiglu::Dims,
    /// `[T, 2 F]`
    pub gate_up: ViewMut<'a, T>,
    pub kept: GateUp,
    /// `[T, F]`
    pub out: ViewMut<'a, T>,
}

/// The gradient of a linear layer's outputs.
pub enum OutputGradient<'a, T: Float> {
    /// `[n_rows, outputs]`
    Apart(View<'a, T>),
    /// `[n_rows, outputs + pitch]`: with room for the gradient of `x A^T` behind its rows.
    Joined(ViewMut<'a, T>),
}

impl<'a, T: Float> OutputGradient<'a, T> {
    /// The gradient of the outputs of `linear` in an arena.
    pub fn of(linear: &Linear<Parameter<T>>, n_rows: usize, rows: ViewMut<'a, T>) -> Self {
        let is_joined = rows.len() > n_rows * linear.weight.matrix().shape().outputs;
        if is_joined { Self::Joined(rows) } else { Self::Apart(rows.into_view()) }
    }
}

/// What the gradient of gate and up is made from, and where it goes.
pub struct ActivationBackward<'a, T: Float> {
    pub dims: swiglu::Dims,
    /// `[T, 2 F]`
    pub gate_up: View<'a, T>,
    /// `[T, 2 F]`, overwritten.
    pub d_gate_up: ViewMut<'a, T>,
}

impl<T: Float> Linear<Parameter<T>> {
    /// `y = x W^T + b`, and the terms of the adapters. Shapes: x `[n_rows, inputs]`; y `[n_rows, outputs]`.
    pub fn forward(&self, device: &Device, n_rows: usize, input: Input<'_, T>, y: ViewMut<'_, T>) {
        match self.split(input) {
            Ok((input, adapter)) => {
                let product = self.product(device, input, &adapter);
                matmul_lora::forward(device, n_rows, product, y);
            }
            Err(x) => matmul::forward(device, n_rows, x, self.unpacked(device), self.bias(), y),
        }
    }

    /// `swiglu(x W^T + b)`, and the terms of the adapters. Shape: x `[n_rows, inputs]`.
    pub fn forward_swiglu(&self, device: &Device, input: Input<'_, T>, to: Activation<'_, T>) {
        let Activation { dims, mut gate_up, kept, out } = to;
        match self.split(input) {
            Ok((input, adapter)) => {
                let product = self.product(device, input, &adapter);
                matmul_lora::forward_swiglu(device, dims, product, gate_up, kept, out);
            }
            Err(x) if self.bias.is_none() && kept == GateUp::Dropped => {
                matmul_swiglu::forward(device, dims, x, self.unpacked(device), gate_up, out);
            }
            Err(x) => {
                matmul::forward(
                    device,
                    dims.tokens,
                    x,
                    self.unpacked(device),
                    self.bias(),
                    gate_up.reborrow(),
                );
                swiglu::forward(device, dims, gate_up.into_view(), out);
            }
        }
    }

    /// `exit.stream = stream + x W^T + b`, `exit.normed = norm(exit.stream)`. Shape: x `[n_rows, inputs]`.
    pub fn forward_residual_norm(&self, device: &Device, input: Input<'_, T>, to: ResidualNorm<'_, T>) {
        let ResidualNorm { dims, stream, mut addend, norm_weight, exit } = to;
        let out = rmsnorm::Out { normed: exit.normed, inv_rms: exit.inv_rms };
        let x = match self.split(input) {
            Ok((input, adapter)) => {
                let to = matmul_lora::Residual { stream, addend, sum: exit.stream };
                let product = self.product(device, input, &adapter);
                return matmul_lora::forward_add_rmsnorm(device, dims, product, to, norm_weight, out);
            }
            Err(x) => x,
        };
        if let Some(bias) = self.bias() {
            matmul::forward(device, dims.tokens, x, self.unpacked(device), Some(bias), addend.reborrow());
            let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
            return rmsnorm::forward_add(device, dims, residual, norm_weight, exit.stream, out);
        }
        let product = matmul_add_rmsnorm::Product { x, weight: self.unpacked(device), y: addend };
        matmul_add_rmsnorm::forward(device, dims, stream, product, norm_weight, exit.stream, out);
    }

    /// `x A^T` once more where it lies behind x, which was recomputed.
    pub fn project_again(&self, device: &Device, n_rows: usize, input: Input<'_, T>) {
        if let Ok((mut input @ lora::Input::Joined(_), adapter)) = self.split(input) {
            lora::project(device, n_rows, &adapter, &mut input);
        }
    }

    /// The input and the adapters, where both are there; else x.
    fn split<'a>(
        &'a self,
        input: Input<'a, T>,
    ) -> Result<(lora::Input<'a, T>, lora::Adapter<'a, T>), View<'a, T>> {
        match (input, &self.adapter) {
            (Input::Adapted(input), Some(adapter)) => Ok((input, adapter.factors())),
            (Input::Adapted(lora::Input::Apart { x, .. }) | Input::Plain(x), _) => Err(x),
            (Input::Adapted(lora::Input::Joined(rows)), None) => Err(rows.into_view()),
        }
    }

    fn product<'a>(
        &'a self,
        device: &Device,
        input: lora::Input<'a, T>,
        adapter: &'a lora::Adapter<'a, T>,
    ) -> matmul_lora::Product<'a, T> {
        matmul_lora::Product { input, weight: self.unpacked(device), bias: self.bias(), adapter }
    }

    /// The weight for the op that is called next: a quantised one is unpacked, over the one before.
    fn unpacked(&self, device: &Device) -> &Weight<T> {
        let weight = self.weight.matrix();
        if weight.is_quantised() {
            lora::unpack(device, weight, self.adapter.as_ref().map(Adapter::factors).as_ref());
        }
        weight
    }

    fn bias(&self) -> Option<View<'_, T>> {
        self.bias.as_ref().map(Parameter::view)
    }

    /// [`Linear::forward_residual_norm`], then a product of `exit.normed` with the weight of `next`; without adapters. Where
    /// one op does all of it, `exit.normed` is left holding anything.
    pub fn forward_residual_norm_to(
        &self,
        device: &Device,
        x: View<'_, T>,
        to: ResidualNorm<'_, T>,
        next: &Self,
        rows: NextRows<'_, T>,
    ) {
        let weight = next.weight.matrix();
        // Of quantised weights only one is unpacked at a time.
        let are_apart = self.weight.matrix().is_quantised() || weight.is_quantised();
        if are_apart || self.bias.is_some() || next.bias.is_some() {
            let ResidualNorm { dims, stream, addend, norm_weight, mut exit } = to;
            let (stream_to, normed) = (exit.stream, exit.normed.reborrow());
            let own = HalfEntry { stream: stream_to, normed, inv_rms: exit.inv_rms };
            let to = ResidualNorm { dims, stream, addend, norm_weight, exit: own };
            self.forward_residual_norm(device, Input::Plain(x), to);
            return match rows {
                NextRows::Product(y) => {
                    next.forward(device, dims.tokens, Input::Plain(exit.normed.view()), y);
                }
                NextRows::Swiglu { gate_up, out } => {
                    let dims = swiglu::Dims { tokens: dims.tokens, width: weight.shape().outputs / 2 };
                    let to = Activation { dims, gate_up, kept: GateUp::Dropped, out };
                    next.forward_swiglu(device, Input::Plain(exit.normed.view()), to);
                }
            };
        }
        let ResidualNorm { dims, stream, addend, norm_weight, exit } = to;
        let product = matmul_add_rmsnorm::Product { x, weight: self.weight.matrix(), y: addend };
        let out = rmsnorm::Out { normed: exit.normed, inv_rms: exit.inv_rms };
        let normed = Normed { dims, stream, weight: norm_weight, sum: exit.stream, out };
        let next = match rows {
            NextRows::Product(y) => Next::Product { weight, y },
            NextRows::Swiglu { gate_up, out } => Next::Swiglu { weight, gate_up, out },
        };
        matmul_add_rmsnorm_matmul::forward(device, product, normed, next);
    }

    /// Sets `d_x` and adds to the gradients of weight, bias and adapters, where these are trained. Shapes: x, d_x
    /// `[n_rows, inputs]`; d_y `[n_rows, outputs]`.
    pub fn backward(
        &self,
        device: &Device,
        n_rows: usize,
        of: (View<'_, T>, OutputGradient<'_, T>),
        mut d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'_, T>>,
    ) {
        let adapted = self.backward_weights(device, n_rows, of, d_x.reborrow(), gradient, hidden);
        if let Some((adapter, d_hidden)) = adapted {
            lora::backward_input(device, n_rows, &adapter, d_hidden, d_x);
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
        let Some((adapter, gradient)) = self.adapter.as_ref().zip(gradient.adapter.as_mut()) else { return };
        let HiddenBackward { hidden, d_hidden, factors } =
            hidden.expect("a policy with adapters has memory for their backward");
        let mut d_output = match d_y {
            OutputGradient::Joined(rows) => lora::Input::Joined(rows),
            OutputGradient::Apart(x) => {
                let hidden = d_hidden.into_range(0..n_rows * adapter.modules[0].hidden.of);
                lora::Input::Apart { x, hidden }
            }
        };
        adapter.backward(device, n_rows, x, &mut d_output, gradient, (hidden, factors));
    }

    /// As [`Linear::backward`] of a layer whose x is a SwiGLU's output, and the gradient of gate and up; that of x is not
    /// kept. Shape: d_x as above, left holding anything.
    pub fn backward_swiglu(
        &self,
        device: &Device,
        of: (View<'_, T>, OutputGradient<'_, T>),
        mut d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'_, T>>,
        to: ActivationBackward<'_, T>,
    ) {
        let ActivationBackward { dims, gate_up, d_gate_up } = to;
        let hidden =
            hidden.map(|hidden| HiddenBackward { factors: self.factors_beside_swiglu(device), ..hidden });
        match self.backward_weights(device, dims.tokens, of, d_x.reborrow(), gradient, hidden) {
            Some((adapter, d_hidden)) => {
                let d_a = gradient.adapter.as_mut().and_then(|adapter| adapter.a.as_mut());
                let d_a =
                    d_a.filter(|_| matmul_lora::makes_first_factor(device, &adapter)).map(Gradient::writable);
                let down = DownGradient { adapter: &adapter, d_hidden, d_activated: d_x };
                matmul_lora::backward_swiglu(device, dims, down, gate_up, d_gate_up, d_a);
            }
            None => swiglu::backward(device, dims, gate_up, d_x.into_view(), d_gate_up),
        }
    }

    /// The factors whose gradients [`Linear::backward_swiglu`] leaves to the adapter's own backward.
    fn factors_beside_swiglu(&self, device: &Device) -> Factors {
        let makes_first = |adapter: &Adapter<_>| matmul_lora::makes_first_factor(device, &adapter.factors());
        if self.adapter.as_ref().is_some_and(makes_first) { Factors::Second } else { Factors::Both }
    }

    /// [`Linear::backward`] without the terms' part of d_x where that is still to be made from what is returned.
    fn backward_weights<'a>(
        &'a self,
        device: &Device,
        n_rows: usize,
        (x, d_y): (View<'_, T>, OutputGradient<'_, T>),
        d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'a, T>>,
    ) -> Option<(lora::Adapter<'a, T>, View<'a, T>)> {
        let Shape { outputs, inputs } = self.weight.matrix().shape();
        let memory = || hidden.expect("a policy with adapters has memory for their backward");
        let d_y = match (d_y, &self.adapter, &mut gradient.adapter) {
            (OutputGradient::Apart(d_y), _, _) => d_y,
            (OutputGradient::Joined(rows), Some(adapter), Some(gradient)) => {
                let mut d_y = lora::Input::Joined(rows);
                let HiddenBackward { hidden, factors, .. } = memory();
                adapter.backward(device, n_rows, x, &mut d_y, gradient, (hidden, factors));
                let lora::Input::Joined(rows) = d_y else { return None };
                matmul_lora::backward_input(device, n_rows, rows.into_view(), self.unpacked(device), d_x);
                return None;
            }
            (OutputGradient::Joined(_), _, _) => panic!("room for adapters behind outputs without adapters"),
        };
        if let Some(Some(d_bias)) = &mut gradient.bias {
            matmul::backward_bias(device, n_rows, outputs, d_y, d_bias.sum_mut());
        }
        matmul::backward_input(device, n_rows, d_y, self.unpacked(device), Write::Set, d_x);
        if let Some(d_weight) = &mut gradient.weight {
            let dims = matmul::Dims { tokens: n_rows, inputs, outputs };
            let (d_weight, write) = d_weight.writable();
            matmul::backward_weight(device, dims, x, d_y, write, d_weight);
        }
        let (adapter, gradient) = self.adapter.as_ref().zip(gradient.adapter.as_mut())?;
        let HiddenBackward { hidden, d_hidden, factors } = memory();
        let mut d_hidden = d_hidden.into_range(0..n_rows * adapter.modules[0].hidden.of);
        let mut d_output = lora::Input::Apart { x: d_y, hidden: d_hidden.reborrow() };
        adapter.backward(device, n_rows, x, &mut d_output, gradient, (hidden, factors));
        Some((adapter.factors(), d_hidden.into_view()))
    }
}

impl<T: Float> Linear<Parameter<T>> {
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

impl<T: Float> Adapter<Parameter<T>> {
    /// The factors as ops take them.
    fn factors(&self) -> lora::Adapter<'_, T> {
        lora::Adapter {
            a: self.a.matrix(),
            b: self.b.iter().map(Parameter::matrix).collect(),
            modules: &self.modules,
        }
    }

    /// Adds to the gradients of the factors, or of the second alone. `d_output` has d_y for x, and the gradient of `x A^T` is written to its hidden;
    /// `hidden` is `x A^T`, `None` where it lies behind x.
    fn backward(
        &self,
        device: &Device,
        n_rows: usize,
        x: View<'_, T>,
        d_output: &mut lora::Input<'_, T>,
        gradient: &mut Adapter<Option<Gradient<T>>>,
        (hidden, made): (Option<View<'_, T>>, Factors),
    ) {
        let factors = self.factors();
        let hidden = match hidden {
            Some(hidden) => lora::Hidden::apart(hidden),
            None => lora::Hidden::joined(x, factors.a.shape().inputs),
        };
        lora::backward_hidden(device, n_rows, &factors, d_output);
        let to = lora::FactorGradients {
            b: gradient.b.iter_mut().flatten().map(Gradient::writable).collect(),
            a: gradient.a.as_mut().filter(|_| made == Factors::Both).map(Gradient::writable),
        };
        let d_hidden = d_output.hidden(self.modules[0].outputs.of);
        let of = lora::Backward { x, d_y: d_output.x(), hidden, d_hidden };
        lora::backward_factors(device, n_rows, &factors, of, to);
    }
}
