//! What a supervised run takes: `stapo sft`, `prefer`, `rm` and `pretrain`.

use super::cost::{Costs, Tokens};
use super::machine::Machine;
use super::simulated::Phase;
use crate::error::Result;
use crate::learn::pretrain::PretrainConfig;
use crate::plan::config::{Config, LoraConfig, Plan, RecomputeChoice, States};
use crate::plan::memory::{self, MemoryPart};
use stapo_model::ModelConfig;
use stapo_model::decoder::Recompute;

/// The rows of a data set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowCounts {
    /// Rows that are learned from.
    pub n_learned: u64,
    pub n_held_out: u64,
    /// Tokens of a row on average, of a pair both responses.
    pub tokens_mean: f64,
}

/// A supervised run to be simulated.
#[derive(Debug, Clone, Copy)]
pub struct SupervisedShape<'a> {
    pub config: &'a PretrainConfig,
    pub model: &'a ModelConfig,
    pub machine: &'a Machine,
    pub rows: RowCounts,
}

/// What a supervised run will take.
#[derive(Debug, Clone, PartialEq)]
pub struct SupervisedPrediction {
    pub n_steps: u64,
    /// Tokens of a step on average.
    pub step_tokens: f64,
    /// Seconds before the first step: the log-probs of a stored reference, and what a first step takes beyond a later one.
    pub before: f64,
    /// Seconds of a step by phase, on average over the run.
    pub phases: [Phase; 4],
}

impl SupervisedPrediction {
    pub fn step_seconds(&self) -> f64 {
        self.phases.iter().map(|phase| phase.seconds).sum()
    }

    pub fn seconds(&self) -> f64 {
        self.before + self.n_steps as f64 * self.step_seconds()
    }
}

impl SupervisedShape<'_> {
    fn costs(&self) -> Costs<'_> {
        let n_adapter = self.config.lora.as_ref().map(|lora| lora.spec().n_parameters(self.model));
        Costs { model: self.model, n_adapter, quantised: None, machine: self.machine }
    }

    /// The weights that the run trains.
    pub fn n_trained(&self) -> u64 {
        self.costs().n_trained()
    }

    /// Whether the reference's log-probs are stored before the first step, and not computed without adapters in each.
    fn stores_reference(&self) -> bool {
        self.config.lora.as_ref().is_none_or(|lora: &LoraConfig| lora.adapter.is_some())
    }

    /// Simulates the run.
    pub fn simulate(&self) -> SupervisedPrediction {
        let Self { config, machine, rows, .. } = *self;
        let update = &config.update;
        let step_tokens = match update.batch_rows {
            Some(n_rows) => n_rows as f64 * rows.tokens_mean,
            None => update.batch_tokens as f64 + rows.tokens_mean / 2.0,
        };
        let all_tokens = rows.n_learned as f64 * rows.tokens_mean;
        let n_steps = config.epochs.map_or(config.steps, |epochs| {
            let steps = match update.batch_rows {
                Some(n_rows) => (epochs * rows.n_learned).div_ceil(n_rows as u64),
                None => (epochs as f64 * all_tokens / step_tokens).ceil() as u64,
            };
            steps.max(1)
        });
        let costs = self.costs();
        let training = costs.training(self.tokens(step_tokens), self.n_passes(step_tokens), update.recompute);
        let reads_reference = config.preference.as_ref().is_some_and(|spec| spec.loss.reads_reference());
        let reference = |is_stored: bool, n_tokens: f64| {
            if reads_reference && is_stored == self.stores_reference() { self.scoring(n_tokens) } else { 0.0 }
        };
        let held_out = rows.n_held_out as f64 * rows.tokens_mean;
        let n_evaluations = match config.evaluation.every_steps {
            0 => 1,
            every => n_steps.div_ceil(every),
        };
        let state_bytes = 12.0 * costs.n_trained() as f64;
        let n_checkpoints = 1 + (n_steps - 1) / config.record.checkpoint_every_steps;
        let copied = state_bytes / machine.host_copy.per_second + state_bytes / machine.state_hash.per_second;
        let written = state_bytes / machine.hash.per_second.min(machine.disk.per_second);
        let of_run = |seconds: f64| seconds / n_steps as f64;
        SupervisedPrediction {
            n_steps,
            step_tokens,
            before: reference(true, all_tokens + held_out) + machine.fixed.first_step,
            phases: [
                Phase { name: "update", seconds: training + costs.optimizer_step(States::F32) },
                Phase { name: "reference", seconds: reference(false, step_tokens) },
                Phase { name: "evaluate", seconds: of_run(n_evaluations as f64 * self.scoring(held_out)) },
                Phase { name: "checkpoint", seconds: of_run(n_checkpoints as f64 * copied + written) },
            ],
        }
    }

    /// A forward pass over tokens; nothing for none.
    fn scoring(&self, n_tokens: f64) -> f64 {
        if n_tokens == 0.0 {
            0.0
        } else {
            self.costs().scoring(self.tokens(n_tokens), self.n_passes(n_tokens))
        }
    }

    fn n_passes(&self, n_tokens: f64) -> f64 {
        (n_tokens / self.config.update.microbatch_tokens as f64).ceil()
    }

    /// Every token of a language model is taken to have a loss; a reward model has one score for a sequence.
    fn tokens(&self, all: f64) -> Tokens {
        let is_ranking = self.config.reward_model.is_some();
        let n_sequences = if is_ranking || self.config.preference.is_some() { 2.0 } else { 1.0 };
        let scored = if is_ranking { 0.0 } else { all };
        Tokens { all, scored, length: self.rows.tokens_mean / n_sequences }
    }

    /// The memory of the run, by part: a step of `stapo train` over micro-batches of this size, without sampling.
    pub fn memory(&self) -> Result<Vec<MemoryPart>> {
        let Self { config, model, .. } = *self;
        let mut plan =
            Config { device: config.device.clone(), lora: config.lora.clone(), ..Config::default() };
        plan.rollout.max_prompt_tokens = 1;
        plan.rollout.max_response_tokens = config.update.microbatch_tokens.saturating_sub(1).max(1);
        plan.update.microbatch_tokens = config.update.microbatch_tokens.max(2);
        plan.update.recompute = match config.update.recompute {
            Recompute::Nothing => RecomputeChoice::Nothing,
            Recompute::Inputs => RecomputeChoice::Inputs,
            Recompute::Layers => RecomputeChoice::Layers,
        };
        let plan = Plan::resolve(plan)?;
        let planned = memory::resolve(&plan, model, &[], None);
        let parts = planned.held.into_iter().chain(planned.updating);
        // The few products of a score are the host's.
        Ok(parts.filter(|part| model.score.is_none() || part.name != "logits").collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_core::settings::RawConfig;

    fn shape<'a>(
        config: &'a PretrainConfig,
        model: &'a ModelConfig,
        machine: &'a Machine,
    ) -> SupervisedShape<'a> {
        let rows = RowCounts { n_learned: 6400, n_held_out: 640, tokens_mean: 1000.0 };
        SupervisedShape { config, model, machine, rows }
    }

    fn config(defaults: &PretrainConfig, set: &[&str]) -> PretrainConfig {
        let set = [&["device=cuda"], set].concat();
        PretrainConfig::with_defaults(defaults, &RawConfig::new("", set).unwrap()).unwrap()
    }

    #[test]
    fn references_held_out_rows_and_heads_are_counted() {
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        let machine = Machine::by_name("h200").unwrap();
        let plan = |config: &PretrainConfig| shape(config, &model, &machine).simulate();
        let seconds = |prediction: &SupervisedPrediction, name: &str| {
            prediction.phases.iter().find(|phase| phase.name == name).unwrap().seconds
        };
        let dpo = plan(&config(&PretrainConfig::preferring(), &[]));
        assert_eq!((dpo.n_steps, dpo.step_tokens), (100, 64_000.0));
        // Log-probs of 7,040 rows: a forward pass has a third of the operations of 6,400 rows of training.
        let trained = 100.0 * seconds(&dpo, "update");
        assert!(dpo.before > 0.2 * trained && dpo.before < 0.6 * trained, "{} {trained}", dpo.before);
        assert_eq!(seconds(&dpo, "reference"), 0.0);
        let simpo = plan(&config(&PretrainConfig::preferring(), &["preference.loss={kind=\"simpo\"}"]));
        assert_eq!(simpo.before, machine.fixed.first_step);
        let adapted = plan(&config(&PretrainConfig::preferring(), &["model.lora={rank=16}"]));
        assert!(adapted.before == machine.fixed.first_step && seconds(&adapted, "reference") > 0.0);
        let ranking = plan(&config(&PretrainConfig::ranking(), &[]));
        assert!(seconds(&ranking, "update") < seconds(&dpo, "update"), "a reward model has no logits");
        let sft = plan(&config(&PretrainConfig::fine_tuning(), &["epochs=2", "update.batch_tokens=100000"]));
        assert_eq!(sft.n_steps, 128);
        assert!(seconds(&sft, "evaluate") > 0.0);
    }

    #[test]
    fn memory_has_the_parts_of_a_step_and_no_keys_and_values() {
        let machine = Machine::by_name("h200").unwrap();
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        let parts = |config: &PretrainConfig, model: &ModelConfig| {
            let parts = shape(config, model, &machine).memory().unwrap();
            parts
                .into_iter()
                .map(|part| (part.name, part.bytes))
                .collect::<std::collections::BTreeMap<_, _>>()
        };
        let prefer = parts(&config(&PretrainConfig::preferring(), &[]), &model);
        let names: Vec<&str> = prefer.keys().copied().collect();
        assert_eq!(names, ["activations", "gradients", "libraries", "logits", "optimizer", "weights"]);
        assert_eq!(prefer["optimizer"], 8 * model.n_parameters());
        let small = parts(&config(&PretrainConfig::preferring(), &["update.microbatch_tokens=1024"]), &model);
        assert!(small["activations"] < prefer["activations"] / 4);
        let ranked = model.clone().with_score(None);
        assert!(!parts(&config(&PretrainConfig::ranking(), &[]), &ranked).contains_key("logits"));
    }
}
