//! Every product of a layer: training, prefill and decode call these methods. `adapted` has what the
//! adapters of a linear layer add to its product.

mod adapted;

use super::arena::{HalfEntry, HiddenBackward, Input, OutputRows};
use super::gradient::Gradient;
use super::parameter::Parameter;
use super::weights::{Adapter, Linear};
use adapted::Operands;
use stapo_ops::fused::matmul_add_rmsnorm;
use stapo_ops::fused::matmul_add_rmsnorm_matmul::{self, Next, Normed};
use stapo_ops::fused::matmul_lora;
use stapo_ops::fused::matmul_rmsnorm_add::{self, NormedResult};
use stapo_ops::fused::matmul_swiglu::{self, GateUp};
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

/// The gradient of a linear layer's outputs; [`Linear::output_gradient`] makes it from memory of the arena.
pub enum OutputGradient<'a, T: Float> {
    /// `[n_rows, outputs]`
    Apart(View<'a, T>),
    /// `[n_rows, outputs + pitch]`: with room for the gradient of `x A^T` of these adapters after its rows.
    Joined { rows: ViewMut<'a, T>, adapter: &'a Adapter<Parameter<T>> },
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
        match self.operands(input) {
            Operands::Plain(x) => matmul::forward(device, n_rows, x, self.unpacked(device), self.bias(), y),
            Operands::Adapted(input, adapter) => {
                let product = self.adapted_product(device, input, &adapter);
                matmul_lora::forward(device, n_rows, product, y);
            }
        }
    }

    /// `swiglu(x W^T + b)`, and the terms of the adapters. Shape: x `[n_rows, inputs]`.
    pub fn forward_swiglu(&self, device: &Device, input: Input<'_, T>, to: Activation<'_, T>) {
        let Activation { dims, mut gate_up, kept, out } = to;
        match self.operands(input) {
            Operands::Plain(x) if self.bias.is_none() => {
                matmul_swiglu::forward(device, dims, x, self.unpacked(device), (gate_up, kept), out);
            }
            Operands::Plain(x) => {
                let (weight, y) = (self.unpacked(device), gate_up.reborrow());
                matmul::forward(device, dims.tokens, x, weight, self.bias(), y);
                swiglu::forward(device, dims, gate_up.into_view(), out);
            }
            Operands::Adapted(input, adapter) => {
                let product = self.adapted_product(device, input, &adapter);
                matmul_lora::forward_swiglu(device, dims, product, gate_up, kept, out);
            }
        }
    }

    /// `exit.stream = stream + x W^T + b`, `exit.normed = norm(exit.stream)`. Shape: x `[n_rows, inputs]`.
    pub fn forward_residual_norm(&self, device: &Device, input: Input<'_, T>, to: ResidualNorm<'_, T>) {
        let ResidualNorm { dims, stream, mut addend, norm_weight, exit } = to;
        let out = rmsnorm::Out { normed: exit.normed, inv_rms: exit.inv_rms };
        match (self.operands(input), self.bias()) {
            (Operands::Plain(x), None) => {
                let product = matmul_add_rmsnorm::Product { x, weight: self.unpacked(device), y: addend };
                matmul_add_rmsnorm::forward(device, dims, stream, product, norm_weight, exit.stream, out);
            }
            (Operands::Plain(x), bias) => {
                matmul::forward(device, dims.tokens, x, self.unpacked(device), bias, addend.reborrow());
                let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
                rmsnorm::forward_add(device, dims, residual, norm_weight, exit.stream, out);
            }
            (Operands::Adapted(input, adapter), _) => {
                let to = matmul_lora::Residual { stream, addend, sum: exit.stream };
                let product = self.adapted_product(device, input, &adapter);
                matmul_lora::forward_add_rmsnorm(device, dims, product, to, norm_weight, out);
            }
        }
    }

    /// `product = x W^T + b`, and what `result` says of it. Shapes: x `[n_rows, inputs]`; product `[n_rows, outputs]`.
    pub fn forward_normed_result(
        &self,
        device: &Device,
        input: Input<'_, T>,
        mut product: ViewMut<'_, T>,
        result: NormedResult<'_, T>,
    ) {
        match (self.operands(input), self.bias()) {
            (Operands::Plain(x), None) => {
                let product = matmul_add_rmsnorm::Product { x, weight: self.unpacked(device), y: product };
                return matmul_rmsnorm_add::forward(device, product, result);
            }
            (Operands::Plain(x), bias) => {
                let (n_rows, y) = (result.dims.tokens, product.reborrow());
                matmul::forward(device, n_rows, x, self.unpacked(device), bias, y);
            }
            (Operands::Adapted(input, adapter), _) => {
                let terms = self.adapted_product(device, input, &adapter);
                matmul_lora::forward(device, result.dims.tokens, terms, product.reborrow());
            }
        }
        matmul_rmsnorm_add::norm_and_add(device, product.into_view(), result);
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
            let norm_exit = HalfEntry { stream: stream_to, normed, inv_rms: exit.inv_rms };
            let to = ResidualNorm { dims, stream, addend, norm_weight, exit: norm_exit };
            self.forward_residual_norm(device, Input::Plain(x), to);
            return match rows {
                NextRows::Product(y) => {
                    next.forward(device, dims.tokens, Input::Plain(exit.normed.view()), y);
                }
                NextRows::Swiglu { gate_up, out } => {
                    let width = weight.shape().outputs / 2;
                    let dims = swiglu::Dims { tokens: dims.tokens, width, gate: swiglu::Gate::Silu };
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

    /// The gradient of the outputs, in memory of the arena.
    pub fn output_gradient<'a>(&'a self, memory: OutputRows<'a, T>) -> OutputGradient<'a, T> {
        match &self.adapter {
            Some(adapter) if memory.is_joined => OutputGradient::Joined { rows: memory.rows, adapter },
            _ => OutputGradient::Apart(memory.rows.into_view()),
        }
    }

    /// Sets `d_x` and adds to the gradients of weight, bias and adapters, where these are trained. Shapes: x, d_x
    /// `[n_rows, inputs]`; d_y `[n_rows, outputs]`.
    pub fn backward(
        &self,
        device: &Device,
        n_rows: usize,
        (x, d_y): (View<'_, T>, OutputGradient<'_, T>),
        mut d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'_, T>>,
    ) {
        match d_y {
            OutputGradient::Apart(d_y) => {
                self.backward_product(device, n_rows, (x, d_y), d_x.reborrow(), gradient);
                if let Some((adapter, d_hidden)) =
                    self.backward_terms(device, n_rows, (x, d_y), gradient, hidden)
                {
                    lora::backward_input(device, n_rows, &adapter, d_hidden, d_x);
                }
            }
            OutputGradient::Joined { rows, adapter } => {
                let rows = adapter.backward_joined(device, n_rows, (x, rows), gradient, hidden);
                matmul_lora::backward_input(device, n_rows, rows.view(), self.unpacked(device), d_x);
            }
        }
    }

    /// As [`Linear::backward`] of a layer whose x is a SwiGLU's output, and the gradient of gate and up; that of x is not
    /// kept. Shape: d_x as above, left holding anything.
    pub fn backward_swiglu(
        &self,
        device: &Device,
        (x, d_y): (View<'_, T>, View<'_, T>),
        mut d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
        hidden: Option<HiddenBackward<'_, T>>,
        to: ActivationBackward<'_, T>,
    ) {
        let ActivationBackward { dims, gate_up, d_gate_up } = to;
        self.backward_product(device, dims.tokens, (x, d_y), d_x.reborrow(), gradient);
        let hidden = self.without_first_factor(device, dims.gate, hidden);
        match self.backward_terms(device, dims.tokens, (x, d_y), gradient, hidden) {
            None => swiglu::backward(device, dims, gate_up, d_x.into_view(), d_gate_up),
            Some((adapter, d_hidden)) => {
                let down = matmul_lora::DownGradient { adapter: &adapter, d_hidden, d_activated: d_x };
                let d_a = adapted::first_factor_gradient(device, dims.gate, &adapter, gradient);
                matmul_lora::backward_swiglu(device, dims, down, gate_up, d_gate_up, d_a);
            }
        }
    }

    /// The backward of `x W^T + b` alone: sets `d_x` and adds to the gradients of weight and bias, where these are trained.
    fn backward_product(
        &self,
        device: &Device,
        n_rows: usize,
        (x, d_y): (View<'_, T>, View<'_, T>),
        d_x: ViewMut<'_, T>,
        gradient: &mut Linear<Option<Gradient<T>>>,
    ) {
        let Shape { outputs, inputs } = self.weight.matrix().shape();
        if let Some(Some(d_bias)) = &mut gradient.bias {
            matmul::backward_bias(device, n_rows, outputs, d_y, d_bias.sum_mut());
        }
        matmul::backward_input(device, n_rows, d_y, self.unpacked(device), Write::Set, d_x);
        if let Some(d_weight) = &mut gradient.weight {
            let dims = matmul::Dims { tokens: n_rows, inputs, outputs };
            let (d_weight, write) = d_weight.writable();
            matmul::backward_weight(device, dims, x, d_y, write, d_weight);
        }
    }

    /// The weight for the op that is called next: a quantised one is unpacked, which overwrites the one unpacked before.
    pub fn unpacked(&self, device: &Device) -> &Weight<T> {
        let weight = self.weight.matrix();
        if weight.is_quantised() {
            lora::unpack(device, weight, self.adapter.as_ref().map(Adapter::factors).as_ref());
        }
        weight
    }

    fn bias(&self) -> Option<View<'_, T>> {
        self.bias.as_ref().map(Parameter::view)
    }
}
