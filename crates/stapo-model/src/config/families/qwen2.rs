//! Qwen2 and 2.5: Llama with biases on q, k and v, whatever `attention_bias` says.

use super::{AttentionBiases, FamilyRow, ObjectReader, llama, set_windows, sliding_layers, write_windows};
use crate::config::ModelConfig;
use crate::error::Result;
use serde_json::{Map, Value, json};

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "qwen2",
    architecture: "Qwen2ForCausalLM",
    gguf: "qwen2",
    gguf_pairs_rows: false,
    biases: AttentionBiases::QueryKeyValue,
    max_positions: 32_768,
    window: Some(4096),
    n_kv_heads: Some(32),
    describe: set_windows_in_use,
    write: |config, keys| {
        keys.insert("attention_bias".into(), json!(true));
        write_windows_in_use(config, keys);
    },
    ..llama::ROW
};

/// Layers from `max_window_layers` on have a window where `use_sliding_window` says so.
pub(super) fn set_windows_in_use(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    if keys.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let first = keys.optional_whole("max_window_layers")?.unwrap_or(28);
    let sliding = sliding_layers(keys, config.layers.len(), |index| index >= first)?;
    set_windows(keys, config, &sliding)
}

pub(super) fn write_windows_in_use(config: &ModelConfig, keys: &mut Map<String, Value>) {
    let in_use = config.attentions().any(|attention| attention.rule.window.is_some());
    keys.insert("use_sliding_window".into(), json!(in_use));
    if in_use {
        write_windows(config, keys);
    }
}
