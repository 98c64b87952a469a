//! Which tensors of a configuration make up which parameter.

use super::{
    Adapter, DELTA_NET, DecoderWeights, DeltaNet, Ffn, GATE_UP, HeadNorms, LayerWeights, Linear,
    ParameterKind, ParameterSpec, QKV, Role, SwiGlu,
};
use crate::config::{
    AttentionBiases, AttentionSpec, FeedForward, LayerSpec, Mixer, ModelConfig, QkNorm, SCORE, TensorSpec,
};
use crate::decoder::lora::LoraSpec;
use stapo_ops::lora::joined_columns;
use std::collections::BTreeMap;

impl DecoderWeights<ParameterSpec> {
    /// The parameters of a model of this configuration, with the adapters of `lora`.
    pub fn specs(config: &ModelConfig, lora: Option<&LoraSpec>) -> Self {
        let left = config.tensors().into_iter().map(|spec| (spec.name.clone(), spec)).collect();
        let mut tensors = Tensors { left, lora };
        let specs = DecoderWeights {
            embedding: tensors.take("model.embed_tokens.weight"),
            layers: (0..).zip(&config.layers).map(|(index, layer)| tensors.layer(layer, index)).collect(),
            final_norm: tensors.take("model.norm.weight"),
            head: match config.score {
                // The head of a reward model is trained with adapters, since nothing in the model's files is like it.
                Some(_) => Some(ParameterSpec { role: Role::Trained, ..tensors.take(SCORE) }),
                None => (!config.tied_embeddings).then(|| tensors.take("lm_head.weight")),
            },
        };
        debug_assert!(tensors.left.is_empty(), "tensors that are no part of a parameter: {:?}", tensors.left);
        specs
    }
}

/// The parameters of a layer's mixer.
struct MixerWeights<P> {
    qkv: Linear<P>,
    delta_net: Option<DeltaNet<P>>,
    head_norms: Option<HeadNorms<P>>,
    sinks: Option<P>,
    output: Linear<P>,
}

/// The tensors of a configuration that are not yet part of a parameter, by name.
struct Tensors<'a> {
    left: BTreeMap<String, TensorSpec>,
    lora: Option<&'a LoraSpec>,
}

impl Tensors<'_> {
    fn take(&mut self, name: &str) -> ParameterSpec {
        self.stack([name.to_string()])
    }

    fn stack<const N: usize>(&mut self, names: [String; N]) -> ParameterSpec {
        let mut take = |name: String| {
            self.left.remove(&name).unwrap_or_else(|| panic!("the configuration lists no tensor {name}"))
        };
        let role = if self.lora.is_some() { Role::Frozen } else { Role::Trained };
        ParameterSpec::stacked(names.into_iter().map(&mut take).collect(), role)
    }

    fn linear<const N: usize>(
        &mut self,
        weights: [String; N],
        biases: Option<[String; N]>,
    ) -> Linear<ParameterSpec> {
        let mut weight = self.stack(weights);
        let bias = biases.map(|names| self.stack(names));
        let adapter = self.lora.and_then(|lora| Adapter::for_weight(lora, &weight));
        if let (Some(adapter), ParameterKind::Matrix(shape)) = (&adapter, weight.kind)
            // The product of so deep a layer uses split-K without a bias, and does not with one.
            && (bias.is_none() || shape.inputs < 2 * shape.outputs)
        {
            weight.n_joined = joined_columns(shape.inputs, &adapter.modules);
        }
        Linear { weight, bias, adapter }
    }

    fn attention(
        &mut self,
        spec: &AttentionSpec,
        named: impl Fn(&str) -> String,
    ) -> MixerWeights<ParameterSpec> {
        let qkv = |kind: &str| QKV.map(|name| named(&format!("self_attn.{name}.{kind}")));
        let has_output_bias = spec.biases == AttentionBiases::All;
        MixerWeights {
            qkv: self.linear(
                qkv("weight"),
                match spec.biases {
                    AttentionBiases::Absent => None,
                    AttentionBiases::QueryKeyValue | AttentionBiases::All => Some(qkv("bias")),
                },
            ),
            delta_net: None,
            head_norms: match spec.qk_norm {
                QkNorm::Absent => None,
                QkNorm::PerHead | QkNorm::PerProjection => Some(HeadNorms {
                    query: self.take(&named("self_attn.q_norm.weight")),
                    key: self.take(&named("self_attn.k_norm.weight")),
                }),
            },
            sinks: spec.has_sinks.then(|| self.take(&named("self_attn.sinks"))),
            output: self.linear(
                [named("self_attn.o_proj.weight")],
                has_output_bias.then(|| [named("self_attn.o_proj.bias")]),
            ),
        }
    }

    fn delta_net(&mut self, named: impl Fn(&str) -> String) -> MixerWeights<ParameterSpec> {
        let inside = |name: &str| named(&format!("linear_attn.{name}"));
        MixerWeights {
            qkv: self.linear(DELTA_NET.map(|name| inside(&format!("{name}.weight"))), None),
            delta_net: Some(DeltaNet {
                conv: self.take(&inside("conv1d.weight")),
                a_log: self.take(&inside("A_log")),
                dt_bias: self.take(&inside("dt_bias")),
                norm: self.take(&inside("norm.weight")),
            }),
            head_norms: None,
            sinks: None,
            output: self.linear([inside("out_proj.weight")], None),
        }
    }

    fn layer(&mut self, spec: &LayerSpec, index: usize) -> LayerWeights<ParameterSpec> {
        let named = |name: &str| format!("model.layers.{index}.{name}");
        let FeedForward::Gated { has_biases, .. } = spec.feed_forward;
        let gate_up = |kind: &str| GATE_UP.map(|name| named(&format!("mlp.{name}.{kind}")));
        let norm = |names: Option<[&str; 2]>, half: usize| Some(named(&format!("{}.weight", names?[half])));
        let (before, after) = (spec.norms.before(), spec.norms.after());
        let mixer = match &spec.mixer {
            Mixer::Attention(attention) => self.attention(attention, named),
            Mixer::DeltaNet(_) => self.delta_net(named),
        };
        let MixerWeights { qkv, delta_net, head_norms, sinks, output } = mixer;
        LayerWeights {
            attention_norm: norm(before, 0).map(|name| self.take(&name)),
            qkv,
            delta_net,
            head_norms,
            sinks,
            output,
            attended_norm: norm(after, 0).map(|name| self.take(&name)),
            ffn_norm: norm(before, 1).map(|name| self.take(&name)),
            ffn: Ffn::SwiGlu(SwiGlu {
                gate_up: self.linear(gate_up("weight"), has_biases.then(|| gate_up("bias"))),
                down: self.linear(
                    [named("mlp.down_proj.weight")],
                    has_biases.then(|| [named("mlp.down_proj.bias")]),
                ),
            }),
            fed_norm: norm(after, 1).map(|name| self.take(&name)),
        }
    }
}
