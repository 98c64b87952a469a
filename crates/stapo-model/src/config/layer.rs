//! What a layer of a decoder is made of. Readers of model files describe every layer, `decoder/` executes the
//! description, and plans of memory and time count it.

use super::{Family, Rope, TensorSpec};
use crate::error::{Error, Result};
use stapo_ops::attention::Heads;

/// One layer: a mixer, which moves numbers between positions, then a feed-forward. Each adds its result to the residual
/// stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerSpec {
    pub norms: NormPlacement,
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
}

/// Where a layer norms the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// In front of the mixer (`input_layernorm`) and in front of the feed-forward (`post_attention_layernorm`).
    Before,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mixer {
    Attention(AttentionSpec),
}

/// Causal attention over all earlier positions with grouped queries and rotary positions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// The dimension of a head is even, because rotary positions rotate pairs of dimensions. It is not always the width
    /// divided by the number of heads.
    pub heads: Heads,
    pub qk_norm: QkNorm,
    pub biases: AttentionBiases,
    pub rope: Rope,
}

/// The RMS norm of queries and keys, before rope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    Absent,
    /// Of each head alone (`q_norm.weight`, `k_norm.weight`, each `[head_dim]`).
    PerHead,
}

/// Which projections of attention have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionBiases {
    Absent,
    QueryKeyValue,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// `down(silu(gate(x)) * up(x))`, without biases.
    SwiGlu { width: usize },
}

/// What a linear layer does in the layer that it is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinearRole {
    /// From the residual stream to queries, keys and values.
    QueryKeyValue,
    /// From the heads to the residual stream.
    AttentionOutput,
    /// From the residual stream to gate and up.
    GateUp,
    /// From the activation to the residual stream.
    Down,
}

/// Largest values accepted: far above any model, and small enough that the product of two cannot overflow.
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 14;
const MAX_FFN_WIDTH: usize = 1 << 20;

impl Family {
    /// A layer as this family has them.
    pub fn layer(self, heads: Heads, rope: Rope, ffn_width: usize) -> LayerSpec {
        let qk_norm = if self == Self::Qwen3 { QkNorm::PerHead } else { QkNorm::Absent };
        let biases =
            if self == Self::Qwen2 { AttentionBiases::QueryKeyValue } else { AttentionBiases::Absent };
        LayerSpec {
            norms: NormPlacement::Before,
            mixer: Mixer::Attention(AttentionSpec { heads, qk_norm, biases, rope }),
            feed_forward: FeedForward::SwiGlu { width: ffn_width },
        }
    }
}

impl LayerSpec {
    pub fn attention(&self) -> &AttentionSpec {
        let Mixer::Attention(attention) = &self.mixer;
        attention
    }

    /// Columns of the feed-forward's activation.
    pub fn ffn_width(&self) -> usize {
        let FeedForward::SwiGlu { width } = self.feed_forward;
        width
    }

    /// Numbers that the KV cache holds for each token.
    pub fn kv_numbers_per_token(&self) -> usize {
        let heads = self.attention().heads;
        2 * heads.kv * heads.dim
    }

    /// Numbers in the layer's matrices, in a model of this width.
    pub fn n_matrix_weights(&self, width: usize) -> usize {
        let tensors = self.tensors(width);
        tensors.iter().filter(|spec| spec.shape.len() == 2).map(TensorSpec::n_elements).sum()
    }

    /// Every weight of the layer in the order of the forward pass, by its name within the layer.
    pub(super) fn tensors(&self, width: usize) -> Vec<TensorSpec> {
        let mut list = Vec::new();
        let mut add = |name: String, shape: &[usize]| list.push(TensorSpec { name, shape: shape.to_vec() });
        let AttentionSpec { heads, qk_norm, biases, .. } = self.attention();
        let NormPlacement::Before = self.norms;
        add("input_layernorm.weight".into(), &[width]);
        let kv_width = heads.kv * heads.dim;
        let projections = [("q", heads.out_width()), ("k", kv_width), ("v", kv_width)];
        for (name, rows) in projections {
            add(format!("self_attn.{name}_proj.weight"), &[rows, width]);
        }
        let biased = match biases {
            AttentionBiases::Absent => &[][..],
            AttentionBiases::QueryKeyValue => &projections,
        };
        for (name, rows) in biased {
            add(format!("self_attn.{name}_proj.bias"), &[*rows]);
        }
        let normed = match qk_norm {
            QkNorm::Absent => &[][..],
            QkNorm::PerHead => &["q", "k"],
        };
        for name in normed {
            add(format!("self_attn.{name}_norm.weight"), &[heads.dim]);
        }
        add("self_attn.o_proj.weight".into(), &[width, heads.out_width()]);
        add("post_attention_layernorm.weight".into(), &[width]);
        let FeedForward::SwiGlu { width: ffn_width } = self.feed_forward;
        add("mlp.gate_proj.weight".into(), &[ffn_width, width]);
        add("mlp.up_proj.weight".into(), &[ffn_width, width]);
        add("mlp.down_proj.weight".into(), &[width, ffn_width]);
        list
    }

    /// Checks that the values are possible and fit each other; `location` names the file in errors.
    pub(super) fn validate(&self, location: &str) -> Result<()> {
        let AttentionSpec { heads, rope, .. } = self.attention();
        check_range(location, "number of attention heads", heads.query, MAX_HEADS)?;
        check_range(location, "number of key-value heads", heads.kv, MAX_HEADS)?;
        check_range(location, "head dimension", heads.dim, MAX_HEAD_DIM)?;
        check_range(location, "feed-forward width", self.ffn_width(), MAX_FFN_WIDTH)?;
        if !heads.query.is_multiple_of(heads.kv) {
            let Heads { query, kv, .. } = heads;
            let problem = format!("{query} attention heads do not divide among {kv} key-value heads");
            return Err(Error::malformed(location, problem));
        }
        if !heads.dim.is_multiple_of(2) {
            let problem = format!("head dimension is {}, expected an even number (rotary pairs)", heads.dim);
            return Err(Error::malformed(location, problem));
        }
        rope.validate(location)
    }
}

/// Refuses 0 and values above `max`.
pub(super) fn check_range(location: &str, name: &str, value: usize, max: usize) -> Result<()> {
    if value == 0 || value > max {
        return Err(Error::malformed(location, format!("{name} is {value}, expected 1 to {max}")));
    }
    Ok(())
}
