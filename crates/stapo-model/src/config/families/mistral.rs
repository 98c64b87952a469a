//! Mistral: Llama with a window in all layers, where the model has one.

use super::{FamilyRow, llama, set_windows, write_windows};

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "mistral",
    architecture: "MistralForCausalLM",
    max_positions: 131_072,
    window: Some(4096),
    n_kv_heads: Some(8),
    describe: |keys, config| set_windows(keys, config, &vec![true; config.layers.len()]),
    write: |config, keys| {
        write_windows(config, keys);
        keys.remove("layer_types");
    },
    ..llama::ROW
};
