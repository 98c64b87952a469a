//! What a run will take: memory by part, and time from measured steps.

use crate::config::{Plan, States};
use crate::error::{Error, Result};
use crate::train::Trainer;
use stapo_core::Finish;
use stapo_model::decoder::{Keep, Plan as Activations};
use stapo_model::{Device, DeviceName, ModelConfig, TensorSpec};
use std::time::Instant;

/// A part of a run's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub name: &'static str,
    pub bytes: u64,
}

/// Memory by part at the run's largest moment on the plan's device. `reference` is the model of a KL penalty.
pub fn memory(plan: &Plan, model: &ModelConfig, reference: Option<&ModelConfig>) -> Vec<Part> {
    let n = model.n_parameters();
    let is_8bit = plan.config.update.states == States::EightBit;
    let (device, update) = (plan.device(), &plan.config.update);
    let (rows, tokens) = (stapo_model::generate::Settings::default().max_rows, update.microbatch_tokens);
    let arena = |n_tokens, keep| {
        Activations::new(model, n_tokens, n_tokens, keep).bytes(device.compute_bytes()) as u64
    };
    let embedding = (model.vocabulary * model.width) as u64;
    // A tied embedding has two gradients until the end of a mini-batch.
    let n_gradients = if model.tied_embeddings { n + embedding } else { n };
    let mut parts = vec![
        Part { name: "weights", bytes: if is_8bit { 2 * n } else { policy_bytes(device, model) } },
        Part { name: "gradients", bytes: 4 * n_gradients },
        Part { name: "optimizer", bytes: if is_8bit { 2 * n + n / 32 } else { 8 * n } },
        Part { name: "activations", bytes: arena(tokens, plan.keep()) },
        Part {
            name: "keys, values",
            bytes: ((plan.config.rollout.kv_mib as u64) << 20) + arena(rows, Keep::Nothing),
        },
    ];
    if let Some(reference) = reference {
        parts.push(Part { name: "reference", bytes: policy_bytes(device, reference) });
    }
    if device != DeviceName::Cpu {
        // Rows of logits and their gradient; and those that are drawn from.
        let logits = ((tokens.min(GPU_LOGIT_ROWS) * 6 + rows * 4) * model.vocabulary) as u64;
        parts.push(Part { name: "logits", bytes: logits });
        parts.push(Part { name: "libraries", bytes: GPU_LIBRARY_BYTES });
    }
    parts
}

/// Most rows of logits that a GPU holds at once.
const GPU_LOGIT_ROWS: usize = 2048;
/// A context, its kernels and their workspace, as measured on an H200.
const GPU_LIBRARY_BYTES: u64 = 700 << 20;

/// Refuses a run that the device's free memory cannot hold. The CPU's may be swapped, and is not asked.
pub fn check(plan: &Plan, model: &ModelConfig, device: &Device) -> Result<()> {
    let Some((free, _)) = device.memory() else { return Ok(()) };
    let needed: u64 = memory(plan, model, None).iter().map(|part| part.bytes).sum();
    if needed <= free as u64 {
        return Ok(());
    }
    Err(Error::DoesNotFit { device: device.name(), needed_mib: needed >> 20, free_mib: free as u64 >> 20 })
}

/// Weights; on the CPU the matrices once more in the order the kernels read them, on a GPU all once more in f32 for the
/// optimizer.
fn policy_bytes(device: DeviceName, model: &ModelConfig) -> u64 {
    if device != DeviceName::Cpu {
        return 6 * model.n_parameters();
    }
    let matrices: usize =
        model.tensors().iter().filter(|spec| spec.shape.len() == 2).map(TensorSpec::n_elements).sum();
    4 * (model.n_parameters() + matrices as u64)
}

/// How fast a run goes, from a measured step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Response tokens per second: sampling and judging; updating.
    pub rollout_rate: f64,
    pub update_rate: f64,
    pub response_tokens_mean: f64,
    /// Responses that the limit of the measured step cut: with any, lengths are a lower bound.
    pub truncated_share: f64,
    /// Problems of the measured step.
    pub n_problems: usize,
}

impl Pace {
    /// Seconds for all steps and held-out evaluations, if responses keep their length.
    pub fn seconds(&self, plan: &Plan) -> f64 {
        let config = &plan.config;
        let per_problem = config.rollout.group_size as f64 * self.response_tokens_mean;
        let per_step = config.rollout.problems_per_step as f64 * per_problem;
        let passes = plan.objective.n_passes() as f64;
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

/// Problems and longest response of the first try.
const TRY_PROBLEMS: usize = 2;
const TRY_TOKENS: usize = 64;
/// A try that took longer is the last one: the next would have four times as many problems.
const LONG_SECONDS: f64 = 3.0;

/// Measures the pace with ever larger tries, up to a step of full size, until one takes long. The trainer is used up: its
/// weights have moved.
pub fn measure(plan: &Plan, mut trainer: Trainer) -> Result<Pace> {
    let full = plan.config.rollout.problems_per_step;
    let mut n_problems = TRY_PROBLEMS.min(full);
    loop {
        let start = Instant::now();
        let pace = measure_step(&try_of(plan, n_problems), &mut trainer)?;
        if n_problems == full || start.elapsed().as_secs_f64() > LONG_SECONDS {
            return Ok(pace);
        }
        n_problems = (4 * n_problems).min(full);
    }
}

/// The plan with fewer problems a step and, below full size, shorter responses.
fn try_of(plan: &Plan, n_problems: usize) -> Plan {
    let mut smaller = plan.clone();
    let (rollout, update) = (&mut smaller.config.rollout, &mut smaller.config.update);
    rollout.max_redraws = 0;
    if n_problems < rollout.problems_per_step {
        rollout.problems_per_step = n_problems;
        rollout.max_response_tokens = rollout.max_response_tokens.min(TRY_TOKENS);
        update.problems_per_minibatch = update.problems_per_minibatch.min(n_problems);
    }
    smaller
}

fn measure_step(plan: &Plan, trainer: &mut Trainer) -> Result<Pace> {
    let start = Instant::now();
    let rolled = trainer.roll_out(plan)?;
    let rollout_seconds = start.elapsed().as_secs_f64();
    let start = Instant::now();
    trainer.learn(plan, &rolled)?;
    let update_seconds = start.elapsed().as_secs_f64();
    let responses: Vec<_> = rolled.batch.responses().collect();
    let n = responses.len().max(1) as f64;
    let n_tokens = responses.iter().map(|scored| scored.rollout.tokens.len()).sum::<usize>().max(1) as f64;
    let n_cut = responses.iter().filter(|scored| scored.rollout.finish == Finish::LengthLimit).count() as f64;
    Ok(Pace {
        rollout_rate: rolled.n_sampled as f64 / rollout_seconds,
        update_rate: n_tokens * plan.objective.n_passes() as f64 / update_seconds,
        response_tokens_mean: n_tokens / n,
        truncated_share: n_cut / n,
        n_problems: plan.config.rollout.problems_per_step,
    })
}
