//! Phi-3 and Phi-4-mini: Llama with joined projections, a window in all layers of some models, and `LongRoPE`.

use super::{FamilyRow, llama, set_windows, write_no_padding, write_windows};
use serde_json::json;

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "phi3",
    architecture: "Phi3ForCausalLM",
    gguf: "phi3",
    gguf_pairs_rows: false,
    joins_projections: true,
    max_positions: 4096,
    norm_eps: 1e-5,
    describe: |keys, config| set_windows(keys, config, &vec![true; config.layers.len()]),
    write: |config, keys| {
        write_windows(config, keys);
        write_no_padding(keys);
        keys.remove("layer_types");
        let original =
            keys.get("rope_parameters").and_then(|table| table.get("original_max_position_embeddings"));
        let original = original.cloned().unwrap_or(json!(config.max_positions));
        keys.insert("original_max_position_embeddings".into(), original);
    },
    ..llama::ROW
};
