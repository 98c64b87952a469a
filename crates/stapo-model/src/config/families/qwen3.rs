//! Qwen3: Llama with a norm of every query and key head.

use super::{FamilyRow, ObjectReader, QkNorm, llama, qwen2, set_biases, write_biases};
use crate::config::ModelConfig;
use crate::error::Result;

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "qwen3",
    architecture: "Qwen3ForCausalLM",
    gguf: "qwen3",
    gguf_pairs_rows: false,
    qk_norm: QkNorm::PerHead,
    max_positions: 32_768,
    window: Some(4096),
    head_dim: Some(128),
    n_kv_heads: Some(32),
    describe,
    write: |config, keys| {
        write_biases(config, keys);
        qwen2::write_windows_in_use(config, keys);
    },
    ..llama::ROW
};

fn describe(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    set_biases(keys, config)?;
    qwen2::set_windows_in_use(keys, config)
}
