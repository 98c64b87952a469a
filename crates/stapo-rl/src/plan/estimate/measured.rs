//! Measured steps of growing size, which correct a simulation.

use super::lengths::Lengths;
use super::simulated::{Prediction, RunShape};
use crate::error::Result;
use crate::plan::config::Plan;
use crate::train::Trainer;
use stapo_core::Finish;
use std::time::Instant;

/// What the largest measured step was like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measurement {
    pub n_problems: usize,
    /// The longest response that the step allowed.
    pub response_limit: usize,
    pub rollout_seconds: f64,
    /// Of these, the seconds in which all sequences waited for an environment.
    pub environment_seconds: f64,
    pub update_seconds: f64,
    /// Response tokens sampled and trained.
    pub n_sampled: f64,
    pub n_trained: f64,
    pub prompt_mean: f64,
    pub response_mean: f64,
    /// Turns of an episode, and tokens that it was given between them.
    pub turns_mean: f64,
    pub given_mean: f64,
    /// Share of responses that reached the limit. Above 0, `response_mean` is a lower bound.
    pub truncated_share: f64,
}

/// Problems and longest response of the smallest step.
const FIRST_PROBLEMS: usize = 2;
const FIRST_TOKENS: usize = 64;
/// A step that would take longer is not measured.
const LONGEST_SECONDS: f64 = 30.0;

/// Measures steps of growing size, up to a step of full size, as long as the next is expected to take less than
/// [`LONGEST_SECONDS`]. Every size runs twice and the second time counts: the first compiles kernels, chooses algorithms
/// and touches memory. `shape` says how a step's time grows with its size, and `begins` gets each step before it is measured.
/// Measuring trains, so the trainer is consumed.
pub fn measure(shape: &RunShape, mut trainer: Trainer, mut begins: impl FnMut(&Plan)) -> Result<Measurement> {
    let sizes = sizes(&shape.plan.config.rollout);
    let mut last: Option<Measurement> = None;
    for (n_problems, response_limit) in sizes {
        let plan = smaller_plan(shape.plan, n_problems, response_limit);
        if let Some(last) = &last
            && expected_seconds(shape, last, &plan) > LONGEST_SECONDS
        {
            break;
        }
        begins(&plan);
        measure_step(&plan, &mut trainer)?;
        last = Some(measure_step(&plan, &mut trainer)?);
    }
    Ok(last.expect("there is at least one size"))
}

/// Problems and longest response of each measured step.
fn sizes(rollout: &crate::plan::config::RolloutConfig) -> Vec<(usize, usize)> {
    let full = rollout.problems_per_step;
    let mut n_problems = FIRST_PROBLEMS.min(full);
    let mut sizes = vec![(n_problems, rollout.max_response_tokens.min(FIRST_TOKENS))];
    loop {
        sizes.push((n_problems, rollout.max_response_tokens));
        if n_problems == full {
            sizes.dedup();
            return sizes;
        }
        n_problems = (4 * n_problems).min(full);
    }
}

/// The plan with fewer problems per step and shorter responses, without redrawn groups.
fn smaller_plan(plan: &Plan, n_problems: usize, response_limit: usize) -> Plan {
    let mut smaller = plan.clone();
    let config = &mut smaller.config;
    config.rollout.max_redraws = 0;
    config.rollout.problems_per_step = n_problems;
    config.rollout.max_response_tokens = response_limit;
    config.update.problems_per_minibatch = config.update.problems_per_minibatch.min(n_problems);
    smaller
}

/// The expected seconds of a step of another size: the measured ones, in the proportion of the simulated ones.
fn expected_seconds(shape: &RunShape, measured: &Measurement, plan: &Plan) -> f64 {
    let next =
        RunShape { plan, lengths: measured.lengths(plan, shape.lengths.spread), ..*shape }.simulate().phases;
    let now = measured.simulated(shape).phases;
    measured.rollout_seconds * next.rolled_out() / now.rolled_out()
        + measured.update_seconds * next.learned() / now.learned()
}

impl Measurement {
    /// The measured lengths under the limit of `plan`, with a given spread. Where most measured responses were cut, half
    /// of the limit stands for their mean.
    fn lengths(&self, plan: &Plan, spread: f64) -> Lengths {
        let response_limit = plan.config.rollout.max_response_tokens;
        let is_cut = self.response_limit < response_limit && self.truncated_share > 0.5;
        let response_mean = if is_cut { 0.5 * response_limit as f64 } else { self.response_mean };
        Lengths { prompt_mean: self.prompt_mean, response_mean, response_limit, spread }
    }

    /// Whether the measured mean predicts the mean of a run with responses up to `limit`.
    pub fn knows_lengths(&self, limit: usize) -> bool {
        self.response_limit >= limit || self.truncated_share == 0.0
    }

    /// The measured step, simulated.
    fn simulated(&self, shape: &RunShape) -> Prediction {
        let plan = smaller_plan(shape.plan, self.n_problems, self.response_limit);
        RunShape { plan: &plan, lengths: self.lengths(&plan, shape.lengths.spread), ..*shape }.simulate()
    }

    /// The simulation of the whole run with sampling and updating in the proportion of the measured step to its own
    /// simulation. Phases that were not measured stay as simulated.
    pub fn correct(&self, shape: &RunShape) -> Prediction {
        let step = self.simulated(shape).phases;
        let rollout =
            (self.rollout_seconds - self.environment_seconds) / (step.rolled_out() - step.environment);
        let update = self.update_seconds / step.learned();
        let mut prediction = shape.simulate();
        let phases = &mut prediction.phases;
        // Waiting grows with the step as the simulated waiting does, where answers take time there.
        let growth = if step.environment > 0.0 { phases.environment / step.environment } else { 1.0 };
        phases.environment = self.environment_seconds * growth;
        phases.rollout *= rollout;
        phases.score *= rollout;
        phases.grade *= rollout;
        phases.evaluate *= rollout;
        phases.calibrate *= update;
        phases.update *= update;
        prediction
    }
}

fn measure_step(plan: &Plan, trainer: &mut Trainer) -> Result<Measurement> {
    let start = Instant::now();
    trainer.meter().take();
    let rolled = trainer.roll_out(plan)?;
    let rollout_seconds = start.elapsed().as_secs_f64();
    let environment_seconds = trainer.meter().take().environment;
    let start = Instant::now();
    let n_trained: usize = trainer.learn(plan, &rolled)?.iter().map(|update| update.tally.n_tokens).sum();
    let update_seconds = start.elapsed().as_secs_f64();
    let responses: Vec<_> = rolled.batch.responses().map(|scored| &scored.rollout).collect();
    let n = responses.len().max(1) as f64;
    let mean = |length: &dyn Fn(&stapo_core::Rollout) -> usize| {
        responses.iter().map(|rollout| length(rollout)).sum::<usize>() as f64 / n
    };
    Ok(Measurement {
        n_problems: plan.config.rollout.problems_per_step,
        response_limit: plan.config.rollout.max_response_tokens,
        rollout_seconds,
        environment_seconds,
        update_seconds,
        n_sampled: rolled.n_sampled as f64,
        n_trained: n_trained as f64,
        prompt_mean: mean(&|rollout| rollout.prompt().len()),
        response_mean: mean(&|rollout| rollout.response().len()),
        turns_mean: mean(&|rollout| rollout.turn_lengths().len()),
        given_mean: mean(&|rollout| rollout.response().len() - rollout.n_sampled()),
        truncated_share: mean(&|rollout| usize::from(rollout.finish == Finish::LengthLimit)),
    })
}

#[cfg(test)]
mod tests {
    use super::super::links::World;
    use super::super::machine::Machine;
    use super::*;
    use crate::plan::config::Config;
    use stapo_model::ModelConfig;
    use stapo_model::decoder::Recompute;

    fn plan(n_problems: usize) -> Plan {
        let text = format!(
            "rollout = {{ problems_per_step = {n_problems}, max_response_tokens = 512 }}\nupdate = {{ problems_per_minibatch = {} }}",
            n_problems / 2
        );
        Plan::resolve(Config::from_toml(&text, []).unwrap()).unwrap()
    }

    #[test]
    fn sizes_grow_to_the_full_step() {
        let rollout = plan(100).config.rollout;
        assert_eq!(sizes(&rollout), [(2, 64), (2, 512), (8, 512), (32, 512), (100, 512)]);
        let tiny =
            crate::plan::config::RolloutConfig { problems_per_step: 1, max_response_tokens: 9, ..rollout };
        assert_eq!(sizes(&tiny), [(1, 9)]);
    }

    #[test]
    fn a_small_measured_step_corrects_the_whole_run() {
        let plan = plan(20);
        let model = ModelConfig::known("qwen3-0.6b").unwrap();
        let machine = Machine::by_name("cpu").unwrap();
        let lengths = Lengths { prompt_mean: 40.0, response_mean: 200.0, response_limit: 512, spread: 0.5 };
        let shape = RunShape {
            plan: &plan,
            model: &model,
            frozen: &[],
            quantised: None,
            machine: &machine,
            lengths,
            episodes: None,
            kv_bytes: 256 << 20,
            recompute: Recompute::Nothing,
            world: World::one(machine.links),
        };
        let measured = Measurement {
            n_problems: 8,
            response_limit: 512,
            rollout_seconds: 1.0,
            environment_seconds: 0.0,
            update_seconds: 1.0,
            n_sampled: 12_800.0,
            n_trained: 12_800.0,
            prompt_mean: 40.0,
            response_mean: 200.0,
            turns_mean: 1.0,
            given_mean: 0.0,
            truncated_share: 0.0,
        };
        let small = measured.simulated(&shape).phases;
        let as_simulated =
            Measurement { rollout_seconds: small.rolled_out(), update_seconds: small.learned(), ..measured };
        let simulated = shape.simulate().phases;
        let corrected = as_simulated.correct(&shape).phases;
        assert!((corrected.total() / simulated.total() - 1.0).abs() < 1e-12);
        let slow = Measurement { rollout_seconds: 3.0 * small.rolled_out(), ..as_simulated };
        let corrected = slow.correct(&shape).phases;
        assert!((corrected.rolled_out() / simulated.rolled_out() - 3.0).abs() < 1e-9);
        assert_eq!(corrected.record, simulated.record);
        let expected = 3.0 * simulated.rolled_out() + simulated.learned();
        assert!((expected_seconds(&shape, &slow, &plan) / expected - 1.0).abs() < 1e-9);
        // Waiting for an environment does not slow sampling down.
        let rollout_seconds = small.rolled_out() + 2.0;
        let waits = Measurement { rollout_seconds, environment_seconds: 2.0, ..as_simulated };
        let corrected = waits.correct(&shape).phases;
        assert!((corrected.rollout / simulated.rollout - 1.0).abs() < 1e-9 && corrected.environment == 2.0);
        assert!(measured.knows_lengths(512));
        let cut = Measurement { response_limit: 64, truncated_share: 0.2, ..measured };
        assert!(!cut.knows_lengths(512) && cut.knows_lengths(64));
        // Where more than half of the measured responses were cut, half of the run's limit is assumed.
        let mean = |response_limit, truncated_share| {
            Measurement { response_limit, truncated_share, ..measured }.lengths(&plan, 0.5).response_mean
        };
        assert_eq!([mean(64, 0.5), mean(64, 0.51), mean(512, 1.0)], [200.0, 256.0, 200.0]);
    }
}
