//! `config.json`, in both layouts of rotary parameters: `rope_theta` + `rope_scaling`, and `rope_parameters`.

use super::{AttentionBiases, AttentionSpec, Family, Heads, ModelConfig, Rope, RopeScaling};
use crate::error::{Error, Result};
use crate::json;
use serde_json::{Map, Value, json};

impl ModelConfig {
    /// Reads the keys of a `config.json`; `location` names the file in errors. Absent keys take the value that
    /// `transformers` gives them. Refused by name: other families, mixtures of experts, sliding windows in use,
    /// biases outside q, k and v, other activations, quantised checkpoints, rotary kinds not in [`RopeScaling`].
    pub fn from_hugging_face(location: &str, keys: &Map<String, Value>) -> Result<Self> {
        let keys = ObjectReader { location, prefix: "", keys };
        let family = family(&keys)?;
        refuse_what_is_not_built(&keys)?;
        let n_layers = keys.whole("num_hidden_layers")?;
        refuse_sliding_window(&keys, family, n_layers)?;
        let width = keys.whole("hidden_size")?;
        let n_heads = keys.whole("num_attention_heads")?;
        let head_dim = match (keys.optional_whole("head_dim")?, family) {
            (Some(head_dim), _) => head_dim,
            (None, Family::Qwen3) => 128,
            (None, _) if n_heads > 0 && width.is_multiple_of(n_heads) => width / n_heads,
            (None, _) => {
                let problem = format!("hidden size {width} does not divide among {n_heads} attention heads");
                return Err(Error::malformed(location, problem));
            }
        };
        let max_positions = keys.optional_whole("max_position_embeddings")?.unwrap_or(match family {
            Family::Llama => 2048,
            Family::Qwen2 | Family::Qwen3 => 32768,
        });
        let n_kv_heads = keys.optional_whole("num_key_value_heads")?.unwrap_or(n_heads);
        let heads = Heads { query: n_heads, kv: n_kv_heads, dim: head_dim };
        let layer = family.layer(heads, rope(&keys, max_positions)?, keys.whole("intermediate_size")?);
        let config = Self {
            family,
            width,
            layers: Self::repeat_layer(location, layer, n_layers)?,
            vocabulary: keys.whole("vocab_size")?,
            norm_eps: keys.optional_number("rms_norm_eps")?.unwrap_or(1e-6) as f32,
            max_positions,
            tied_embeddings: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            bos: token_ids(location, "bos_token_id", keys.get("bos_token_id"))?.first().copied(),
            stops: token_ids(location, "eos_token_id", keys.get("eos_token_id"))?,
        };
        config.validate(location)?;
        Ok(config)
    }

    /// The `config.json` that `transformers` 5 loads; older versions find `rope_theta` and `rope_scaling` too.
    /// `dtype` is the name that `transformers` has for the type of the weights, such as `bfloat16`. Refuses layers that
    /// differ, for which the keys of these families have no words.
    pub fn to_hugging_face(&self, dtype: &str) -> Result<Map<String, Value>> {
        let layer = self.uniform_layer().ok_or_else(|| {
            let problem = format!("the layers of a {} differ", self.family.architecture());
            Error::unsupported(
                "config.json",
                problem,
                "expected the same heads, widths and rope in all layers",
            )
        })?;
        let AttentionSpec { heads, biases, rope, .. } = layer.attention();
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
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": shortest(self.norm_eps),
            "tie_word_embeddings": self.tied_embeddings,
            "attention_bias": *biases == AttentionBiases::QueryKeyValue,
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
        keys.insert("rope_parameters".into(), Value::Object(scaling));
        if self.family != Family::Llama {
            keys.insert("use_sliding_window".into(), json!(false));
        }
        Ok(keys)
    }
}

/// The ids under `key`, which may hold one, several or none.
pub(crate) fn token_ids(location: &str, key: &str, value: Option<&Value>) -> Result<Vec<u32>> {
    let one = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            Error::malformed(
                format!("{location}: {key}"),
                format!("is {value}, expected a token id or a list of them"),
            )
        })
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}

fn family(keys: &ObjectReader) -> Result<Family> {
    let supported =
        "supported: Qwen3, Qwen2 and 2.5, Llama 2 and 3, SmolLM2, TinyLlama (model_type qwen3, qwen2, llama)";
    let location = |key: &str| format!("{}: {key}", keys.location);
    let name = keys.text("model_type")?.ok_or_else(|| {
        Error::missing(
            keys.location,
            "no model_type, expected the config.json of a language model",
            supported,
        )
    })?;
    let family = Family::from_name(name).ok_or_else(|| {
        Error::unsupported(location("model_type"), format!("{name:?} is not supported"), supported)
    })?;
    if let Some(Value::Array(classes)) = keys.get("architectures")
        && !classes.is_empty()
        && !classes.iter().any(|class| class == family.architecture())
    {
        let problem =
            format!("{} is not a causal language model of the {name} family", Value::Array(classes.clone()));
        return Err(Error::unsupported(
            location("architectures"),
            problem,
            format!("expected {}", family.architecture()),
        ));
    }
    Ok(family)
}

fn refuse_what_is_not_built(keys: &ObjectReader) -> Result<()> {
    let refuse = |key: &str, value: &Value, hint: &str| {
        let problem = format!("{} is not supported", abbreviated(value));
        Err(Error::unsupported(format!("{}: {key}", keys.location), problem, hint))
    };
    for key in ["num_experts", "num_local_experts", "n_routed_experts"] {
        if let Some(value) = keys.get(key).filter(|v| v.as_u64() != Some(0)) {
            return refuse(key, value, "mixtures of experts are not built; use a dense model");
        }
    }
    if let Some(value) = keys.get("quantization_config") {
        return refuse("quantization_config", value, "use the checkpoint in bf16, f16 or f32, or as GGUF");
    }
    if let Some(value) = keys.get("hidden_act").filter(|v| *v != "silu") {
        return refuse("hidden_act", value, "expected \"silu\"");
    }
    for key in ["attention_bias", "mlp_bias"] {
        // Qwen2 always has biases on q, k and v; `transformers` does not read this key for Qwen2.
        let is_qwen2 = keys.get("model_type").is_some_and(|v| v == "qwen2");
        if keys.flag(key)? == Some(true) && !is_qwen2 {
            return refuse(key, &json!(true), "biases outside Qwen2's q, k and v are not built");
        }
    }
    if let Some(value) = keys.get("partial_rotary_factor").filter(|v| v.as_f64() != Some(1.0)) {
        return refuse("partial_rotary_factor", value, "expected rotary positions over the whole head");
    }
    Ok(())
}

fn refuse_sliding_window(keys: &ObjectReader, family: Family, n_layers: usize) -> Result<()> {
    let hint = "only full attention is built; a window would silently change the log-probs of long sequences";
    if let Some(Value::Array(types)) = keys.get("layer_types") {
        if let Some(other) = types.iter().find(|t| *t != "full_attention") {
            let problem = format!("{} is not supported", abbreviated(other));
            return Err(Error::unsupported(format!("{}: layer_types", keys.location), problem, hint));
        }
        return Ok(());
    }
    let in_use = family != Family::Llama
        && keys.flag("use_sliding_window")?.unwrap_or(false)
        && keys.get("sliding_window").is_none_or(|window| !window.is_null())
        && keys.optional_whole("max_window_layers")?.unwrap_or(28) < n_layers;
    if in_use {
        let location = format!("{}: use_sliding_window", keys.location);
        return Err(Error::unsupported(location, "sliding-window attention is not supported", hint));
    }
    Ok(())
}

fn rope(keys: &ObjectReader, max_positions: usize) -> Result<Rope> {
    let (name, table) = match (keys.get("rope_scaling"), keys.get("rope_parameters")) {
        (Some(table), _) => ("rope_scaling", table),
        (None, Some(table)) => ("rope_parameters", table),
        (None, None) => return Ok(Rope { theta: top_level_theta(keys)?, scaling: RopeScaling::None }),
    };
    let location = format!("{}: {name}", keys.location);
    let Value::Object(table) = table else {
        return Err(Error::malformed(location, format!("is {}, expected an object", json::kind(table))));
    };
    if table.contains_key("full_attention") || table.contains_key("sliding_attention") {
        let hint = "expected one set of parameters for the whole model";
        return Err(Error::unsupported(location, "rotary parameters by layer type are not supported", hint));
    }
    let rope = ObjectReader { location: keys.location, prefix: name, keys: table };
    if let Some(value) = rope.get("partial_rotary_factor").filter(|v| v.as_f64() != Some(1.0)) {
        let problem = format!("partial_rotary_factor {value} is not supported");
        return Err(Error::unsupported(location, problem, "expected rotary positions over the whole head"));
    }
    let theta = match rope.optional_number("rope_theta")? {
        Some(theta) => theta,
        None => top_level_theta(keys)?,
    };
    let original_positions = || -> Result<usize> {
        let outer = keys.optional_whole("original_max_position_embeddings")?;
        let inner = rope.optional_whole("original_max_position_embeddings")?;
        Ok(outer.or(inner).unwrap_or(max_positions))
    };
    let scaling = match rope.text("rope_type")?.or(rope.text("type")?).unwrap_or("default") {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear { factor: rope.number("factor")? },
        "llama3" => RopeScaling::Llama3 {
            factor: rope.number("factor")?,
            low_freq_factor: rope.number("low_freq_factor")?,
            high_freq_factor: rope.number("high_freq_factor")?,
            original_positions: original_positions()?,
        },
        "yarn" => yarn(&rope, max_positions, original_positions()?)?,
        other => {
            let problem = format!("rope type {other:?} is not supported");
            return Err(Error::unsupported(location, problem, "supported: default, linear, llama3, yarn"));
        }
    };
    Ok(Rope { theta, scaling })
}

fn top_level_theta(keys: &ObjectReader) -> Result<f64> {
    Ok(keys.optional_number("rope_theta")?.unwrap_or(10_000.0))
}

/// `YaRN` with its attention factor: as given, or from the two `mscale` keys, or 0.1 ln(factor) + 1.
fn yarn(rope: &ObjectReader, max_positions: usize, original_positions: usize) -> Result<RopeScaling> {
    let factor =
        rope.optional_number("factor")?.unwrap_or(max_positions as f64 / original_positions.max(1) as f64);
    let magnitude = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    let nonzero = |key| rope.optional_number(key).map(|value| value.filter(|&value| value != 0.0));
    let attention_factor =
        match (rope.optional_number("attention_factor")?, nonzero("mscale")?, nonzero("mscale_all_dim")?) {
            (Some(given), ..) => given,
            (None, Some(mscale), Some(all_dim)) => magnitude(mscale) / magnitude(all_dim),
            (None, ..) => magnitude(1.0),
        };
    Ok(RopeScaling::Yarn {
        factor,
        original_positions,
        beta_fast: nonzero("beta_fast")?.unwrap_or(32.0),
        beta_slow: nonzero("beta_slow")?.unwrap_or(1.0),
        attention_factor,
        truncate: rope.flag("truncate")?.unwrap_or(true),
    })
}

impl Rope {
    /// `rope_scaling` as `transformers` spells it.
    fn scaling_keys(&self) -> Map<String, Value> {
        let value = match self.scaling {
            RopeScaling::None => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_positions,
            }),
            RopeScaling::Yarn {
                factor,
                original_positions,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => json!({
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original_positions,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "attention_factor": attention_factor,
                "truncate": truncate,
            }),
        };
        let Value::Object(keys) = value else { unreachable!("json! was given an object") };
        keys
    }
}

/// An f32 as the shortest decimal that reads back as it: 1e-6, not 9.999999974752427e-7.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}

/// A value for a message; a long value is named by its kind.
fn abbreviated(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= 60 { text } else { json::kind(value).to_owned() }
}

/// Reads typed values from one JSON object. null counts as absent; errors name the key and the value.
struct ObjectReader<'a> {
    location: &'a str,
    prefix: &'a str,
    keys: &'a Map<String, Value>,
}

impl<'a> ObjectReader<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    fn whole(&self, key: &str) -> Result<usize> {
        self.optional_whole(key)?.ok_or_else(|| self.absent(key))
    }

    fn optional_whole(&self, key: &str) -> Result<Option<usize>> {
        let read = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.typed(key, "a whole number", read)
    }

    fn number(&self, key: &str) -> Result<f64> {
        self.optional_number(key)?.ok_or_else(|| self.absent(key))
    }

    fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong =
            || Error::malformed(self.path(key), format!("is {}, expected {expected}", abbreviated(value)));
        read(value).map(Some).ok_or_else(wrong)
    }

    fn absent(&self, key: &str) -> Error {
        Error::missing(self.path(key), "is missing", "is this the config.json of a language model?")
    }

    fn path(&self, key: &str) -> String {
        let dot = if self.prefix.is_empty() { "" } else { "." };
        format!("{}: {}{dot}{key}", self.location, self.prefix)
    }
}
