//! The seconds of a whole run by phase, from the costs of its work.

use super::cost::{Costs, Tokens};
use super::episodes::EpisodeMeans;
use super::lengths::Lengths;
use super::links::World;
use super::machine::Machine;
use super::ranks::{RankedStep, Rounds, SharedWork};
use super::sampling::{self, SampledWork, SamplingWork};
use crate::plan::config::{Plan, States};
use crate::plan::memory::DRAFT;
use stapo_model::ModelConfig;
use stapo_model::decoder::{QuantisedBase, Recompute};
use stapo_model::generate::EngineSettings;

/// A run to be simulated.
#[derive(Debug, Clone, Copy)]
pub struct RunShape<'a> {
    pub plan: &'a Plan,
    pub model: &'a ModelConfig,
    /// The frozen models that score every rollout batch, by their roles.
    pub frozen: &'a [(&'static str, ModelConfig)],
    /// The layers of the model that stay quantised (`model.lora.base`).
    pub quantised: Option<QuantisedBase>,
    pub machine: &'a Machine,
    pub lengths: Lengths,
    /// What an environment adds; `None` for responses of one turn.
    pub episodes: Option<EpisodeMeans>,
    /// Bytes for keys and values, on each rank.
    pub kv_bytes: u64,
    pub recompute: Recompute,
    pub world: World,
}

/// A phase of a training step, named as in `metrics.jsonl`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phase {
    pub name: &'static str,
    pub seconds: f64,
}

/// Seconds of a training step by phase, on average over the run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Phases {
    /// Prompts and decoding.
    pub rollout: f64,
    /// Waiting for an environment while nothing can be sampled.
    pub environment: f64,
    /// Scoring passes of frozen models.
    pub score: f64,
    /// Texts and verdicts by rules.
    pub grade: f64,
    /// Scoring passes from which masks take their thresholds.
    pub calibrate: f64,
    /// Forward, backward and optimizer.
    pub update: f64,
    /// What ranks send each other; 0 for one rank.
    pub exchange: f64,
    /// State hashes.
    pub record: f64,
    /// Held-out evaluations.
    pub evaluate: f64,
    pub checkpoint: f64,
}

impl Phases {
    pub fn list(&self) -> [Phase; 10] {
        [
            Phase { name: "rollout", seconds: self.rollout },
            Phase { name: "environment", seconds: self.environment },
            Phase { name: "score", seconds: self.score },
            Phase { name: "grade", seconds: self.grade },
            Phase { name: "calibrate", seconds: self.calibrate },
            Phase { name: "update", seconds: self.update },
            Phase { name: "exchange", seconds: self.exchange },
            Phase { name: "record", seconds: self.record },
            Phase { name: "evaluate", seconds: self.evaluate },
            Phase { name: "checkpoint", seconds: self.checkpoint },
        ]
    }

    pub fn total(&self) -> f64 {
        self.list().iter().map(|phase| phase.seconds).sum()
    }

    /// What [`crate::train::Trainer::roll_out`] does.
    pub fn rolled_out(&self) -> f64 {
        self.rollout + self.environment + self.score + self.grade
    }

    /// What [`crate::train::Trainer::learn`] does.
    pub fn learned(&self) -> f64 {
        self.calibrate + self.update
    }
}

/// What a run will take.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    pub lengths: Lengths,
    pub episodes: Option<EpisodeMeans>,
    pub phases: Phases,
    /// Sampled and trained response tokens of a step.
    pub n_sampled: f64,
    pub n_trained: f64,
    /// The most sequences that run at once.
    pub most_running: usize,
    /// Seconds of the first step beyond a later one.
    pub first_step: f64,
    pub n_steps: u64,
    /// How a step falls on several ranks; `None` for one rank.
    pub ranks: Option<RankedStep>,
    /// Tokens of prompts in a rollout batch that responses share, so that no pass of an update computes them again.
    pub n_saved_tokens: f64,
}

impl Prediction {
    pub fn seconds(&self) -> f64 {
        self.n_steps as f64 * self.phases.total() + self.first_step
    }

    /// Response tokens sampled in a second of sampling; `None` for a run that samples none.
    pub fn sampled_per_second(&self) -> Option<f64> {
        (self.phases.rollout > 0.0).then(|| self.n_sampled / self.phases.rollout)
    }

    /// Response tokens trained in a second of calibrating and updating.
    pub fn trained_per_second(&self) -> f64 {
        self.n_trained / self.phases.learned()
    }
}

/// The share of tokens that wait for the thresholds of their mini-batch. Assumed: 3 % of responses of 290 tokens and 33 % of
/// those of 4,000 then have one; 5 % and 12 to 42 % were seen.
const WAITING_TOKENS: f64 = 1e-4;

impl RunShape<'_> {
    fn costs(&self) -> Costs<'_> {
        let lora = self.plan.config.lora.as_ref();
        let n_adapter = lora.map(|lora| lora.spec().n_parameters(self.model));
        Costs { model: self.model, n_adapter, quantised: self.quantised, machine: self.machine }
    }

    /// Simulates the run.
    pub fn simulate(&self) -> Prediction {
        let rollout = &self.plan.config.rollout;
        let fixed = &self.machine.fixed;
        let n_responses = (rollout.problems_per_step * rollout.group_size) as f64;
        let sampled = self.sample(rollout.problems_per_step, rollout.group_size);
        let uses = self.n_uses();
        let shared = self.shared();
        let rounds = shared.rounds();
        let n_updates = self.plan.updates_per_step() as f64;
        let pass = rounds.share * self.pass();
        let exchange = shared.exchange(rounds, n_updates, pass);
        let phases = Phases {
            rollout: if rollout.source.is_none() { sampled.slowest_seconds } else { 0.0 },
            environment: self.waiting(n_responses, sampled),
            score: rounds.share * self.score(),
            grade: n_responses * fixed.response / self.world.ranks(),
            calibrate: rounds.share * self.calibrate(),
            update: pass + n_updates * self.optimizer_step(),
            exchange: exchange.seconds(),
            record: self.record(),
            evaluate: self.evaluate(),
            checkpoint: self.checkpoint(),
        };
        let ranks = (self.world.n_ranks > 1).then(|| RankedStep {
            world: self.world,
            rollout_mean: sampled.mean_seconds,
            exchange,
            idle_share: self.idle_share(&phases, sampled, rounds),
        });
        Prediction {
            lengths: self.lengths,
            episodes: self.episodes,
            phases,
            n_sampled: n_responses * self.sampled_mean(),
            n_trained: uses * n_responses * self.sampled_mean(),
            most_running: sampled.most_running,
            first_step: fixed.first_step,
            n_steps: self.plan.config.steps,
            ranks,
            n_saved_tokens: self.n_saved_tokens(),
        }
    }

    fn shared(&self) -> SharedWork<'_> {
        let config = &self.plan.config;
        let n_problems = config.rollout.problems_per_step;
        let group_size = config.rollout.group_size;
        SharedWork {
            costs: self.costs(),
            lengths: self.lengths,
            world: self.world,
            n_responses: n_problems * group_size,
            n_minibatch_responses: config.update.problems_per_minibatch.min(n_problems) * group_size,
            microbatch_tokens: config.update.microbatch_tokens,
            recompute: self.recompute,
        }
    }

    /// The share of all ranks' time in which a rank waits: for longer responses, for longer micro-batches, and for rank 0,
    /// which hashes and saves alone.
    fn idle_share(&self, phases: &Phases, sampled: SampledWork, rounds: Rounds) -> f64 {
        let sampling = if phases.rollout > 0.0 { phases.rollout - sampled.mean_seconds } else { 0.0 };
        let passes = phases.score + phases.calibrate + phases.update;
        let alone = (phases.record + phases.checkpoint) * (1.0 - 1.0 / self.world.ranks());
        let waiting = sampling + passes * (1.0 - 1.0 / (self.world.ranks() * rounds.share)) + alone;
        waiting / phases.total()
    }

    /// Tokens of an episode that the policy is given between its turns.
    fn given_mean(&self) -> f64 {
        self.episodes.map_or(0.0, |episodes| episodes.given(self.lengths))
    }

    /// Tokens of a response that are sampled.
    fn sampled_mean(&self) -> f64 {
        self.lengths.response_mean - self.given_mean()
    }

    /// Given tokens are computed as prompts are, and take their share of the cache.
    fn sample(&self, n_groups: usize, group_size: usize) -> SampledWork {
        let (given, sampled) = (self.given_mean(), self.sampled_mean());
        let response_limit = self.lengths.response_limit - given as usize;
        let lengths = Lengths { response_mean: sampled, response_limit, ..self.lengths };
        let work = SamplingWork {
            n_groups,
            group_size,
            lengths,
            kv_bytes: (self.kv_bytes as f64 * sampled / self.lengths.response_mean) as u64,
            max_sequences: EngineSettings::default().max_sequences,
        };
        let mut done = sampling::simulate(&self.costs(), &work, self.world.n_ranks);
        if given > 0.0 {
            let all = (n_groups * group_size) as f64 * given / self.world.ranks();
            let length = self.lengths.attention_length();
            let seconds = self.costs().prefill(Tokens { all, scored: 0.0, length });
            done.slowest_seconds += seconds;
            done.mean_seconds += seconds;
        }
        done
    }

    /// Seconds in which all sequences wait for the environment, besides sampling.
    fn waiting(&self, n_responses: f64, sampled: SampledWork) -> f64 {
        let per_rank = n_responses / self.world.ranks();
        self.episodes.map_or(0.0, |episodes| episodes.waiting(per_rank, sampled.slowest_seconds))
    }

    /// The tokens of one rollout batch that a pass over it computes: a prompt once where responses share it.
    fn tokens(&self) -> Tokens {
        let rollout = &self.plan.config.rollout;
        let n_responses = (rollout.problems_per_step * rollout.group_size) as f64;
        let n_saved = self.n_saved_tokens();
        let all = n_responses * self.lengths.sequence_mean();
        // Pairs of a query and a key, twice.
        let pairs = all * self.lengths.attention_length() - n_saved * self.lengths.prompt_mean;
        Tokens {
            all: all - n_saved,
            scored: n_responses * self.sampled_mean(),
            length: pairs / (all - n_saved),
        }
    }

    /// Tokens of prompts that responses share instead of computing them again.
    fn n_saved_tokens(&self) -> f64 {
        let rollout = &self.plan.config.rollout;
        let n_sharing = match self.plan.packing(self.model).budget_keys {
            Some(_) => rollout.problems_per_step * (rollout.group_size - 1),
            None => 0,
        };
        n_sharing as f64 * self.lengths.prompt_mean
    }

    /// Passes of the optimizer over a rollout batch, at most.
    fn n_uses(&self) -> f64 {
        (self.plan.objective.n_passes() * self.plan.max_uses()) as f64
    }

    /// Micro-batches of one use of a rollout batch.
    fn n_microbatches(&self) -> f64 {
        let config = &self.plan.config;
        let n_minibatches =
            config.rollout.problems_per_step.div_ceil(config.update.problems_per_minibatch) as f64;
        let per_minibatch = self.tokens().all / n_minibatches / config.update.microbatch_tokens as f64;
        n_minibatches * per_minibatch.ceil()
    }

    fn score(&self) -> f64 {
        let pass = |(model, quantised)| {
            let costs = Costs { model, n_adapter: None, quantised, machine: self.machine };
            costs.scoring(self.tokens(), self.n_microbatches())
        };
        let has_free_reference = self.plan.objective.needs_reference() && self.plan.has_free_reference();
        let without_adapters = has_free_reference.then_some((self.model, self.quantised));
        let scoring = self.frozen.iter().filter(|(role, _)| *role != DRAFT);
        scoring.map(|(_, model)| (model, None)).chain(without_adapters).map(pass).sum()
    }

    /// Of mini-batches whose masks are calibrated on a policy that has changed since it sampled: the scoring passes, or
    /// forward and backward of the sequences that wait for thresholds, where that is less.
    fn calibrate(&self) -> f64 {
        let objective = &self.plan.objective;
        let n_updates = self.plan.updates_per_step() as f64;
        let share = if objective.reads_collision() {
            1.0
        } else if objective.calibrates_on_current_policy() {
            let n_on_policy = if self.plan.has_behavior_of_sampler() { 0.0 } else { 1.0 };
            (n_updates - n_on_policy) / n_updates
        } else {
            0.0
        };
        let scoring = self.costs().scoring(self.tokens(), self.n_microbatches());
        let cost = match objective.deferral() {
            Some(_) if !objective.reads_collision() => {
                let waiting = 1.0 - (-WAITING_TOKENS * self.lengths.response_mean).exp();
                let training = self.costs().training(self.tokens(), self.n_microbatches(), self.recompute);
                scoring.min(waiting * training)
            }
            _ => scoring,
        };
        share * self.n_uses() * cost
    }

    /// Forward and backward of all uses of a rollout batch on one rank.
    fn pass(&self) -> f64 {
        let tokens = self.tokens();
        let pass = self.costs().training(tokens, self.n_microbatches(), self.recompute)
            + tokens.scored * self.machine.fixed.trained_token;
        self.n_uses() * pass
    }

    /// One optimizer step; each rank has an equal part of it.
    fn optimizer_step(&self) -> f64 {
        self.costs().optimizer_step(self.plan.config.update.states) / self.world.ranks()
    }

    /// The weights that the run trains.
    pub fn n_trained(&self) -> u64 {
        self.costs().n_trained()
    }

    /// Bytes of the state that is hashed and saved: the weight and two moments, in f32, or in bf16 and 8 bits.
    fn state_bytes(&self) -> f64 {
        let is_8bit = self.plan.config.update.states == States::EightBit;
        let per_weight = if is_8bit { 4.0 } else { 12.0 };
        per_weight * self.costs().n_trained() as f64
    }

    /// For a state hash each rank reads what it owns twice, once to check that it is finite.
    fn record(&self) -> f64 {
        let every = self.plan.config.record.state_hash_every_steps;
        if every == 0 {
            return 0.0;
        }
        let Machine { bandwidth, state_hash, .. } = self.machine;
        let per_byte = 1.0 / bandwidth.per_second + 1.0 / state_hash.per_second;
        self.state_bytes() * per_byte / self.world.ranks() / every as f64
    }

    fn evaluate(&self) -> f64 {
        let config = &self.plan.config;
        let n_before = u64::from(config.evaluation.at_start);
        let n_after = match config.evaluation.every_steps {
            0 => 1,
            every => 1 + (config.steps - 1) / every,
        };
        let n_responses = (config.evaluation.problems * config.evaluation.samples) as f64;
        let sampled = self.sample(config.evaluation.problems, config.evaluation.samples);
        let graded = n_responses * self.machine.fixed.response / self.world.ranks();
        let seconds = sampled.slowest_seconds + graded + self.waiting(n_responses, sampled);
        (n_before + n_after) as f64 * seconds / config.steps as f64
    }

    /// A checkpoint is copied to the host of rank 0, and hashed and written during the steps that follow; the last one is waited
    /// for.
    fn checkpoint(&self) -> f64 {
        let config = &self.plan.config;
        let n_checkpoints = 1 + (config.steps - 1) / config.record.checkpoint_every_steps;
        let Machine { host_copy, hash, disk, .. } = self.machine;
        let copied = self.state_bytes() / host_copy.per_second + self.world.gather(self.state_bytes());
        let written = self.state_bytes() / hash.per_second.min(disk.per_second);
        (n_checkpoints as f64 * copied + written) / config.steps as f64
    }
}

#[cfg(test)]
mod tests;
