//! What a layer of a decoder is made of. Readers of model files describe every layer, `decoder/` executes the
//! description, and plans of memory and time count it.

use super::{Rope, TensorSpec};
use crate::error::{Error, Result};
use stapo_ops::attention::{Heads, ScoreRule};
use stapo_ops::deltanet;
use stapo_ops::swiglu::Gate;

/// One layer: a mixer, which moves numbers between positions, then a feed-forward. Each adds its result to the residual
/// stream.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    pub norms: NormPlacement,
    pub mixer: Mixer,
    pub feed_forward: FeedForward,
    /// What the results of mixer and feed-forward are multiplied by before they are added to the residual stream.
    pub residual_scale: f64,
}

/// Where a layer has norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// In front of the mixer (`input_layernorm`) and in front of the feed-forward (`post_attention_layernorm`).
    Before,
    /// On the results of the mixer (`post_attention_layernorm`) and of the feed-forward (`post_feedforward_layernorm`), before
    /// these are added to the residual stream.
    After,
    /// In front of both (`input_layernorm`, `pre_feedforward_layernorm`) and on the results of both, as in `After`.
    Both,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    Attention(AttentionSpec),
    DeltaNet(DeltaNetSpec),
}

/// Gated DeltaNet: a recurrence over a state of fixed size instead of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaNetSpec {
    pub heads: deltanet::Heads,
    /// Rows that the causal convolution over queries, keys and values reads.
    pub kernel: usize,
}

/// Causal attention with grouped queries.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// The dimension of a head is even, because rotary positions rotate pairs of dimensions. It is not always the width
    /// divided by the number of heads.
    pub heads: Heads,
    /// The scale of scores, their softcap, and the window of keys that a token sees.
    pub rule: ScoreRule,
    pub qk_norm: QkNorm,
    pub biases: AttentionBiases,
    /// Whether every query head has a learned logit that joins the softmax's denominator (`self_attn.sinks`).
    pub has_sinks: bool,
    pub rope: Rope,
    /// The first dimensions of a head, which rope rotates; 0 in layers without positions.
    pub rotary_dim: usize,
    /// Whether `q_proj` holds a gate after the query of each head, whose sigmoid multiplies the head's output.
    pub has_output_gate: bool,
}

/// The RMS norm of queries and keys, before rope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    Absent,
    /// Of each head alone (`q_norm.weight`, `k_norm.weight`, each `[head_dim]`).
    PerHead,
    /// Of all query heads together and all key heads together (`q_norm.weight` `[query heads * head_dim]`).
    PerProjection,
}

/// Which projections of attention have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionBiases {
    Absent,
    QueryKeyValue,
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForward {
    /// `down(activation(gate(x)) * up(x))`.
    Gated { width: usize, gate: Gate, has_biases: bool },
}

/// What a linear layer does in the layer that it is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LinearRole {
    /// From the residual stream to what the mixer takes in: queries, keys and values, and in DeltaNet their gates.
    QueryKeyValue,
    /// From the mixer's heads to the residual stream.
    AttentionOutput,
    /// From the residual stream to gate and up.
    GateUp,
    /// From the activation to the residual stream.
    Down,
}

/// Largest values accepted: far above any model, and small enough that the product of two cannot overflow.
const MAX_HEADS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 14;
const MAX_KERNEL: usize = 64;
const MAX_FFN_WIDTH: usize = 1 << 20;

impl NormPlacement {
    /// The names of the norms in front of mixer and feed-forward.
    pub(crate) fn before(self) -> Option<[&'static str; 2]> {
        match self {
            Self::Before => Some(["input_layernorm", "post_attention_layernorm"]),
            Self::After => None,
            Self::Both => Some(["input_layernorm", "pre_feedforward_layernorm"]),
        }
    }

    /// The names of the norms on the results of mixer and feed-forward.
    pub(crate) fn after(self) -> Option<[&'static str; 2]> {
        match self {
            Self::Before => None,
            Self::After | Self::Both => Some(["post_attention_layernorm", "post_feedforward_layernorm"]),
        }
    }
}

impl LayerSpec {
    /// `None` in layers with another mixer.
    pub fn attention(&self) -> Option<&AttentionSpec> {
        match &self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::DeltaNet(_) => None,
        }
    }

    pub fn attention_mut(&mut self) -> Option<&mut AttentionSpec> {
        match &mut self.mixer {
            Mixer::Attention(attention) => Some(attention),
            Mixer::DeltaNet(_) => None,
        }
    }

    pub fn delta_net(&self) -> Option<DeltaNetSpec> {
        match self.mixer {
            Mixer::Attention(_) => None,
            Mixer::DeltaNet(spec) => Some(spec),
        }
    }

    /// Columns that the mixer's input projections give, and columns that its output projection takes in.
    pub fn mixer_widths(&self) -> (usize, usize) {
        match &self.mixer {
            Mixer::Attention(attention) => (attention.projected_width(), attention.heads.out_width()),
            Mixer::DeltaNet(DeltaNetSpec { heads, .. }) => (heads.input_width(), heads.value_width()),
        }
    }

    /// Bytes that a running sequence keeps besides keys and values, whatever its length, where an activation has `compute_bytes`.
    pub fn state_bytes(&self, compute_bytes: usize) -> usize {
        let bytes =
            |spec: DeltaNetSpec| deltanet::States::<f32>::slot_bytes(spec.heads, spec.kernel, compute_bytes);
        self.delta_net().map_or(0, bytes)
    }

    /// Columns of the feed-forward's activation.
    pub fn ffn_width(&self) -> usize {
        let FeedForward::Gated { width, .. } = self.feed_forward;
        width
    }

    /// The activation of the feed-forward's gate.
    pub fn gate(&self) -> Gate {
        let FeedForward::Gated { gate, .. } = self.feed_forward;
        gate
    }

    /// Whether the results of mixer and feed-forward are added to the residual stream as they are.
    pub(crate) fn adds_results_unchanged(&self) -> bool {
        self.norms == NormPlacement::Before && self.residual_scale == 1.0
    }

    /// Numbers that the KV cache holds for each token.
    pub fn kv_numbers_per_token(&self) -> usize {
        self.attention().map_or(0, |attention| 2 * attention.heads.kv * attention.heads.dim)
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
        let (before, after) = (self.norms.before(), self.norms.after());
        let norm =
            |names: Option<[&str; 2]>, half: usize| names.map(|names| format!("{}.weight", names[half]));
        if let Some(name) = norm(before, 0) {
            add(name, &[width]);
        }
        match &self.mixer {
            Mixer::Attention(attention) => attention.tensors(width, &mut add),
            Mixer::DeltaNet(spec) => spec.tensors(width, &mut add),
        }
        for name in [norm(after, 0), norm(before, 1)].into_iter().flatten() {
            add(name, &[width]);
        }
        let FeedForward::Gated { width: ffn_width, has_biases, .. } = self.feed_forward;
        for module in [&["gate", "up"][..], &["down"]] {
            let shape = if module == ["down"] { [width, ffn_width] } else { [ffn_width, width] };
            for name in module {
                add(format!("mlp.{name}_proj.weight"), &shape);
            }
            for name in module.iter().filter(|_| has_biases) {
                add(format!("mlp.{name}_proj.bias"), &shape[..1]);
            }
        }
        if let Some(name) = norm(after, 1) {
            add(name, &[width]);
        }
        list
    }

    /// Checks that the values are possible and fit each other; `location` names the file in errors.
    pub(super) fn validate(&self, location: &str) -> Result<()> {
        check_range(location, "feed-forward width", self.ffn_width(), MAX_FFN_WIDTH)?;
        positive(location, "the multiplier of the residual stream", self.residual_scale)?;
        match &self.mixer {
            Mixer::Attention(attention) => attention.validate(location),
            Mixer::DeltaNet(spec) => spec.validate(location),
        }
    }
}

fn positive(location: &str, name: &str, value: f64) -> Result<()> {
    let problem = format!("{name} is {value}, expected above 0");
    if value.is_finite() && value > 0.0 { Ok(()) } else { Err(Error::malformed(location, problem)) }
}

impl AttentionSpec {
    /// Columns of queries, keys and values, and of the gates of outputs where there are any.
    pub fn projected_width(&self) -> usize {
        self.heads.qkv_width() + if self.has_output_gate { self.heads.out_width() } else { 0 }
    }

    fn tensors(&self, width: usize, add: &mut impl FnMut(String, &[usize])) {
        let Self { heads, qk_norm, biases, has_sinks, .. } = self;
        let kv_width = heads.kv * heads.dim;
        let query_width = self.projected_width() - 2 * kv_width;
        let projections = [("q", query_width), ("k", kv_width), ("v", kv_width)];
        for (name, rows) in projections {
            add(format!("self_attn.{name}_proj.weight"), &[rows, width]);
        }
        if *biases != AttentionBiases::Absent {
            for (name, rows) in projections {
                add(format!("self_attn.{name}_proj.bias"), &[rows]);
            }
        }
        for (name, rows) in &projections[..2] {
            match qk_norm {
                QkNorm::Absent => {}
                QkNorm::PerHead => add(format!("self_attn.{name}_norm.weight"), &[heads.dim]),
                QkNorm::PerProjection => add(format!("self_attn.{name}_norm.weight"), &[*rows]),
            }
        }
        if *has_sinks {
            add("self_attn.sinks".into(), &[heads.query]);
        }
        add("self_attn.o_proj.weight".into(), &[width, heads.out_width()]);
        if *biases == AttentionBiases::All {
            add("self_attn.o_proj.bias".into(), &[width]);
        }
    }

    fn validate(&self, location: &str) -> Result<()> {
        let Self { heads, rope, rule, rotary_dim, .. } = self;
        check_range(location, "number of attention heads", heads.query, MAX_HEADS)?;
        check_range(location, "number of key-value heads", heads.kv, MAX_HEADS)?;
        check_range(location, "head dimension", heads.dim, MAX_HEAD_DIM)?;
        if !heads.query.is_multiple_of(heads.kv) {
            let Heads { query, kv, .. } = heads;
            let problem = format!("{query} attention heads do not divide among {kv} key-value heads");
            return Err(Error::malformed(location, problem));
        }
        if !heads.dim.is_multiple_of(2) {
            let problem = format!("head dimension is {}, expected an even number (rotary pairs)", heads.dim);
            return Err(Error::malformed(location, problem));
        }
        if !rotary_dim.is_multiple_of(2) || *rotary_dim > heads.dim {
            let problem =
                format!("{rotary_dim} rotated dimensions of heads of {}, expected an even number", heads.dim);
            return Err(Error::malformed(location, problem));
        }
        positive(location, "the scale of attention scores", rule.scale)?;
        positive(location, "the softcap of attention scores", rule.softcap.unwrap_or(1.0))?;
        positive(location, "the window of attention", rule.window.map_or(1.0, |window| window as f64))?;
        rope.validate(location, *rotary_dim)
    }
}

impl DeltaNetSpec {
    fn tensors(self, width: usize, add: &mut impl FnMut(String, &[usize])) {
        let Self { heads, kernel } = self;
        let projections =
            [("qkv", heads.conv_width()), ("z", heads.value_width()), ("b", heads.value), ("a", heads.value)];
        for (name, rows) in projections {
            add(format!("linear_attn.in_proj_{name}.weight"), &[rows, width]);
        }
        add("linear_attn.conv1d.weight".into(), &[heads.conv_width(), 1, kernel]);
        add("linear_attn.A_log".into(), &[heads.value]);
        add("linear_attn.dt_bias".into(), &[heads.value]);
        add("linear_attn.norm.weight".into(), &[heads.value_dim]);
        add("linear_attn.out_proj.weight".into(), &[width, heads.value_width()]);
    }

    fn validate(self, location: &str) -> Result<()> {
        let deltanet::Heads { key, value, key_dim, value_dim } = self.heads;
        check_range(location, "number of key heads of linear attention", key, MAX_HEADS)?;
        check_range(location, "number of value heads of linear attention", value, MAX_HEADS)?;
        check_range(location, "key dimension of linear attention", key_dim, MAX_HEAD_DIM)?;
        check_range(location, "value dimension of linear attention", value_dim, MAX_HEAD_DIM)?;
        check_range(location, "kernel of the convolution", self.kernel, MAX_KERNEL)?;
        if !value.is_multiple_of(key) {
            let problem = format!("{value} value heads do not divide among {key} key heads");
            return Err(Error::malformed(location, problem));
        }
        Ok(())
    }
}

/// Refuses 0 and values above `max`.
pub(super) fn check_range(location: &str, name: &str, value: usize, max: usize) -> Result<()> {
    if value == 0 || value > max {
        return Err(Error::malformed(location, format!("{name} is {value}, expected 1 to {max}")));
    }
    Ok(())
}
