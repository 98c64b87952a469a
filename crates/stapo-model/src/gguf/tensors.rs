//! Maps GGUF's tensor names and row order to those of Hugging Face.

use super::families::{LONG_FACTORS, SHORT_FACTORS};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::{RowOrder, StoredTensor};
use std::collections::BTreeMap;

/// The table under Hugging Face names. Names without a counterpart are kept, so that `Weights::check` sees them.
pub(super) fn renamed(
    location: &str,
    tensors: &BTreeMap<String, StoredTensor>,
    config: &ModelConfig,
) -> Result<BTreeMap<String, StoredTensor>> {
    let mut renamed = BTreeMap::new();
    for (name, stored) in tensors {
        let mut stored = stored.clone();
        // The rope factors have become part of the config.
        if ["rope_freqs.weight", SHORT_FACTORS, LONG_FACTORS].contains(&name.as_str()) {
            continue;
        }
        stored.rows = row_order(name, config);
        if let RowOrder::RotaryPairs { n_heads } = stored.rows
            && (stored.shape.first().is_none_or(|rows| !rows.is_multiple_of(2 * n_heads))
                || (stored.shape.len() == 1 && stored.encoding.is_quantised()))
        {
            let problem = format!("shape {:?} does not split into {n_heads} heads of pairs", stored.shape);
            return Err(Error::malformed(format!("{location}: tensor {name}"), problem));
        }
        let new_name = hugging_face_name(name, config).unwrap_or_else(|| name.clone());
        if renamed.insert(new_name, stored).is_some() {
            return Err(Error::malformed(
                format!("{location}: tensor {name}"),
                "is there under another name too",
            ));
        }
    }
    Ok(renamed)
}

/// llama.cpp rotates neighbouring rows of q and k of some families as pairs; the others pair the two halves of a head.
fn row_order(name: &str, config: &ModelConfig) -> RowOrder {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let spec = layer.and_then(|(index, part)| Some((config.layers.get(index.parse::<usize>().ok()?)?, part)));
    let heads = spec.and_then(|(layer, part)| Some((layer.attention()?.heads, part)));
    match heads.filter(|_| config.family.pairs_rows_in_gguf()) {
        Some((heads, "attn_q.weight" | "attn_q.bias")) => RowOrder::RotaryPairs { n_heads: heads.query },
        Some((heads, "attn_k.weight" | "attn_k.bias")) => RowOrder::RotaryPairs { n_heads: heads.kv },
        _ => RowOrder::AsNamed,
    }
}

fn hugging_face_name(name: &str, config: &ModelConfig) -> Option<String> {
    let (stem, suffix) = name.rsplit_once('.')?;
    let whole = match stem {
        "token_embd" => "model.embed_tokens",
        "output_norm" => "model.norm",
        "output" => "lm_head",
        _ => {
            let (layer, part) = stem.strip_prefix("blk.")?.split_once('.')?;
            let part = match part {
                "attn_norm" => "input_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "attn_q_norm" => "self_attn.q_norm",
                "attn_k_norm" => "self_attn.k_norm",
                "attn_sinks" => return Some(format!("model.layers.{layer}.self_attn.sinks")),
                "ffn_norm" => config.layers.first()?.norms.before()?[1],
                "post_attention_norm" => "post_attention_layernorm",
                "post_ffw_norm" => "post_feedforward_layernorm",
                "attn_qkv" => "self_attn.qkv_proj",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" if config.family.joins_projections() => "mlp.gate_up_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                _ => return None,
            };
            return Some(format!("model.layers.{layer}.{part}.{suffix}"));
        }
    };
    Some(format!("{whole}.{suffix}"))
}
