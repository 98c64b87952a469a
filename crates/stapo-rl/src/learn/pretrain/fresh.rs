//! New models: random weights and a tokenizer of single characters, written as a Hugging Face folder.

use crate::error::Result;
use crate::run::disk::write_whole;
use crate::tasks::ALPHABET;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use stapo_model::decoder::Policy;
use stapo_model::export::{Existing, ExportOptions, Precision, export};
use stapo_model::{
    DeltaNetHeads, DeltaNetSpec, Device, Family, Heads, LayerSpec, Mixer, ModelConfig, Rope, RopeScaling,
};
use std::path::Path;

/// The shape of a Qwen3-like model, or of a Qwen3.5-like hybrid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Shape {
    /// The width of the residual stream.
    pub width: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads of a layer.
    pub n_heads: usize,
    /// Key and value heads of a layer.
    pub n_kv_heads: usize,
    /// The width of a head.
    pub head_dim: usize,
    /// The width of the feed-forward.
    pub ffn_width: usize,
    /// The longest sequence, in tokens.
    pub max_positions: usize,
    /// Standard deviation of the random weights.
    pub deviation: f64,
    /// A hybrid: gated DeltaNet in three of four layers, with as many key and value heads as query heads.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_hybrid: bool,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            width: 128,
            n_layers: 4,
            n_heads: 4,
            n_kv_heads: 2,
            head_dim: 32,
            ffn_width: 384,
            max_positions: 256,
            deviation: 0.02,
            is_hybrid: false,
        }
    }
}

impl Shape {
    fn family(&self) -> Family {
        if self.is_hybrid { Family::Qwen35 } else { Family::Qwen3 }
    }

    fn layers(&self) -> Result<Vec<LayerSpec>> {
        let heads = Heads { query: self.n_heads, kv: self.n_kv_heads, dim: self.head_dim };
        let rope = Rope { theta: 10_000.0, scaling: RopeScaling::None };
        let mut layer = self.family().layer(heads, rope, self.ffn_width);
        if let Some(attention) = layer.attention_mut().filter(|_| self.is_hybrid) {
            // Of an even number of dimensions.
            attention.rotary_dim = (self.head_dim / 8 * 2).max(2);
        }
        let mut layers = ModelConfig::repeat_layer("config.start", layer, self.n_layers)?;
        let heads = DeltaNetHeads {
            key: self.n_heads,
            value: self.n_heads,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
        };
        let is_recurrent = |index: usize| self.is_hybrid && !(index + 1).is_multiple_of(4);
        for (_, layer) in layers.iter_mut().enumerate().filter(|(index, _)| is_recurrent(*index)) {
            layer.mixer = Mixer::DeltaNet(DeltaNetSpec { heads, kernel: 4 });
        }
        Ok(layers)
    }
}

const END: &str = "<|end|>";

/// Writes the folder of a new model.
pub fn write(folder: &Path, shape: &Shape, seed: u64, device: &Device) -> Result<()> {
    let n_characters = ALPHABET.chars().count();
    let config = ModelConfig {
        width: shape.width,
        layers: shape.layers()?,
        vocabulary: (n_characters + 1).next_multiple_of(16),
        norm_eps: 1e-6,
        max_positions: shape.max_positions,
        tied_embeddings: true,
        stops: vec![n_characters as u32],
        ..ModelConfig::empty(shape.family())
    };
    config.validate("config.start")?;
    config.check_device(device)?;
    let policy: Policy = Policy::random(device, &config, seed, shape.deviation)?;
    let options =
        ExportOptions { precision: Precision::F32, existing: Existing::Replace, ..ExportOptions::default() };
    export_policy(folder, &policy, &[], &options)?;
    let tokenizer = tokenizer_json(n_characters as u32);
    write_whole(&folder.join("tokenizer.json"), format!("{tokenizer:#}\n").as_bytes())?;
    let keys = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": shape.max_positions});
    write_whole(&folder.join("tokenizer_config.json"), format!("{keys:#}\n").as_bytes())?;
    let keys = json!({"eos_token_id": n_characters, "do_sample": true, "temperature": 1.0});
    write_whole(&folder.join("generation_config.json"), format!("{keys:#}\n").as_bytes())
}

/// Exports the weights of a policy to a folder, those of its adapters merged into them.
pub fn export_policy(
    folder: &Path,
    policy: &Policy,
    companions: &[stapo_model::export::Companion],
    options: &ExportOptions,
) -> Result<stapo_model::export::Exported> {
    let mut tensors = policy.merged_tensors();
    Ok(export(folder, policy.config(), companions, options, |spec, values| {
        let (named, tensor) = tensors.next().expect("a policy has the tensors of its config");
        assert_eq!(named.name, spec.name, "tensors come in the order of the config");
        values.copy_from_slice(&tensor);
        Ok(())
    })?)
}

/// A byte-pair encoding without merges, in which every character is a token.
fn tokenizer_json(end: u32) -> Value {
    let vocabulary: Map<String, Value> =
        ALPHABET.chars().enumerate().map(|(id, c)| (c.to_string(), json!(id))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": end, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": null,
        "post_processor": null,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": []
        }
    })
}
