//! `OLMo` 3: `OLMo` 2 with windows in three of four layers; rope is scaled in the full layers only.

use super::{
    FamilyRow, ObjectReader, olmo2, set_biases, set_ropes_by_kind, set_windows, sliding_layers, write_biases,
    write_no_padding, write_ropes_by_kind, write_windows,
};
use crate::config::ModelConfig;
use crate::error::Result;

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "olmo3",
    architecture: "Olmo3ForCausalLM",
    theta: 500_000.0,
    window: Some(4096),
    describe,
    write: |config, keys| {
        write_biases(config, keys);
        write_no_padding(keys);
        write_windows(config, keys);
        write_ropes_by_kind(config, keys, None);
    },
    ..olmo2::ROW
};

fn describe(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    set_biases(keys, config)?;
    let sliding = sliding_layers(keys, config.layers.len(), |index| !(index + 1).is_multiple_of(4))?;
    set_windows(keys, config, &sliding)?;
    set_ropes_by_kind(keys, config, &sliding, None)
}
