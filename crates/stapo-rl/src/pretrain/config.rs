//! The config of a pretraining run.

use super::fresh::Shape;
use super::texts::TextsSpec;
use crate::config::{Config, Plan, PlanError, Schedule};
use crate::task::TaskSpec;
use serde::{Deserialize, Serialize};
use stapo_core::settings::{self, SettingsError};
use stapo_model::optimizer::AdamWSettings;

/// A pretraining config. Every key has a default; the defaults make the built-in model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PretrainConfig {
    pub name: String,
    pub seed: u64,
    pub steps: u64,
    pub start: Start,
    pub texts: TextsSpec,
    pub loss_on: LossOn,
    /// Tokens of one optimizer step, at least: an optimizer step takes whole examples until this number is reached.
    pub batch_tokens: usize,
    /// Tokens of one forward and backward pass.
    pub microbatch_tokens: usize,
    pub learning_rate: f64,
    pub schedule: Schedule,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub max_gradient_norm: f64,
    /// Steps between measurements of the held-out accuracy on the task of the texts; 0 measures only at the end.
    pub evaluation_every_steps: u64,
    pub evaluation_problems: usize,
    pub checkpoint_every_steps: u64,
}

/// The model that is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Start {
    /// Random weights of this shape, with a tokenizer of single characters.
    Fresh(Shape),
    /// A Hugging Face folder or a GGUF file.
    Path { path: String },
}

/// Which tokens have a loss.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// The tokens of the response.
    #[default]
    Response,
    Everything,
}

impl Default for PretrainConfig {
    fn default() -> Self {
        PretrainConfig {
            name: "base".to_string(),
            seed: 0,
            steps: 1500,
            start: Start::Fresh(Shape::default()),
            texts: TextsSpec::default(),
            loss_on: LossOn::Response,
            batch_tokens: 8192,
            microbatch_tokens: 8192,
            learning_rate: 2e-3,
            schedule: Schedule::Cosine {
                warmup_steps: Some(50),
                warmup_share: None,
                total_steps: Some(1500),
                final_factor: 0.05,
            },
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            max_gradient_norm: 1.0,
            evaluation_every_steps: 250,
            evaluation_problems: 512,
            checkpoint_every_steps: 250,
        }
    }
}

impl PretrainConfig {
    pub fn from_toml<'a>(
        text: &str,
        overrides: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, SettingsError> {
        let mut table = settings::overlay(settings::to_table(&Self::default()), settings::parse(text)?);
        settings::set_all(&mut table, overrides)?;
        settings::read("config", table)
    }

    pub fn to_toml(&self) -> String {
        settings::to_table(self).to_string()
    }

    pub(super) fn optimizer(&self) -> AdamWSettings {
        AdamWSettings { beta1: self.beta1, beta2: self.beta2, eps: 1e-8, weight_decay: self.weight_decay }
    }

    /// The task on which progress is measured; `None` where the texts are not from a task.
    pub fn evaluation_task(&self) -> Result<Option<TaskSpec>, PlanError> {
        self.texts.task().map(|task| Ok(settings::read("texts.task", task.clone())?)).transpose()
    }

    /// The plan of the held-out evaluation: that of a training run on the same task.
    pub(super) fn evaluation_plan(&self) -> Result<Plan, PlanError> {
        let Some(task) = self.texts.task() else { return Plan::resolve(Config::default()) };
        let mut config = Config { task: task.clone(), seed: self.seed, ..Config::default() };
        config.evaluation.problems = self.evaluation_problems;
        Plan::resolve(config)
    }
}
