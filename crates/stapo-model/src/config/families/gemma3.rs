//! Gemma 3's language model: Gemma 2 with a norm of every query and key head, windows in five of six layers, and another rope
//! in these.

use super::{
    FamilyRow, ObjectReader, QkNorm, Sizes, gemma2, set_ropes_by_kind, set_windows, sliding_layers,
    write_ropes_by_kind, write_windows,
};
use crate::config::ModelConfig;
use crate::error::Result;

/// The key for the theta of layers with a window before `transformers` 5.
const SLIDING_THETA: &str = "rope_local_base_freq";

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    gguf: "gemma3",
    qk_norm: QkNorm::PerHead,
    theta: 1_000_000.0,
    max_positions: 131_072,
    sizes: Some(Sizes { n_layers: 26, width: 2304, ffn_width: 9216, n_heads: 8, vocabulary: 262_208 }),
    describe,
    write: |config, keys| {
        gemma2::write_softcaps(config, keys);
        write_windows(config, keys);
        write_ropes_by_kind(config, keys, Some(SLIDING_THETA));
    },
    ..gemma2::ROW
};

fn describe(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    gemma2::describe_softcaps(keys, config, [None, None])?;
    let pattern = keys.optional_whole("sliding_window_pattern")?.unwrap_or(6).max(1);
    let sliding = sliding_layers(keys, config.layers.len(), |index| !(index + 1).is_multiple_of(pattern))?;
    set_windows(keys, config, &sliding)?;
    let local = keys.optional_number(SLIDING_THETA)?.unwrap_or(10_000.0);
    set_ropes_by_kind(keys, config, &sliding, Some(local))
}
