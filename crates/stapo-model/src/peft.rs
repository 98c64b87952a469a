//! Adapters in the format of PEFT: a folder with `adapter_config.json` and `adapter_model.safetensors`.

#[cfg(test)]
mod tests;

use crate::config::{ModelConfig, TensorSpec};
use crate::decoder::{LoraScale, LoraSpec, LoraTarget, Policy};
use crate::error::{Error, Result};
use crate::export::{Existing, Precision, write_folder, write_json, write_shard};
use crate::json;
use crate::weights::Weights;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The files of an adapter's folder.
pub const CONFIG: &str = "adapter_config.json";
pub const WEIGHTS: &str = "adapter_model.safetensors";

/// Longest `adapter_config.json` accepted.
const MAX_CONFIG: u64 = 1 << 20;
/// The largest rank accepted.
pub const MAX_RANK: usize = 1 << 14;
/// What PEFT puts before the Hugging Face name of a module.
const PREFIX: &str = "base_model.model.";

/// An adapter on disk whose config has been read and whose tensors have been listed.
#[derive(Debug)]
pub struct PeftAdapter {
    pub spec: LoraSpec,
    /// The share of `x` that PEFT sets to 0 in training.
    pub dropout: f64,
    /// The base model that the adapter's config names.
    pub base: Option<String>,
    folder: PathBuf,
    weights: Weights,
}

impl PeftAdapter {
    /// Opens a folder. What this program cannot compute is refused by the name of its key, module or tensor.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        let keys = Keys { location: path.display().to_string(), map: json::read_object(&path, MAX_CONFIG)? };
        keys.check_kind()?;
        let spec = keys.spec()?;
        let dropout = keys.number("lora_dropout")?.unwrap_or(0.0);
        let base = keys.map.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
        let weights = Weights::open(&folder.join(WEIGHTS))?;
        Ok(Self { spec, dropout, base, folder: folder.to_owned(), weights })
    }

    /// Copies the factors to the adapters of a policy that was made with [`PeftAdapter::spec`].
    pub fn read_into(&self, policy: &mut Policy) -> Result<()> {
        self.check(policy.config())?;
        policy
            .try_fill_adapters(|spec, values| self.weights.read_f32(&stored_name(spec), &spec.shape, values))
    }

    /// Refuses tensors that are missing, of another shape, or of no module of the model, without reading one.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        check_modules(&self.folder.display().to_string(), config, &self.spec)?;
        let specs = self.spec.tensors(config);
        for spec in &specs {
            self.weights.check_shape(&stored_name(spec), &spec.shape)?;
        }
        let known: std::collections::BTreeSet<String> = specs.iter().map(stored_name).collect();
        if let Some(other) = self.weights.names().find(|name| !known.contains(*name)) {
            let location = self.folder.join(WEIGHTS).display().to_string();
            let problem = format!("tensor {other} is no factor of a module that {CONFIG} targets");
            return Err(Error::unsupported(location, problem, "the adapter must be of this model's layers"));
        }
        Ok(())
    }
}

fn stored_name(spec: &TensorSpec) -> String {
    format!("{PREFIX}{}", spec.name)
}

/// The keys of `adapter_config.json`.
struct Keys {
    location: String,
    map: Map<String, Value>,
}

/// Keys that describe the adapter or how it was made and change nothing that is computed.
const NEUTRAL: [&str; 15] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_ga_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Keys that [`Keys::spec`], [`Keys::check_kind`] and [`PeftAdapter::open`] read.
const READ: [&str; 7] =
    ["bias", "init_lora_weights", "lora_alpha", "lora_dropout", "r", "target_modules", "use_rslora"];

impl Keys {
    /// Refuses what is no plain LoRA adapter: another method, or a key that changes what is computed.
    fn check_kind(&self) -> Result<()> {
        match self.map.get("peft_type").and_then(Value::as_str) {
            Some("LORA") => {}
            Some(other) => return self.refuse(&format!("peft_type {other:?}"), "only LORA is read"),
            None => return Err(Error::malformed(&self.location, "no peft_type, expected \"LORA\"")),
        }
        if let Some(bias) = self.map.get("bias").filter(|bias| !is_off(bias) && **bias != json!("none")) {
            return self.refuse(&format!("bias {bias}"), "only adapters without biases are read");
        }
        let start = self.map.get("init_lora_weights").unwrap_or(&Value::Bool(true));
        let changes_base = |name: &str| !matches!(name, "gaussian" | "orthogonal" | "eva");
        if start.as_str().is_some_and(changes_base) {
            let hint = "such a start changes the base weights; convert the adapter with PEFT first";
            return self.refuse(&format!("init_lora_weights {start}"), hint);
        }
        let unread = self.map.iter().find(|(key, value)| {
            let is_known = NEUTRAL.contains(&key.as_str()) || READ.contains(&key.as_str());
            !is_known && !is_off(value)
        });
        unread.map_or(Ok(()), |(key, value)| {
            self.refuse(&format!("{key} {value}"), "only plain LoRA on whole modules is read")
        })
    }

    fn spec(&self) -> Result<LoraSpec> {
        let malformed = |problem: String| Error::malformed(&self.location, problem);
        let rank = self.map.get("r").and_then(Value::as_u64).map(|rank| rank as usize);
        let rank = rank
            .filter(|rank| (1..=MAX_RANK).contains(rank))
            .ok_or_else(|| malformed(format!("r {:?}, expected 1 to {MAX_RANK}", self.map.get("r"))))?;
        let alpha = self.number("lora_alpha")?.ok_or_else(|| malformed("no lora_alpha".to_string()))?;
        let scale = match self.map.get("use_rslora") {
            Some(Value::Bool(true)) => LoraScale::RankStabilised,
            None | Some(Value::Bool(false) | Value::Null) => LoraScale::Plain,
            Some(other) => return Err(malformed(format!("use_rslora {other}, expected true or false"))),
        };
        Ok(LoraSpec { rank, alpha, scale, targets: self.targets()? })
    }

    fn targets(&self) -> Result<Vec<LoraTarget>> {
        let names = match self.map.get("target_modules") {
            Some(Value::String(word)) if word == "all-linear" => return Ok(LoraTarget::ALL.to_vec()),
            Some(Value::Array(names)) if !names.is_empty() => names,
            other => {
                let problem = format!("target_modules {}", other.unwrap_or(&Value::Null));
                return self.refuse(&problem, "expected \"all-linear\" or a list of modules");
            }
        };
        let mut targets = Vec::new();
        for name in names {
            // PEFT writes "all-linear" out as the whole names of modules, such as model.layers.0.self_attn.q_proj. That every
            // layer has the module's factors is checked with the tensors.
            let last = name.as_str().and_then(|name| name.rsplit('.').next());
            let target = last.and_then(LoraTarget::named);
            let Some(target) = target else {
                let known: Vec<&str> = LoraTarget::ALL.iter().map(|target| target.name()).collect();
                let hint = format!("modules of a layer are {}", known.join(", "));
                return self.refuse(&format!("target_modules has {name}"), &hint);
            };
            targets.push(target);
        }
        Ok(LoraTarget::normalised(targets))
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.map.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        let number = value.as_f64().filter(|number| number.is_finite());
        let problem = || Error::malformed(&self.location, format!("{key} {value}, expected a number"));
        number.ok_or_else(problem).map(Some)
    }

    fn refuse<T>(&self, problem: &str, hint: &str) -> Result<T> {
        Err(Error::unsupported(&self.location, problem, hint))
    }
}

/// Whether a value switches nothing on.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrittenAdapter {
    pub n_tensors: usize,
    pub n_parameters: u64,
    pub bytes: u64,
}

/// Writes the adapters of a policy in f32 to the folder `out`, which appears whole or not at all. `base` is the name of
/// the base model, for other programs.
///
/// # Panics
/// If the policy has no adapters.
pub fn write(out: &Path, policy: &Policy, base: &str) -> Result<WrittenAdapter> {
    let spec = policy.lora().expect("only a policy with adapters is written as an adapter");
    check_modules(&out.display().to_string(), policy.config(), spec)?;
    let adapters: Vec<_> = policy.trained_tensors().collect();
    let renamed = |spec: &TensorSpec| TensorSpec { name: stored_name(spec), shape: spec.shape.clone() };
    let specs: Vec<TensorSpec> = adapters.iter().map(|(spec, _)| renamed(spec)).collect();
    write_folder(out, Existing::Refuse, |folder| {
        write_json(&folder.join(CONFIG), &config_of(spec, &specs, base))?;
        let mut values = adapters.iter();
        write_shard(&folder.join(WEIGHTS), &specs, Precision::F32, &str::to_owned, &mut |_, numbers| {
            if let Some((_, tensor)) = values.next() {
                tensor.read(numbers);
            }
            Ok(())
        })
    })?;
    let n_parameters = specs.iter().map(|spec| spec.n_elements() as u64).sum();
    Ok(WrittenAdapter { n_tensors: specs.len(), n_parameters, bytes: 4 * n_parameters })
}

/// Refuses adapters of parts of joined projections: PEFT knows only the whole.
fn check_modules(location: &str, config: &ModelConfig, spec: &LoraSpec) -> Result<()> {
    use LoraTarget::{Gate, Key, Query, Up, Value};
    let is_part = |target: &&LoraTarget| [Query, Key, Value, Gate, Up].contains(target);
    let Some(part) = spec.targets.iter().find(is_part).filter(|_| config.family.joins_projections()) else {
        return Ok(());
    };
    let problem = format!("{part} is a part of a joined matrix of {}", config.family.architecture());
    let hint = "export the merged model, or train adapters on o_proj and down_proj";
    Err(Error::unsupported(location, problem, hint))
}

/// `adapter_config.json`, with the targets that the model has factors of.
fn config_of(spec: &LoraSpec, factors: &[TensorSpec], base: &str) -> Map<String, Value> {
    let names = spec.targets.iter().map(|target| target.name());
    let is_found = |name: &&str| factors.iter().any(|factor| factor.name.contains(&format!(".{name}.")));
    let targets: Vec<&str> = names.filter(is_found).collect();
    let is_whole = spec.alpha.fract() == 0.0 && spec.alpha.abs() < 1e15;
    let alpha = if is_whole { json!(spec.alpha as i64) } else { json!(spec.alpha) };
    let keys = json!({
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": spec.rank,
        "rank_pattern": {},
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": spec.scale == LoraScale::RankStabilised,
    });
    let Value::Object(keys) = keys else { unreachable!("json! was given an object") };
    keys
}
