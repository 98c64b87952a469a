//! `matmul::forward`, then `rmsnorm::forward` of the product, the addition to the residual stream, and `rmsnorm::forward` of the
//! sum or a copy of it: the end of a half-layer whose result is normed, and the beginning of the next.

use super::matmul_add_rmsnorm::Product;
use crate::cuda::{Cuda, Slice};
use crate::device::Backend;
use crate::matmul::cuda::{DeepProduct, uses_split_k};
use crate::rmsnorm::cuda as kernels;
use crate::{Device, Float, View, ViewMut, check, matmul, residual, rmsnorm};

/// `sum = stream + norm(product)`. Shapes: stream, sum `[T, D]`.
pub struct NormedResult<'a, T: Float> {
    pub dims: rmsnorm::Dims,
    /// `[D]`: of the product's norm.
    pub weight: View<'a, T>,
    /// `[T]`: of the product's norm, kept for backward.
    pub inv_rms: ViewMut<'a, T>,
    pub stream: View<'a, T>,
    pub sum: ViewMut<'a, T>,
    /// `[T, D]`, scratch that is left holding anything.
    pub addend: ViewMut<'a, T>,
    /// `[D]`: `out.normed = norm(sum)`; `None`: `out.normed = sum`, and `out.inv_rms` is left as it is.
    pub next_weight: Option<View<'a, T>>,
    pub out: rmsnorm::Out<'a, T>,
}

/// Shapes: product as in [`Product`]; its y is kept for backward.
pub fn forward<T: Float>(device: &Device, product: Product<'_, T>, result: NormedResult<'_, T>) {
    let op = "fused::matmul_rmsnorm_add";
    let Product { x, weight, mut y } = product;
    let tokens = result.dims.tokens;
    let matmul::Shape { outputs, inputs } = weight.shape();
    check(op, "x", x.len(), tokens * inputs);
    check(op, "weight", outputs, result.dims.width);
    if let Backend::Cuda(cuda) = device.backend()
        && kernels::fits_result(result.dims.width)
    {
        let d = matmul::Dims { tokens, inputs, outputs };
        let deep = DeepProduct { d, x: x.cuda(), weight: weight.view().cuda(), n_further: 0 };
        if uses_split_k(d, deep.weight) && !deep.is_one_kernel(cuda, y.cuda()) {
            result.check(op, y.len());
            deep.for_each_split(cuda, |start, n, partials| {
                result.run(cuda, start..start + n, y.cuda(), Some(partials));
            });
            return;
        }
    }
    matmul::forward(device, tokens, x, weight, None, y.reborrow());
    norm_and_add(device, y.into_view(), result);
}

/// What [`forward`] does after the product `[T, D]`.
pub fn norm_and_add<T: Float>(device: &Device, product: View<'_, T>, result: NormedResult<'_, T>) {
    let op = "fused::matmul_rmsnorm_add";
    result.check(op, product.len());
    if let Backend::Cuda(cuda) = device.backend()
        && kernels::fits_result(result.dims.width)
    {
        return result.run(cuda, 0..result.dims.tokens, product.cuda(), None);
    }
    let NormedResult { dims, weight, inv_rms, stream, mut sum, mut addend, next_weight, out } = result;
    rmsnorm::forward(device, dims, product, weight, rmsnorm::Out { normed: addend.reborrow(), inv_rms });
    if let Some(weight) = next_weight {
        let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
        return rmsnorm::forward_add(device, dims, residual, weight, sum, out);
    }
    sum.copy_from(stream);
    residual::add(device, sum.reborrow(), addend.into_view());
    residual::copy_rows(device, dims.tokens, sum.into_view(), out.normed);
}

impl<T: Float> NormedResult<'_, T> {
    #[track_caller]
    fn check(&self, op: &str, product_len: usize) {
        let n = self.dims.tokens * self.dims.width;
        check(op, "product", product_len, n);
        check(op, "stream", self.stream.len(), n);
        check(op, "sum", self.sum.len(), n);
        check(op, "inv_rms", self.inv_rms.len(), self.dims.tokens);
        rmsnorm::check_out(op, self.dims, self.weight, &self.out);
    }

    /// Some rows by one kernel.
    fn run(&self, cuda: &Cuda, range: std::ops::Range<usize>, product: Slice, partials: Option<Slice>) {
        let (start, n, width) = (range.start, range.len(), self.dims.width);
        let wide = |slice: Slice| slice.part(start * width, n * width);
        let normed = self.out.normed.cuda();
        let pitch = normed.len / self.dims.tokens.max(1);
        let rows = kernels::NormedResult {
            product: wide(product),
            partials,
            weight: self.weight.cuda(),
            inv_rms: self.inv_rms.cuda().part(start, n),
            stream: wide(self.stream.cuda()),
            sum: wide(self.sum.cuda()),
            next_weight: self.next_weight.map(|weight| weight.cuda()),
            normed: normed.part(start * pitch, n * pitch),
            next_inv_rms: self.out.inv_rms.cuda().part(start, n),
        };
        kernels::forward_result(cuda, rmsnorm::Dims { tokens: n, ..self.dims }, &rows);
    }
}
