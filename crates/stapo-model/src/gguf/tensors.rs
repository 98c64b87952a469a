//! Maps GGUF's tensor names and row order to those of Hugging Face.

use crate::config::{Family, ModelConfig};
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
        if name == "rope_freqs.weight" {
            continue;
        }
        stored.rows = row_order(name, config);
        if let RowOrder::RotaryPairs { n_heads } = stored.rows
            && (stored.shape.len() != 2 || !stored.shape[0].is_multiple_of(2 * n_heads))
        {
            let problem = format!("shape {:?} does not split into {n_heads} heads of pairs", stored.shape);
            return Err(Error::malformed(format!("{location}: tensor {name}"), problem));
        }
        let new_name = hugging_face_name(name).unwrap_or_else(|| name.clone());
        if renamed.insert(new_name, stored).is_some() {
            return Err(Error::malformed(
                format!("{location}: tensor {name}"),
                "is there under another name too",
            ));
        }
    }
    Ok(renamed)
}

/// llama.cpp rotates neighbouring rows of Llama's q and k as pairs; the other families pair the two halves of a head.
fn row_order(name: &str, config: &ModelConfig) -> RowOrder {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let spec = layer.and_then(|(index, part)| Some((config.layers.get(index.parse::<usize>().ok()?)?, part)));
    match (config.family, spec) {
        (Family::Llama, Some((layer, "attn_q.weight"))) => {
            RowOrder::RotaryPairs { n_heads: layer.attention().heads.query }
        }
        (Family::Llama, Some((layer, "attn_k.weight"))) => {
            RowOrder::RotaryPairs { n_heads: layer.attention().heads.kv }
        }
        _ => RowOrder::AsNamed,
    }
}

fn hugging_face_name(name: &str) -> Option<String> {
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
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                _ => return None,
            };
            return Some(format!("model.layers.{layer}.{part}.{suffix}"));
        }
    };
    Some(format!("{whole}.{suffix}"))
}
