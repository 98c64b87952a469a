//! A linear layer with adapters: `matmul::forward`, `lora::project` and `lora::expand`, or where adapters are joined one product
//! that continues over the ranks; and what may follow it.

use std::sync::Arc;

use super::matmul_add_rmsnorm;
use super::matmul_swiglu::GateUp;
use crate::cuda::{Cuda, Slice};
use crate::device::Backend;
use crate::lora::cuda::Layer;
use crate::lora::{self, Adapter, Input};
use crate::matmul::cuda::{DeepProduct, SPLIT_K, uses_split_k};
use crate::matmul::large_m;
use crate::matmul::small_m::{MAX_ROWS, Output};
use crate::rmsnorm::cuda::{Addend, Addition};
use crate::{Device, Float, View, ViewMut, Weight, Write, check, matmul, pitch_of, rmsnorm, swiglu};

/// `y = x W^T + bias`, and the terms of the adapter. Shapes: weight `[outputs, inputs]`, joined where the input is; bias
/// `[outputs]`.
pub struct Product<'a, T: Float> {
    pub input: Input<'a, T>,
    pub weight: &'a Weight<T>,
    pub bias: Option<View<'a, T>>,
    pub adapter: &'a Adapter<'a, T>,
}

impl<T: Float> Product<'_, T> {
    fn dims(&self, tokens: usize) -> matmul::Dims {
        let matmul::Shape { outputs, inputs } = self.weight.shape();
        matmul::Dims { tokens, inputs, outputs }
    }

    #[track_caller]
    fn check(&self, op: &str, tokens: usize) {
        let inputs = self.weight.shape().inputs;
        pitch_of(op, "x", self.input.x().len(), tokens, inputs);
        let is_joined = matches!(self.input, Input::Joined(_));
        assert!(is_joined == self.weight.is_joined(), "{op}: input and weight are not joined alike");
    }

    fn project(&mut self, device: &Device, tokens: usize) {
        lora::project(device, tokens, self.adapter, &mut self.input);
    }

    /// The layer as the kernels that run at the same time as `x A^T` take it, on a GPU.
    fn overlapped_layer(&self, tokens: usize) -> Layer<'_, T> {
        Layer { d: self.dims(tokens), x: self.input.x().cuda(), weight: self.weight, adapter: self.adapter }
    }

    /// On a GPU, the operands of one chain with the terms of joined adapters; `None` where adapters are not joined, or there is a bias.
    fn many_rows(&self, tokens: usize) -> Option<large_m::Operands> {
        let joined = self.weight.joined().filter(|joined| joined.n_parts == 1 && self.bias.is_none())?;
        let (x, weight) = (self.input.x().cuda(), self.weight.view().cuda());
        Some(large_m::Operands { d: self.dims(tokens), x, weight, n_further: joined.columns })
    }

    /// On a GPU, the split-K product with the terms of joined adapters; `None` where the product does not use split-K.
    fn deep(&self, tokens: usize) -> Option<DeepProduct> {
        let (d, joined) = (self.dims(tokens), self.weight.joined()?);
        let (x, weight) = (self.input.x().cuda(), self.weight.view().cuda());
        let is_deep = self.bias.is_none() && uses_split_k(d, weight);
        is_deep.then_some(DeepProduct { d, x, weight, n_further: joined.columns })
    }
}

/// Shape: y `[T, outputs]`, overwritten.
pub fn forward<T: Float>(device: &Device, tokens: usize, product: Product<'_, T>, mut y: ViewMut<'_, T>) {
    let op = "fused::matmul_lora";
    product.check(op, tokens);
    let mut product = product;
    check(op, "y", y.len(), tokens * product.weight.shape().outputs);
    if let Backend::Cuda(cuda) = device.backend()
        && tokens > 0
    {
        let (d, weight) = (product.dims(tokens), product.weight.view().cuda());
        let layer = product.overlapped_layer(tokens);
        let is_one_chain = product.bias.is_none() && !uses_split_k(d, weight);
        if is_one_chain && layer.fits(Output::Product, cuda, y.cuda()) {
            return layer.run(Output::Product, cuda, y.cuda());
        }
        if product.weight.is_joined() {
            product.project(device, tokens);
            return run_joined(cuda, tokens, &product, y.cuda());
        }
    }
    product.project(device, tokens);
    let Input::Apart { x, hidden } = product.input else { return };
    matmul::forward(device, tokens, x, product.weight, product.bias, y.reborrow());
    lora::expand(device, tokens, product.adapter, hidden.into_view(), y);
}

/// The product of depth `inputs + pitch`.
fn run_joined<T: Float>(cuda: &Arc<Cuda>, tokens: usize, product: &Product<'_, T>, y: Slice) {
    if let Some(deep) = product.deep(tokens) {
        return deep.run(cuda, y);
    }
    let (d, x) = (product.dims(tokens), product.input.x().cuda());
    let d = matmul::Dims { inputs: d.inputs + product.adapter.pitch(), ..d };
    let bias = product.bias.map(|bias| bias.cuda());
    matmul::cuda::forward_one_chain(cuda, d, x, product.weight.view().cuda(), bias, y);
}

/// Gate and up with their adapters, and `swiglu::forward` of them. Shapes: gate_up `[T, 2 width]`; out `[T, width]`, on a GPU
/// possibly with further columns after its rows; both overwritten.
pub fn forward_swiglu<T: Float>(
    device: &Device,
    dims: swiglu::Dims,
    product: Product<'_, T>,
    mut gate_up: ViewMut<'_, T>,
    kept: GateUp,
    out: ViewMut<'_, T>,
) {
    let op = "fused::matmul_lora::forward_swiglu";
    product.check(op, dims.tokens);
    check(op, "gate_up", gate_up.len(), dims.tokens * product.weight.shape().outputs);
    pitch_of(op, "out", out.len(), dims.tokens, dims.width);
    if let Backend::Cuda(cuda) = device.backend()
        && product.bias.is_none()
        && kept == GateUp::Dropped
        && dims.gate == swiglu::Gate::Silu
        && product.overlapped_layer(dims.tokens).fits(Output::Gated(dims.gate), cuda, out.cuda())
    {
        return product.overlapped_layer(dims.tokens).run(Output::Gated(dims.gate), cuda, out.cuda());
    }
    if let Backend::Cuda(cuda) = device.backend()
        && let Some(operands) = product.many_rows(dims.tokens)
    {
        let kept = (kept == GateUp::Kept).then(|| gate_up.cuda());
        let many = large_m::Output::Gated { gate: dims.gate, kept };
        if large_m::pays(many, cuda, &operands, out.cuda()) {
            let mut product = product;
            product.project(device, dims.tokens);
            return large_m::run(many, cuda, &operands, out.cuda());
        }
    }
    forward(device, dims.tokens, product, gate_up.reborrow());
    swiglu::forward(device, dims, gate_up.into_view(), out);
}

/// The residual stream that a product is added to. Shapes: `[T, D]` each.
pub struct Residual<'a, T: Float> {
    pub stream: View<'a, T>,
    /// Memory for the product; left holding anything.
    pub addend: ViewMut<'a, T>,
    /// Overwritten with stream + product.
    pub sum: ViewMut<'a, T>,
}

/// A product with its adapter, `sum = stream + product` and `out = norm(sum)`. Shape: norm_weight `[D]`.
pub fn forward_add_rmsnorm<T: Float>(
    device: &Device,
    dims: rmsnorm::Dims,
    product: Product<'_, T>,
    to: Residual<'_, T>,
    norm_weight: View<'_, T>,
    out: rmsnorm::Out<'_, T>,
) {
    let Residual { stream, mut addend, sum } = to;
    let op = "fused::matmul_lora::forward_add_rmsnorm";
    product.check(op, dims.tokens);
    check(op, "outputs", product.weight.shape().outputs, dims.width);
    check(op, "stream", stream.len(), dims.tokens * dims.width);
    check(op, "sum", sum.len(), dims.tokens * dims.width);
    rmsnorm::check_out(op, dims, norm_weight, &out);
    if let Backend::Cuda(cuda) = device.backend()
        && let Some(deep) = product.deep(dims.tokens)
        && !deep.is_one_kernel(cuda, addend.cuda())
    {
        let to = (sum.cuda(), out.normed.cuda(), out.inv_rms.cuda());
        let (stream, norm_weight) = (stream.cuda(), norm_weight.cuda());
        if let Some(partials) = partials_of_few_rows(cuda, &product.overlapped_layer(dims.tokens)) {
            let add = Addition { addend: Addend::SplitK(partials), rows: None, sum: to.0 };
            return rmsnorm::cuda::forward(cuda, dims, stream, Some(add), norm_weight, to.1, to.2);
        }
        let mut product = product;
        product.project(device, dims.tokens);
        return matmul_add_rmsnorm::run(cuda, dims, stream, &deep, norm_weight, to);
    }
    forward(device, dims.tokens, product, addend.reborrow());
    let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
    rmsnorm::forward_add(device, dims, residual, norm_weight, sum, out);
}

/// The partial sums of a split-K product of few rows; `None` if one kernel does not compute them.
fn partials_of_few_rows<T: Float>(cuda: &Arc<Cuda>, layer: &Layer<'_, T>) -> Option<Slice> {
    let d = layer.d;
    if d.tokens > MAX_ROWS {
        return None;
    }
    let partials = cuda.split_k_workspace(SPLIT_K * d.tokens * d.outputs);
    let output = Output::SplitK { n_splits: SPLIT_K };
    layer.fits(output, cuda, partials).then(|| {
        layer.run(output, cuda, partials);
        partials
    })
}

/// `d_x = d_y W + d_hidden A` as one product. Shapes: d_y `[T, outputs + pitch]`, with d_hidden after its rows; d_x
/// `[T, inputs]`, overwritten.
///
/// # Panics
/// If the weight has no first factors below it (`Weight::joins_gradients`).
pub fn backward_input<T: Float>(
    device: &Device,
    tokens: usize,
    d_y: View<'_, T>,
    weight: &Weight<T>,
    d_x: ViewMut<'_, T>,
) {
    let op = "fused::matmul_lora::backward_input";
    let matmul::Shape { outputs, inputs } = weight.shape();
    check(op, "d_x", d_x.len(), tokens * inputs);
    let (Backend::Cuda(cuda), Some(both)) = (device.backend(), weight.with_first_factors()) else {
        panic!("{op}: a weight without first factors below it");
    };
    let pitch = both.len() / (outputs + weight.joined().map_or(0, |joined| joined.columns));
    let depth = both.len() / pitch;
    check(op, "d_y", d_y.len(), tokens * depth);
    let d_x = d_x.into_view().cuda();
    matmul::cuda::backward_input_rows(cuda, (tokens, depth), d_y.cuda(), (both.cuda(), pitch), d_x);
}

/// Whether [`backward_swiglu`] makes the gradient of the adapter's first factor.
pub fn makes_first_factor<T: Float>(device: &Device, gate: swiglu::Gate, adapter: &Adapter<'_, T>) -> bool {
    let is_silu = gate == swiglu::Gate::Silu;
    is_silu
        && matches!(device.backend(), Backend::Cuda(cuda) if lora::cuda_backward::makes_first_factor(cuda, adapter))
}

/// What [`backward_swiglu`] reads of down. Shapes: d_hidden `[T, pitch]`; d_activated `[T, width]`, the gradient without the
/// terms' part, left holding anything.
pub struct DownGradient<'a, T: Float> {
    pub adapter: &'a Adapter<'a, T>,
    pub d_hidden: View<'a, T>,
    pub d_activated: ViewMut<'a, T>,
}

/// `lora::backward_input` of a layer that takes in a SwiGLU's output, then `swiglu::backward`, and with `d_a` the gradient of the
/// layer's first factor. Shapes: gate_up, d_gate_up `[T, 2 width]`, the last overwritten; d_a `[rank, width]`.
///
/// # Panics
/// If that gradient is asked for where [`makes_first_factor`] denies it.
pub fn backward_swiglu<T: Float>(
    device: &Device,
    dims: swiglu::Dims,
    down: DownGradient<'_, T>,
    gate_up: View<'_, T>,
    d_gate_up: ViewMut<'_, T>,
    d_a: Option<(ViewMut<'_, T>, Write)>,
) {
    let op = "fused::matmul_lora::backward_swiglu";
    let DownGradient { adapter, d_hidden, mut d_activated } = down;
    check(op, "d_activated", d_activated.len(), dims.tokens * dims.width);
    check(op, "gate_up", gate_up.len(), 2 * dims.tokens * dims.width);
    pitch_of(op, "d_gate_up", d_gate_up.len(), dims.tokens, 2 * dims.width);
    if let Some((d_a, _)) = &d_a {
        assert!(makes_first_factor(device, dims.gate, adapter), "{op}: the gradient of a first factor");
        check(op, "d_a", d_a.len(), adapter.a.shape().len());
    }
    if dims.tokens == 0 {
        return d_a.into_iter().for_each(lora::clear);
    }
    if let Backend::Cuda(cuda) = device.backend()
        && lora::cuda::fits(cuda, adapter)
        && dims.gate == swiglu::Gate::Silu
    {
        check(op, "d_hidden", d_hidden.len(), dims.tokens * adapter.pitch());
        let of_down = (d_hidden.cuda(), d_activated.cuda());
        let (gate_up, d_gate_up) = (gate_up.cuda(), d_gate_up.cuda());
        let d_a = d_a.as_ref().map(|(d_a, write)| (d_a.cuda(), *write));
        let tokens = dims.tokens;
        return lora::cuda_backward::backward_swiglu(cuda, tokens, adapter, of_down, gate_up, d_gate_up, d_a);
    }
    lora::backward_input(device, dims.tokens, adapter, d_hidden, d_activated.reborrow());
    swiglu::backward(device, dims, gate_up, d_activated.into_view(), d_gate_up);
}
