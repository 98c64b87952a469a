//! `stapo plan`

mod json;
mod planned;
mod text;

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::option::{positive, threads};
use crate::shared::run_folder::{self, Use};
use anyhow::{Result, bail};
use planned::{Here, ModelShapes, Planned};
use stapo_rl::Plan;
use stapo_rl::device::DeviceName;
use stapo_rl::estimate::{self, Lengths, Machine, Measurement, Processor, Remedy, RunShape};
use stapo_rl::memory;
use stapo_rl::train::Trainer;
use std::path::PathBuf;
use std::process::ExitCode;

/// Says what a config would run: steps, tokens, memory and time by phase.
///
/// Times are measured here where the config's device, weights and data are here, and simulated from a machine's rates
/// otherwise: with --machine and --model neither a GPU nor weights nor data are needed.
#[derive(clap::Args)]
pub struct Args {
    /// What to run, as TOML, or a run folder; the built-in run where absent.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in rollout.group_size=16; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Plans for another model: a folder, a config.json, a GGUF file, or a known name such as qwen3-1.7b.
    #[arg(long)]
    model: Option<String>,

    /// Simulates the run on a named machine.
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(Machine::all().iter().map(|machine| machine.name)))]
    machine: Option<String>,

    /// Mean tokens of a prompt; a quarter of rollout.max_prompt_tokens by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    mean_prompt: Option<usize>,

    /// Mean tokens of a response; a third of rollout.max_response_tokens by default.
    #[arg(long, value_name = "N", value_parser = positive)]
    mean_response: Option<usize>,

    /// Simulates the run without measuring anything here.
    #[arg(long)]
    no_measure: bool,

    /// One JSON object: bytes, tokens, seconds.
    #[arg(long)]
    json: bool,

    /// Threads; all cores by default.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let named = args.machine.as_deref().and_then(Machine::by_name);
    let mut set = args.set.clone();
    if let Some(machine) = &named {
        let device = if machine.processor == Processor::Cpu { "cpu" } else { "cuda" };
        set.push(format!("device={device}"));
    }
    let (_, mut plan) = run_folder::read_plan(args.config.as_deref(), &set)?;
    plan.pin_adapters()?;
    let mut assumed = Vec::new();
    let shapes = ModelShapes::find(&plan, args.model.as_deref(), &mut assumed)?;
    let here = Here::look(&plan);
    let machine = named.unwrap_or_else(|| here.machine(&plan, args.threads, &mut assumed));
    let memory_bytes = if named.is_some() { machine.memory_bytes } else { here.memory_bytes };
    let lengths = lengths(args, &plan)?;
    let memory = memory::resolve(&plan, &shapes.model, &shapes.frozen, limit(&plan, memory_bytes));
    let shape = RunShape {
        plan: &plan,
        model: &shapes.model,
        frozen: &shapes.frozen,
        machine: &machine,
        lengths,
        kv_bytes: memory.kv_bytes,
        recompute: memory.recompute,
    };
    let is_simulation = named.is_some() || args.model.is_some() || args.no_measure;
    let obstacle = if is_simulation { None } else { here.obstacle(&plan, &shapes) };
    let measured = match &obstacle {
        None if !is_simulation => Some(measure(args, &shape)?),
        None => None,
        Some(obstacle) => {
            assumed.push(format!("times are simulated, not measured: {obstacle}"));
            None
        }
    };
    let lengths = known_lengths(args, lengths, measured.as_ref());
    let shape = RunShape { lengths, ..shape };
    let prediction = measured.as_ref().map_or_else(|| shape.simulate(), |measured| measured.correct(&shape));
    planned::assume_lengths(
        &mut assumed,
        &plan,
        lengths,
        [args.mean_prompt, args.mean_response],
        measured.as_ref(),
    );
    planned::assume_settings(&mut assumed, &plan);
    let planned = Planned {
        memory,
        remedy: memory_bytes.and_then(|bytes| remedy(&plan, &shapes, bytes)),
        plan: &plan,
        shapes: &shapes,
        machine: &machine,
        memory_bytes,
        prediction,
        measured,
        assumed,
    };
    if args.json {
        println!("{:#}", json::of(&planned));
    } else {
        text::print(&planned);
    }
    Ok(ExitCode::SUCCESS)
}

/// The memory that a run has to fit: that of a GPU. Main memory is no limit, because the system may swap.
fn limit(plan: &Plan, memory_bytes: Option<u64>) -> Option<u64> {
    memory_bytes.filter(|_| plan.device() != DeviceName::Cpu)
}

/// What to change where a run does not fit `memory_bytes`.
fn remedy(plan: &Plan, shapes: &ModelShapes, memory_bytes: u64) -> Option<Remedy> {
    let ModelShapes { model, frozen, .. } = shapes;
    let total =
        |plan: &Plan| memory::resolve(plan, model, frozen, limit(plan, Some(memory_bytes))).peak_bytes();
    estimate::remedy(plan, model, memory_bytes, total).filter(|remedy| !remedy.changes.is_empty())
}

/// The mean lengths that the command line gives, or shares of the config's limits.
fn lengths(args: &Args, plan: &Plan) -> Result<Lengths> {
    let rollout = &plan.config.rollout;
    let given = [
        ("--mean-prompt", args.mean_prompt, "rollout.max_prompt_tokens", rollout.max_prompt_tokens),
        ("--mean-response", args.mean_response, "rollout.max_response_tokens", rollout.max_response_tokens),
    ];
    for (option, mean, key, limit) in given {
        if let Some(mean) = mean.filter(|mean| *mean > limit) {
            bail!(
                "{option} {mean}: above {key}, {limit}\nhint: lower the one, or raise the other with --set"
            );
        }
    }
    let or_share = |mean: Option<usize>, limit: usize, share: usize| {
        mean.map_or((limit as f64 / share as f64).max(1.0), |mean| mean as f64)
    };
    Ok(Lengths {
        prompt_mean: or_share(args.mean_prompt, rollout.max_prompt_tokens, planned::PROMPT_SHARE),
        response_mean: or_share(args.mean_response, rollout.max_response_tokens, planned::RESPONSE_SHARE),
        response_limit: rollout.max_response_tokens,
    })
}

/// The lengths with what a measurement found in place of what nobody gave.
fn known_lengths(args: &Args, lengths: Lengths, measured: Option<&Measurement>) -> Lengths {
    let Some(measured) = measured else { return lengths };
    let mut known = lengths;
    if args.mean_prompt.is_none() {
        known.prompt_mean = measured.prompt_mean;
    }
    if args.mean_response.is_none() && measured.knows_lengths(lengths.response_limit) {
        known.response_mean = measured.response_mean.max(1.0);
    }
    known
}

fn measure(args: &Args, shape: &RunShape) -> Result<Measurement> {
    let plan = shape.plan;
    let device = run_folder::device(plan.device(), args.threads, Use::of(plan))?;
    let programs = args.allow.of_config(args.config.as_deref());
    let trainer = Trainer::new(plan, &device, programs)?;
    allow_command::warn(&trainer.task);
    if plan.device() != DeviceName::Cpu {
        eprintln!("measuring: every step runs twice, and the second time counts");
    }
    Ok(estimate::measure(shape, trainer)?)
}
