//! The model's config from GGUF metadata.

use super::Gguf;
use crate::config::{
    AttentionBiases, Family, FeedForward, Heads, LayerSpec, ModelConfig, Rope, RopeScaling, missing,
};
use crate::error::{Error, Result};
use crate::weights::{Encoding, decode};
use std::collections::BTreeSet;

impl Gguf {
    /// The config of a file of a supported family. Embeddings are tied when there is no `output.weight`.
    /// With an `output.weight` the head is a separate matrix, even if the model was trained with tied embeddings:
    /// quantisers keep a more precise copy for the head.
    pub fn config(&self) -> Result<ModelConfig> {
        let architecture =
            self.text("general.architecture")?.ok_or_else(|| self.absent("general.architecture"))?;
        let family = Family::from_gguf(architecture).ok_or_else(|| {
            let location = format!("{}: general.architecture", self.location);
            let hint = "supported: qwen3, qwen2, llama (Mistral too), smollm3, olmo2 (OLMo 3 too), gemma3, gemma2, phi3, granite";
            Error::unsupported(location, missing::refusal(architecture), hint)
        })?;
        let key = |name: &str| format!("{architecture}.{name}");
        self.refuse_what_is_not_built(&key)?;
        let width = self.required_whole(&key("embedding_length"))?;
        let n_heads = self.same_in_all_layers(&key("attention.head_count"))?;
        let n_heads = n_heads.ok_or_else(|| self.absent(&key("attention.head_count")))?;
        let head_dim = self.head_dim(&key, width, n_heads)?;
        let max_positions = self.required_whole(&key("context_length"))?;
        let n_kv_heads = self.same_in_all_layers(&key("attention.head_count_kv"))?.unwrap_or(n_heads);
        let ffn_width = self.same_in_all_layers(&key("feed_forward_length"))?;
        let ffn_width = ffn_width.ok_or_else(|| self.absent(&key("feed_forward_length")))?;
        let heads = Heads { query: n_heads, kv: n_kv_heads, dim: head_dim };
        let mut layer = family.layer(heads, self.rope(&key, head_dim, max_positions)?, ffn_width);
        if let Some(attention) = layer.attention_mut() {
            attention.rotary_dim = self.rotary_dim(&key, family, head_dim)?;
        }
        self.set_biases(&mut layer);
        let n_layers = self.required_whole(&key("block_count"))?;
        let mut config = ModelConfig {
            width,
            layers: ModelConfig::repeat_layer(&self.location, layer, n_layers)?,
            vocabulary: self.vocabulary(&key)?,
            norm_eps: self.number(&key("attention.layer_norm_rms_epsilon"))?.unwrap_or(1e-6) as f32,
            max_positions,
            tied_embeddings: !self.tensors.contains_key("output.weight"),
            bos: self.token_id("tokenizer.ggml.bos_token_id")?,
            stops: self.stops()?,
            ..ModelConfig::empty(family)
        };
        self.describe(&key, &mut config)?;
        config.validate(&self.location)?;
        Ok(config)
    }

    fn refuse_what_is_not_built(&self, key: &impl Fn(&str) -> String) -> Result<()> {
        let refuse = |key: &str, what: &str, hint: &str| {
            Err(Error::unsupported(format!("{}: {key}", self.location), what, hint))
        };
        if self.unsigned(&key("expert_count"))?.unwrap_or(0) > 0 {
            return refuse(
                &key("expert_count"),
                "mixtures of experts are not supported",
                "use a dense model",
            );
        }
        if self.unsigned("split.count")?.unwrap_or(0) > 1 {
            return refuse(
                "split.count",
                "split GGUF files are not read",
                "join them with llama-gguf-split --merge",
            );
        }
        Ok(())
    }

    /// A number that GGUF gives once or per layer; numbers that differ between layers are refused.
    fn same_in_all_layers(&self, key: &str) -> Result<Option<usize>> {
        if !self.is_array(key) {
            return self.whole(key);
        }
        let values = self.numbers(key)?.unwrap_or_default();
        match values.first() {
            Some(&first) if first >= 0.0 && values.iter().all(|&value| value == first) => {
                Ok(Some(first as usize))
            }
            _ => Err(Error::unsupported(
                format!("{}: {key}", self.location),
                "differs between layers",
                "expected one value",
            )),
        }
    }

    fn head_dim(&self, key: &impl Fn(&str) -> String, width: usize, n_heads: usize) -> Result<usize> {
        let refuse = |problem: String| Err(Error::unsupported(&self.location, problem, ""));
        let head_dim = match self.whole(&key("attention.key_length"))? {
            Some(head_dim) => head_dim,
            None if n_heads > 0 && width.is_multiple_of(n_heads) => width / n_heads,
            None => {
                return refuse(format!(
                    "hidden size {width} does not divide among {n_heads} attention heads"
                ));
            }
        };
        let other = key("attention.value_length");
        if let Some(value) = self.whole(&other)?.filter(|&value| value != head_dim) {
            return refuse(format!("{other} is {value}, expected the head dimension {head_dim}"));
        }
        Ok(head_dim)
    }

    /// Biases that a family may have: the tensors show it, no key does.
    fn set_biases(&self, layer: &mut LayerSpec) {
        let has = |part: &str| self.tensors.contains_key(&format!("blk.0.{part}.bias"));
        if let Some(attention) = layer.attention_mut() {
            if has("attn_output") {
                attention.biases = AttentionBiases::All;
            } else if has("attn_q") {
                attention.biases = AttentionBiases::QueryKeyValue;
            }
        }
        let FeedForward::Gated { has_biases, .. } = &mut layer.feed_forward;
        *has_biases = has("ffn_down");
    }

    /// Dimensions of a head that are rotated. Files whose rows are pairs rotate whole heads.
    fn rotary_dim(&self, key: &impl Fn(&str) -> String, family: Family, head_dim: usize) -> Result<usize> {
        let key = key("rope.dimension_count");
        let rotary_dim = self.whole(&key)?.unwrap_or(head_dim);
        if rotary_dim != head_dim && (rotary_dim > head_dim || family.pairs_rows_in_gguf()) {
            let problem = format!("{key} is {rotary_dim}, expected the head dimension {head_dim}");
            return Err(Error::unsupported(&self.location, problem, ""));
        }
        Ok(rotary_dim)
    }

    /// The number of rows of the embedding.
    fn vocabulary(&self, key: &impl Fn(&str) -> String) -> Result<usize> {
        let embedding = self.tensors.get("token_embd.weight").ok_or_else(|| {
            Error::missing(
                &self.location,
                "no tensor token_embd.weight",
                "expected the weights of a language model",
            )
        })?;
        let rows = embedding.shape[0];
        if let Some(declared) = self.whole(&key("vocab_size"))?.filter(|&declared| declared != rows) {
            let problem = format!("is {declared}, but token_embd.weight has {rows} rows");
            return Err(Error::mismatch(format!("{}: {}", self.location, key("vocab_size")), problem, ""));
        }
        Ok(rows)
    }

    /// The tokens that end a response, first the one that the file names.
    fn stops(&self) -> Result<Vec<u32>> {
        let mut stops = Vec::new();
        for name in ["eos", "eot", "eom"] {
            stops.extend(self.token_id(&format!("tokenizer.ggml.{name}_token_id"))?);
        }
        stops.extend(self.ends_by_text());
        let mut seen = BTreeSet::new();
        stops.retain(|id| seen.insert(*id));
        Ok(stops)
    }

    fn rope(&self, key: &impl Fn(&str) -> String, head_dim: usize, max_positions: usize) -> Result<Rope> {
        let theta = self.number(&key("rope.freq_base"))?.unwrap_or(10_000.0);
        if self.tensors.contains_key("rope_freqs.weight") {
            return Ok(Rope { theta, scaling: self.llama3_from_factors(theta, head_dim)? });
        }
        if let Some(scaling) = self.longrope(key, max_positions)? {
            return Ok(Rope { theta, scaling });
        }
        let factor = || -> Result<f64> {
            let factor = self.number(&key("rope.scaling.factor"))?;
            factor.ok_or_else(|| self.absent(&key("rope.scaling.factor")))
        };
        let scaling = match self.text(&key("rope.scaling.type"))?.unwrap_or("none") {
            "none" => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor: factor()? },
            "yarn" => {
                let factor = factor()?;
                let or = |name: &str, default: f64| Ok(self.number(&key(name))?.unwrap_or(default));
                RopeScaling::Yarn {
                    factor,
                    original_positions: self
                        .whole(&key("rope.scaling.original_context_length"))?
                        .unwrap_or(max_positions),
                    beta_fast: or("rope.scaling.yarn_beta_fast", 32.0)?,
                    beta_slow: or("rope.scaling.yarn_beta_slow", 1.0)?,
                    attention_factor: self.yarn_attention_factor(key, factor)?,
                    truncate: true,
                }
            }
            other => {
                let location = format!("{}: {}", self.location, key("rope.scaling.type"));
                let problem = format!("{other:?} is not supported");
                return Err(Error::unsupported(
                    location,
                    problem,
                    "supported: none, linear, yarn, and Llama 3 by rope_freqs",
                ));
            }
        };
        Ok(Rope { theta, scaling })
    }

    /// What YaRN multiplies rotated queries and keys by. llama.cpp multiplies YaRN's own factor by `attn_factor`. Some files of
    /// OLMo 3 give that very factor there, which is all of `attention_factor` in Hugging Face's config, so it counts once.
    fn yarn_attention_factor(&self, key: &impl Fn(&str) -> String, factor: f64) -> Result<f64> {
        let by_factor = 1.0 + 0.1 * factor.max(1.0).ln();
        let more = self.number(&key("rope.scaling.attn_factor"))?.unwrap_or(1.0);
        let is_all = (more - by_factor).abs() <= 1e-3;
        Ok(if is_all { by_factor } else { more * by_factor })
    }

    /// Llama 3's scaling from `rope_freqs.weight`, which lists the divisor of each frequency. The original context
    /// length is found by trying every power of two from 1024 to 131072; the result must reproduce the listed divisors.
    fn llama3_from_factors(&self, theta: f64, head_dim: usize) -> Result<RopeScaling> {
        let location = format!("{}: tensor rope_freqs.weight", self.location);
        let stored = &self.tensors["rope_freqs.weight"];
        if stored.shape != [head_dim / 2] || stored.encoding != Encoding::F32 {
            let problem = format!(
                "is {:?} as {}, expected [{}] as F32",
                stored.shape,
                stored.encoding.name(),
                head_dim / 2
            );
            return Err(Error::mismatch(location, problem, ""));
        }
        let mut factors = vec![0.0; head_dim / 2];
        decode(stored.encoding, &self.file[stored.bytes.clone()], &mut factors);
        let factor = f64::from(factors.iter().copied().fold(0.0, f32::max));
        let close = |a: f64, b: f32| (a - f64::from(b)).abs() <= 1e-4 * a;
        for original_positions in (10..=17).map(|log2| 1_usize << log2) {
            let scaling = RopeScaling::Llama3 {
                factor,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_positions,
            };
            let fits = |(i, &listed): (usize, &f32)| {
                let frequency = theta.powf(-2.0 * i as f64 / head_dim as f64);
                close(llama3_divisor(frequency, factor, original_positions as f64), listed)
            };
            if factors.iter().enumerate().all(fits) {
                return Ok(scaling);
            }
        }
        Err(Error::unsupported(
            location,
            "the factors are not those of Llama 3's scaling",
            "expected low 1, high 4",
        ))
    }
}

/// The divisor of a frequency under Llama 3's scaling with low and high frequency factors 1 and 4.
fn llama3_divisor(frequency: f64, factor: f64, context: f64) -> f64 {
    let turns = context * frequency / std::f64::consts::TAU;
    if turns > 4.0 {
        1.0
    } else if turns < 1.0 {
        factor
    } else {
        let smooth = (turns - 1.0) / 3.0;
        1.0 / ((1.0 - smooth) / factor + smooth)
    }
}
