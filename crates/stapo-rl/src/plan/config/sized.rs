//! Defaults that follow the size of a model. The defaults of a config are those of the built-in run, whose model has 0.8
//! million parameters; a larger model that learns from a data file needs a lower learning rate and more tokens.

use super::{Config, ModelSource, PlanError};
use stapo_core::settings::{Override, RawConfig};
use stapo_model::{DeviceName, ModelConfig};
use toml::Value;

/// Models below this size keep the defaults of the built-in run.
const SMALL: u64 = 10_000_000;

/// Values that fit a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SizedDefaults {
    pub learning_rate: f64,
    pub max_prompt_tokens: usize,
    pub max_response_tokens: usize,
}

impl SizedDefaults {
    /// For full training, 1e-6 is the rate of published runs, and smaller models need more. Adapters take ten times as much.
    pub fn for_model(model: &ModelConfig, device: DeviceName, has_adapters: bool) -> Self {
        let (full, of_adapters) = match model.n_parameters() {
            0..SMALL => (1e-4, 1e-3),
            SMALL..200_000_000 => (1e-5, 1e-4),
            _ => (1e-6, 1e-5),
        };
        let max_prompt_tokens = 1024.min(model.max_positions / 2);
        Self {
            learning_rate: if has_adapters { of_adapters } else { full },
            max_prompt_tokens,
            max_response_tokens: Self::response_limit(device).min(model.max_positions - max_prompt_tokens),
        }
    }
}

impl SizedDefaults {
    /// The longest response that is sampled in reasonable time.
    pub fn response_limit(device: DeviceName) -> usize {
        if device == DeviceName::Cpu { 256 } else { 4096 }
    }
}

impl Config {
    /// Reads a config for whose model `shape` finds the shape. Where a model by name learns from a data file, keys that are
    /// absent and depend on its size have defaults for that size.
    pub fn for_model(
        mut raw: RawConfig,
        shape: impl FnOnce(&ModelSource) -> Option<ModelConfig>,
    ) -> Result<Self, PlanError> {
        let config = Self::read(&raw)?;
        let learns_from_file =
            config.task.rows().is_some() && matches!(config.model, ModelSource::Path { .. });
        let Some(model) = learns_from_file.then(|| shape(&config.model)).flatten() else {
            return Ok(config);
        };
        let Ok(device) = config.device.parse::<DeviceName>() else { return Ok(config) };
        if model.n_parameters() < SMALL {
            return Ok(config);
        }
        let defaults = SizedDefaults::for_model(&model, device, config.lora.is_some());
        let keys = [
            ("update", "learning_rate", Value::Float(defaults.learning_rate)),
            ("rollout", "max_prompt_tokens", integer(defaults.max_prompt_tokens)),
            ("rollout", "max_response_tokens", integer(room(&raw, &config, &model, defaults))),
        ];
        let mut followed = Vec::new();
        for (table, key, value) in keys {
            if is_given(&raw, table, key) {
                continue;
            }
            let text = format!("{table}.{key}={}", shown(&value));
            followed.push(text.replace('=', " = "));
            raw.overrides.push(Override::parse(&text)?);
        }
        Ok(Self { followed, ..Self::read(&raw)? })
    }
}

/// Tokens that the prompt leaves for a response, in the model's positions and in a micro-batch.
fn room(raw: &RawConfig, config: &Config, model: &ModelConfig, defaults: SizedDefaults) -> usize {
    let is_prompt_given = is_given(raw, "rollout", "max_prompt_tokens");
    let prompt = if is_prompt_given { config.rollout.max_prompt_tokens } else { defaults.max_prompt_tokens };
    let room = model.max_positions.min(config.update.microbatch_tokens).saturating_sub(prompt);
    defaults.max_response_tokens.min(room).max(1)
}

fn is_given(raw: &RawConfig, table: &str, key: &str) -> bool {
    let names = |set: &Override| match set.keys.as_slice() {
        [only] => only == table && set.value.get(key).is_some(),
        [first, second, ..] => first == table && second == key,
        [] => false,
    };
    let in_file = raw.table.get(table).and_then(|inner| inner.get(key)).is_some();
    in_file || raw.overrides.iter().any(names)
}

fn integer(n: usize) -> Value {
    Value::Integer(n as i64)
}

fn shown(value: &Value) -> String {
    value.as_float().map_or_else(|| value.to_string(), |rate| format!("{rate:e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::Plan;

    fn read(text: &str, overrides: &[&str]) -> Config {
        let raw = RawConfig::new(text, overrides.iter().copied()).unwrap();
        let config = Config::for_model(raw, |source| ModelConfig::known(&source.to_string())).unwrap();
        Plan::resolve(config).unwrap().config
    }

    const OWN: &str = "model = \"Qwen/Qwen3-1.7B\"\n[task]\npath = \"rows.jsonl\"\n";

    #[test]
    fn a_large_model_with_a_data_file_has_defaults_of_its_size() {
        let config = read(OWN, &["device=cuda"]);
        assert_eq!((config.update.learning_rate, config.rollout.max_response_tokens), (1e-6, 4096));
        assert_eq!(config.rollout.max_prompt_tokens, 1024);
        assert_eq!(config.followed.len(), 3);
        let on_cpu = read(OWN, &["model.lora.rank=8"]);
        assert_eq!((on_cpu.update.learning_rate, on_cpu.rollout.max_response_tokens), (1e-5, 256));
        // The plan that a run writes has every key, so that it reads the same without the model.
        let plan = Plan::resolve(config).unwrap();
        let again = Plan::resolve(Config::from_toml(&plan.to_toml(), []).unwrap()).unwrap();
        assert_eq!(again.to_toml(), plan.to_toml());
    }

    #[test]
    fn sizes_of_models_and_their_positions_set_the_defaults() {
        let rates = |name: &str| {
            let model = ModelConfig::known(name).unwrap();
            [false, true].map(|has_adapters| {
                SizedDefaults::for_model(&model, DeviceName::Cpu, has_adapters).learning_rate
            })
        };
        assert_eq!(rates("qwen3-0.6b"), [1e-6, 1e-5]);
        // One layer of Qwen3-0.6B has 15.7 million parameters.
        let known = ModelConfig::known("qwen3-0.6b").unwrap();
        let cut = |n_layers: usize| {
            let layers = vec![known.layers[0].clone(); n_layers];
            ModelConfig { layers, vocabulary: 1000, ..known.clone() }
        };
        let rate = |n_layers: usize, has_adapters: bool| {
            SizedDefaults::for_model(&cut(n_layers), DeviceName::Cpu, has_adapters).learning_rate
        };
        assert_eq!([0, 1, 12, 13].map(|n| rate(n, false)), [1e-4, 1e-5, 1e-5, 1e-6]);
        assert_eq!([0, 1, 13].map(|n| rate(n, true)), [1e-3, 1e-4, 1e-5]);
        for (n_layers, n_followed) in [(0, 0), (1, 3)] {
            let raw = RawConfig::new(OWN, []).unwrap();
            let config = Config::for_model(raw, |_| Some(cut(n_layers))).unwrap();
            assert_eq!(config.followed.len(), n_followed, "{n_layers} layers");
        }
        let short = ModelConfig { max_positions: 1000, ..ModelConfig::known("qwen3-0.6b").unwrap() };
        let sized = SizedDefaults::for_model(&short, "cuda".parse().unwrap(), false);
        assert_eq!((sized.max_prompt_tokens, sized.max_response_tokens), (500, 500));
    }

    #[test]
    fn given_keys_stay_and_leave_room() {
        let set =
            ["update.learning_rate=3e-6", "rollout={max_prompt_tokens=64}", "update.microbatch_tokens=1024"];
        let config = read(OWN, &[&set[..], &["device=cuda"]].concat());
        assert_eq!((config.update.learning_rate, config.rollout.max_prompt_tokens), (3e-6, 64));
        assert_eq!(config.rollout.max_response_tokens, 960);
        assert_eq!(config.followed, ["rollout.max_response_tokens = 960"]);
    }

    #[test]
    fn the_built_in_run_and_its_task_keep_their_defaults() {
        for (text, model) in [("", "builtin"), ("model = \"Qwen/Qwen3-1.7B\"", "by name")] {
            let config = read(text, &[]);
            assert_eq!(
                (config.update.learning_rate, config.rollout.max_response_tokens),
                (1e-4, 96),
                "{model}"
            );
        }
    }
}
