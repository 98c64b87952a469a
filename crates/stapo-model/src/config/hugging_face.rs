//! `config.json`: the keys that all families have. `families` has those of each family.

use super::families::{Family, Sizes};
use super::missing;
use super::reader::{ObjectReader, abbreviated, token_ids};
use super::rope::{self, RopeContext};
use super::score::ScoreHead;
use super::{AttentionSpec, EmbeddingScale, Heads, LogitRule, ModelConfig, RopeScaling};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use stapo_ops::swiglu::Gate;

impl ModelConfig {
    /// Reads the keys of a `config.json`; `location` names the file in errors. Absent keys take the value that
    /// `transformers` gives them, but for sizes, which only a `text_config` may leave out. Of a multimodal model, `text_config`
    /// is read. Refused by name: other families, mixtures of experts, other activations, quantised checkpoints, rotary kinds
    /// not in [`RopeScaling`].
    pub fn from_hugging_face(location: &str, keys: &Map<String, Value>) -> Result<Self> {
        let outer = ObjectReader { location, prefix: "", keys };
        let keys = language_model(&outer)?;
        let family = family(&keys)?;
        let row = family.row();
        refuse_what_is_not_built(&keys, &outer, family)?;
        let size = |key: &str, default: fn(&Sizes) -> usize| match &row.sizes {
            Some(sizes) => Ok(keys.optional_whole(key)?.unwrap_or(default(sizes))),
            None => keys.whole(key),
        };
        let n_layers = size("num_hidden_layers", |sizes| sizes.n_layers)?;
        let width = size("hidden_size", |sizes| sizes.width)?;
        let n_heads = size("num_attention_heads", |sizes| sizes.n_heads)?;
        let head_dim = match keys.optional_whole("head_dim")?.or(row.head_dim) {
            Some(head_dim) => head_dim,
            None if n_heads > 0 && width.is_multiple_of(n_heads) => width / n_heads,
            None => {
                let problem = format!("hidden size {width} does not divide among {n_heads} attention heads");
                return Err(Error::malformed(location, problem));
            }
        };
        let max_positions = keys.optional_whole("max_position_embeddings")?.unwrap_or(row.max_positions);
        // null means as many as heads of queries, in every family.
        let default =
            row.n_kv_heads.filter(|_| !keys.keys.contains_key("num_key_value_heads")).unwrap_or(n_heads);
        let n_kv_heads = keys.optional_whole("num_key_value_heads")?.unwrap_or(default);
        let heads = Heads { query: n_heads, kv: n_kv_heads, dim: head_dim };
        let context = RopeContext { head_dim, max_positions, theta: row.theta };
        let (rope, rotary_dim) = rope::read(&keys, rope::FULL, context)?;
        let mut layer = family.layer(heads, rope, size("intermediate_size", |sizes| sizes.ffn_width)?);
        if let Some(attention) = layer.attention_mut() {
            attention.rotary_dim = rotary_dim;
        }
        let token = |key: &str| token_ids(location, key, keys.get(key).or(outer.get(key)));
        let score = ScoreHead::read(&outer, &keys, family)?;
        let is_tied = keys
            .flag("tie_word_embeddings")?
            .or(outer.flag("tie_word_embeddings")?)
            .unwrap_or(row.tied_embeddings);
        let mut config = Self {
            family,
            width,
            layers: Self::repeat_layer(location, layer, n_layers)?,
            vocabulary: size("vocab_size", |sizes| sizes.vocabulary)?,
            norm_eps: keys.optional_number("rms_norm_eps")?.unwrap_or(row.norm_eps) as f32,
            max_positions,
            tied_embeddings: is_tied && score.is_none(),
            score,
            embedding_scale: EmbeddingScale::One,
            logits: LogitRule::default(),
            bos: token("bos_token_id")?.first().copied(),
            stops: token("eos_token_id")?,
        };
        (row.describe)(&keys, &mut config)?;
        config.validate(location)?;
        Ok(config)
    }

    /// The `config.json` that `transformers` 5 loads; older versions find `rope_theta` and `rope_scaling` too.
    /// `dtype` is the name that `transformers` has for the type of the weights, such as `bfloat16`. Refuses what the keys of
    /// the family have no words for, such as layers of different widths.
    pub fn to_hugging_face(&self, dtype: &str) -> Result<Map<String, Value>> {
        let layer = &self.layers[0];
        let Some(AttentionSpec { heads, rope, rotary_dim, .. }) = self.attentions().next() else {
            let hint = "expected at least one layer of attention";
            return Err(Error::unsupported("config.json", "no layer has attention", hint));
        };
        let stops = match self.stops.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            several => json!(several),
        };
        let mut scaling = rope.scaling_keys();
        let value = json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.name(),
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": layer.ffn_width(),
            "num_hidden_layers": self.layers.len(),
            "num_attention_heads": heads.query,
            "num_key_value_heads": heads.kv,
            "head_dim": heads.dim,
            self.family.row().activation_key: activation(self.family.row().gate),
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": shortest(self.norm_eps),
            "tie_word_embeddings": self.tied_embeddings,
            "attention_dropout": 0.0,
            "bos_token_id": self.bos,
            "eos_token_id": stops,
            "rope_theta": rope.theta,
            "rope_scaling": if rope.scaling == RopeScaling::None { Value::Null } else { json!(scaling) },
            "dtype": dtype,
            "use_cache": true,
            // The version whose layout this is. Without the key, transformers warns of a known fault in old tokenizers.
            "transformers_version": "5.0.0",
        });
        let Value::Object(mut keys) = value else { unreachable!("json! was given an object") };
        scaling.insert("rope_theta".into(), json!(rope.theta));
        if *rotary_dim > 0 && *rotary_dim < heads.dim {
            let factor = *rotary_dim as f64 / heads.dim as f64;
            scaling.insert("partial_rotary_factor".into(), json!(factor));
            keys.insert("partial_rotary_factor".into(), json!(factor));
        }
        keys.insert("rope_parameters".into(), Value::Object(scaling));
        (self.family.row().write)(self, &mut keys);
        if let Some(score) = self.score {
            score.write(self.family, &mut keys)?;
        }
        if Self::from_hugging_face("config.json", &keys).ok().is_none_or(|read| !read.computes_as(self)) {
            let problem = format!("the layers of a {} differ", self.family.architecture());
            let hint = "expected layers that the keys of this family describe";
            return Err(Error::unsupported("config.json", problem, hint));
        }
        Ok(keys)
    }
}

fn activation(gate: Gate) -> &'static str {
    match gate {
        Gate::Silu => "silu",
        Gate::GeluTanh => "gelu_pytorch_tanh",
    }
}

/// Whether the keys are those of a model with a language model inside.
pub(crate) fn is_multimodal(keys: &Map<String, Value>) -> bool {
    let name = keys.get("model_type").and_then(Value::as_str).unwrap_or_default();
    ["gemma3", "qwen3_5"].contains(&name) && keys.contains_key("text_config")
}

/// The keys of the language model: `text_config` of a multimodal model, else all keys.
fn language_model<'a>(keys: &ObjectReader<'a>) -> Result<ObjectReader<'a>> {
    match keys.get("text_config").filter(|_| is_multimodal(keys.keys)) {
        Some(Value::Object(inner)) => {
            Ok(ObjectReader { location: keys.location, prefix: "text_config", keys: inner })
        }
        Some(other) => {
            let problem = format!("is {}, expected an object", abbreviated(other));
            Err(Error::malformed(keys.path("text_config"), problem))
        }
        None => Ok(*keys),
    }
}

fn family(keys: &ObjectReader) -> Result<Family> {
    // All published models of gpt-oss have experts, which are not built.
    let built = Family::ALL.into_iter().filter(|family| *family != Family::GptOss);
    let names: Vec<&str> = built.map(Family::name).collect();
    let supported = format!(
        "supported: Qwen3 and 3.5, Qwen2 and 2.5, Llama 2 and 3, SmolLM2 and 3, Mistral, OLMo 2 and 3, Gemma 2 and 3, Phi-3, \
         Phi-4-mini, Granite (model_type {})",
        names.join(", ")
    );
    let name = keys.text("model_type")?.ok_or_else(|| {
        let problem = "no model_type, expected the config.json of a language model";
        Error::missing(keys.location, problem, supported.as_str())
    })?;
    let family = Family::from_name(name).ok_or_else(|| {
        Error::unsupported(keys.path("model_type"), missing::refusal(name), supported.as_str())
    })?;
    if let Some(Value::Array(classes)) = keys.get("architectures")
        && !classes.is_empty()
        && !classes.iter().any(|class| class == family.architecture())
        && !classes.iter().any(|class| class.as_str().map(str::to_owned) == family.classifier())
    {
        let problem =
            format!("{} is not a causal language model of the {name} family", Value::Array(classes.clone()));
        let hint = format!("expected {}", family.architecture());
        return Err(Error::unsupported(keys.path("architectures"), problem, hint));
    }
    Ok(family)
}

fn refuse_what_is_not_built(keys: &ObjectReader, outer: &ObjectReader, family: Family) -> Result<()> {
    let refuse = |key: &str, value: &Value, hint: &str| {
        let problem = format!("{} is not supported", abbreviated(value));
        Err(Error::unsupported(keys.path(key), problem, hint))
    };
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if let Some(value) = keys.get(key).filter(|v| v.as_u64() != Some(0)) {
            return refuse(key, value, "mixtures of experts are not built; use a dense model");
        }
    }
    if let Some(value) = keys.get("quantization_config").or(outer.get("quantization_config")) {
        return refuse("quantization_config", value, "use the checkpoint in bf16, f16 or f32, or as GGUF");
    }
    if let Some(value) = keys.get("use_bidirectional_attention").filter(|v| v.as_bool() != Some(false)) {
        return refuse("use_bidirectional_attention", value, "expected causal attention");
    }
    let (key, expected) = (family.row().activation_key, activation(family.row().gate));
    if let Some(value) = keys.get(key).filter(|v| *v != expected) {
        return refuse(key, value, &format!("expected {expected:?}"));
    }
    match unread_structure(keys, family) {
        Some((key, value)) => refuse(key, value, "models of this family are computed without it"),
        None => Ok(()),
    }
}

/// A key that would change how a model computes, and that its family does not read. A program that wrote such a config computes
/// another model than the one that would be trained here.
fn unread_structure<'a>(keys: &ObjectReader<'a>, family: Family) -> Option<(&'static str, &'a Value)> {
    let other_than = |key: &'static str, is_neutral: &dyn Fn(&Value) -> bool| {
        keys.get(key).filter(|value| !is_neutral(value)).map(|value| (key, value))
    };
    let all_are = |list: &Value, entry: &Value| {
        list.as_array().is_none_or(|entries| entries.iter().all(|found| found == entry))
    };
    let nowhere = ["attention_sinks", "clip_qkv", "llama_4_scaling_beta"];
    let mut found =
        nowhere.into_iter().find_map(|key| other_than(key, &|value| *value == Value::Bool(false)));
    if family != Family::Granite {
        let factors =
            ["embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"];
        let unread =
            factors.into_iter().find_map(|key| other_than(key, &|value| value.as_f64() == Some(1.0)));
        found = found.or(unread);
    }
    // transformers ignores a softcap on the scores of Gemma 3, and vLLM applies it.
    if family != Family::Gemma2 {
        found = found.or(other_than("attn_logit_softcapping", &|_| false));
    }
    if !matches!(family, Family::Gemma2 | Family::Gemma3) {
        found = found.or(other_than("final_logit_softcapping", &|_| false));
    }
    if family != Family::SmolLm3 {
        found = found.or(other_than("no_rope_layers", &|list| all_are(list, &json!(1))));
    }
    let is_full = |list: &Value| all_are(list, &json!(rope::FULL));
    let is_sliding = |list: &Value| all_are(list, &json!("sliding_attention"));
    let kinds = match family {
        Family::Llama | Family::Olmo2 | Family::Granite => other_than("layer_types", &is_full),
        Family::Mistral | Family::Phi3 => {
            other_than("layer_types", &|list| is_full(list) || is_sliding(list))
        }
        _ => None,
    };
    found.or(kinds)
}

/// An f32 as the shortest decimal that reads back as it: 1e-6, not 9.999999974752427e-7.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}
