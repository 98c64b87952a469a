//! The first half of a layer, in both directions:
//!
//! ```text
//! exit = stream + output(attention(rope(qkv(norm(stream)))))
//! ```
//!
//! Some families norm or scale what is added to the stream, and some have no norm in front.

use super::arena::{AttentionBackward, AttentionViews, HalfEntry, HalfHiddenBackward, Hidden, Input};
use super::context::{Context, Packed, Paged, PagedSet};
use super::delta_net;
use super::gradient::Gradient;
use super::layer::{Exit, LayerPass};
use super::linear::{NextRows, OutputGradient, ResidualNorm};
use super::parameter::Parameter;
use super::weights::LayerWeights;
use crate::config::{AttentionSpec, Mixer, QkNorm};
use stapo_ops::attention::{key_copies, paged};
use stapo_ops::fused::rope_paged_attention::{self, Raw, Unrotated};
use stapo_ops::rope::{HeadNorm, HeadNormGrad, HeadNormSums, NormExtent};
use stapo_ops::{Float, View, ViewMut, attention, deltanet, output_gate, rope};

/// From the normed stream at the entry to the stream and its norm at the exit; where halves are joined, to `attended`.
pub fn forward<T: Float>(
    layer: &LayerPass<'_, T>,
    mut views: AttentionViews<'_, T>,
    context: &mut Context<'_, T>,
) {
    let weights = layer.weights;
    let attention_projects = attention_projects(layer, &views, context);
    project(layer, &mut views, attention_projects);
    match &layer.spec.mixer {
        Mixer::Attention(spec) => attend(layer, spec, &mut views, context, attention_projects),
        Mixer::DeltaNet(spec) => {
            let (mixed, out) = (views.qkv, views.attended.reborrow());
            let to = deltanet::Out { mixed, inv_norms: views.head_inv_rms, out };
            delta_net::forward(layer, *spec, views.raw_qkv.view(), to, context);
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

/// From `raw_qkv` to `attended`; with `projects` from the normed stream.
fn attend<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: &AttentionSpec,
    views: &mut AttentionViews<'_, T>,
    context: &mut Context<'_, T>,
    projects: bool,
) {
    let device = layer.device;
    let RawRows { qkv: raw, gate, ungated } = RawRows::new(layer, spec, views.raw_qkv.reborrow());
    let mut qkv = views.qkv.reborrow().into_range(0..raw.len());
    let head_inv_rms = views.head_inv_rms.reborrow();
    let attended = views.attended.reborrow();
    let (mut out, gated) = if spec.has_output_gate { (ungated, Some(attended)) } else { (attended, None) };
    match context {
        Context::Packed(packed) => {
            rotate(layer, spec, raw.view(), qkv.reborrow(), head_inv_rms);
            let dims = packed_dims(layer, spec, packed);
            let lse = views.lse.reborrow();
            let inputs = attention::Inputs { qkv: qkv.view(), sinks: sinks(layer) };
            let keys = views.keys.reborrow();
            let sequences = sequences(layer, spec, packed, inputs.qkv, keys);
            attention::forward(device, dims, inputs, sequences, out.reborrow(), lse);
        }
        Context::Paged(paged) => {
            let raw = if projects {
                let (x, weight) = (views.entry.normed.view(), layer.weights.qkv.unpacked(device));
                Raw::Product { x, weight, rows: raw }
            } else {
                Raw::Rows(raw.into_view())
            };
            let unrotated = Unrotated {
                table: layer.rows.tables.layer(layer.index),
                positions: layer.rows.positions,
                norm: head_norm(layer, spec),
                raw,
                sinks: sinks(layer),
                qkv,
                inv_rms: head_inv_rms,
            };
            let dims = paged_dims(layer, spec, paged);
            let PagedSet { slots, sequences } = paged.sets[paged.layer_sets.set_of_layer(layer.index)];
            let cache = &mut paged.caches[paged.layer_sets.cache_of_layer(layer.index)];
            rope_paged_attention::forward(device, dims, unrotated, slots, cache, sequences, out.reborrow());
        }
    }
    if let Some(gated) = gated {
        output_gate::forward(device, gate_dims(layer, spec), out.into_view(), gate.into_view(), gated);
    }
}

/// The parts of `raw_qkv`.
struct RawRows<'a, T: Float> {
    /// `[T, W]`
    qkv: ViewMut<'a, T>,
    /// `[T, Q]` each, with a gate on attention's outputs, else empty: the gates, and the outputs in front of them.
    gate: ViewMut<'a, T>,
    ungated: ViewMut<'a, T>,
}

impl<'a, T: Float> RawRows<'a, T> {
    fn new(layer: &LayerPass<'_, T>, spec: &AttentionSpec, rows: ViewMut<'a, T>) -> Self {
        let (qkv, rest) = rows.split_at(layer.rows.n_tokens * spec.heads.qkv_width());
        let n_gates = rest.len() / 2;
        let (gate, ungated) = rest.split_at(n_gates);
        Self { qkv, gate, ungated }
    }
}

/// Whether attention computes the product of queries, keys and values too. Nothing else reads `raw_qkv` then.
fn attention_projects<T: Float>(
    layer: &LayerPass<'_, T>,
    views: &AttentionViews<'_, T>,
    context: &Context<'_, T>,
) -> bool {
    matches!(context, Context::Paged(_))
        && layer.rows.n_tokens >= rope_paged_attention::LEAST_ROWS
        && layer.spec.attention().is_some_and(|spec| !spec.has_output_gate)
        && layer.weights.qkv.bias.is_none()
        && matches!(views.hidden.first, Hidden::Absent)
}

/// From the normed stream at the entry to `raw_qkv`, or from what the layer before has activated; with `attention_projects` only
/// to the normed stream.
fn project<T: Float>(layer: &LayerPass<'_, T>, views: &mut AttentionViews<'_, T>, attention_projects: bool) {
    let qkv = &layer.weights.qkv;
    if let Some(spec) = layer.spec.attention().filter(|spec| spec.has_output_gate) {
        return project_gated(layer, spec, views);
    }
    let to = views.raw_qkv.reborrow();
    let entry = &mut views.entry;
    let (Some(unfinished), Some(norm)) = (layer.unfinished, &layer.weights.attention_norm) else {
        if attention_projects {
            return;
        }
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
    if attention_projects {
        return unfinished.forward_residual_norm(layer.device, Input::Plain(activated), residual);
    }
    unfinished.forward_residual_norm_to(layer.device, activated, residual, qkv, NextRows::Product(to));
}

/// [`project`] where each query is followed by its gate.
fn project_gated<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: &AttentionSpec,
    views: &mut AttentionViews<'_, T>,
) {
    let hidden = std::mem::replace(&mut views.hidden.first, Hidden::Absent);
    let input = hidden.with(views.entry.normed.reborrow());
    let mut projected = views.qkv.reborrow();
    layer.weights.qkv.forward(layer.device, layer.rows.n_tokens, input, projected.reborrow());
    let to = RawRows::new(layer, spec, views.raw_qkv.reborrow());
    output_gate::divide(layer.device, gate_dims(layer, spec), projected.into_view(), to.qkv, to.gate);
}

/// The norm of the stream at the entry, where it was not made together with the stream.
pub fn norm_entry<T: Float>(layer: &LayerPass<'_, T>, views: AttentionViews<'_, T>) {
    layer.enter(layer.weights.attention_norm.as_ref(), views.entry);
}

/// From `raw_qkv` to `qkv`: norm per head, where the family has one, and rotary position embedding.
fn rotate<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: &AttentionSpec,
    raw: View<'_, T>,
    out: ViewMut<'_, T>,
    head_inv_rms: ViewMut<'_, T>,
) {
    let norm = head_norm(layer, spec).map(|norm| (norm, head_inv_rms));
    let table = layer.rows.tables.layer(layer.index);
    rope::forward(layer.device, rope_dims(layer, spec), table, layer.rows.positions, norm, raw, out);
}

/// What `raw_qkv` and the norm at the entry are followed by, once more: `qkv`, and `x A^T` that lies after the norm.
pub fn recompute_inputs<T: Float>(
    layer: &LayerPass<'_, T>,
    mut views: AttentionViews<'_, T>,
    packed: Packed<'_>,
) {
    let hidden = std::mem::replace(&mut views.hidden.first, Hidden::Absent);
    let input = hidden.with(views.entry.normed.reborrow());
    layer.weights.qkv.project_again(layer.device, layer.rows.n_tokens, input);
    match &layer.spec.mixer {
        Mixer::Attention(spec) => {
            let raw = RawRows::new(layer, spec, views.raw_qkv).qkv;
            let qkv = views.qkv.into_range(0..raw.len());
            rotate(layer, spec, raw.view(), qkv, views.head_inv_rms);
        }
        Mixer::DeltaNet(spec) => delta_net::recompute(layer, *spec, views, packed),
    }
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
    match &layer.spec.mixer {
        Mixer::Attention(spec) if spec.has_output_gate => {
            attend_gated_backward(layer, spec, &mut views, packed, gradients);
        }
        Mixer::Attention(spec) => {
            let saved = attention::Saved { qkv: views.qkv, out: views.attended, lse: views.lse };
            let dims = packed_dims(layer, spec, &packed);
            let (d_attended, d_qkv) = (views.d_attended.view(), views.d_qkv.reborrow());
            let keys = (views.keys.reborrow(), views.d_keys.reborrow());
            attend_backward(layer, spec, &packed, saved, keys, (d_attended, d_qkv));
            if let (Some(sinks), Some(Some(d_sinks))) = (sinks(layer), &mut gradients.sinks) {
                attention::sinks::backward(device, dims, saved, sinks, d_attended, d_sinks.sum_mut());
            }
            let saved = (views.raw_qkv, views.head_inv_rms);
            let d_raw = views.d_raw_qkv.rows.reborrow();
            rotate_backward(layer, spec, saved, (views.d_qkv.view(), d_raw), gradients);
        }
        Mixer::DeltaNet(spec) => delta_net::backward(layer, *spec, &mut views, packed, gradients),
    }
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

/// From `d_attended` to `d_raw_qkv` through the gate on attention's outputs.
fn attend_gated_backward<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: &AttentionSpec,
    views: &mut AttentionBackward<'_, T>,
    packed: Packed<'_>,
    gradients: &mut LayerWeights<Option<Gradient<T>>>,
) {
    let device = layer.device;
    let (n_qkv, n_out) = (layer.rows.n_tokens * spec.heads.qkv_width(), views.d_attended.len());
    let raw = views.raw_qkv.range(0..n_qkv);
    let gate = views.raw_qkv.range(n_qkv..n_qkv + n_out);
    let ungated = views.raw_qkv.range(n_qkv + n_out..n_qkv + 2 * n_out);
    let (mut d_qkv, rest) = views.d_qkv.reborrow().split_at(n_qkv);
    let (mut d_raw, rest) = rest.split_at(n_qkv);
    let (mut d_ungated, mut d_gate) = rest.split_at(n_out);
    let d_out = views.d_attended.view();
    let (gate_dims, to) = (gate_dims(layer, spec), (d_ungated.reborrow(), d_gate.reborrow()));
    output_gate::backward(device, gate_dims, (ungated, gate), d_out, to.0, to.1);
    let saved = attention::Saved { qkv: views.qkv.range(0..n_qkv), out: ungated, lse: views.lse };
    let keys = (views.keys.reborrow(), views.d_keys.reborrow());
    attend_backward(layer, spec, &packed, saved, keys, (d_ungated.view(), d_qkv.reborrow()));
    let between = (d_qkv.view(), d_raw.reborrow());
    rotate_backward(layer, spec, (raw, views.head_inv_rms), between, gradients);
    let to = views.d_raw_qkv.rows.reborrow();
    output_gate::join(device, gate_dims, d_raw.into_view(), d_gate.into_view(), to);
}

/// What attention reads of packed sequences. Where these share rows, `keys` becomes copies of their keys and values.
fn sequences<'a, T: Float>(
    layer: &LayerPass<'_, T>,
    spec: &AttentionSpec,
    packed: &Packed<'a>,
    qkv: View<'_, T>,
    mut keys: ViewMut<'a, T>,
) -> attention::Sequences<'a, T> {
    let Some(copied) = packed.keys else { return packed.offsets.into() };
    key_copies::forward(layer.device, spec.heads, copied.copies, qkv, keys.reborrow());
    let keys = attention::Keys { rows: keys.into_view(), offsets: copied.offsets };
    attention::Sequences { offsets: packed.offsets, keys: Some(keys) }
}

/// From the gradient of attention's outputs to that of `qkv`: of a row that several sequences share, the sum over these.
fn attend_backward<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: &AttentionSpec,
    packed: &Packed<'_>,
    saved: attention::Saved<'_, T>,
    (keys, mut d_keys): (ViewMut<'_, T>, ViewMut<'_, T>),
    (d_out, mut d_qkv): (View<'_, T>, ViewMut<'_, T>),
) {
    let device = layer.device;
    let dims = packed_dims(layer, spec, packed);
    let sequences = sequences(layer, spec, packed, saved.qkv, keys);
    let to = attention::Gradients { qkv: d_qkv.reborrow(), keys: packed.keys.map(|_| d_keys.reborrow()) };
    attention::backward(device, dims, saved, sequences, d_out, to);
    if let Some(copied) = packed.keys {
        key_copies::backward(device, spec.heads, copied.copies, d_keys.into_view(), d_qkv);
    }
}

/// From the gradient after rope to that before it and before the norms, from what these took in.
fn rotate_backward<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: &AttentionSpec,
    (raw, inv_rms): (View<'_, T>, View<'_, T>),
    (d_qkv, d_raw): (View<'_, T>, ViewMut<'_, T>),
    gradients: &mut LayerWeights<Option<Gradient<T>>>,
) {
    let norm = head_norm(layer, spec).zip(gradients.head_norms.as_mut()).map(|(norm, gradients)| {
        let weights = gradients.query.as_mut().zip(gradients.key.as_mut());
        let to = weights.map(|(query, key)| HeadNormSums {
            d_query_weight: query.sum_mut(),
            d_key_weight: key.sum_mut(),
        });
        HeadNormGrad { norm, raw, inv_rms, to }
    });
    let table = layer.rows.tables.layer(layer.index);
    rope::backward(layer.device, rope_dims(layer, spec), table, layer.rows.positions, norm, d_qkv, d_raw);
}

fn packed_dims<T: Float>(layer: &LayerPass<'_, T>, spec: &AttentionSpec, packed: &Packed) -> attention::Dims {
    let AttentionSpec { heads, rule, .. } = *spec;
    attention::Dims { tokens: layer.rows.n_tokens, sequences: packed.n_sequences, heads, rule }
}

fn paged_dims<T: Float>(layer: &LayerPass<'_, T>, spec: &AttentionSpec, paged: &Paged<T>) -> paged::Dims {
    paged::Dims {
        tokens: layer.rows.n_tokens,
        sequences: paged.n_sequences,
        heads: spec.heads,
        rule: spec.rule,
        table_width: paged.table_width,
    }
}

fn gate_dims<T: Float>(layer: &LayerPass<'_, T>, spec: &AttentionSpec) -> output_gate::Dims {
    output_gate::Dims { tokens: layer.rows.n_tokens, heads: spec.heads }
}

fn sinks<'a, T: Float>(layer: &LayerPass<'a, T>) -> Option<View<'a, T>> {
    layer.weights.sinks.as_ref().map(Parameter::view)
}

fn head_norm<'a, T: Float>(layer: &LayerPass<'a, T>, spec: &AttentionSpec) -> Option<HeadNorm<'a, T>> {
    layer.weights.head_norms.as_ref().map(|norms| HeadNorm {
        extent: match spec.qk_norm {
            QkNorm::PerProjection => NormExtent::Projection,
            QkNorm::PerHead | QkNorm::Absent => NormExtent::Head,
        },
        query_weight: norms.query.view(),
        key_weight: norms.key.view(),
        eps: layer.config.norm_eps.into(),
    })
}

fn rope_dims<T: Float>(layer: &LayerPass<'_, T>, spec: &AttentionSpec) -> rope::Dims {
    rope::Dims { tokens: layer.rows.n_tokens, heads: spec.heads }
}
