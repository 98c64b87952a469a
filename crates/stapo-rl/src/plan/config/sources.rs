//! Where models, rollouts and a teacher's log-probs come from.

use super::lora;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::settings::Override;
use std::path::PathBuf;
use toml::{Table, Value};

/// The origin of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum ModelSource {
    /// The small model inside the program.
    #[default]
    Builtin,
    /// A model by name: a Hugging Face folder, a GGUF file, a run folder, `RUN@STEP`, or a name on the hub.
    Path {
        /// The folder, file, run or name.
        path: String,
    },
    /// Random weights of a published shape, such as `qwen3-14b`, with the tokenizer of the model inside the program: for
    /// benchmarks, without a file.
    Random {
        /// The name of a published shape.
        shape: String,
        /// The seed of the weights.
        #[serde(default)]
        seed: u64,
    },
}

impl ModelSource {
    /// The model that a command line names; `builtin` is the model inside the program.
    pub fn named(name: &str) -> Self {
        if name == BUILTIN { ModelSource::Builtin } else { ModelSource::Path { path: name.to_string() } }
    }
}

impl std::fmt::Display for ModelSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            ModelSource::Builtin => f.write_str(BUILTIN),
            ModelSource::Path { path } => f.write_str(path),
            ModelSource::Random { shape, .. } => write!(f, "random {shape}"),
        }
    }
}

/// The name of the model inside the program.
const BUILTIN: &str = "builtin";

/// The keys of a config that name a model.
const MODELS: [&str; 3] = ["model", "reference", "teacher"];

/// Writes out the `kind` of models that are named without one, `model = "NAME"` and `[model] path = "NAME"`, and moves
/// the adapters out of the model.
pub(super) fn spelled_out(mut table: Table) -> Table {
    lora::lift(&mut table);
    for key in MODELS {
        let name = match table.get(key) {
            Some(Value::String(name)) => name.clone(),
            Some(Value::Table(inner)) if inner.len() == 1 => match inner.get("path") {
                Some(Value::String(name)) => name.clone(),
                _ => continue,
            },
            _ => continue,
        };
        table.insert(key.to_string(), named_model(key, &name));
    }
    table
}

/// An override such as `model.path=NAME` as one of the whole model, which may be of another kind in the file.
pub(super) fn renamed(mut set: Override) -> Override {
    if let ([key, path], Value::String(name)) = (set.keys.as_slice(), &set.value)
        && MODELS.contains(&key.as_str())
        && path == "path"
    {
        set.value = named_model(key, name);
        set.keys.truncate(1);
    }
    set
}

/// The table of a model that is named without its kind.
fn named_model(key: &str, name: &str) -> Value {
    let kind = |kind: &str| ("kind".to_string(), Value::String(kind.to_string()));
    Value::Table(match name {
        BUILTIN => Table::from_iter([kind(BUILTIN)]),
        "solution" if key == "teacher" => Table::from_iter([kind("solution")]),
        _ => Table::from_iter([kind("path"), ("path".to_string(), Value::String(name.to_string()))]),
    })
}

/// Rollouts that come from elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RolloutSourceSpec {
    /// One response per line: `{"id", "prompt_tokens", "tokens", "logp", "reward"}`, the reward optional. The lines of
    /// one id form groups of `rollout.group_size` in the order of the file.
    Jsonl {
        /// The file.
        path: PathBuf,
        /// Whose log-probs the ratios of the first update divide by.
        #[serde(default)]
        behavior: Behavior,
    },
}

/// Whose log-probs the ratios of the first update divide by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Behavior {
    /// The policy at the start of the step, which scores the rollouts; the file's log-probs feed `objective.off_policy`.
    #[default]
    Policy,
    /// The sampler: the file's log-probs. The clip of the surrogate is then the only correction.
    Sampler,
}

/// What a distillation learns from: a policy that scores the student's own responses.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TeacherSource {
    /// The policy itself with the reference solution in its prompt (DASD).
    Solution {
        /// A Jinja template over `prompt`, `solution`, `reference` and `id`; that of the task by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        template: Option<String>,
    },
    /// The small model inside the program.
    Builtin,
    /// A model by name, with the vocabulary of the trained model.
    Path {
        /// The folder, file, run or name.
        path: String,
    },
    /// Random weights of a published shape, for benchmarks.
    Random {
        /// The name of a published shape.
        shape: String,
        /// The seed of the weights.
        #[serde(default)]
        seed: u64,
    },
}

impl From<ModelSource> for TeacherSource {
    fn from(model: ModelSource) -> Self {
        match model {
            ModelSource::Builtin => TeacherSource::Builtin,
            ModelSource::Path { path } => TeacherSource::Path { path },
            ModelSource::Random { shape, seed } => TeacherSource::Random { shape, seed },
        }
    }
}

impl TeacherSource {
    /// The frozen model; `None` if the teacher is the policy itself.
    pub fn model(&self) -> Option<ModelSource> {
        match self {
            TeacherSource::Solution { .. } => None,
            TeacherSource::Builtin => Some(ModelSource::Builtin),
            TeacherSource::Path { path } => Some(ModelSource::Path { path: path.clone() }),
            TeacherSource::Random { shape, seed } => {
                Some(ModelSource::Random { shape: shape.clone(), seed: *seed })
            }
        }
    }
}
