//! How long a run takes, from measured steps.

use crate::config::Plan;
use crate::error::Result;
use crate::train::Trainer;
use stapo_core::Finish;
use std::time::Instant;

/// The speed of a run, from a measured step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Response tokens per second of sampling and judging, and of updating.
    pub rollout_rate: f64,
    pub update_rate: f64,
    pub response_tokens_mean: f64,
    /// Share of the measured step's responses that reached the length limit. Above 0, `response_tokens_mean` is a lower
    /// bound.
    pub truncated_share: f64,
    /// Problems of the measured step.
    pub n_problems: usize,
}

impl Pace {
    /// Seconds for all steps and held-out evaluations, if the response length does not change.
    pub fn seconds(&self, plan: &Plan) -> f64 {
        let config = &plan.config;
        let per_problem = config.rollout.group_size as f64 * self.response_tokens_mean;
        let per_step = config.rollout.problems_per_step as f64 * per_problem;
        let passes = (plan.objective.n_passes() * plan.max_uses()) as f64;
        let step = per_step / self.rollout_rate + passes * per_step / self.update_rate;
        let n_evaluations = match config.evaluation.every_steps {
            0 => 2,
            every => 2 + (config.steps - 1) / every,
        };
        let samples = config.evaluation.problems * config.evaluation.samples;
        let evaluation = samples as f64 * self.response_tokens_mean / self.rollout_rate;
        config.steps as f64 * step + n_evaluations as f64 * evaluation
    }
}

/// Problems and longest response of the first measurement.
const FIRST_PROBLEMS: usize = 2;
const FIRST_TOKENS: usize = 64;
/// A measurement that takes longer is the last: the next would have four times as many problems.
const LONG_SECONDS: f64 = 3.0;

/// Measures the pace with growing steps, up to a step of full size, until a step takes longer than [`LONG_SECONDS`].
/// Measuring trains, so the trainer is consumed.
pub fn measure(plan: &Plan, mut trainer: Trainer) -> Result<Pace> {
    let full = plan.config.rollout.problems_per_step;
    let mut n_problems = FIRST_PROBLEMS.min(full);
    loop {
        let start = Instant::now();
        let pace = measure_step(&smaller_plan(plan, n_problems), &mut trainer)?;
        if n_problems == full || start.elapsed().as_secs_f64() > LONG_SECONDS {
            return Ok(pace);
        }
        n_problems = (4 * n_problems).min(full);
    }
}

/// The plan with `n_problems` per step and, below full size, shorter responses.
fn smaller_plan(plan: &Plan, n_problems: usize) -> Plan {
    let mut smaller = plan.clone();
    let rollout = &mut smaller.config.rollout;
    let update = &mut smaller.config.update;
    rollout.max_redraws = 0;
    if n_problems < rollout.problems_per_step {
        rollout.problems_per_step = n_problems;
        rollout.max_response_tokens = rollout.max_response_tokens.min(FIRST_TOKENS);
        update.problems_per_minibatch = update.problems_per_minibatch.min(n_problems);
    }
    smaller
}

fn measure_step(plan: &Plan, trainer: &mut Trainer) -> Result<Pace> {
    let start = Instant::now();
    let rolled = trainer.roll_out(plan)?;
    let rollout_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let n_updated: usize = trainer.learn(plan, &rolled)?.iter().map(|update| update.tally.n_tokens).sum();
    let update_seconds = start.elapsed().as_secs_f64();
    let responses: Vec<_> = rolled.batch.responses().collect();
    let n = responses.len().max(1) as f64;
    let n_tokens = responses.iter().map(|scored| scored.rollout.tokens.len()).sum::<usize>().max(1) as f64;
    let n_cut = responses.iter().filter(|scored| scored.rollout.finish == Finish::LengthLimit).count() as f64;
    Ok(Pace {
        rollout_rate: rolled.n_sampled as f64 / rollout_seconds,
        update_rate: n_updated as f64 / update_seconds,
        response_tokens_mean: n_tokens / n,
        truncated_share: n_cut / n,
        n_problems: plan.config.rollout.problems_per_step,
    })
}
