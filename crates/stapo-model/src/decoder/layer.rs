//! What both halves of a layer work with.

use super::arena::{HalfEntry, Input, ResultBackward, ResultViews};
use super::gradient::Gradient;
use super::linear::ResidualNorm;
use super::parameter::Parameter;
use super::rope_tables::RopeTables;
use super::weights::{LayerWeights, Linear};
use crate::config::{LayerSpec, ModelConfig};
use stapo_ops::fused::matmul_rmsnorm_add::NormedResult;
use stapo_ops::{Device, Float, View, ViewMut, Write, residual, rmsnorm};

/// The rows of a batch, the same for all layers.
#[derive(Clone, Copy)]
pub struct Rows<'a, T: Float> {
    pub n_tokens: usize,
    /// `[T]`
    pub positions: View<'a, u32>,
    pub tables: &'a RopeTables<T>,
}

/// One layer at work on the rows of a batch.
#[derive(Clone, Copy)]
pub struct LayerPass<'a, T: Float> {
    pub device: &'a Device,
    pub config: &'a ModelConfig,
    pub index: usize,
    pub spec: &'a LayerSpec,
    pub weights: &'a LayerWeights<Parameter<T>>,
    pub rows: Rows<'a, T>,
    /// Whether the last product of a half-layer, the residual stream with its norm and the first product of the next
    /// half-layer are one op. All layers must share the memory of one.
    pub joins_halves: bool,
    /// Where halves are joined: the last product of the layer before, which is still to be computed.
    pub unfinished: Option<&'a Linear<Parameter<T>>>,
}

/// Where a half-layer ends.
pub struct Exit<'a, T: Float> {
    /// `[T, D]`: the residual stream at the half-layer's entry.
    pub stream: View<'a, T>,
    /// `[T, D]`: what is added to the residual stream; after the last layer it is read, else left holding anything.
    pub addend: ViewMut<'a, T>,
    pub result: ResultViews<'a, T>,
    /// `[D]`: the norm of the half-layer's result, where it has one.
    pub result_norm: Option<View<'a, T>>,
    /// The entry of the next half-layer; `None` after the last layer.
    pub next: Option<HalfEntry<'a, T>>,
    /// `[D]`: the norm in front of the next half-layer, where it has one.
    pub next_norm: Option<View<'a, T>>,
}

impl<T: Float> LayerPass<'_, T> {
    /// The last product of a half-layer, the norm or the factor of it, the residual stream, and the norm in front of the next
    /// half-layer.
    pub fn leave(&self, linear: &Linear<Parameter<T>>, input: Input<'_, T>, exit: Exit<'_, T>) {
        let Exit { stream, mut addend, result, result_norm, next, next_norm } = exit;
        let (device, dims) = (self.device, self.norm_dims());
        let (next, norm_weight) = match (next, next_norm) {
            (Some(exit), Some(norm_weight)) if self.spec.adds_results_unchanged() => {
                let to = ResidualNorm { dims, stream, addend, norm_weight, exit };
                return linear.forward_residual_norm(device, input, to);
            }
            other => other,
        };
        let (next, norm_weight) = match (next, result_norm) {
            (Some(exit), Some(weight)) if self.spec.residual_scale == 1.0 => {
                let ResultViews { product, inv_rms } = result;
                let HalfEntry { stream: sum, normed, inv_rms: next_inv_rms } = exit;
                let out = rmsnorm::Out { normed, inv_rms: next_inv_rms };
                let next_weight = norm_weight;
                let result = NormedResult { dims, weight, inv_rms, stream, sum, addend, next_weight, out };
                return linear.forward_normed_result(device, input, product, result);
            }
            (next, _) => (next, norm_weight),
        };
        match result_norm {
            Some(weight) => self.product_and_norm(linear, input, addend.reborrow(), result, weight),
            None => linear.forward(device, dims.tokens, input, addend.reborrow()),
        }
        if self.spec.residual_scale != 1.0 {
            residual::scale(device, addend.reborrow(), self.spec.residual_scale);
        }
        let Some(mut exit) = next else { return };
        if let Some(weight) = norm_weight {
            let residual = rmsnorm::Residual { stream, addend: addend.into_view() };
            let out = rmsnorm::Out { normed: exit.normed, inv_rms: exit.inv_rms };
            return rmsnorm::forward_add(device, dims, residual, weight, exit.stream, out);
        }
        exit.stream.copy_from(stream);
        residual::add(device, exit.stream.reborrow(), addend.into_view());
        residual::copy_rows(device, dims.tokens, exit.stream.into_view(), exit.normed);
    }

    /// The last product of a half-layer and its norm.
    pub fn product_and_norm(
        &self,
        linear: &Linear<Parameter<T>>,
        input: Input<'_, T>,
        normed: ViewMut<'_, T>,
        result: ResultViews<'_, T>,
        weight: View<'_, T>,
    ) {
        let ResultViews { mut product, inv_rms } = result;
        linear.forward(self.device, self.rows.n_tokens, input, product.reborrow());
        let out = rmsnorm::Out { normed, inv_rms };
        rmsnorm::forward(self.device, self.norm_dims(), product.into_view(), weight, out);
    }

    /// The norm of the stream at a half-layer's entry, or the stream itself in a layer without that norm.
    pub fn enter(&self, norm: Option<&Parameter<T>>, entry: HalfEntry<'_, T>) {
        let HalfEntry { stream, normed, inv_rms } = entry;
        match norm {
            Some(norm) => {
                let out = rmsnorm::Out { normed, inv_rms };
                rmsnorm::forward(self.device, self.norm_dims(), stream.view(), norm.view(), out);
            }
            None => residual::copy_rows(self.device, self.rows.n_tokens, stream.into_view(), normed),
        }
    }

    /// The gradient of a half-layer's last product, from that of the residual stream, into `d_product` where the two differ.
    /// Adds to the gradient of the norm of the result.
    pub fn leave_backward(
        &self,
        d_stream: View<'_, T>,
        mut d_product: ViewMut<'_, T>,
        result: &ResultBackward<'_, T>,
        norm: Option<&Parameter<T>>,
        d_norm: Option<&mut Gradient<T>>,
    ) {
        if let Some(norm) = norm {
            let saved = rmsnorm::Saved { x: result.product, weight: norm.view(), inv_rms: result.inv_rms };
            let d_weight = d_norm.map(Gradient::sum_mut);
            rmsnorm::backward(
                self.device,
                self.norm_dims(),
                saved,
                d_stream,
                Write::Set,
                d_product,
                d_weight,
            );
        } else if self.spec.residual_scale != 1.0 {
            d_product.copy_from(d_stream);
            residual::scale(self.device, d_product, self.spec.residual_scale);
        }
    }

    pub fn norm_dims(&self) -> rmsnorm::Dims {
        norm_dims(self.config, self.rows.n_tokens)
    }

    /// The backward of the norm at a half-layer's entry, of the stream and inv_rms there. Shapes: d_normed, d_stream `[T, D]`.
    /// Adds to `d_stream` and to the gradient of the norm's weight, where this is trained.
    pub fn enter_backward(
        &self,
        norm: Option<&Parameter<T>>,
        (x, inv_rms): (View<'_, T>, View<'_, T>),
        d_normed: View<'_, T>,
        d_stream: ViewMut<'_, T>,
        d_weight: Option<&mut Gradient<T>>,
    ) {
        let Some(norm) = norm else { return residual::add(self.device, d_stream, d_normed) };
        let saved = rmsnorm::Saved { x, weight: norm.view(), inv_rms };
        let dims = self.norm_dims();
        let d_weight = d_weight.map(Gradient::sum_mut);
        rmsnorm::backward(self.device, dims, saved, d_normed, Write::Add, d_stream, d_weight);
    }
}

pub fn norm_dims(config: &ModelConfig, n_rows: usize) -> rmsnorm::Dims {
    rmsnorm::Dims { tokens: n_rows, width: config.width, eps: config.norm_eps.into() }
}
