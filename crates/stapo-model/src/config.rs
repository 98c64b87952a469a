//! The shape of a model, from which every other part takes its sizes.

mod hugging_face;
mod known;
#[cfg(test)]
mod tests;

pub(crate) use hugging_face::token_ids;

use crate::error::{Error, Result};

/// A decoder-only language model with grouped-query attention, rotary positions, RMS norms and a `SwiGLU`
/// feed-forward. Values read by [`ModelConfig::from_hugging_face`] or from GGUF metadata are within the limits of
/// [`ModelConfig::validate`]; call `validate` on a config built by hand.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub family: Family,
    /// Length of the residual stream (`hidden_size`).
    pub width: usize,
    pub n_layers: usize,
    /// Query heads; a multiple of `n_kv_heads`.
    pub n_heads: usize,
    pub n_kv_heads: usize,
    /// Even, because rotary positions rotate pairs of dimensions. Not always `width / n_heads`.
    pub head_dim: usize,
    pub ffn_width: usize,
    /// Rows of the embedding; may exceed the tokenizer's ids (padding rows).
    pub vocabulary: usize,
    pub norm_eps: f32,
    pub rope: Rope,
    /// Longest sequence that the model was trained for.
    pub max_positions: usize,
    /// An RMS norm over each head of q and k, before rope (`q_norm.weight`, `k_norm.weight`, each `[head_dim]`).
    pub qk_norm: bool,
    /// Biases on q, k and v; the output projection and the feed-forward never have a bias.
    pub qkv_bias: bool,
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
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub kind: RopeKind,
}

/// How the base frequencies are stretched to longer contexts.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeKind {
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        factor: f64,
    },
    /// With wavelength w and context C = `original_positions`: unchanged for w < C / `high_freq_factor`, divided by
    /// `factor` for w > C / `low_freq_factor`, and between the two mixed with weight
    /// s = (C / w - low) / (high - low): frequency * ((1 - s) / factor + s).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_positions: usize,
    },
    /// Peng et al., 2023. The dimension that turns r times over `original_positions` is
    /// d(r) = `head_dim` * ln(`original_positions` / (2 pi r)) / (2 ln theta). Below d(`beta_fast`) unchanged, above
    /// d(`beta_slow`) divided by `factor`, a linear ramp between; `truncate` rounds the two outwards to whole
    /// dimensions. cos and sin are multiplied by `attention_factor`.
    Yarn {
        factor: f64,
        original_positions: usize,
        beta_fast: f64,
        beta_slow: f64,
        attention_factor: f64,
        truncate: bool,
    },
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
    pub const HEADS: usize = 1 << 12;
    pub const HEAD_DIM: usize = 1 << 14;
    pub const FFN_WIDTH: usize = 1 << 20;
    pub const VOCABULARY: usize = 1 << 24;
    pub const POSITIONS: usize = 1 << 31;
}

impl ModelConfig {
    /// Checks that the values are possible and fit each other; `place` names the file in errors.
    pub fn validate(&self, place: &str) -> Result<()> {
        let ranges = [
            ("hidden size", self.width, limit::WIDTH),
            ("number of layers", self.n_layers, limit::LAYERS),
            ("number of attention heads", self.n_heads, limit::HEADS),
            ("number of key-value heads", self.n_kv_heads, limit::HEADS),
            ("head dimension", self.head_dim, limit::HEAD_DIM),
            ("feed-forward width", self.ffn_width, limit::FFN_WIDTH),
            ("vocabulary", self.vocabulary, limit::VOCABULARY),
            ("maximum positions", self.max_positions, limit::POSITIONS),
        ];
        for (name, value, max) in ranges {
            if value == 0 || value > max {
                return Err(Error::malformed(place, format!("{name} is {value}, expected 1 to {max}")));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let problem = format!(
                "{} attention heads do not divide among {} key-value heads",
                self.n_heads, self.n_kv_heads
            );
            return Err(Error::malformed(place, problem));
        }
        if !self.head_dim.is_multiple_of(2) {
            let problem =
                format!("head dimension is {}, expected an even number (rotary pairs)", self.head_dim);
            return Err(Error::malformed(place, problem));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps > 0.0) {
            return Err(Error::malformed(
                place,
                format!("norm epsilon is {}, expected above 0", self.norm_eps),
            ));
        }
        if let Some(&id) = self.bos.iter().chain(&self.stops).find(|&&id| id as usize >= self.vocabulary) {
            let problem = format!("token id {id} is outside the vocabulary of {}", self.vocabulary);
            return Err(Error::malformed(place, problem));
        }
        self.rope.validate(place)
    }

    /// Every weight the model has, in the order of the forward pass. `lm_head.weight` only when untied.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        let spec = |name: String, shape: &[usize]| TensorSpec { name, shape: shape.to_vec() };
        let d = self.width;
        let q = self.n_heads * self.head_dim;
        let kv = self.n_kv_heads * self.head_dim;
        let mut list = vec![spec("model.embed_tokens.weight".into(), &[self.vocabulary, d])];
        for layer in 0..self.n_layers {
            let mut add =
                |name: &str, shape: &[usize]| list.push(spec(format!("model.layers.{layer}.{name}"), shape));
            add("input_layernorm.weight", &[d]);
            let projections = [("q", q), ("k", kv), ("v", kv)];
            for (name, rows) in projections {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, d]);
            }
            for (name, rows) in projections.into_iter().filter(|_| self.qkv_bias) {
                add(&format!("self_attn.{name}_proj.bias"), &[rows]);
            }
            if self.qk_norm {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
            add("self_attn.o_proj.weight", &[d, q]);
            add("post_attention_layernorm.weight", &[d]);
            add("mlp.gate_proj.weight", &[self.ffn_width, d]);
            add("mlp.up_proj.weight", &[self.ffn_width, d]);
            add("mlp.down_proj.weight", &[d, self.ffn_width]);
        }
        list.push(spec("model.norm.weight".into(), &[d]));
        if !self.tied_embeddings {
            list.push(spec("lm_head.weight".into(), &[self.vocabulary, d]));
        }
        list
    }

    /// Numbers that the KV cache holds for each token.
    pub fn kv_numbers_per_token(&self) -> u64 {
        2 * (self.n_layers * self.n_kv_heads * self.head_dim) as u64
    }

    /// Trainable numbers; tied embeddings count once.
    pub fn n_parameters(&self) -> u64 {
        self.tensors().iter().map(|t| t.n_elements() as u64).sum()
    }
}

impl Rope {
    fn validate(&self, place: &str) -> Result<()> {
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            Err(Error::malformed(place, format!("rope {name} is {value}, expected above 0")))
        };
        positive("theta", self.theta)?;
        match self.kind {
            RopeKind::Default => Ok(()),
            RopeKind::Linear { factor } => positive("factor", factor),
            RopeKind::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                positive("factor", factor)?;
                positive("low_freq_factor", low_freq_factor)?;
                positive("original positions", original_positions as f64)?;
                positive("high_freq_factor - low_freq_factor", high_freq_factor - low_freq_factor)
            }
            RopeKind::Yarn { factor, original_positions, beta_fast, beta_slow, attention_factor, .. } => {
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
