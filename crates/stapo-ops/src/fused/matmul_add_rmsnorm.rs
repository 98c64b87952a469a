//! `matmul::forward`, then `rmsnorm::forward_add`: a product that is added to the residual stream, and the next norm.
//! The norm's kernel adds up split-K partial sums itself, where the product's kernel does not.

use std::sync::Arc;

use crate::cuda::{Cuda, Slice};
use crate::device::Backend;
use crate::matmul::cuda::{DeepProduct, uses_split_k};
use crate::rmsnorm::cuda::{Addend, Addition};
use crate::{Device, Float, View, ViewMut, Weight, check, matmul, rmsnorm};

/// `y = x W^T`. Shapes: x `[T, inputs]`; weight `[D, inputs]`; y `[T, D]`, scratch that is left holding anything.
pub struct Product<'a, T: Float> {
    pub x: View<'a, T>,
    pub weight: &'a Weight<T>,
    pub y: ViewMut<'a, T>,
}

/// `sum = stream + product`, `normed = norm(sum)`. Shapes: stream, sum `[T, D]`; norm_weight `[D]`.
pub fn forward<T: Float>(
    device: &Device,
    dims: rmsnorm::Dims,
    stream: View<'_, T>,
    product: Product<'_, T>,
    norm_weight: View<'_, T>,
    sum: ViewMut<'_, T>,
    to: rmsnorm::Out<'_, T>,
) {
    let op = "fused::matmul_add_rmsnorm";
    let Product { x, weight, mut y } = product;
    let matmul::Shape { outputs, inputs } = weight.shape();
    check(op, "x", x.len(), dims.tokens * inputs);
    check(op, "weight", outputs, dims.width);
    check(op, "stream", stream.len(), dims.tokens * dims.width);
    check(op, "sum", sum.len(), dims.tokens * dims.width);
    rmsnorm::check_out(op, dims, norm_weight, &to);
    if let Backend::Cuda(cuda) = device.backend() {
        let d = matmul::Dims { tokens: dims.tokens, inputs, outputs };
        let deep = DeepProduct { d, x: x.cuda(), weight: weight.view().cuda(), n_further: 0 };
        if fits(cuda, &deep, y.cuda()) {
            let to = (sum.cuda(), to.normed.cuda(), to.inv_rms.cuda());
            return run(cuda, dims, stream.cuda(), &deep, norm_weight.cuda(), to);
        }
    }
    matmul::forward(device, dims.tokens, x, weight, None, y.reborrow());
    let residual = rmsnorm::Residual { stream, addend: y.into_view() };
    rmsnorm::forward_add(device, dims, residual, norm_weight, sum, to);
}

fn fits(cuda: &Cuda, product: &DeepProduct, y: Slice) -> bool {
    uses_split_k(product.d, product.weight) && !product.is_one_kernel(cuda, y)
}

/// The norm adds up the partial sums of `product`. Shapes: stream, sum `[T, D]`; normed `[T, D]`, or rows that have further
/// columns after these.
pub(super) fn run(
    cuda: &Arc<Cuda>,
    dims: rmsnorm::Dims,
    stream: Slice,
    product: &DeepProduct,
    norm_weight: Slice,
    (sum, normed, inv_rms): (Slice, Slice, Slice),
) {
    let pitch = normed.len / dims.tokens.max(1);
    product.for_each_split(cuda, |start, n, partials| {
        let rows = |slice: Slice| slice.part(start * dims.width, n * dims.width);
        let add = Addition { addend: Addend::SplitK(partials), rows: None, sum: rows(sum) };
        let dims = rmsnorm::Dims { tokens: n, ..dims };
        let (normed, inv_rms) = (normed.part(start * pitch, n * pitch), inv_rms.part(start, n));
        rmsnorm::cuda::forward(cuda, dims, rows(stream), Some(add), norm_weight, normed, inv_rms);
    });
}
