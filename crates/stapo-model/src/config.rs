//! The shape of a model, from which every other part takes its sizes.

mod families;
mod hugging_face;
mod known;
mod layer;
mod layer_sets;
pub(crate) mod missing;
mod parts;
mod reader;
mod rope;
mod score;
#[cfg(test)]
mod tests;

pub use families::Family;
pub(crate) use hugging_face::is_multimodal;
pub use layer::{
    AttentionBiases, AttentionSpec, DeltaNetSpec, FeedForward, LayerSpec, LinearRole, Mixer, NormPlacement,
    QkNorm,
};
pub use layer_sets::{KEPT_BEFORE_WINDOW, LayerSets, READ_BEFORE_WINDOW, REWOUND_POSITIONS};
pub use parts::Part;
pub(crate) use reader::token_ids;
pub use rope::Rope;
pub use score::{SCORE, ScoreHead};
pub use stapo_ops::attention::{Heads, ScoreRule};
pub use stapo_ops::deltanet::Heads as DeltaNetHeads;
pub use stapo_ops::lm_head::LogitRule;
pub use stapo_ops::rope::{LongFactors, Scaling as RopeScaling};
pub use stapo_ops::swiglu::Gate;

use crate::error::{Error, Result};
use half::bf16;
use layer::check_range;

/// A decoder-only language model: an embedding, layers, a final RMS norm and a head. Values read by
/// [`ModelConfig::from_hugging_face`] or from GGUF metadata are within the limits of [`ModelConfig::validate`]; call
/// `validate` on a config built by hand.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    /// Length of the residual stream (`hidden_size`).
    pub width: usize,
    /// At least one. Layers may differ from each other.
    pub layers: Vec<LayerSpec>,
    /// Rows of the embedding; may exceed the tokenizer's ids (padding rows).
    pub vocabulary: usize,
    /// Of every norm.
    pub norm_eps: f32,
    /// Longest sequence that the model was trained for.
    pub max_positions: usize,
    /// The head is the embedding; there is no `lm_head.weight`.
    pub tied_embeddings: bool,
    /// The head of a reward model, instead of a language model's.
    pub score: Option<ScoreHead>,
    pub embedding_scale: EmbeddingScale,
    pub logits: LogitRule,
    pub bos: Option<u32>,
    /// Tokens that end a response, from `generation_config.json` where that file names any, else from `config.json` or
    /// GGUF.
    pub stops: Vec<u32>,
}

/// What looked-up embeddings are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum EmbeddingScale {
    One,
    /// sqrt(hidden size), rounded to the type of the embedding's weights.
    SqrtWidth,
    Factor(f64),
}

impl EmbeddingScale {
    /// The factor in a model of this width, where an activation has `compute_bytes`: 2 for bf16.
    pub(crate) fn factor(self, width: usize, compute_bytes: usize) -> f64 {
        match self {
            Self::One => 1.0,
            Self::SqrtWidth if compute_bytes == 2 => bf16::from_f32((width as f64).sqrt() as f32).into(),
            Self::SqrtWidth => (width as f64).sqrt(),
            Self::Factor(factor) => factor,
        }
    }
}

/// One weight as the Hugging Face layout names and shapes it. Matrices are `[out, in]`, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The modules of a layer that a family with joined projections stores as one, from top to bottom.
const JOINED: [(&str, &[&str]); 2] = [
    ("self_attn.qkv_proj", &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    ("mlp.gate_up_proj", &["mlp.gate_proj", "mlp.up_proj"]),
];

/// Largest values accepted: far above any model, and small enough that the product of two cannot overflow.
mod limit {
    pub const WIDTH: usize = 1 << 18;
    pub const LAYERS: usize = 1 << 12;
    pub const VOCABULARY: usize = 1 << 24;
    pub const POSITIONS: usize = 1 << 31;
}

impl ModelConfig {
    /// A model of no size without special tokens, for struct update: `ModelConfig { width, layers, .. }`.
    pub fn empty(family: Family) -> Self {
        Self {
            family,
            width: 0,
            layers: Vec::new(),
            vocabulary: 0,
            norm_eps: 1e-6,
            max_positions: 0,
            tied_embeddings: false,
            score: None,
            embedding_scale: EmbeddingScale::One,
            logits: LogitRule::default(),
            bos: None,
            stops: Vec::new(),
        }
    }

    /// `n_layers` layers that are all the same; `location` names the file in errors.
    pub fn repeat_layer(location: &str, layer: LayerSpec, n_layers: usize) -> Result<Vec<LayerSpec>> {
        check_range(location, "number of layers", n_layers, limit::LAYERS)?;
        Ok(vec![layer; n_layers])
    }

    /// Checks that the values are possible and fit each other; `location` names the file in errors.
    pub fn validate(&self, location: &str) -> Result<()> {
        check_range(location, "hidden size", self.width, limit::WIDTH)?;
        check_range(location, "number of layers", self.layers.len(), limit::LAYERS)?;
        check_range(location, "vocabulary", self.vocabulary, limit::VOCABULARY)?;
        check_range(location, "maximum positions", self.max_positions, limit::POSITIONS)?;
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            return Err(Error::malformed(
                location,
                format!("norm epsilon is {}, expected above 0", self.norm_eps),
            ));
        }
        for (name, value) in
            [("divisor", self.logits.divisor), ("softcap", self.logits.softcap.unwrap_or(1.0))]
        {
            if !(value.is_finite() && value > 0.0) {
                let problem = format!("the {name} of logits is {value}, expected above 0");
                return Err(Error::malformed(location, problem));
            }
        }
        if let Some(&id) = self.bos.iter().chain(&self.stops).find(|&&id| id as usize >= self.vocabulary) {
            let problem = format!("token id {id} is outside the vocabulary of {}", self.vocabulary);
            return Err(Error::malformed(location, problem));
        }
        self.layers.iter().try_for_each(|layer| layer.validate(location))
    }

    /// Whether both describe the same computation, whichever factors `LongRoPE` uses for now.
    fn computes_as(&self, other: &Self) -> bool {
        let mut with_same_factors = self.clone();
        for (attention, other) in with_same_factors.attentions_mut().zip(other.attentions()) {
            if let (RopeScaling::Long { used, .. }, RopeScaling::Long { used: other, .. }) =
                (&mut attention.rope.scaling, &other.rope.scaling)
            {
                *used = *other;
            }
        }
        with_same_factors == *other
    }

    /// Chooses `LongRoPE`'s factors, once for a whole run: those for long sequences where `longest` exceeds what the model was
    /// first trained for.
    pub fn fit_longest(&mut self, longest: usize) {
        for attention in self.attentions_mut() {
            if let RopeScaling::Long { used, original_positions, .. } = &mut attention.rope.scaling {
                *used = if longest > *original_positions { LongFactors::Long } else { LongFactors::Short };
            }
        }
    }

    /// Positions that a sequence may have: those that the model was trained for, with `LongRoPE`'s factors for short sequences
    /// those that these factors are for.
    pub fn position_limit(&self) -> usize {
        let of_layer = |attention: &AttentionSpec| match attention.rope.scaling {
            RopeScaling::Long { used: LongFactors::Short, original_positions, .. } => original_positions,
            _ => self.max_positions,
        };
        self.attentions().map(of_layer).min().unwrap_or(self.max_positions).min(self.max_positions)
    }

    /// The layers with attention.
    pub fn attentions(&self) -> impl Iterator<Item = &AttentionSpec> {
        self.layers.iter().filter_map(LayerSpec::attention)
    }

    pub fn attentions_mut(&mut self) -> impl Iterator<Item = &mut AttentionSpec> {
        self.layers.iter_mut().filter_map(LayerSpec::attention_mut)
    }

    /// Bytes that a running sequence keeps besides keys and values, whatever its length, where an activation has `compute_bytes`.
    pub fn state_bytes(&self, compute_bytes: usize) -> u64 {
        self.layers.iter().map(|layer| layer.state_bytes(compute_bytes) as u64).sum()
    }

    /// The one description that all layers share; `None` if layers differ.
    pub fn uniform_layer(&self) -> Option<&LayerSpec> {
        let (first, others) = self.layers.split_first()?;
        others.iter().all(|layer| layer == first).then_some(first)
    }

    /// Every weight the model has, in the order of the forward pass. `lm_head.weight` only when untied, `score.weight` in its place
    /// in a reward model.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let spec = |name: &str, shape: &[usize]| TensorSpec { name: name.into(), shape: shape.to_vec() };
        let mut list = vec![spec("model.embed_tokens.weight", &[self.vocabulary, self.width])];
        for (index, layer) in self.layers.iter().enumerate() {
            list.extend(layer.tensors(self.width).into_iter().map(|TensorSpec { name, shape }| TensorSpec {
                name: format!("model.layers.{index}.{name}"),
                shape,
            }));
        }
        list.push(spec("model.norm.weight", &[self.width]));
        if self.score.is_some() {
            list.push(spec(SCORE, &[1, self.width]));
        } else if !self.tied_embeddings {
            list.push(spec("lm_head.weight", &[self.vocabulary, self.width]));
        }
        list
    }

    /// The matrices that a family with joined projections stores, each with those that it is made of.
    pub(crate) fn joined_tensors(&self) -> Vec<(TensorSpec, Vec<TensorSpec>)> {
        let specs = self.tensors();
        let joined = |index: usize, (name, modules): (&str, &[&str])| {
            let named = |module: &str| format!("model.layers.{index}.{module}.weight");
            let is_part = |spec: &&TensorSpec| modules.iter().any(|module| spec.name == named(module));
            let parts: Vec<TensorSpec> = specs.iter().filter(is_part).cloned().collect();
            let rows = parts.iter().map(|part| part.shape[0]).sum();
            (TensorSpec { name: named(name), shape: vec![rows, self.width] }, parts)
        };
        (0..self.layers.len()).flat_map(|index| JOINED.map(|modules| joined(index, modules))).collect()
    }

    /// Numbers that the KV cache holds for each token.
    pub fn kv_numbers_per_token(&self) -> u64 {
        self.layers.iter().map(|layer| layer.kv_numbers_per_token() as u64).sum()
    }

    /// Trainable numbers; tied embeddings count once.
    pub fn n_parameters(&self) -> u64 {
        self.tensors().iter().map(|t| t.n_elements() as u64).sum()
    }
}
