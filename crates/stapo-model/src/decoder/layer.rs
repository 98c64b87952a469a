//! What both halves of a layer work with.

use super::gradient::Gradient;
use super::parameter::Parameter;
use super::rope_tables::RopeTables;
use super::weights::{LayerWeights, Linear};
use crate::config::{LayerSpec, ModelConfig};
use stapo_ops::{Device, Float, View, ViewMut, Write, rmsnorm};

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

impl<T: Float> LayerPass<'_, T> {
    pub fn norm_dims(&self) -> rmsnorm::Dims {
        norm_dims(self.config, self.rows.n_tokens)
    }

    /// The backward of a half-layer's norm. Shapes: d_normed, d_stream `[T, D]`. Adds to `d_stream` and to the gradient of
    /// the norm's weight, where this is trained.
    pub fn norm_backward(
        &self,
        saved: rmsnorm::Saved<'_, T>,
        d_normed: View<'_, T>,
        d_stream: ViewMut<'_, T>,
        d_weight: &mut Option<Gradient<T>>,
    ) {
        let dims = self.norm_dims();
        let d_weight = d_weight.as_mut().map(Gradient::sum_mut);
        rmsnorm::backward(self.device, dims, saved, d_normed, Write::Add, d_stream, d_weight);
    }
}

pub fn norm_dims(config: &ModelConfig, n_rows: usize) -> rmsnorm::Dims {
    rmsnorm::Dims { tokens: n_rows, width: config.width, eps: config.norm_eps.into() }
}
