//! Adapters in the format of PEFT: a folder with `adapter_config.json` and `adapter_model.safetensors`.

mod joined;
#[cfg(test)]
mod tests;

use crate::config::{ModelConfig, TensorSpec};
use crate::decoder::{LoraScale, LoraSpec, LoraTarget, Policy};
use crate::error::{Error, Result};
use crate::export::{Existing, Precision, write_folder, write_json, write_shard};
use crate::json;
use crate::weights::Weights;
use joined::{JoinedModule, Places};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
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
    /// The joined modules whose adapters have a block for each part.
    with_blocks: Vec<JoinedModule>,
}

impl PeftAdapter {
    /// Opens a folder. What this program cannot compute is refused by the name of its key, module or tensor.
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG);
        let keys = Keys { location: path.display().to_string(), map: json::read_object(&path, MAX_CONFIG)? };
        keys.check_kind()?;
        let mut spec = keys.spec()?;
        let with_blocks = keys.with_blocks(&spec)?;
        let dropout = keys.number("lora_dropout")?.unwrap_or(0.0);
        let base = keys.map.get("base_model_name_or_path").and_then(Value::as_str).map(str::to_owned);
        let weights = Weights::open(&folder.join(WEIGHTS))?;
        for module in &with_blocks {
            let adapted = module.adapted(&weights, spec.rank)?;
            spec.targets.retain(|target| !module.parts.contains(target) || adapted.contains(target));
        }
        spec.targets = LoraTarget::normalised(spec.targets);
        Ok(Self { spec, dropout, base, folder: folder.to_owned(), weights, with_blocks })
    }

    /// Copies the factors to the adapters of a policy that was made with [`PeftAdapter::spec`].
    pub fn read_into(&self, policy: &mut Policy) -> Result<()> {
        self.check(policy.config())?;
        let places = Places::new(policy.config(), &self.with_blocks);
        let mut numbers = Vec::new();
        policy.try_fill_adapters(|spec, values| {
            let found = places.find(spec);
            numbers.resize(found.whole.n_elements(), 0.0);
            self.weights.read_f32(&found.whole.name, &found.whole.shape, &mut numbers)?;
            found.copy_from(self.weights.location(), &numbers, &spec.shape, values)
        })
    }

    /// Refuses tensors that are missing, of another shape, or of no module of the model, without reading one.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        let places = Places::new(config, &self.with_blocks);
        let mut known = BTreeSet::new();
        for whole in self.spec.tensors(config).iter().map(|spec| places.find(spec).whole) {
            self.weights.check_shape(&whole.name, &whole.shape)?;
            known.insert(whole.name);
        }
        if let Some(other) = self.weights.names().find(|name| !known.contains(*name)) {
            let location = self.folder.join(WEIGHTS).display().to_string();
            let problem = format!("tensor {other} is no factor of a module that {CONFIG} targets");
            return Err(Error::unsupported(location, problem, "the adapter must be of this model's layers"));
        }
        Ok(())
    }
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

/// Keys that [`Keys`] and [`PeftAdapter::open`] read.
const READ: [&str; 9] = [
    "alpha_pattern",
    "bias",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
];

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

    /// The joined modules whose adapters have a block for each part, by their rank and alpha. No other module may have a rank or
    /// an alpha of its own.
    fn with_blocks(&self, spec: &LoraSpec) -> Result<Vec<JoinedModule>> {
        let given = |pattern: &str, name: &str| self.map.get(pattern)?.get(name)?.as_f64();
        let has_blocks = |module: &JoinedModule| {
            let (rank, alpha) = module.rank_and_alpha(spec);
            let is_near = |given: f64| (given - alpha).abs() <= 1e-9 * alpha.abs();
            given("rank_pattern", module.name) == Some(rank as f64)
                && given("alpha_pattern", module.name).is_some_and(is_near)
        };
        let with_blocks: Vec<_> = JoinedModule::ALL.into_iter().filter(has_blocks).collect();
        for key in ["rank_pattern", "alpha_pattern"] {
            let Some(value) = self.map.get(key).filter(|value| !is_off(value)) else { continue };
            let is_known = |name: &String| with_blocks.iter().any(|module| module.name == name);
            if !value.as_object().is_some_and(|pattern| pattern.keys().all(is_known)) {
                let hint = "only adapters with one rank and one alpha for all modules are read";
                return self.refuse(&format!("{key} {value}"), hint);
            }
        }
        Ok(with_blocks)
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
            let last = name.as_str().and_then(|name| name.rsplit('.').next()).unwrap_or_default();
            if let Some(module) = JoinedModule::named(last) {
                targets.extend(module.parts);
                continue;
            }
            let Some(target) = LoraTarget::named(last) else {
                let known: Vec<&str> = LoraTarget::ALL.iter().map(|target| target.name()).collect();
                let hint = format!("modules of a layer are {}", known.join(", "));
                return self.refuse(&format!("target_modules has {name}"), &hint);
            };
            targets.push(target);
        }
        Ok(targets)
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
/// the base model, for other programs. Adapters of the parts of a joined matrix become one adapter of the matrix.
///
/// # Panics
/// If the policy has no adapters.
pub fn write(out: &Path, policy: &Policy, base: &str) -> Result<WrittenAdapter> {
    let spec = policy.lora().expect("only a policy with adapters is written as an adapter");
    let places = Places::new(policy.config(), &JoinedModule::ALL);
    let adapters: Vec<_> =
        policy.trained_tensors().map(|(spec, tensor)| (places.find(spec), spec, tensor)).collect();
    let mut specs: Vec<TensorSpec> = Vec::new();
    for (place, ..) in &adapters {
        if !specs.contains(&place.whole) {
            specs.push(place.whole.clone());
        }
    }
    write_folder(out, Existing::Refuse, |folder| {
        write_json(&folder.join(CONFIG), &config_of(spec, &specs, base))?;
        write_shard(&folder.join(WEIGHTS), &specs, Precision::F32, &str::to_owned, &mut |whole, numbers| {
            numbers.fill(0.0);
            for (place, spec, tensor) in adapters.iter().filter(|(place, ..)| place.whole == *whole) {
                let mut factor = vec![0.0; spec.n_elements()];
                tensor.read(&mut factor);
                place.copy_to(numbers, &spec.shape, &factor);
            }
            Ok(())
        })
    })?;
    let n_parameters = specs.iter().map(|spec| spec.n_elements() as u64).sum();
    Ok(WrittenAdapter { n_tensors: specs.len(), n_parameters, bytes: 4 * n_parameters })
}

/// `adapter_config.json`, with the targets that the model has factors of.
fn config_of(spec: &LoraSpec, factors: &[TensorSpec], base: &str) -> Map<String, Value> {
    let joined = JoinedModule::ALL.map(|module| module.name).into_iter();
    let is_found = |name: &&str| factors.iter().any(|factor| factor.name.contains(&format!(".{name}.")));
    let targets: Vec<&str> =
        spec.targets.iter().map(|target| target.name()).chain(joined).filter(is_found).collect();
    let with_blocks = || targets.iter().filter_map(|name| JoinedModule::named(name));
    let ranks: Map<String, Value> =
        with_blocks().map(|module| (module.name.into(), json!(module.rank_and_alpha(spec).0))).collect();
    let alphas: Map<String, Value> =
        with_blocks().map(|module| (module.name.into(), number(module.rank_and_alpha(spec).1))).collect();
    let keys = json!({
        "alpha_pattern": alphas,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": number(spec.alpha),
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": spec.rank,
        "rank_pattern": ranks,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": spec.scale == LoraScale::RankStabilised,
    });
    let Value::Object(keys) = keys else { unreachable!("json! was given an object") };
    keys
}

/// As a JSON integer where it is one.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e15 { json!(value as i64) } else { json!(value) }
}
