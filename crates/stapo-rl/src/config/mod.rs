//! A run as it is written down: TOML -> [`Config`] (what was written) -> [`Plan`] (what it means, checked, immutable).

mod plan;

pub use plan::{Plan, PlanError, Schedule};

use serde::{Deserialize, Serialize};
use stapo_core::ObjectiveSpec;
use stapo_core::rollout::OverlongShaping;
use stapo_core::settings::{self, SettingsError};
use toml::{Table, Value};

/// A run as written. Everything has a default; the defaults are the built-in run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Names the run folder.
    pub name: String,
    /// Keys all randomness: problems, samples, random masks.
    pub seed: u64,
    pub steps: u64,
    /// `cpu`, `cuda` or `cuda:N`.
    pub device: String,
    pub model: Model,
    /// Frozen, for objectives with a KL penalty; the model as it was at the start where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<Model>,
    /// See `stapo_rl::task::TaskSpec`.
    pub task: Table,
    /// See `stapo_core::ObjectiveSpec`; `preset` names where it starts.
    pub objective: Table,
    pub rollout: Rollout,
    pub reward: Reward,
    pub update: Update,
    pub evaluation: Evaluation,
    pub record: Record,
    pub canaries: Canaries,
}

/// Where the policy comes from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Model {
    /// The small model inside the program.
    #[default]
    Builtin,
    /// A Hugging Face folder or a GGUF file.
    Path { path: String },
}

/// How responses are sampled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rollout {
    pub problems_per_step: usize,
    /// Responses per problem.
    pub group_size: usize,
    pub temperature: f64,
    pub max_prompt_tokens: usize,
    pub max_response_tokens: usize,
    /// For keys and values, MiB.
    pub kv_mib: usize,
    /// Render prompts with the model's chat template.
    pub chat: bool,
    /// What becomes of responses that the length limit cut.
    pub truncated: Truncated,
    /// Redraw groups whose rewards are all equal, this many times at the most.
    pub max_redraws: usize,
    /// Reward shaping for long responses; none where absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overlong: Option<OverlongShaping>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncated {
    /// They are responses like others, as in JustRL.
    #[default]
    Keep,
    /// They count for their group's rewards but take no part in the update.
    Drop,
}

/// Rewards by verdict.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Reward {
    pub right: f64,
    /// For every other verdict.
    pub wrong: f64,
}

/// How the policy is updated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Update {
    /// Problems in one optimizer step; a rollout batch gives several steps where it has more.
    pub problems_per_minibatch: usize,
    /// Prompt and response tokens in one forward and backward pass.
    pub microbatch_tokens: usize,
    pub recompute: Recompute,
    pub states: States,
    pub learning_rate: f64,
    pub schedule: Schedule,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub epsilon: f64,
    /// Longest gradient (global norm).
    pub max_gradient_norm: f64,
}

/// What backward computes once more instead of keeping it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    #[default]
    Nothing,
    /// What attention and feed-forward take in: norms, rope, swiglu. No product is computed twice.
    Inputs,
    /// All of a layer but its input.
    Layers,
}

/// What the optimizer keeps of each weight.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum States {
    /// Two moments in f32, and on a GPU an f32 master of the bf16 weight.
    #[default]
    #[serde(rename = "f32")]
    F32,
    /// On a GPU only: two moments in 8 bits; the bf16 weight is rounded at random.
    #[serde(rename = "8bit")]
    EightBit,
}

/// Held-out evaluation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Evaluation {
    /// 0: only before the first and after the last step.
    pub every_steps: u64,
    pub problems: usize,
    pub samples: usize,
    /// Ends the run early once reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_accuracy: Option<f64>,
}

/// What is kept of the run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Record {
    pub checkpoint_every_steps: u64,
    pub keep_checkpoints: usize,
    /// Responses with full token records in such a step, beside those with a silenced token.
    pub responses: usize,
    pub responses_every_steps: u64,
    /// Likeliest tokens kept beside each recorded one.
    pub alternatives: usize,
    /// Hash of weights and optimizer state, for `stapo verify-run`; 0: never.
    pub state_hash_every_steps: u64,
}

/// Checks that stop or warn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Canaries {
    pub enabled: bool,
    /// Share of responses the verifier could not judge (unparsable, over budget) that stops the run.
    pub max_unjudged_share: f64,
    /// Mean entropy, nats: below warns of collapse, above of explosion relative to the first step.
    pub entropy_collapse_factor: f64,
    pub entropy_explosion_factor: f64,
}

impl Canaries {
    /// Whether a step's mean entropy has collapsed, given that of the run's first step.
    pub fn is_collapse(&self, first_entropy: f64, entropy: f64) -> bool {
        entropy < self.entropy_collapse_factor * first_entropy
    }
}

impl Default for Config {
    fn default() -> Self {
        let kind = |kind: &str| Table::from_iter([("kind".to_string(), Value::String(kind.to_string()))]);
        Config {
            name: "stapo".to_string(),
            seed: 0,
            steps: 80,
            device: "cpu".to_string(),
            model: Model::Builtin,
            reference: None,
            task: kind("arithmetic"),
            objective: Table::from_iter([("preset".to_string(), Value::String("stapo".to_string()))]),
            rollout: Rollout::default(),
            reward: Reward::default(),
            update: Update::default(),
            evaluation: Evaluation::default(),
            record: Record::default(),
            canaries: Canaries::default(),
        }
    }
}

impl Default for Rollout {
    fn default() -> Self {
        Rollout {
            problems_per_step: 32,
            group_size: 8,
            temperature: 1.0,
            max_prompt_tokens: 64,
            max_response_tokens: 96,
            kv_mib: 256,
            chat: false,
            truncated: Truncated::Keep,
            max_redraws: 0,
            overlong: None,
        }
    }
}

impl Default for Reward {
    fn default() -> Self {
        Reward { right: 1.0, wrong: -1.0 }
    }
}

impl Default for Update {
    fn default() -> Self {
        Update {
            problems_per_minibatch: 16,
            microbatch_tokens: 8192,
            recompute: Recompute::Nothing,
            states: States::F32,
            learning_rate: 1e-4,
            schedule: Schedule::Constant { warmup_steps: 5 },
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            max_gradient_norm: 1.0,
        }
    }
}

impl Default for Evaluation {
    fn default() -> Self {
        Evaluation { every_steps: 10, problems: 256, samples: 1, target_accuracy: None }
    }
}

impl Default for Record {
    fn default() -> Self {
        Record {
            checkpoint_every_steps: 20,
            keep_checkpoints: 2,
            responses: 32,
            responses_every_steps: 10,
            alternatives: 4,
            state_hash_every_steps: 1,
        }
    }
}

impl Default for Canaries {
    fn default() -> Self {
        Canaries {
            enabled: true,
            max_unjudged_share: 0.5,
            entropy_collapse_factor: 0.1,
            entropy_explosion_factor: 5.0,
        }
    }
}

impl Config {
    /// Reads a config and applies `key=value` overrides. Absent keys keep their defaults; a `task` or `objective` of another kind or
    /// preset starts anew.
    pub fn from_toml<'a>(
        text: &str,
        overrides: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, SettingsError> {
        let mut table = settings::overlay(settings::to_table(&Config::default()), settings::parse(text)?);
        for text in overrides {
            spell_out_objective(&mut table, text);
            settings::set(&mut table, text)?;
        }
        settings::read("config", table)
    }

    pub fn to_toml(&self) -> String {
        settings::to_table(self).to_string()
    }
}

/// Writes a preset out where an override reaches into it, as in `objective.masks.0.tau_p=0.001`. A preset that cannot be
/// read is left as it is: resolving the plan says what is wrong with it.
fn spell_out_objective(table: &mut Table, text: &str) {
    let Some(Value::Table(objective)) = table.get_mut("objective") else { return };
    let key = text.strip_prefix("objective.").and_then(|rest| rest.split(['.', '=']).next());
    let is_inside = key.is_some_and(|key| key != "preset" && !objective.contains_key(key));
    if let Some(spec) = is_inside.then(|| ObjectiveSpec::from_table(objective.clone()).ok()).flatten() {
        *objective = settings::to_table(&spec);
    }
}

#[cfg(test)]
mod tests;
