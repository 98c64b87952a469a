//! Gemma 2: norms around attention and feed-forward, tanh-GELU, scaled embeddings, softcaps, windows in every other layer.

use super::{
    FamilyRow, Gate, NormPlacement, ObjectReader, llama, set_biases, set_score_scale, set_windows,
    sliding_layers, write_biases, write_no_padding, write_windows,
};
use crate::config::{EmbeddingScale, ModelConfig};
use crate::error::Result;
use serde_json::{Map, Value, json};

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "gemma2",
    architecture: "Gemma2ForCausalLM",
    gguf: "gemma2",
    gguf_pairs_rows: false,
    norms: NormPlacement::Both,
    gate: Gate::GeluTanh,
    norms_less_one: true,
    max_positions: 8192,
    window: Some(4096),
    tied_embeddings: true,
    head_dim: Some(256),
    n_kv_heads: Some(4),
    activation_key: "hidden_activation",
    describe: |keys, config| {
        describe_softcaps(keys, config, [Some(50.0), Some(30.0)])?;
        let sliding = sliding_layers(keys, config.layers.len(), |index| index.is_multiple_of(2))?;
        set_windows(keys, config, &sliding)
    },
    write: |config, keys| {
        write_softcaps(config, keys);
        write_windows(config, keys);
    },
    ..llama::ROW
};

/// What Gemma 2 and 3 share. `defaults` are the softcaps of scores and logits without keys; null means no softcap.
pub(super) fn describe_softcaps(
    keys: &ObjectReader<'_>,
    config: &mut ModelConfig,
    defaults: [Option<f64>; 2],
) -> Result<()> {
    set_biases(keys, config)?;
    let softcap = |key: &str, default: Option<f64>| {
        if keys.keys.contains_key(key) { keys.optional_number(key) } else { Ok(default) }
    };
    let of_scores = softcap("attn_logit_softcapping", defaults[0])?;
    config.attentions_mut().for_each(|attention| attention.rule.softcap = of_scores);
    config.logits.softcap = softcap("final_logit_softcapping", defaults[1])?;
    let scalar = keys.optional_number("query_pre_attn_scalar")?.unwrap_or(256.0);
    set_score_scale(config, 1.0 / scalar.sqrt());
    config.embedding_scale = EmbeddingScale::SqrtWidth;
    Ok(())
}

pub(super) fn write_softcaps(config: &ModelConfig, keys: &mut Map<String, Value>) {
    write_biases(config, keys);
    write_no_padding(keys);
    keys.remove("mlp_bias");
    let Some(rule) = config.attentions().next().map(|attention| attention.rule) else { return };
    keys.insert("attn_logit_softcapping".into(), json!(rule.softcap));
    keys.insert("final_logit_softcapping".into(), json!(config.logits.softcap));
    let scalar = rule.scale.powi(-2);
    // The scalars of published models are whole; the inverse square is not always.
    let whole = if (scalar - scalar.round()).abs() < 1e-9 * scalar { scalar.round() } else { scalar };
    keys.insert(
        "query_pre_attn_scalar".into(),
        if whole.fract() == 0.0 { json!(whole as u64) } else { json!(whole) },
    );
}
