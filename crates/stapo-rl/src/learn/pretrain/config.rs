//! The config of a supervised run. Its keys are those of a training run wherever both have a thing.

use super::file_rows::RowKind;
use super::fresh::Shape;
use super::spelling;
use super::texts::TextsSpec;
use crate::error::Result as RunResult;
use crate::plan::config::refusal::{at_least_one, positive, require};
use crate::plan::config::{
    Config, Curve, FileKind, Keeping, KeptOptimizer, LoraConfig, ModelSource, Plan, PlanError, Recompute,
    Schedule, lora,
};
use crate::tasks::TaskSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stapo_core::preference::PreferenceSpec;
use stapo_core::reward_model::RankingSpec;
use stapo_core::settings::{self, Override, RawConfig, SettingsError};
use stapo_model::DeviceName;
use stapo_model::optimizer::AdamWSettings;
use toml::Table;

/// The config of a supervised run. Every key has a default; the defaults make the built-in model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PretrainConfig {
    /// The name of the run, which is part of its folder's name.
    pub name: String,
    /// The seed of all randomness.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Passes over the file, instead of `steps`. A run that starts turns them into steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    /// The device: `cpu`, `cuda` or `cuda:N`.
    pub device: String,
    /// The model that is trained.
    pub model: Start,
    /// Adapters that are trained instead of the model's weights.
    #[serde(rename = "model.lora", skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// The texts.
    pub data: TextsSpec,
    /// Which tokens have a loss.
    pub loss_on: LossOn,
    /// What is learned from chosen and rejected responses, for `stapo prefer`; absent if texts are learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preference: Option<PreferenceSpec>,
    /// How a reward model is trained from chosen and rejected responses, for `stapo rm`; absent for other runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_model: Option<RankingSpec>,
    /// How the model is updated.
    pub update: PretrainUpdate,
    /// Held-out evaluation on the task of the texts.
    pub evaluation: PretrainEvaluation,
    /// What the run writes to its folder.
    pub record: PretrainRecord,
}

/// The model that is trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Start {
    /// Random weights of this shape, with a tokenizer of single characters.
    Fresh(Shape),
    /// The small model inside the program.
    Builtin,
    /// A Hugging Face folder or a GGUF file.
    Path {
        /// The folder or file.
        path: String,
    },
}

impl Start {
    /// The model on disk; `None` for a fresh one.
    pub fn source(&self) -> Option<ModelSource> {
        match self {
            Start::Fresh(_) => None,
            Start::Builtin => Some(ModelSource::Builtin),
            Start::Path { path } => Some(ModelSource::Path { path: path.clone() }),
        }
    }
}

/// Which tokens have a loss.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossOn {
    /// The tokens of the response; in a conversation, those of every assistant's turn.
    #[default]
    Response,
    /// All tokens.
    Everything,
}

/// How the model is updated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "struct Update")]
pub struct PretrainUpdate {
    /// Tokens of one optimizer step, at least: an optimizer step takes whole examples until this number is reached.
    pub batch_tokens: usize,
    /// Rows of one optimizer step, instead of `batch_tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_rows: Option<usize>,
    /// Tokens of one forward and backward pass.
    pub microbatch_tokens: usize,
    /// What backward computes once more instead of keeping it in memory.
    pub recompute: Recompute,
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
}

/// Held-out evaluation on the task of the texts, where the texts have a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "struct Evaluation")]
pub struct PretrainEvaluation {
    /// Steps between evaluations; 0 evaluates only after the last step.
    pub every_steps: u64,
    /// Held-out problems of one evaluation.
    pub problems: usize,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields, expecting = "struct Record")]
pub struct PretrainRecord {
    /// Steps between checkpoints.
    pub checkpoint_every_steps: u64,
    /// How many of the latest checkpoints are kept.
    pub keep_checkpoints: usize,
    /// Which of the kept checkpoints have the optimizer's state, without which a run cannot continue from them.
    pub optimizer: KeptOptimizer,
}

impl Default for PretrainConfig {
    fn default() -> Self {
        PretrainConfig {
            name: "base".to_string(),
            seed: 0,
            steps: 1500,
            epochs: None,
            device: "cpu".to_string(),
            model: Start::Fresh(Shape::default()),
            lora: None,
            data: TextsSpec::default(),
            loss_on: LossOn::Response,
            preference: None,
            reward_model: None,
            update: PretrainUpdate::default(),
            evaluation: PretrainEvaluation::default(),
            record: PretrainRecord::default(),
        }
    }
}

impl Default for PretrainUpdate {
    fn default() -> Self {
        PretrainUpdate {
            batch_tokens: 8192,
            batch_rows: None,
            microbatch_tokens: 8192,
            recompute: Recompute::Nothing,
            learning_rate: 2e-3,
            schedule: Schedule {
                warmup_steps: Some(50),
                total_steps: Some(1500),
                final_factor: Some(0.05),
                ..Schedule::without_warmup(Curve::Cosine)
            },
            weight_decay: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            max_gradient_norm: 1.0,
        }
    }
}

impl Default for PretrainEvaluation {
    fn default() -> Self {
        PretrainEvaluation { every_steps: 250, problems: 512 }
    }
}

impl PretrainRecord {
    pub fn keeping(&self) -> Keeping {
        Keeping { checkpoints: self.keep_checkpoints, optimizer: self.optimizer }
    }
}

impl Default for PretrainRecord {
    fn default() -> Self {
        PretrainRecord { checkpoint_every_steps: 250, keep_checkpoints: 2, optimizer: KeptOptimizer::All }
    }
}

impl PretrainConfig {
    /// The defaults of fine-tuning: values that suit a pretrained model of some billion parameters, one pass over the
    /// file.
    pub fn fine_tuning() -> Self {
        PretrainConfig {
            name: "sft".to_string(),
            epochs: Some(1),
            model: Start::Builtin,
            update: PretrainUpdate {
                batch_tokens: 32768,
                learning_rate: 1e-5,
                schedule: Schedule::constant(10),
                weight_decay: 0.0,
                ..PretrainUpdate::default()
            },
            ..PretrainConfig::default()
        }
    }

    /// The defaults of learning from preferences.
    pub fn preferring() -> Self {
        let tuning = Self::fine_tuning();
        PretrainConfig {
            name: "prefer".to_string(),
            preference: Some(PreferenceSpec::default()),
            update: PretrainUpdate { batch_rows: Some(64), learning_rate: 1e-6, ..tuning.update },
            ..tuning
        }
    }

    /// The defaults of training a reward model.
    pub fn ranking() -> Self {
        let tuning = Self::fine_tuning();
        PretrainConfig {
            name: "rm".to_string(),
            reward_model: Some(RankingSpec::default()),
            update: PretrainUpdate { batch_rows: Some(64), ..tuning.update },
            ..tuning
        }
    }

    /// Reads a config over the defaults of pretraining and applies `key=value` overrides.
    pub fn from_toml<'a>(
        text: &str,
        overrides: impl IntoIterator<Item = &'a str>,
    ) -> Result<Self, SettingsError> {
        Self::with_defaults(&Self::default(), &RawConfig::new(text, overrides)?)
    }

    /// Reads a config whose absent keys have the given defaults. Keys may have the names of earlier programs.
    pub fn with_defaults(defaults: &Self, raw: &RawConfig) -> Result<Self, SettingsError> {
        FileKind::Supervised.check("config", &raw.table)?;
        let mut given = Table::new();
        spelling::set_all(&mut given, raw.table.clone())?;
        lora::lift(&mut given);
        let overrides = raw.overrides.iter().cloned().map(spelling::modern_override).map(lora::renamed);
        let overrides: Vec<Override> = overrides.collect();
        let mut below = settings::to_table(defaults);
        // A number of steps replaces the default number of epochs.
        let names = |key: &str| given.contains_key(key) || overrides.iter().any(|set| set.keys == [key]);
        if names("steps") && !names("epochs") {
            below.remove("epochs");
        }
        if names("steps") && names("epochs") {
            return Err(SettingsError::Unreadable {
                path: "config.epochs".into(),
                problem: "given together with steps".into(),
                suggestion: "steps and epochs both say how long to train; give one".into(),
            });
        }
        let mut table = settings::overlay(below, given);
        settings::set_all(&mut table, overrides)?;
        lora::lift(&mut table);
        settings::read("config", table)
    }

    pub fn to_toml(&self) -> String {
        let mut table = settings::to_table(self);
        lora::lower(&mut table);
        table.to_string()
    }

    /// Checks what can be checked without files.
    pub fn check(&self) -> Result<(), PlanError> {
        let update = &self.update;
        let is_device = self.device.parse::<DeviceName>().is_ok();
        require(is_device, "device", &self.device, "expected cpu, cuda, or cuda:N", "")?;
        for (key, value) in [
            ("update.learning_rate", update.learning_rate),
            ("update.epsilon", update.epsilon),
            ("update.max_gradient_norm", update.max_gradient_norm),
        ] {
            positive(key, value)?;
        }
        for (key, value) in [
            ("steps", self.steps),
            ("epochs", self.epochs.unwrap_or(1)),
            ("update.batch_tokens", update.batch_tokens as u64),
            ("update.batch_rows", update.batch_rows.unwrap_or(1) as u64),
            ("update.microbatch_tokens", update.microbatch_tokens as u64),
            ("record.checkpoint_every_steps", self.record.checkpoint_every_steps),
            ("record.keep_checkpoints", self.record.keep_checkpoints as u64),
        ] {
            at_least_one(key, value)?;
        }
        if let Some(lora) = &self.lora {
            lora.check(self.device())?;
            if let Start::Fresh(_) = self.model {
                let problem =
                    "given, but a fresh model has random weights that adapters would freeze".to_string();
                let remedy = "name a trained model, or leave it out";
                return Err(PlanError::Refused { key: "model.lora", problem, remedy });
            }
        }
        if let Some(preference) = &self.preference {
            preference.check()?;
        }
        self.check_compared()?;
        update.schedule.check()
    }

    /// Checks what learning from compared responses excludes.
    fn check_compared(&self) -> Result<(), PlanError> {
        let refuse = |key, problem: &str, remedy| {
            Err(PlanError::Refused { key, problem: problem.to_string(), remedy })
        };
        if self.preference.is_none() && self.reward_model.is_none() {
            return Ok(());
        }
        if self.loss_on == LossOn::Everything {
            return refuse("loss_on", "everything, but responses are compared", "loss_on = \"response\"");
        }
        let Some(ranking) = self.reward_model else { return Ok(()) };
        let key = "reward_model.center_coefficient";
        let value = ranking.center_coefficient;
        require(ranking.is_possible(), key, value, "expected at least 0", "0 leaves scores where they are")?;
        if self.preference.is_some() {
            return refuse("preference", "given together with reward_model", "leave one of the two out");
        }
        match self.model {
            Start::Fresh(_) => refuse("model", "a fresh model knows no text to rank", "name a trained model"),
            _ => Ok(()),
        }
    }

    pub fn device(&self) -> DeviceName {
        self.device.parse().unwrap_or(DeviceName::Cpu)
    }

    pub(super) fn optimizer(&self) -> AdamWSettings {
        let update = &self.update;
        AdamWSettings {
            beta1: update.beta1,
            beta2: update.beta2,
            eps: update.epsilon,
            weight_decay: update.weight_decay,
        }
    }

    /// What the rows of a file are read as.
    pub(super) fn row_kind(&self) -> RowKind {
        match (&self.preference, &self.reward_model) {
            (Some(_), _) => RowKind::Judged,
            (None, Some(_)) => RowKind::Ranked,
            (None, None) => RowKind::Learned,
        }
    }

    /// The rows that the config's files have and the bytes of their texts, and the share that is held out, without a model that
    /// reads them; `None` for texts that are not files.
    pub fn count_rows(&self) -> RunResult<Option<(u64, u64, f64)>> {
        self.data.count_rows(self.row_kind())
    }

    /// The task on which progress is measured; `None` if the texts are not from a task, and for a reward model, which answers
    /// no problem.
    pub fn evaluation_task(&self) -> Result<Option<TaskSpec>, PlanError> {
        if self.reward_model.is_some() {
            return Ok(None);
        }
        self.data.task().map(|task| Ok(TaskSpec::read("data.task", task.clone())?)).transpose()
    }

    /// The plan of the held-out evaluation: that of a training run on the same task.
    pub(super) fn evaluation_plan(&self) -> Result<Plan, PlanError> {
        let Some(task) = self.evaluation_task()? else { return Plan::resolve(Config::default()) };
        let mut config = Config { task, seed: self.seed, ..Config::default() };
        config.evaluation.problems = self.evaluation.problems;
        Plan::resolve(config)
    }
}
