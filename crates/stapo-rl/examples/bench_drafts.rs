//! Steps and time that drafts save, with a model and a task of a config:
//!
//! `bench_drafts CONFIG.toml [KEY=VALUE ..]` samples `rollout.problems_per_step` problems greedily, one response each, and
//! with `rollout.group_size` responses each at `rollout.temperature`, without drafts and with them. It fails unless the
//! responses are the same. The tail is the part in which at most 32 responses are unfinished.

#![allow(clippy::print_stdout, reason = "a benchmark's result")]

use stapo_model::generate::{
    Completion, Engine, EngineMemory, EngineSettings, Event, Filter, Request, SamplingRule, Speculation,
    StepCounts,
};
use stapo_rl::device::cuda::CudaOptions;
use stapo_rl::device::{CpuOptions, Device, DeviceName};
use stapo_rl::tasks::{Split, Task};
use stapo_rl::{Config, LoadedModel, Plan};
use std::time::Instant;

type Failure = Box<dyn std::error::Error>;

/// Unfinished responses in the tail, at most.
const TAIL: usize = 32;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("expected CONFIG.toml [KEY=VALUE ..]")?;
    let overrides: Vec<String> = arguments.collect();
    let text = std::fs::read_to_string(&path)?;
    let plan = Plan::resolve(Config::from_toml(&text, overrides.iter().map(String::as_str))?)?;
    let device = match plan.device() {
        DeviceName::Cpu => Device::cpu(CpuOptions::from_env()?),
        DeviceName::Cuda { ordinal } => Device::cuda(CudaOptions { ordinal, ..CudaOptions::default() })?,
    };
    let model = LoadedModel::open(&plan.config.model, &device)?;
    let task = Task::open(&plan.config.task)?;
    let rollout = &plan.config.rollout;
    let draw = SamplingRule::Draw { temperature: rollout.temperature, filter: Filter::NONE };
    for (rule, n_samples) in [(SamplingRule::Greedy, 1), (draw, rollout.group_size as u32)] {
        let requests = requests(&plan, &model, &task, n_samples)?;
        let mut memory = EngineMemory::new();
        // The first pass compiles kernels and records graphs.
        let first = sample(&plan, &model, &mut memory, (rule, Speculation::Auto), &requests)?;
        let plain = sample(&plan, &model, &mut memory, (rule, Speculation::Off), &requests)?;
        let drafting = sample(&plan, &model, &mut memory, (rule, Speculation::Auto), &requests)?;
        if plain.responses != drafting.responses || plain.responses != first.responses {
            return Err(format!("{rule:?}: responses differ with drafts").into());
        }
        report(rule, &plain, &drafting);
    }
    Ok(())
}

fn requests(plan: &Plan, model: &LoadedModel, task: &Task, n_samples: u32) -> Result<Vec<Request>, Failure> {
    let prompting = model.prompting(&plan.style)?;
    let request = |position| -> Result<Request, Failure> {
        let problem = task.problem(plan.config.seed, Split::Train, position)?;
        Ok(Request {
            problem: position,
            prompt: prompting.tokens(&problem)?,
            n_samples,
            max_tokens: plan.config.rollout.max_response_tokens,
            stops: model.stops.clone(),
        })
    };
    (0..plan.config.rollout.problems_per_step as u64).map(request).collect()
}

struct Sampled {
    responses: Vec<Completion>,
    counts: StepCounts,
    seconds: f64,
    tail_steps: u64,
    tail_seconds: f64,
}

fn sample(
    plan: &Plan,
    model: &LoadedModel,
    memory: &mut EngineMemory,
    (rule, speculation): (SamplingRule, Speculation),
    requests: &[Request],
) -> Result<Sampled, Failure> {
    let kv_bytes = match plan.config.rollout.kv_mib {
        stapo_rl::plan::config::KvMemory::Mib(mib) => mib << 20,
        stapo_rl::plan::config::KvMemory::Auto => 16 << 30,
    };
    let settings = EngineSettings { rule, kv_bytes, speculation, ..EngineSettings::default() };
    let mut engine = Engine::new(&model.policy, memory, settings)?;
    engine.stop_at(model.stop_texts(&plan.style)?);
    for request in requests {
        engine.submit(request.clone())?;
    }
    let n_all: usize = requests.iter().map(|request| request.n_samples as usize).sum();
    let mut responses = Vec::with_capacity(n_all);
    let start = Instant::now();
    let mut tail = None;
    while !engine.is_idle() {
        if tail.is_none() && n_all - responses.len() <= TAIL {
            tail = Some((engine.step_counts().n_steps, Instant::now()));
        }
        engine.step(|event| {
            if let Event::Finished(response) = event {
                responses.push(response);
            }
        })?;
    }
    let (n_before, tail) = tail.ok_or("nothing was sampled")?;
    responses.sort_by_key(|response| (response.ticket, response.sample));
    let counts = engine.step_counts();
    Ok(Sampled {
        responses,
        counts,
        seconds: start.elapsed().as_secs_f64(),
        tail_steps: counts.n_steps - n_before,
        tail_seconds: tail.elapsed().as_secs_f64(),
    })
}

fn report(rule: SamplingRule, plain: &Sampled, drafting: &Sampled) {
    let StepCounts { n_drafting_steps, n_drafted, n_accepted, .. } = drafting.counts;
    let n_tokens: usize = plain.responses.iter().map(|response| response.tokens.len()).sum();
    let name =
        if rule == SamplingRule::Greedy { "greedy".into() } else { format!("T = {}", rule.temperature()) };
    println!(
        r#"{{"sampling": "{name}", "responses": {}, "tokens": {n_tokens}, "drafting_steps": {n_drafting_steps}, "drafted": {n_drafted}, "accepted": {n_accepted}, "steps": [{}, {}], "tail_steps": [{}, {}], "tail_ratio": {:.2}, "tail_s": [{:.3}, {:.3}], "tail_time_ratio": {:.2}, "s": [{:.3}, {:.3}]}}"#,
        plain.responses.len(),
        plain.counts.n_steps,
        drafting.counts.n_steps,
        plain.tail_steps,
        drafting.tail_steps,
        plain.tail_steps as f64 / drafting.tail_steps.max(1) as f64,
        plain.tail_seconds,
        drafting.tail_seconds,
        plain.tail_seconds / drafting.tail_seconds,
        plain.seconds,
        drafting.seconds,
    );
}
