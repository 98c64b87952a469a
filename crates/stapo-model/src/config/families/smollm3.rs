//! `SmolLM3`: Llama with layers without positions, which have a window where the model has one.

use super::{
    FamilyRow, ObjectReader, llama, qwen2, set_biases, set_windows, sliding_layers, write_biases,
    write_no_padding,
};
use crate::config::ModelConfig;
use crate::error::Result;
use serde_json::json;

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "smollm3",
    architecture: "SmolLM3ForCausalLM",
    gguf: "smollm3",
    theta: 2_000_000.0,
    max_positions: 32_768,
    tied_embeddings: true,
    n_kv_heads: Some(4),
    describe,
    write: |config, keys| {
        write_biases(config, keys);
        write_no_padding(keys);
        let has_rope: Vec<u8> =
            config.attentions().map(|attention| u8::from(attention.rotary_dim > 0)).collect();
        keys.insert("no_rope_layers".into(), json!(has_rope));
        qwen2::write_windows_in_use(config, keys);
    },
    ..llama::ROW
};

fn describe(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    set_biases(keys, config)?;
    let interval = keys.optional_whole("no_rope_layer_interval")?.unwrap_or(4).max(1);
    // Despite its name, the list has 1 for layers with rope.
    let listed = keys.list("no_rope_layers", config.layers.len())?;
    let has_rope =
        |index: usize| listed.map_or(!(index + 1).is_multiple_of(interval), |list| list[index] != 0);
    for (_, attention) in config.attentions_mut().enumerate().filter(|(index, _)| !has_rope(*index)) {
        attention.rotary_dim = 0;
    }
    if keys.flag("use_sliding_window")? != Some(true) {
        return Ok(());
    }
    let sliding = sliding_layers(keys, config.layers.len(), |index| !has_rope(index))?;
    set_windows(keys, config, &sliding)
}
