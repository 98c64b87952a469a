//! The tiny model of this crate's tests. Tests in `tests/` include this file as a separate module, so its names come
//! from the module above.

use super::{
    DeltaNetHeads, DeltaNetSpec, EmbeddingScale, Family, FeedForward, Heads, LayerSpec, LogitRule,
    LongFactors, Mixer, ModelConfig, Rope, RopeScaling,
};

/// A model of two layers whose sizes are multiples of nothing that a kernel would like.
pub fn tiny_config(family: Family) -> ModelConfig {
    ModelConfig {
        width: 12,
        layers: tiny_layers(family, Heads { query: 3, kv: 1, dim: 6 }, 11, 2),
        vocabulary: 17,
        norm_eps: 1e-5,
        max_positions: 64,
        tied_embeddings: family != Family::Llama,
        embedding_scale: match family {
            Family::Gemma2 | Family::Gemma3 => EmbeddingScale::SqrtWidth,
            Family::Granite => EmbeddingScale::Factor(2.5),
            _ => EmbeddingScale::One,
        },
        logits: match family {
            Family::Gemma2 => LogitRule { softcap: Some(2.0), ..LogitRule::default() },
            Family::Granite => LogitRule { divisor: 1.5, ..LogitRule::default() },
            _ => LogitRule::default(),
        },
        ..ModelConfig::empty(family)
    }
}

/// Layers of these sizes, for variants of the tiny model.
pub fn tiny_layers(family: Family, heads: Heads, ffn_width: usize, n_layers: usize) -> Vec<LayerSpec> {
    let rope = Rope { theta: 100.0, scaling: RopeScaling::None };
    let mut layers = vec![family.layer(heads, rope, ffn_width); n_layers];
    for (index, layer) in layers.iter_mut().enumerate() {
        let is_even = index % 2 == 0;
        if family == Family::Qwen35 && is_even {
            let deltanet = DeltaNetHeads { key: 1, value: 2, key_dim: 3, value_dim: heads.dim };
            layer.mixer = Mixer::DeltaNet(DeltaNetSpec { heads: deltanet, kernel: 3 });
        }
        let FeedForward::Gated { has_biases, .. } = &mut layer.feed_forward;
        *has_biases = family == Family::SmolLm3;
        let Some(attention) = layer.attention_mut() else { continue };
        match family {
            Family::SmolLm3 if is_even => attention.rotary_dim = 0,
            Family::Mistral => attention.rule.window = Some(5),
            Family::Olmo3 | Family::GptOss if is_even => attention.rule.window = Some(4),
            Family::Gemma3 if is_even => {
                attention.rule.window = Some(7);
                attention.rope.theta = 30.0;
            }
            Family::Gemma2 => {
                attention.rule.window = is_even.then_some(6);
                attention.rule.softcap = Some(1.5);
                attention.rule.scale = 0.3;
            }
            Family::Qwen35 => attention.rotary_dim = heads.dim - 2,
            Family::Phi3 => {
                attention.rotary_dim = heads.dim - 2;
                attention.rope.scaling = long_rope(attention.rotary_dim / 2);
            }
            Family::Granite => {
                // Larger scales make attention so sharp that rounding weights to bf16 alone changes gradients by half.
                attention.rule.scale = 1.4 / (heads.dim as f64).sqrt();
                layer.residual_scale = 0.4;
            }
            _ => {}
        }
    }
    layers
}

/// `LongRoPE` that uses its factors for long sequences.
fn long_rope(n_pairs: usize) -> RopeScaling {
    RopeScaling::Long {
        short: vec![1.0; n_pairs].into(),
        long: (1..=n_pairs).map(|pair| pair as f64).collect(),
        used: LongFactors::Long,
        original_positions: 8,
        attention_factor: 1.2,
    }
}
