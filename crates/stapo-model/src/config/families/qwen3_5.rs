//! Qwen3.5's language model: gated DeltaNet in three of four layers; in the others attention with a gate on its outputs and rope on a
//! quarter of a head. Weights of norms are stored less 1, but for the norm inside DeltaNet.

use super::{FULL, FamilyRow, ObjectReader, Sizes, qwen3, set_biases, write_biases};
use crate::config::reader::abbreviated;
use crate::config::{DeltaNetSpec, LayerSpec, Mixer, ModelConfig};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use stapo_ops::deltanet::Heads;

const LINEAR: &str = "linear_attention";
const ROTARY_FACTOR: f64 = 0.25;

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "qwen3_5_text",
    architecture: "Qwen3_5ForCausalLM",
    gguf: "qwen35",
    norms_less_one: true,
    window: None,
    head_dim: Some(256),
    n_kv_heads: Some(4),
    sizes: Some(Sizes { n_layers: 32, width: 4096, ffn_width: 12_288, n_heads: 16, vocabulary: 248_320 }),
    describe,
    write,
    ..qwen3::ROW
};

fn describe(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    set_biases(keys, config)?;
    let given = keys.get("rope_parameters").is_some_and(|table| table.get("partial_rotary_factor").is_some());
    if !given && keys.get("partial_rotary_factor").is_none() {
        for attention in config.attentions_mut() {
            attention.rotary_dim = (attention.heads.dim as f64 * ROTARY_FACTOR) as usize;
        }
    }
    let size = |key: &str, default: usize| Ok::<_, Error>(keys.optional_whole(key)?.unwrap_or(default));
    let spec = DeltaNetSpec {
        heads: Heads {
            key: size("linear_num_key_heads", 16)?,
            value: size("linear_num_value_heads", 32)?,
            key_dim: size("linear_key_head_dim", 128)?,
            value_dim: size("linear_value_head_dim", 128)?,
        },
        kernel: size("linear_conv_kernel_dim", 4)?,
    };
    let interval = size("full_attention_interval", 4)?.max(1);
    let types = keys.list("layer_types", config.layers.len())?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let is_linear = match types.map(|types| &types[index]) {
            None => !(index + 1).is_multiple_of(interval),
            Some(kind) if kind == LINEAR => true,
            Some(kind) if kind == FULL => false,
            Some(kind) => {
                let problem = format!("{} is not supported", abbreviated(kind));
                let hint = format!("supported: {FULL}, {LINEAR}");
                return Err(Error::unsupported(keys.path("layer_types"), problem, hint));
            }
        };
        if is_linear {
            layer.mixer = Mixer::DeltaNet(spec);
        }
    }
    if config.attentions().next().is_none() {
        let hint = "expected at least one layer of full attention";
        return Err(Error::unsupported(keys.path("layer_types"), "no layer has attention", hint));
    }
    Ok(())
}

fn write(config: &ModelConfig, keys: &mut Map<String, Value>) {
    write_biases(config, keys);
    // Without the key, a quarter is read.
    if let Some(attention) = config.attentions().next() {
        let factor = json!(attention.rotary_dim as f64 / attention.heads.dim as f64);
        if let Some(Value::Object(rope)) = keys.get_mut("rope_parameters") {
            rope.insert("partial_rotary_factor".into(), factor.clone());
        }
        keys.insert("partial_rotary_factor".into(), factor);
    }
    let kind = |layer: &LayerSpec| if layer.delta_net().is_some() { LINEAR } else { FULL };
    keys.insert("layer_types".into(), json!(config.layers.iter().map(kind).collect::<Vec<_>>()));
    if let Some(DeltaNetSpec { heads, kernel }) = config.layers.iter().find_map(LayerSpec::delta_net) {
        keys.insert("linear_num_key_heads".into(), json!(heads.key));
        keys.insert("linear_num_value_heads".into(), json!(heads.value));
        keys.insert("linear_key_head_dim".into(), json!(heads.key_dim));
        keys.insert("linear_value_head_dim".into(), json!(heads.value_dim));
        keys.insert("linear_conv_kernel_dim".into(), json!(kernel));
    }
}
