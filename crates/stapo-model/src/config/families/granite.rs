//! Granite: Llama with multipliers of embeddings, scores, results of half-layers and logits.

use super::{FamilyRow, ObjectReader, llama, set_biases, set_score_scale, write_biases};
use crate::config::{EmbeddingScale, ModelConfig};
use crate::error::Result;
use serde_json::json;

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "granite",
    architecture: "GraniteForCausalLM",
    gguf: "granite",
    describe,
    write: |config, keys| {
        write_biases(config, keys);
        let Some(layer) = config.layers.first() else { return };
        let embedding = match config.embedding_scale {
            EmbeddingScale::Factor(factor) => factor,
            EmbeddingScale::One | EmbeddingScale::SqrtWidth => 1.0,
        };
        keys.insert("embedding_multiplier".into(), json!(embedding));
        let scale = config.attentions().next().map(|attention| attention.rule.scale);
        keys.insert("attention_multiplier".into(), json!(scale));
        keys.insert("residual_multiplier".into(), json!(layer.residual_scale));
        keys.insert("logits_scaling".into(), json!(config.logits.divisor));
    },
    ..llama::ROW
};

fn describe(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    set_biases(keys, config)?;
    let multiplier = |key: &str| Ok(keys.optional_number(key)?.unwrap_or(1.0));
    set_score_scale(config, multiplier("attention_multiplier")?);
    let residual_scale = multiplier("residual_multiplier")?;
    config.layers.iter_mut().for_each(|layer| layer.residual_scale = residual_scale);
    config.embedding_scale = EmbeddingScale::Factor(multiplier("embedding_multiplier")?);
    config.logits.divisor = multiplier("logits_scaling")?;
    Ok(())
}
