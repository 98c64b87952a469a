//! The shape of a model, from which every other part takes its sizes.

mod hugging_face;
mod known;
mod layer;
#[cfg(test)]
mod tests;

pub(crate) use hugging_face::token_ids;
pub use layer::{
    AttentionBiases, AttentionSpec, FeedForward, LayerSpec, LinearRole, Mixer, NormPlacement, QkNorm,
};
pub use stapo_ops::attention::Heads;
pub use stapo_ops::rope::Scaling as RopeScaling;

use crate::error::{Error, Result};
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
    pub bos: Option<u32>,
    /// Tokens that end a response, from `generation_config.json` where that file names any, else from `config.json` or
    /// GGUF.
    pub stops: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Qwen3,
    Qwen2,
    /// Llama 2 and 3, `SmolLM2`, `TinyLlama`: anything `transformers` calls `llama`.
    Llama,
}

/// Rotary positions. Base frequencies: `theta^(-2i / head_dim)` for i from 0 to half of `head_dim`, in the half-split
/// layout (dimension i turns with dimension i + `head_dim` / 2).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    pub theta: f64,
    /// How the base frequencies are stretched to longer contexts.
    pub scaling: RopeScaling,
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

impl Family {
    pub const ALL: [Self; 3] = [Self::Qwen3, Self::Qwen2, Self::Llama];

    /// `model_type` in `config.json`, `general.architecture` in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qwen3 => "qwen3",
            Self::Qwen2 => "qwen2",
            Self::Llama => "llama",
        }
    }

    /// The class in `transformers`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Llama => "LlamaForCausalLM",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }
}

/// Largest values accepted: far above any model, and small enough that the product of two cannot overflow.
mod limit {
    pub const WIDTH: usize = 1 << 18;
    pub const LAYERS: usize = 1 << 12;
    pub const VOCABULARY: usize = 1 << 24;
    pub const POSITIONS: usize = 1 << 31;
}

impl ModelConfig {
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
        if let Some(&id) = self.bos.iter().chain(&self.stops).find(|&&id| id as usize >= self.vocabulary) {
            let problem = format!("token id {id} is outside the vocabulary of {}", self.vocabulary);
            return Err(Error::malformed(location, problem));
        }
        self.layers.iter().try_for_each(|layer| layer.validate(location))
    }

    /// The one description that all layers share; `None` where layers differ.
    pub fn uniform_layer(&self) -> Option<&LayerSpec> {
        let (first, others) = self.layers.split_first()?;
        others.iter().all(|layer| layer == first).then_some(first)
    }

    /// Every weight the model has, in the order of the forward pass. `lm_head.weight` only when untied.
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
        if !self.tied_embeddings {
            list.push(spec("lm_head.weight", &[self.vocabulary, self.width]));
        }
        list
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

impl Rope {
    fn validate(&self, location: &str) -> Result<()> {
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            Err(Error::malformed(location, format!("rope {name} is {value}, expected above 0")))
        };
        positive("theta", self.theta)?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("factor", factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                positive("factor", factor)?;
                positive("low_freq_factor", low_freq_factor)?;
                positive("original positions", original_positions as f64)?;
                positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)
            }
            RopeScaling::Yarn {
                factor, original_positions, beta_fast, beta_slow, attention_factor, ..
            } => {
                positive("theta - 1", self.theta - 1.0)?;
                positive("factor", factor)?;
                positive("original positions", original_positions as f64)?;
                positive("beta_slow", beta_slow)?;
                positive("beta_fast - beta_slow", beta_fast - beta_slow)?;
                positive("attention factor", attention_factor)
            }
        }
    }
}
