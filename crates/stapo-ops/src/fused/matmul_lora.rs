//! `matmul::forward`, then `lora::project` and `lora::expand`: a linear layer with adapters; and what may follow it.

use std::sync::Arc;

use crate::cuda::{Cuda, ElementType, Slice};
use crate::device::Backend;
use crate::lora::cuda::To;
use crate::lora::{self, Adapter, small_m};
use crate::matmul::cuda::{SPLIT_K, for_each_split, uses_split_k};
use crate::matmul::small_m::Output;
use crate::rmsnorm::cuda::{Addend, Addition};
use crate::{Device, Float, View, ViewMut, Weight, check, matmul, rmsnorm, swiglu};

/// `y = x W^T + bias`, and the terms of the adapter. Shapes: x `[T, inputs]`; weight `[outputs, inputs]`; bias
/// `[outputs]`; hidden `[T, pitch]`, which `lora::project` overwrites.
pub struct Product<'a, T: Float> {
    pub x: View<'a, T>,
    pub weight: &'a Weight<T>,
    pub bias: Option<View<'a, T>>,
    pub adapter: &'a Adapter<'a, T>,
    pub hidden: ViewMut<'a, T>,
}

/// Shape: y `[T, outputs]`, overwritten.
pub fn forward<T: Float>(device: &Device, tokens: usize, product: Product<'_, T>, mut y: ViewMut<'_, T>) {
    let Product { x, weight, bias, adapter, mut hidden } = product;
    let matmul::Shape { outputs, inputs } = weight.shape();
    let op = "fused::matmul_lora";
    check(op, "x", x.len(), tokens * inputs);
    check(op, "y", y.len(), tokens * outputs);
    let dims = matmul::Dims { tokens, inputs, outputs };
    if let Backend::Cuda(cuda) = device.backend()
        && bias.is_none()
    {
        let operands = (x.cuda(), weight.view().cuda());
        if fits_split_k(cuda, dims, operands.1, y.cuda(), adapter) {
            lora::project(device, tokens, x, adapter, hidden.reborrow());
            return run_split_k(cuda, dims, operands, adapter, hidden.into_view().cuda(), y.cuda());
        }
        if !uses_split_k(dims, operands.1)
            && small_m::fits(Output::Product, cuda, dims, operands, adapter, y.cuda())
        {
            lora::project(device, tokens, x, adapter, hidden.reborrow());
            let of = (adapter, hidden.into_view().cuda());
            return small_m::run(Output::Product, cuda, dims, operands, of, y.cuda());
        }
    }
    matmul::forward(device, tokens, x, weight, bias, y.reborrow());
    lora::project(device, tokens, x, adapter, hidden.reborrow());
    lora::expand(device, tokens, adapter, hidden.into_view(), y);
}

/// Whether the kernel that adds the terms sums up the partial sums of a split-K product, too.
fn fits_split_k<T: Float>(
    cuda: &Cuda,
    d: matmul::Dims,
    weight: Slice,
    y: Slice,
    adapter: &Adapter<'_, T>,
) -> bool {
    let is_one_module = adapter.modules.len() == 1 && adapter.modules[0].outputs.len == d.outputs;
    uses_split_k(d, weight) && y.kind == ElementType::Bf16 && is_one_module && lora::cuda::fits(cuda, adapter)
}

fn run_split_k<T: Float>(
    cuda: &Arc<Cuda>,
    d: matmul::Dims,
    (x, weight): (Slice, Slice),
    adapter: &Adapter<'_, T>,
    hidden: Slice,
    y: Slice,
) {
    for_each_split(cuda, d, (x, weight), 0, |start, n, partials| {
        let pitch = adapter.pitch();
        let hidden = hidden.part(start * pitch, n * pitch);
        let y = y.part(start * d.outputs, n * d.outputs);
        lora::cuda::expand(cuda, n, adapter, hidden, To::SumOfPartials { partials, y });
    });
}

/// Whether gate and up are read after their SwiGLU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateUp {
    Kept,
    /// Left holding anything.
    Dropped,
}

/// Gate and up with their adapters, and `swiglu::forward` of them. Shapes: gate_up `[T, 2 width]`; out `[T, width]`, both
/// overwritten.
pub fn forward_swiglu<T: Float>(
    device: &Device,
    dims: swiglu::Dims,
    product: Product<'_, T>,
    mut gate_up: ViewMut<'_, T>,
    kept: GateUp,
    out: ViewMut<'_, T>,
) {
    let op = "fused::matmul_lora::forward_swiglu";
    let matmul::Shape { outputs, inputs } = product.weight.shape();
    check(op, "x", product.x.len(), dims.tokens * inputs);
    check(op, "gate_up", gate_up.len(), dims.tokens * outputs);
    check(op, "out", out.len(), dims.tokens * dims.width);
    if let Backend::Cuda(cuda) = device.backend()
        && product.bias.is_none()
    {
        let Product { x, weight, adapter, .. } = product;
        let operands = (x.cuda(), weight.view().cuda());
        let d = matmul::Dims { tokens: dims.tokens, inputs, outputs };
        let is_few = small_m::fits(Output::Swiglu, cuda, d, operands, adapter, out.cuda());
        let is_dropped = kept == GateUp::Dropped;
        if is_few && is_dropped || lora::cuda::fits_swiglu(cuda, adapter) {
            let mut hidden = product.hidden;
            lora::project(device, dims.tokens, x, adapter, hidden.reborrow());
            let hidden = hidden.into_view().cuda();
            if is_few && is_dropped {
                return small_m::run(Output::Swiglu, cuda, d, operands, (adapter, hidden), out.cuda());
            }
            matmul::forward(device, dims.tokens, x, weight, None, gate_up.reborrow());
            let gate_up = (gate_up.cuda(), !is_dropped);
            return lora::cuda::expand_swiglu(cuda, dims.tokens, adapter, hidden, gate_up, out.cuda());
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
    let matmul::Shape { outputs, inputs } = product.weight.shape();
    check(op, "x", product.x.len(), dims.tokens * inputs);
    check(op, "outputs", outputs, dims.width);
    check(op, "stream", stream.len(), dims.tokens * dims.width);
    check(op, "sum", sum.len(), dims.tokens * dims.width);
    rmsnorm::check_out(op, dims, norm_weight, &out);
    if let Backend::Cuda(cuda) = device.backend()
        && product.bias.is_none()
    {
        let Product { x, weight, adapter, .. } = product;
        let operands = (x.cuda(), weight.view().cuda());
        let d = matmul::Dims { tokens: dims.tokens, inputs, outputs };
        let norm = |start: usize, n: usize, partials: Slice| {
            let rows = |slice: Slice| slice.part(start * dims.width, n * dims.width);
            let addend = Addend::SplitKAndTerm(partials);
            let add = Some(Addition { addend, rows: None, sum: rows(sum.cuda()) });
            let (normed, inv_rms) = (rows(out.normed.cuda()), out.inv_rms.cuda().part(start, n));
            let dims = rmsnorm::Dims { tokens: n, ..dims };
            rmsnorm::cuda::forward(cuda, dims, rows(stream.cuda()), add, norm_weight.cuda(), normed, inv_rms);
        };
        if fits_split_k(cuda, d, operands.1, addend.cuda(), adapter) {
            let mut hidden = product.hidden;
            lora::project(device, dims.tokens, x, adapter, hidden.reborrow());
            let hidden = hidden.into_view().cuda();
            if fits_few_rows(cuda, d, operands, adapter) {
                let partials = cuda.split_k_workspace((SPLIT_K + 1) * d.tokens * outputs);
                let output = Output::SplitK { n_splits: SPLIT_K };
                small_m::run(output, cuda, d, operands, (adapter, hidden), partials);
                return norm(0, d.tokens, partials);
            }
            return for_each_split(cuda, d, operands, 1, |start, n, partials| {
                let pitch = adapter.pitch();
                let terms = partials.part(SPLIT_K * n * outputs, n * outputs);
                lora::cuda::expand(cuda, n, adapter, hidden.part(start * pitch, n * pitch), To::Terms(terms));
                norm(start, n, partials);
            });
        }
    }
    forward(device, dims.tokens, product, addend.reborrow());
    let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
    rmsnorm::forward_add(device, dims, residual, norm_weight, sum, out);
}

/// Whether one kernel computes the partial sums and the terms of a product of few rows.
fn fits_few_rows<T: Float>(
    cuda: &Arc<Cuda>,
    d: matmul::Dims,
    of: (Slice, Slice),
    adapter: &Adapter<'_, T>,
) -> bool {
    if d.tokens > small_m::MAX_ROWS || !uses_split_k(d, of.1) {
        return false;
    }
    let partials = cuda.split_k_workspace((SPLIT_K + 1) * d.tokens * d.outputs);
    small_m::fits(Output::SplitK { n_splits: SPLIT_K }, cuda, d, of, adapter, partials)
}

/// `lora::backward_input` of a layer that takes in a SwiGLU's output, then `swiglu::backward`. Shapes: d_hidden
/// `[T, pitch]`; d_activated `[T, width]`, the gradient without the terms' part, left holding anything; gate_up, d_gate_up
/// `[T, 2 width]`, the last overwritten.
pub fn backward_swiglu<T: Float>(
    device: &Device,
    dims: swiglu::Dims,
    adapter: &Adapter<'_, T>,
    (d_hidden, mut d_activated): (View<'_, T>, ViewMut<'_, T>),
    gate_up: View<'_, T>,
    d_gate_up: ViewMut<'_, T>,
) {
    let op = "fused::matmul_lora::backward_swiglu";
    check(op, "d_activated", d_activated.len(), dims.tokens * dims.width);
    check(op, "gate_up", gate_up.len(), 2 * dims.tokens * dims.width);
    check(op, "d_gate_up", d_gate_up.len(), 2 * dims.tokens * dims.width);
    if let Backend::Cuda(cuda) = device.backend()
        && lora::cuda::fits(cuda, adapter)
    {
        check(op, "d_hidden", d_hidden.len(), dims.tokens * adapter.pitch());
        let of_down = (d_hidden.cuda(), d_activated.cuda());
        return lora::cuda::backward_swiglu(
            cuda,
            dims.tokens,
            adapter,
            of_down,
            gate_up.cuda(),
            d_gate_up.cuda(),
        );
    }
    lora::backward_input(device, dims.tokens, adapter, d_hidden, d_activated.reborrow());
    swiglu::backward(device, dims, gate_up, d_activated.into_view(), d_gate_up);
}
