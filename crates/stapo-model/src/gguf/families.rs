//! What GGUF metadata says of each family beyond the keys that all families have.

use super::Gguf;
use crate::config::{EmbeddingScale, Family, ModelConfig, RopeScaling};
use crate::error::{Error, Result};
use crate::weights::{Encoding, decode};
use stapo_ops::rope::LongFactors;

/// Layers of Gemma 2 27B and Gemma 3 27B, whose scale of scores is that of the width per head.
const GEMMA_27B_LAYERS: [(Family, usize); 2] = [(Family::Gemma2, 46), (Family::Gemma3, 62)];
/// What llama.cpp takes for files of Gemma 2 without the keys, which the first ones lack.
const GEMMA_2_WINDOW: usize = 4096;
const GEMMA_2_SOFTCAPS: [f64; 2] = [50.0, 30.0];

impl Gguf {
    /// Changes the layers and the model to what the keys of the family say. As llama.cpp does, constants that the files of a
    /// family do not hold are taken from the family.
    pub(super) fn describe(&self, key: &impl Fn(&str) -> String, config: &mut ModelConfig) -> Result<()> {
        let n_layers = config.layers.len();
        let all = vec![true; n_layers];
        let every = |period: usize| (1..=n_layers).map(|n| !n.is_multiple_of(period)).collect::<Vec<_>>();
        match config.family {
            Family::Qwen3 | Family::Qwen2 | Family::Phi3 => self.set_windows(key, config, &all)?,
            Family::Llama | Family::Mistral => {
                self.set_windows(key, config, &all)?;
                if config.attentions().any(|attention| attention.rule.window.is_some()) {
                    config.family = Family::Mistral;
                }
            }
            Family::SmolLm3 => {
                for (attention, has_rope) in config.attentions_mut().zip(every(4)) {
                    attention.rotary_dim *= usize::from(has_rope);
                }
            }
            Family::Olmo2 | Family::Olmo3 => {
                self.set_windows(key, config, &every(4))?;
                let is_third = config.attentions().any(|attention| attention.rule.window.is_some());
                config.family = if is_third { Family::Olmo3 } else { Family::Olmo2 };
                self.set_sliding_theta(key, config, None)?;
            }
            Family::Gemma2 => {
                self.describe_gemma(key, config)?;
                self.set_windows(key, config, &every(2))?;
            }
            Family::Gemma3 => {
                self.describe_gemma(key, config)?;
                self.set_windows(key, config, &every(6))?;
                self.set_sliding_theta(key, config, Some(10_000.0))?;
            }
            Family::Granite => self.describe_granite(key, config)?,
            Family::Qwen35 => {
                let problem = "gated DeltaNet layers are not read from GGUF";
                return Err(Error::unsupported(&self.location, problem, "use the checkpoint in safetensors"));
            }
            Family::GptOss => self.set_windows(key, config, &every(2))?,
        }
        Ok(())
    }

    /// Gives the layers that `sliding` says the window of the file, or of the family where the file has none.
    fn set_windows(
        &self,
        key: &impl Fn(&str) -> String,
        config: &mut ModelConfig,
        sliding: &[bool],
    ) -> Result<()> {
        let default = (config.family == Family::Gemma2).then_some(GEMMA_2_WINDOW);
        let window = self.whole(&key("attention.sliding_window"))?.or(default).filter(|window| *window > 0);
        let pattern = self.sliding_pattern(&key("attention.sliding_window_pattern"), sliding.len())?;
        let sliding = pattern.as_deref().unwrap_or(sliding);
        for (attention, is_sliding) in config.attentions_mut().zip(sliding) {
            attention.rule.window = window.filter(|_| *is_sliding);
        }
        Ok(())
    }

    /// Which layers have the window, where the file says it: a list, or the period of the layers without it.
    fn sliding_pattern(&self, key: &str, n_layers: usize) -> Result<Option<Vec<bool>>> {
        if !self.is_array(key) {
            let period = self.whole(key)?.filter(|period| *period > 0);
            return Ok(period.map(|period| (1..=n_layers).map(|n| !n.is_multiple_of(period)).collect()));
        }
        let flags = self.numbers(key)?.unwrap_or_default();
        if flags.len() != n_layers {
            let problem = format!("has {} entries for {n_layers} layers", flags.len());
            return Err(Error::malformed(format!("{}: {key}", self.location), problem));
        }
        Ok(Some(flags.into_iter().map(|flag| flag != 0.0).collect()))
    }

    /// Gives layers with a window the plain rope of `rope.freq_base_swa`, or of `theta`, or of the other layers.
    fn set_sliding_theta(
        &self,
        key: &impl Fn(&str) -> String,
        config: &mut ModelConfig,
        theta: Option<f64>,
    ) -> Result<()> {
        let theta = self.number(&key("rope.freq_base_swa"))?.or(theta);
        for attention in config.attentions_mut() {
            if attention.rule.window.is_some() {
                attention.rope.theta = theta.unwrap_or(attention.rope.theta);
                attention.rope.scaling = RopeScaling::None;
            }
        }
        Ok(())
    }

    fn describe_gemma(&self, key: &impl Fn(&str) -> String, config: &mut ModelConfig) -> Result<()> {
        config.embedding_scale = EmbeddingScale::SqrtWidth;
        let [of_scores, of_logits] =
            GEMMA_2_SOFTCAPS.map(|cap| (config.family == Family::Gemma2).then_some(cap));
        config.logits.softcap = self.number(&key("final_logit_softcapping"))?.or(of_logits);
        let softcap = self.number(&key("attn_logit_softcapping"))?.or(of_scores);
        let is_27b = GEMMA_27B_LAYERS.contains(&(config.family, config.layers.len()));
        let width = config.width;
        for attention in config.attentions_mut() {
            attention.rule.softcap = softcap;
            if is_27b {
                attention.rule.scale = 1.0 / ((width / attention.heads.query) as f64).sqrt();
            }
        }
        Ok(())
    }

    fn describe_granite(&self, key: &impl Fn(&str) -> String, config: &mut ModelConfig) -> Result<()> {
        let scale = self.number(&key("attention.scale"))?;
        let residual_scale = self.number(&key("residual_scale"))?.unwrap_or(1.0);
        for layer in &mut config.layers {
            layer.residual_scale = residual_scale;
        }
        for attention in config.attentions_mut() {
            attention.rule.scale = scale.unwrap_or(attention.rule.scale);
        }
        let factor = self.number(&key("embedding_scale"))?.unwrap_or(1.0);
        config.embedding_scale = EmbeddingScale::Factor(factor);
        config.logits.divisor = self.number(&key("logit_scale"))?.unwrap_or(1.0);
        Ok(())
    }

    /// `LongRoPE` from the tensors that list its factors; `None` without them.
    pub(super) fn longrope(
        &self,
        key: &impl Fn(&str) -> String,
        max_positions: usize,
    ) -> Result<Option<RopeScaling>> {
        let (short, long) = match (self.rope_factors(SHORT_FACTORS)?, self.rope_factors(LONG_FACTORS)?) {
            (Some(short), Some(long)) => (short, long),
            (None, None) => return Ok(None),
            (short, _) => {
                let missing = if short.is_none() { SHORT_FACTORS } else { LONG_FACTORS };
                let problem =
                    format!("no tensor {missing}, expected the factors of short and of long sequences");
                return Err(Error::missing(
                    &self.location,
                    problem,
                    "the file is incomplete; convert the model again",
                ));
            }
        };
        let original = self.whole(&key("rope.scaling.original_context_length"))?.unwrap_or(max_positions);
        let attention_factor = self.number(&key("rope.scaling.attn_factor"))?.unwrap_or(1.0);
        Ok(Some(RopeScaling::Long {
            short: short.into(),
            long: long.into(),
            used: LongFactors::Short,
            original_positions: original,
            attention_factor,
        }))
    }

    /// A tensor that lists factors of `LongRoPE`, one for each rotated pair; `None` where the file has no such tensor.
    fn rope_factors(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(stored) = self.tensors.get(name) else { return Ok(None) };
        if stored.encoding != Encoding::F32 {
            let location = format!("{}: tensor {name}", self.location);
            let problem = format!("is stored as {}, expected F32", stored.encoding.name());
            return Err(Error::mismatch(location, problem, ""));
        }
        let mut factors = vec![0.0; stored.shape.iter().product()];
        decode(stored.encoding, &self.file[stored.bytes.clone()], &mut factors);
        Ok(Some(factors.into_iter().map(f64::from).collect()))
    }
}

pub(super) const SHORT_FACTORS: &str = "rope_factors_short.weight";
pub(super) const LONG_FACTORS: &str = "rope_factors_long.weight";
