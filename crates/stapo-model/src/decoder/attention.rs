//! The first half of a layer, in both directions:
//!
//! ```text
//! exit = stream + output(attention(rope(qkv(norm(stream)))))
//! ```
//!
//! Some families norm or scale what is added to the stream, and some have no norm in front.

use super::arena::{AttentionBackward, AttentionViews, HalfEntry, HalfHiddenBackward, Hidden};
use super::gradient::Gradient;
use super::layer::{Exit, LayerPass};
use super::linear::{NextRows, OutputGradient, ResidualNorm};
use super::parameter::Parameter;
use super::weights::LayerWeights;
use crate::config::{AttentionSpec, LayerSets, QkNorm};
use stapo_ops::attention::paged::{self, Cache};
use stapo_ops::fused::rope_paged_attention::{self, Unrotated};
use stapo_ops::rope::{HeadNorm, HeadNormGrad, HeadNormSums, NormExtent};
use stapo_ops::{Float, View, ViewMut, attention, rope};

/// The keys and values that queries attend to.
pub enum Context<'a, T: Float> {
    Packed(Packed<'a>),
    Paged(Paged<'a, T>),
}

/// Whole sequences, one behind the other: each token attends to its own sequence up to itself.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    pub n_sequences: usize,
    /// `[n_sequences + 1]`
    pub offsets: View<'a, u32>,
}

/// New tokens of sequences whose earlier keys and values lie in a paged cache.
pub struct Paged<'a, T: Float> {
    pub n_sequences: usize,
    /// Blocks that the table of a sequence has room for.
    pub table_width: usize,
    pub layer_sets: &'a LayerSets,
    /// One for each set of layers.
    pub sets: Vec<PagedSet<'a>>,
    pub caches: &'a mut [Cache<T>],
}

/// Where the keys and values of one set of layers lie.
#[derive(Clone, Copy)]
pub struct PagedSet<'a> {
    /// `[T]`: where those of the new tokens are stored.
    pub slots: View<'a, u32>,
    pub sequences: paged::Sequences<'a>,
}

/// From the normed stream at the entry to the stream and its norm at the exit; where halves are joined, to `attended`.
pub fn forward<T: Float>(
    layer: &LayerPass<'_, T>,
    mut views: AttentionViews<'_, T>,
    context: &mut Context<'_, T>,
) {
    let device = layer.device;
    let weights = layer.weights;
    project(layer, &mut views);
    match context {
        Context::Packed(packed) => {
            rotate(layer, views.raw_qkv.view(), views.qkv.reborrow(), views.head_inv_rms);
            let dims = packed.dims(layer);
            let out = views.attended.reborrow();
            let inputs = attention::Inputs { qkv: views.qkv.view(), sinks: sinks(layer) };
            attention::forward(device, dims, inputs, packed.offsets, out, views.lse);
        }
        Context::Paged(paged) => {
            let unrotated = Unrotated {
                table: layer.rows.tables.layer(layer.index),
                positions: layer.rows.positions,
                norm: head_norm(layer),
                raw: views.raw_qkv.view(),
                sinks: sinks(layer),
                qkv: views.qkv,
                inv_rms: views.head_inv_rms,
            };
            let dims = paged.dims(layer);
            let PagedSet { slots, sequences } = paged.sets[paged.layer_sets.set_of_layer(layer.index)];
            let cache = &mut paged.caches[paged.layer_sets.cache_of_layer(layer.index)];
            let out = views.attended.reborrow();
            rope_paged_attention::forward(device, dims, unrotated, slots, cache, sequences, out);
        }
    }
    if layer.joins_halves {
        return;
    }
    let exit = Exit {
        stream: views.entry.stream.view(),
        addend: views.addend,
        result: views.result,
        result_norm: weights.attended_norm.as_ref().map(Parameter::view),
        next: Some(views.exit),
        next_norm: weights.ffn_norm.as_ref().map(Parameter::view),
    };
    layer.leave(&weights.output, views.hidden.second.with(views.attended), exit);
}

/// From the normed stream at the entry to `raw_qkv`, or from what the layer before has activated.
fn project<T: Float>(layer: &LayerPass<'_, T>, views: &mut AttentionViews<'_, T>) {
    let qkv = &layer.weights.qkv;
    let to = views.raw_qkv.reborrow();
    let entry = &mut views.entry;
    let (Some(unfinished), Some(norm)) = (layer.unfinished, &layer.weights.attention_norm) else {
        let hidden = std::mem::replace(&mut views.hidden.first, Hidden::Absent);
        let input = hidden.with(entry.normed.reborrow());
        return qkv.forward(layer.device, layer.rows.n_tokens, input, to);
    };
    let residual = ResidualNorm {
        dims: layer.norm_dims(),
        stream: views.exit.stream.view(),
        addend: views.addend.reborrow(),
        norm_weight: norm.view(),
        exit: HalfEntry {
            stream: entry.stream.reborrow(),
            normed: entry.normed.reborrow(),
            inv_rms: entry.inv_rms.reborrow(),
        },
    };
    let activated = views.activated.view();
    unfinished.forward_residual_norm_to(layer.device, activated, residual, qkv, NextRows::Product(to));
}

/// The norm of the stream at the entry, where it was not made together with the stream.
pub fn norm_entry<T: Float>(layer: &LayerPass<'_, T>, views: AttentionViews<'_, T>) {
    layer.enter(layer.weights.attention_norm.as_ref(), views.entry);
}

/// From `raw_qkv` to `qkv`: norm per head, where the family has one, and rotary position embedding.
fn rotate<T: Float>(
    layer: &LayerPass<'_, T>,
    raw: View<'_, T>,
    out: ViewMut<'_, T>,
    head_inv_rms: ViewMut<'_, T>,
) {
    let norm = head_norm(layer).map(|norm| (norm, head_inv_rms));
    let table = layer.rows.tables.layer(layer.index);
    rope::forward(layer.device, rope_dims(layer), table, layer.rows.positions, norm, raw, out);
}

/// What `raw_qkv` and the norm at the entry are followed by, once more: `qkv`, and `x A^T` that lies behind the norm.
pub fn recompute_inputs<T: Float>(layer: &LayerPass<'_, T>, views: AttentionViews<'_, T>) {
    let input = views.hidden.first.with(views.entry.normed);
    layer.weights.qkv.project_again(layer.device, layer.rows.n_tokens, input);
    rotate(layer, views.raw_qkv.view(), views.qkv, views.head_inv_rms);
}

/// `d_stream` holds the gradient of the stream at the exit, and then that of the stream at the entry.
pub fn backward<T: Float>(
    layer: &LayerPass<'_, T>,
    mut views: AttentionBackward<'_, T>,
    packed: Packed<'_>,
    gradients: &mut LayerWeights<Option<Gradient<T>>>,
) {
    let device = layer.device;
    let n_tokens = layer.rows.n_tokens;
    let weights = layer.weights;
    let norm = weights.attended_norm.as_ref();
    let d_product = views.d_normed.reborrow();
    let d_norm = gradients.attended_norm.as_mut().and_then(Option::as_mut);
    layer.leave_backward(views.d_stream.view(), d_product, &views.result, norm, d_norm);
    let is_stream = layer.spec.adds_results_unchanged();
    let d_product = if is_stream { views.d_stream.view() } else { views.d_normed.view() };
    weights.output.backward(
        device,
        n_tokens,
        (views.attended, OutputGradient::Apart(d_product)),
        views.d_attended.reborrow(),
        &mut gradients.output,
        views.hidden.as_mut().map(HalfHiddenBackward::second),
    );
    let saved = attention::Saved { qkv: views.qkv, out: views.attended, lse: views.lse };
    attention::backward(
        device,
        packed.dims(layer),
        saved,
        packed.offsets,
        views.d_attended.view(),
        views.d_qkv.reborrow(),
    );
    if let (Some(sinks), Some(Some(d_sinks))) = (sinks(layer), &mut gradients.sinks) {
        let d_attended = views.d_attended.view();
        attention::sinks::backward(device, packed.dims(layer), saved, sinks, d_attended, d_sinks.sum_mut());
    }
    rotate_backward(layer, &mut views, gradients);
    let rows = (views.normed, weights.qkv.output_gradient(views.d_raw_qkv));
    let hidden = views.hidden.as_mut().map(HalfHiddenBackward::first);
    if layer.index == 0 && gradients.qkv.weight.is_none() {
        // Neither the norm nor the embedding in front of it is trained: the gradient ends here.
        return weights.qkv.backward_factors(device, n_tokens, rows, &mut gradients.qkv, hidden);
    }
    let d_normed = views.d_normed.reborrow();
    weights.qkv.backward(device, n_tokens, rows, d_normed, &mut gradients.qkv, hidden);
    let (norm, entry) = (weights.attention_norm.as_ref(), (views.stream, views.inv_rms));
    let d_norm = gradients.attention_norm.as_mut().and_then(Option::as_mut);
    layer.enter_backward(norm, entry, views.d_normed.view(), views.d_stream, d_norm);
}

/// From `d_qkv` to `d_raw_qkv`.
fn rotate_backward<T: Float>(
    layer: &LayerPass<'_, T>,
    views: &mut AttentionBackward<'_, T>,
    gradients: &mut LayerWeights<Option<Gradient<T>>>,
) {
    let norm = head_norm(layer).zip(gradients.head_norms.as_mut()).map(|(norm, gradients)| {
        let weights = gradients.query.as_mut().zip(gradients.key.as_mut());
        let to = weights.map(|(query, key)| HeadNormSums {
            d_query_weight: query.sum_mut(),
            d_key_weight: key.sum_mut(),
        });
        HeadNormGrad { norm, raw: views.raw_qkv, inv_rms: views.head_inv_rms, to }
    });
    let d_qkv = views.d_qkv.view();
    let d_raw = views.d_raw_qkv.rows.reborrow();
    let table = layer.rows.tables.layer(layer.index);
    rope::backward(layer.device, rope_dims(layer), table, layer.rows.positions, norm, d_qkv, d_raw);
}

impl Packed<'_> {
    fn dims<T: Float>(&self, layer: &LayerPass<'_, T>) -> attention::Dims {
        let AttentionSpec { heads, rule, .. } = *layer.spec.attention();
        attention::Dims { tokens: layer.rows.n_tokens, sequences: self.n_sequences, heads, rule }
    }
}

impl<T: Float> Paged<'_, T> {
    fn dims(&self, layer: &LayerPass<'_, T>) -> paged::Dims {
        paged::Dims {
            tokens: layer.rows.n_tokens,
            sequences: self.n_sequences,
            heads: layer.spec.attention().heads,
            rule: layer.spec.attention().rule,
            table_width: self.table_width,
        }
    }
}

fn sinks<'a, T: Float>(layer: &LayerPass<'a, T>) -> Option<View<'a, T>> {
    layer.weights.sinks.as_ref().map(Parameter::view)
}

fn head_norm<'a, T: Float>(layer: &LayerPass<'a, T>) -> Option<HeadNorm<'a, T>> {
    layer.weights.head_norms.as_ref().map(|norms| HeadNorm {
        extent: match layer.spec.attention().qk_norm {
            QkNorm::PerProjection => NormExtent::Projection,
            QkNorm::PerHead | QkNorm::Absent => NormExtent::Head,
        },
        query_weight: norms.query.view(),
        key_weight: norms.key.view(),
        eps: layer.config.norm_eps.into(),
    })
}

fn rope_dims<T: Float>(layer: &LayerPass<'_, T>) -> rope::Dims {
    rope::Dims { tokens: layer.rows.n_tokens, heads: layer.spec.attention().heads }
}
