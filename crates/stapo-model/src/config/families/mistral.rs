//! Mistral: Llama with a window in all layers, where the model has one.

use super::{FamilyRow, llama, set_windows};
use serde_json::json;

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "mistral",
    architecture: "MistralForCausalLM",
    max_positions: 131_072,
    window: Some(4096),
    n_kv_heads: Some(8),
    describe: |keys, config| set_windows(keys, config, &vec![true; config.layers.len()]),
    write: |config, keys| {
        let window = config.attentions().find_map(|attention| attention.rule.window);
        keys.insert("sliding_window".into(), json!(window));
    },
    ..llama::ROW
};
