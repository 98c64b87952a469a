//! Gated DeltaNet in a layer's first half, in both directions, in the place of attention.

use super::arena::{AttentionBackward, AttentionViews};
use super::context::{Context, Packed};
use super::gradient::Gradient;
use super::layer::LayerPass;
use super::parameter::Parameter;
use super::weights::{DeltaNet, LayerWeights};
use crate::config::DeltaNetSpec;
use stapo_ops::deltanet::{self, Carried, Dims, Out, ParameterSums, Parameters, Saved, Sequences};
use stapo_ops::{Float, View};

/// From the rows of the input projections to those of the output projection. Paged rows continue after the states of their sequences.
pub fn forward<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: DeltaNetSpec,
    raw: View<'_, T>,
    to: Out<'_, T>,
    context: &mut Context<'_, T>,
) {
    let (n_sequences, sequences) = match context {
        Context::Packed(packed) => {
            assert!(packed.keys.is_none(), "DeltaNet: sequences that share rows would need copies of states");
            (packed.n_sequences, Sequences { offsets: packed.offsets, carried: None })
        }
        Context::Paged(paged) => {
            let states = paged.states[layer.index].as_mut().expect("a layer of DeltaNet has states");
            // Sets of layers differ in blocks alone.
            let of_blocks = paged.sets[0].sequences;
            let (contexts, slots) = (of_blocks.contexts, paged.state_slots);
            let carried = Some(Carried { contexts, slots, states });
            (paged.n_sequences, Sequences { offsets: of_blocks.offsets, carried })
        }
    };
    let parameters = parameters(layer).parameters();
    deltanet::forward(layer.device, dims(layer, spec, n_sequences), parameters, raw, sequences, to);
}

/// What `raw_qkv` is followed by, once more.
pub fn recompute<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: DeltaNetSpec,
    views: AttentionViews<'_, T>,
    packed: Packed<'_>,
) {
    let to = Out { mixed: views.qkv, inv_norms: views.head_inv_rms, out: views.attended };
    forward(layer, spec, views.raw_qkv.view(), to, &mut Context::Packed(packed));
}

/// From `d_attended` to `d_raw_qkv`.
pub fn backward<T: Float>(
    layer: &LayerPass<'_, T>,
    spec: DeltaNetSpec,
    views: &mut AttentionBackward<'_, T>,
    packed: Packed<'_>,
    gradients: &mut LayerWeights<Option<Gradient<T>>>,
) {
    let saved = Saved { raw: views.raw_qkv, mixed: views.qkv, inv_norms: views.head_inv_rms };
    let to = (views.d_qkv.reborrow(), views.d_raw_qkv.rows.reborrow());
    deltanet::backward(
        layer.device,
        dims(layer, spec, packed.n_sequences),
        (parameters(layer).parameters(), saved),
        packed.offsets,
        views.d_attended.view(),
        to,
        gradients.delta_net.as_mut().and_then(DeltaNet::sums),
    );
}

fn parameters<'a, T: Float>(layer: &LayerPass<'a, T>) -> &'a DeltaNet<Parameter<T>> {
    layer.weights.delta_net.as_ref().expect("a layer of DeltaNet has its weights")
}

fn dims<T: Float>(layer: &LayerPass<'_, T>, spec: DeltaNetSpec, sequences: usize) -> Dims {
    let DeltaNetSpec { heads, kernel } = spec;
    Dims { tokens: layer.rows.n_tokens, sequences, heads, kernel, eps: layer.config.norm_eps.into() }
}

impl<T: Float> DeltaNet<Parameter<T>> {
    fn parameters(&self) -> Parameters<'_, T> {
        Parameters {
            conv: self.conv.view(),
            a_log: self.a_log.view(),
            dt_bias: self.dt_bias.view(),
            norm: self.norm.view(),
        }
    }
}

impl<T: Float> DeltaNet<Option<Gradient<T>>> {
    /// `None` if the layer is frozen.
    fn sums(&mut self) -> Option<ParameterSums<'_, T>> {
        Some(ParameterSums {
            d_conv: self.conv.as_mut()?.sum_mut(),
            d_a_log: self.a_log.as_mut()?.sum_mut(),
            d_dt_bias: self.dt_bias.as_mut()?.sum_mut(),
            d_norm: self.norm.as_mut()?.sum_mut(),
        })
    }
}
