//! New models: random weights and a tokenizer of single characters, written as a Hugging Face folder.

use crate::error::Result;
use crate::run::disk::write_whole;
use crate::tasks::ALPHABET;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use stapo_model::decoder::Policy;
use stapo_model::export::{Existing, ExportOptions, Precision, export};
use stapo_model::{Device, Family, Heads, ModelConfig, Rope, RopeScaling};
use std::path::Path;

/// The shape of a Qwen3-like model.
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
        }
    }
}

const END: &str = "<|end|>";

/// Writes the folder of a new model.
pub fn write(folder: &Path, shape: &Shape, seed: u64, device: &Device) -> Result<()> {
    let n_characters = ALPHABET.chars().count();
    let heads = Heads { query: shape.n_heads, kv: shape.n_kv_heads, dim: shape.head_dim };
    let rope = Rope { theta: 10_000.0, scaling: RopeScaling::None };
    let layer = Family::Qwen3.layer(heads, rope, shape.ffn_width);
    let config = ModelConfig {
        width: shape.width,
        layers: ModelConfig::repeat_layer("config.start", layer, shape.n_layers)?,
        vocabulary: (n_characters + 1).next_multiple_of(16),
        norm_eps: 1e-6,
        max_positions: shape.max_positions,
        tied_embeddings: true,
        stops: vec![n_characters as u32],
        ..ModelConfig::empty(Family::Qwen3)
    };
    config.validate("config.start")?;
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
