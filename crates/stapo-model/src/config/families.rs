//! The families of models. Each has a file with its row of [`FamilyRow`]: what all its models share, and two functions for what
//! the keys of `config.json` say. `ModelConfig::from_hugging_face` reads the keys that all families have.

mod gemma2;
mod gemma3;
mod gpt_oss;
mod granite;
mod llama;
mod mistral;
mod olmo2;
mod olmo3;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen3_5;
mod smollm3;

use super::layer::{AttentionBiases, AttentionSpec, FeedForward, LayerSpec, Mixer, NormPlacement, QkNorm};
use super::reader::{ObjectReader, abbreviated};
use super::rope::{self, FULL, Rope, RopeContext};
use super::{Heads, ModelConfig};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use stapo_ops::attention::ScoreRule;
use stapo_ops::swiglu::Gate;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Qwen3,
    Qwen2,
    /// Llama 2 and 3, `SmolLM2`, `TinyLlama`: anything `transformers` calls `llama`.
    Llama,
    SmolLm3,
    Mistral,
    Olmo2,
    Olmo3,
    /// The language model of Gemma 3, alone or inside a multimodal checkpoint.
    Gemma3,
    Gemma2,
    /// Phi-3 and Phi-4-mini.
    Phi3,
    Granite,
    /// The language model of Qwen3.5, alone or inside a multimodal checkpoint.
    Qwen35,
    /// The attention of gpt-oss; models with experts are refused.
    GptOss,
}

/// What the models of a family share.
#[allow(clippy::struct_excessive_bools, reason = "the columns of a table")]
pub(super) struct FamilyRow {
    /// `model_type` in `config.json`.
    pub name: &'static str,
    /// The class in `transformers`.
    pub architecture: &'static str,
    /// `general.architecture` in GGUF.
    pub gguf: &'static str,
    /// Whether GGUF files store rotary pairs as neighbouring rows of q and k.
    pub gguf_pairs_rows: bool,
    pub norms: NormPlacement,
    pub qk_norm: QkNorm,
    pub biases: AttentionBiases,
    pub has_sinks: bool,
    pub gate: Gate,
    /// Whether files store q, k and v as one matrix, and gate and up as one.
    pub joins_projections: bool,
    /// Whether `config.json` belongs to weights of norms from which 1 was subtracted.
    pub norms_less_one: bool,
    /// What `transformers` takes where `config.json` has no such key.
    pub theta: f64,
    pub max_positions: usize,
    pub window: Option<usize>,
    pub norm_eps: f64,
    pub tied_embeddings: bool,
    pub head_dim: Option<usize>,
    /// `None`: as many as heads of queries.
    pub n_kv_heads: Option<usize>,
    /// Of families whose models are published inside multimodal ones: their `text_config` leaves out what equals these.
    pub sizes: Option<Sizes>,
    pub activation_key: &'static str,
    /// Changes the layers and the model to what the keys say.
    pub describe: fn(&ObjectReader<'_>, &mut ModelConfig) -> Result<()>,
    /// Adds the keys that `describe` reads.
    pub write: fn(&ModelConfig, &mut Map<String, Value>),
}

/// The sizes that every other family must name.
pub(super) struct Sizes {
    pub n_layers: usize,
    pub width: usize,
    pub ffn_width: usize,
    pub n_heads: usize,
    pub vocabulary: usize,
}

impl Family {
    pub const ALL: [Self; 13] = [
        Self::Qwen3,
        Self::Qwen2,
        Self::Llama,
        Self::SmolLm3,
        Self::Mistral,
        Self::Olmo2,
        Self::Olmo3,
        Self::Gemma3,
        Self::Gemma2,
        Self::Phi3,
        Self::Granite,
        Self::Qwen35,
        Self::GptOss,
    ];

    pub(super) fn row(self) -> &'static FamilyRow {
        match self {
            Self::Qwen3 => &qwen3::ROW,
            Self::Qwen2 => &qwen2::ROW,
            Self::Llama => &llama::ROW,
            Self::SmolLm3 => &smollm3::ROW,
            Self::Mistral => &mistral::ROW,
            Self::Olmo2 => &olmo2::ROW,
            Self::Olmo3 => &olmo3::ROW,
            Self::Gemma3 => &gemma3::ROW,
            Self::Gemma2 => &gemma2::ROW,
            Self::Phi3 => &phi3::ROW,
            Self::Granite => &granite::ROW,
            Self::Qwen35 => &qwen3_5::ROW,
            Self::GptOss => &gpt_oss::ROW,
        }
    }

    /// `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The class in `transformers`.
    pub fn architecture(self) -> &'static str {
        self.row().architecture
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.name() == name)
    }

    /// The family that `general.architecture` names. Several families share a name there: the first of them.
    pub(crate) fn from_gguf(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.row().gguf == name)
    }

    /// Whether GGUF files store rotary pairs as neighbouring rows of q and k.
    pub(crate) fn pairs_rows_in_gguf(self) -> bool {
        self.row().gguf_pairs_rows
    }

    /// Whether safetensors store q, k and v as one matrix, and gate and up as one.
    pub(crate) fn joins_projections(self) -> bool {
        self.row().joins_projections
    }

    /// Whether safetensors store the weights of norms less 1.
    pub(crate) fn norms_less_one(self) -> bool {
        self.row().norms_less_one
    }

    /// A layer as this family has them, with full attention.
    pub fn layer(self, heads: Heads, rope: Rope, ffn_width: usize) -> LayerSpec {
        let row = self.row();
        LayerSpec {
            norms: row.norms,
            mixer: Mixer::Attention(AttentionSpec {
                heads,
                rule: ScoreRule::plain(heads.dim),
                qk_norm: row.qk_norm,
                biases: row.biases,
                has_sinks: row.has_sinks,
                rope,
                rotary_dim: heads.dim,
                has_output_gate: self == Self::Qwen35,
            }),
            feed_forward: FeedForward::Gated { width: ffn_width, gate: row.gate, has_biases: false },
            residual_scale: 1.0,
        }
    }
}

const SLIDING: &str = "sliding_attention";

/// For each layer whether its window is in use, by `layer_types` or else by `default`.
fn sliding_layers(
    keys: &ObjectReader<'_>,
    n_layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let Some(types) = keys.list("layer_types", n_layers)? else {
        return Ok((0..n_layers).map(default).collect());
    };
    let is_sliding = |kind: &Value| match kind.as_str() {
        Some(SLIDING) => Ok(true),
        Some(FULL) => Ok(false),
        _ => {
            let problem = format!("{} is not supported", abbreviated(kind));
            let hint = format!("supported: {FULL}, {SLIDING}");
            Err(Error::unsupported(keys.path("layer_types"), problem, hint))
        }
    };
    types.iter().map(is_sliding).collect()
}

/// Gives the layers that `sliding` says the window of `sliding_window`; none if that key is null.
fn set_windows(keys: &ObjectReader<'_>, config: &mut ModelConfig, sliding: &[bool]) -> Result<()> {
    let is_given = keys.keys.contains_key("sliding_window");
    let window = if is_given { keys.optional_whole("sliding_window")? } else { config.family.row().window };
    for (attention, is_sliding) in config.attentions_mut().zip(sliding) {
        attention.rule.window = window.filter(|_| *is_sliding);
    }
    Ok(())
}

/// Reads `rope_parameters` by kind of layer. Where they are not given by kind, `rope_scaling` belongs to full layers, and
/// sliding layers have the plain rope of `sliding_theta`, which also stands in for a theta that their table leaves out.
fn set_ropes_by_kind(
    keys: &ObjectReader<'_>,
    config: &mut ModelConfig,
    sliding: &[bool],
    sliding_theta: Option<f64>,
) -> Result<()> {
    if keys.keys.get("sliding_window").is_some_and(Value::is_null) && sliding.contains(&true) {
        let hint = "give the window, or full_attention in layer_types";
        return Err(Error::unsupported(keys.path("sliding_window"), "is null in layers with a window", hint));
    }
    let table =
        keys.get("rope_parameters").and_then(|table| table.get(SLIDING)).filter(|table| !table.is_null());
    let has_theta = table.and_then(|table| table.get("rope_theta")).is_some_and(|theta| !theta.is_null());
    let theta = config.family.row().theta;
    let context = RopeContext { head_dim: 0, max_positions: config.max_positions, theta };
    for attention in config.attentions_mut() {
        let is_sliding = attention.rule.window.is_some();
        let context = RopeContext { head_dim: attention.heads.dim, ..context };
        let kind = if is_sliding { SLIDING } else { FULL };
        (attention.rope, attention.rotary_dim) = rope::read(keys, kind, context)?;
        if is_sliding && !has_theta {
            attention.rope.theta = sliding_theta.unwrap_or(attention.rope.theta);
        }
        if is_sliding && table.is_none() {
            attention.rope.scaling = super::RopeScaling::None;
        }
    }
    Ok(())
}

/// `layer_types` and `sliding_window`. Where no layer has a window, the key is the family's: `transformers` builds the mask of a
/// window for every model of a family with kinds of layers.
fn write_windows(config: &ModelConfig, keys: &mut Map<String, Value>) {
    let window = |layer: &LayerSpec| layer.attention()?.rule.window;
    let kind = |layer| if window(layer).is_some() { SLIDING } else { FULL };
    let kinds: Vec<&str> = config.layers.iter().map(kind).collect();
    keys.insert("layer_types".into(), json!(kinds));
    let written = config.layers.iter().find_map(window).or(config.family.row().window);
    keys.insert("sliding_window".into(), json!(written));
}

/// `rope_parameters` by kind of layer for `transformers` 5, and `rope_theta`, `rope_scaling` and `sliding_theta_key` for
/// older versions, whose `rope_scaling` belongs to full layers.
fn write_ropes_by_kind(config: &ModelConfig, keys: &mut Map<String, Value>, sliding_theta_key: Option<&str>) {
    let rope = |is_sliding: bool| {
        let of_kind = |attention: &&AttentionSpec| attention.rule.window.is_some() == is_sliding;
        Some(&config.attentions().find(of_kind).or(config.attentions().next())?.rope)
    };
    let (Some(full), Some(sliding)) = (rope(false), rope(true)) else { return };
    let parameters = |rope: &Rope| {
        let mut table = rope.scaling_keys();
        table.insert("rope_theta".into(), json!(rope.theta));
        table
    };
    keys.insert("rope_parameters".into(), json!({FULL: parameters(full), SLIDING: parameters(sliding)}));
    keys.insert("rope_theta".into(), json!(full.theta));
    let is_scaled = full.scaling != super::RopeScaling::None;
    keys.insert("rope_scaling".into(), json!(is_scaled.then(|| full.scaling_keys())));
    if let Some(key) = sliding_theta_key {
        keys.insert(key.into(), json!(sliding.theta));
    }
}

/// Reads `attention_bias` (of q, k, v and o) and `mlp_bias`.
fn set_biases(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    let attention = keys.flag("attention_bias")?.unwrap_or(false);
    let mlp = keys.flag("mlp_bias")?.unwrap_or(false);
    for layer in &mut config.layers {
        if let Some(attention) = layer.attention_mut().filter(|_| attention) {
            attention.biases = AttentionBiases::All;
        }
        let FeedForward::Gated { has_biases, .. } = &mut layer.feed_forward;
        *has_biases = mlp;
    }
    Ok(())
}

fn write_biases(config: &ModelConfig, keys: &mut Map<String, Value>) {
    let Some(layer) = config.layers.first() else { return };
    let FeedForward::Gated { has_biases, .. } = layer.feed_forward;
    let has_biases_on_all = config.attentions().all(|attention| attention.biases == AttentionBiases::All);
    keys.insert("attention_bias".into(), json!(has_biases_on_all));
    keys.insert("mlp_bias".into(), json!(has_biases));
}

/// Where the class in `transformers` has a padding token by default, which a small vocabulary may lack.
fn write_no_padding(keys: &mut Map<String, Value>) {
    keys.insert("pad_token_id".into(), Value::Null);
}

/// Sets the scale of scores in all layers.
fn set_score_scale(config: &mut ModelConfig, scale: f64) {
    config.attentions_mut().for_each(|attention| attention.rule.scale = scale);
}
