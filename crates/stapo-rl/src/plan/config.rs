//! The config of a run: [`RawConfig`] (as given) -> [`Config`] (merged with defaults and presets, typed) -> [`Plan`]
//! (checked, immutable).

mod auto;
mod canaries;
mod episode;
mod kind;
pub(crate) mod lora;
mod merged;
mod plan;
pub(crate) mod refusal;
mod reuse;
mod rewards;
mod schedule;
mod schema;
mod sized;
mod sources;
mod style;
mod truncation;
mod update;

pub use auto::{KvMemory, RecomputeChoice, Speculate};
pub use canaries::CanaryConfig;
pub use episode::{AnswerSource, Credit, EpisodeConfig};
pub use kind::FileKind;
pub use lora::{BaseStorage, LoraConfig, Targets};
pub use plan::Plan;
pub use refusal::PlanError;
pub use reuse::{Gate, Reuse};
pub use rewards::{Reward, RewardSpec};
pub use schedule::{Curve, Schedule};
pub use schema::schema;
pub use sized::SizedDefaults;
pub use sources::{Behavior, ModelSource, RolloutSourceSpec, TeacherSource};
pub use stapo_model::decoder::Recompute;
pub use style::PromptStyle;
pub(crate) use style::template_variables;
pub use update::{GradientSum, States};

use crate::tasks::{EnvironmentSpec, TaskSpec, bare_name};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::ObjectiveSpec;
use stapo_core::rollout::OverlongShaping;
use stapo_core::settings::{self, RawConfig};
use std::path::PathBuf;
use toml::{Table, Value};

/// The schema of a table whose keys are free.
pub(crate) type FreeTable = serde_json::Map<String, serde_json::Value>;

/// A config. Every key has a default; the defaults are the built-in run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The name of the run, which is part of its folder's name.
    pub name: String,
    /// The seed of all randomness: problems, samples, random masks.
    pub seed: u64,
    /// Training steps. Each samples one rollout batch and learns from it.
    pub steps: u64,
    /// The device: `cpu`, `cuda` or `cuda:N`.
    pub device: String,
    /// The model that is trained.
    pub model: ModelSource,
    /// Adapters that are trained instead of the model's weights.
    #[serde(rename = "model.lora", skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// The frozen reference model of a KL penalty. By default the model at the start of the run; in a run with
    /// adapters, the model without them, which needs no second copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<ModelSource>,
    /// What a distillation learns from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherSource>,
    /// The source of problems and the verifier of answers.
    pub task: TaskSpec,
    /// What answers the policy between its turns. Without an environment a response is one turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<EnvironmentSpec>,
    /// The limits of episodes and the credit of their rewards, for a run with an environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub episode: Option<EpisodeConfig>,
    /// The name of the preset that the other keys of `objective` override; `objective` has its values.
    #[serde(skip)]
    pub preset: Option<String>,
    /// Keys that were not given, so that their values follow the size of the model.
    #[serde(skip)]
    pub followed: Vec<String>,
    /// What the policy learns from a rollout batch: one algorithm, as axes. `preset` names the preset that the other keys
    /// override.
    pub objective: ObjectiveSpec,
    /// How responses are sampled.
    pub rollout: RolloutConfig,
    /// What a verdict is worth.
    pub reward: RewardConfig,
    /// Several rewards by name, instead of `reward` and `task.verifier`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rewards: Vec<RewardSpec>,
    /// How the policy is updated.
    pub update: UpdateConfig,
    /// Evaluations during training.
    pub evaluation: EvaluationConfig,
    /// What the run writes to its folder.
    pub record: RecordConfig,
    /// Checks that stop a run or warn.
    pub canaries: CanaryConfig,
}

/// How responses are sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RolloutConfig {
    /// Problems in one step.
    pub problems_per_step: usize,
    /// Responses per problem.
    pub group_size: usize,
    /// The sampling temperature; 1 samples from the model as it is.
    pub temperature: f64,
    /// Samples from this many likeliest tokens, at most 128, and learns from probabilities among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// Of these, the fewest likeliest tokens that hold this share of their probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// Of these, tokens with at least this share of the likeliest token's probability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// The longest prompt, in tokens.
    pub max_prompt_tokens: usize,
    /// What happens to problems whose prompt is longer.
    pub long_prompts: LongPrompts,
    /// The longest response, in tokens. A longer one is cut there.
    pub max_response_tokens: usize,
    /// Memory for keys and values, in MiB, or `auto`.
    pub kv_mib: KvMemory,
    /// Renders prompts with the model's chat template.
    pub chat: bool,
    /// Further variables of the chat template, such as `enable_thinking`. `today = "2026-11-18"` is the date of templates that
    /// ask for one.
    #[schemars(with = "FreeTable")]
    pub chat_arguments: Table,
    /// Texts that end a response, in addition to the model's stop tokens.
    pub stop: Vec<String>,
    /// How the update treats responses that reached the length limit.
    pub truncated: Truncated,
    /// How often groups with equal rewards are replaced by groups of other problems, at most.
    pub max_redraws: usize,
    /// Whether tokens are drafted and verified several at a time. Responses do not depend on it.
    pub speculate: Speculate,
    /// A smaller model with the same vocabulary that drafts if no text does; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draft: Option<String>,
    /// Reward shaping for long responses; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlong: Option<OverlongShaping>,
    /// Forces lengths of responses, for benchmarks. By default the policy decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Lengths>,
    /// Where the responses of training come from; by default the policy samples them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<RolloutSourceSpec>,
}

/// A log-normal distribution of response lengths, cut at `max_response_tokens`. Stop tokens have no effect.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// Tokens, before the cut.
    pub mean: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
}

/// How problems with a prompt longer than `max_prompt_tokens` are treated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LongPrompts {
    /// The run is refused before its first step, and the error names their number and the longest.
    #[default]
    Refuse,
    /// Such problems are left out and counted.
    Drop,
}

/// How the update treats responses that reached the length limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Truncated {
    /// Such responses are treated like all others, as in JustRL.
    #[default]
    Keep,
    /// Such responses count for the rewards of their group but are left out of the update.
    Drop,
}

/// Rewards by verdict.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RewardConfig {
    /// The reward of a right response.
    pub right: f64,
    /// The reward of every other verdict.
    pub wrong: f64,
}

/// How the policy is updated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct UpdateConfig {
    /// Problems in one optimizer step. A rollout batch with more problems gives several optimizer steps.
    pub problems_per_minibatch: usize,
    /// Prompt and response tokens in one forward and backward pass.
    pub microbatch_tokens: usize,
    /// How gradients are summed; by default `tokens` on the CPU and `microbatches` on a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sum: Option<GradientSum>,
    /// Whether responses share the rows of their prompt, which is then computed once for each micro-batch; by default on a GPU only. Log-probs
    /// keep their bits, gradients differ by rounding. Not with `sum = "tokens"`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_prompts: Option<bool>,
    /// What backward computes once more instead of keeping it in memory. No choice changes a bit of any result.
    pub recompute: RecomputeChoice,
    /// The optimizer's state for each weight.
    pub states: States,
    /// The learning rate of AdamW, before the factor of the schedule.
    pub learning_rate: f64,
    /// The factor on the learning rate over the optimizer steps.
    pub schedule: Schedule,
    /// The decoupled weight decay of AdamW.
    pub weight_decay: f64,
    /// AdamW's decay of the first moment.
    pub beta1: f64,
    /// AdamW's decay of the second moment.
    pub beta2: f64,
    /// AdamW's addition to the denominator.
    pub epsilon: f64,
    /// Gradients with a larger global norm are clipped to this norm.
    pub max_gradient_norm: f64,
    /// How often a rollout batch is used; once by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reuse: Option<Reuse>,
}

/// Evaluations during training: held-out problems of the task, and benchmarks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct EvaluationConfig {
    /// Steps between evaluations; 0 evaluates only before the first and after the last step.
    pub every_steps: u64,
    /// Whether to evaluate before the first step. Runs that start from the same model need this once.
    pub at_start: bool,
    /// Held-out problems of one evaluation.
    pub problems: usize,
    /// Samples per held-out problem.
    pub samples: usize,
    /// A held-out accuracy that ends the run early.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_accuracy: Option<f64>,
    /// Benchmarks that are evaluated whenever held-out problems are: names and files as `stapo eval` takes them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub benchmarks: Vec<String>,
    /// Where the files of benchmarks are, as NAME.jsonl or NAME.parquet.
    pub benchmark_data: PathBuf,
    /// Only the first so many questions of each benchmark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub benchmark_limit: Option<usize>,
    /// Samples per question; those of `stapo eval` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub benchmark_samples: Option<usize>,
    /// The prompt as a Jinja template over `problem`; that of `stapo eval` by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub benchmark_template: Option<String>,
    /// The evaluation by which the best checkpoint is kept: `held_out`, the name of a benchmark, or `none`.
    pub best: String,
    /// Evaluations in a row without a better one than the best, after which the run ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patience: Option<u64>,
    /// Steps in a row in which every group has equal rewards, after which the run ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle_patience: Option<u64>,
}

/// The name of the evaluation on held-out problems in `evaluation.best`.
pub const HELD_OUT: &str = "held_out";

impl EvaluationConfig {
    /// The names under which records have the benchmarks: a file goes by its name without its endings.
    pub fn benchmark_names(&self) -> impl Iterator<Item = String> {
        self.benchmarks.iter().map(|name| bare_name(name))
    }
}

/// Which checkpoints have the state of the optimizer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeptOptimizer {
    #[default]
    All,
    /// The newest one. Earlier ones can be evaluated and exported.
    Last,
}

/// What of a run's checkpoints stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keeping {
    /// The newest ones, besides the best.
    pub checkpoints: usize,
    pub optimizer: KeptOptimizer,
}

/// What a run writes to its folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RecordConfig {
    /// Steps between checkpoints.
    pub checkpoint_every_steps: u64,
    /// How many of the latest checkpoints are kept.
    pub keep_checkpoints: usize,
    /// Which of the kept checkpoints have the optimizer's state, without which a run cannot continue from them.
    pub optimizer: KeptOptimizer,
    /// Responses with full token records in a recorded step: as many whole groups as fit, at least one, and all responses
    /// with a silenced token in addition; 0 records none.
    pub responses: usize,
    /// Steps between steps whose responses are recorded.
    pub responses_every_steps: u64,
    /// Likeliest tokens recorded for each position.
    pub alternatives: usize,
    /// Steps between hashes of weights and optimizer state, for `stapo verify --replay`; 0 writes none.
    pub state_hash_every_steps: u64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            name: "stapo".to_string(),
            seed: 0,
            steps: 80,
            device: "cpu".to_string(),
            model: ModelSource::Builtin,
            lora: None,
            reference: None,
            teacher: None,
            task: TaskSpec::default(),
            environment: None,
            episode: None,
            preset: Some(merged::DEFAULT_PRESET.to_string()),
            followed: Vec::new(),
            objective: ObjectiveSpec::from_preset(merged::DEFAULT_PRESET).expect("the default is a preset"),
            rollout: RolloutConfig::default(),
            reward: RewardConfig::default(),
            rewards: Vec::new(),
            update: UpdateConfig::default(),
            evaluation: EvaluationConfig::default(),
            record: RecordConfig::default(),
            canaries: CanaryConfig::default(),
        }
    }
}

impl Default for RolloutConfig {
    fn default() -> Self {
        RolloutConfig {
            problems_per_step: 32,
            group_size: 8,
            temperature: 1.0,
            top_k: None,
            top_p: None,
            min_p: None,
            max_prompt_tokens: 64,
            long_prompts: LongPrompts::Refuse,
            max_response_tokens: 96,
            kv_mib: KvMemory::Auto,
            chat: false,
            chat_arguments: Table::new(),
            stop: Vec::new(),
            truncated: Truncated::Keep,
            max_redraws: 0,
            speculate: Speculate::Auto,
            draft: None,
            overlong: None,
            lengths: None,
            source: None,
        }
    }
}

impl Default for RewardConfig {
    fn default() -> Self {
        RewardConfig { right: 1.0, wrong: -1.0 }
    }
}

impl Default for UpdateConfig {
    fn default() -> Self {
        UpdateConfig {
            problems_per_minibatch: 16,
            microbatch_tokens: 8192,
            sum: None,
            share_prompts: None,
            recompute: RecomputeChoice::Auto,
            states: States::F32,
            learning_rate: 1e-4,
            schedule: Schedule::constant(5),
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            max_gradient_norm: 1.0,
            reuse: None,
        }
    }
}

impl Default for EvaluationConfig {
    fn default() -> Self {
        EvaluationConfig {
            every_steps: 10,
            at_start: true,
            problems: 256,
            samples: 1,
            target_accuracy: None,
            benchmarks: Vec::new(),
            benchmark_data: "data".into(),
            benchmark_limit: None,
            benchmark_samples: None,
            benchmark_template: None,
            best: HELD_OUT.to_string(),
            patience: None,
            idle_patience: None,
        }
    }
}

impl RecordConfig {
    pub fn keeping(&self) -> Keeping {
        Keeping { checkpoints: self.keep_checkpoints, optimizer: self.optimizer }
    }
}

impl Default for RecordConfig {
    fn default() -> Self {
        RecordConfig {
            checkpoint_every_steps: 20,
            keep_checkpoints: 2,
            optimizer: KeptOptimizer::All,
            responses: 32,
            responses_every_steps: 10,
            alternatives: 4,
            state_hash_every_steps: 1,
        }
    }
}

impl Config {
    /// Reads a config and applies `key=value` overrides.
    pub fn from_toml<'a>(
        text: &str,
        overrides: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, PlanError> {
        Self::read(&RawConfig::new(text, overrides)?)
    }

    /// Reads a config. Absent keys have their defaults; a `task` or `objective` of another kind or preset replaces the
    /// default table as a whole.
    pub fn read(raw: &RawConfig) -> Result<Self, PlanError> {
        FileKind::Training.check("config", &raw.table)?;
        let mut merged = merged::merged(raw)?;
        let mut config: Self = settings::read("config", merged.rest)?;
        config.task = TaskSpec::read("task", merged.task)?;
        config.preset = merged.preset.take();
        config.objective = ObjectiveSpec::from_table(merged.objective)?;
        Ok(config)
    }

    pub fn to_toml(&self) -> String {
        let mut table = settings::to_table(self);
        if let (Some(preset), Some(Value::Table(objective))) = (&self.preset, table.get_mut("objective")) {
            objective.insert("preset".to_string(), Value::String(preset.clone()));
        }
        lora::lower(&mut table);
        table.to_string()
    }
}

#[cfg(test)]
mod tests;
