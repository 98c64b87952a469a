//! `stapo plan`

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::option::threads;
use crate::shared::run_folder::Use;
use crate::shared::units::{grouped, size};
use crate::shared::{clock, machine, run_folder};
use anyhow::Result;
use serde_json::{Value, json};
use stapo_rl::Plan;
use stapo_rl::config::{ModelSource, RecomputeChoice};
use stapo_rl::device::{DeviceName, cuda};
use stapo_rl::estimate::{self, Pace};
use stapo_rl::memory::{self, MemoryPlan};
use stapo_rl::model_files::ModelConfig;
use stapo_rl::train::Trainer;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Says what a config would run: steps, tokens, memory by part, and the time from a quick measurement.
#[derive(clap::Args)]
pub struct Args {
    /// What to run, as TOML, or a run folder; the built-in run where absent.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in rollout.group_size=16; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// Leaves the measurement out: no time estimate, and a model's config.json alone is enough.
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
    let (_, plan) = run_folder::read_plan(args.config.as_deref(), &args.set)?;
    let model = memory::shape(&plan.config.model)?;
    let free = (plan.device() != DeviceName::Cpu).then(|| available(&plan)).flatten();
    let memory = memory::resolve(&plan, &model, &memory::frozen(&plan)?, free);
    let pace = if args.no_measure {
        None
    } else {
        let device = run_folder::device(plan.device(), args.threads, Use::of(&plan))?;
        let programs = args.allow.of_config(args.config.as_deref());
        let trainer = Trainer::new(&plan, &device, programs)?;
        allow_command::warn(&trainer.task);
        Some(estimate::measure(&plan, trainer)?)
    };
    if args.json {
        println!("{:#}", as_json(&plan, &model, &memory, pace));
    } else {
        print_lines(&plan, &model, &memory, pace);
    }
    Ok(ExitCode::SUCCESS)
}

/// Response tokens of the whole run if every response has the greatest length.
fn most_tokens(plan: &Plan) -> u64 {
    let rollout = &plan.config.rollout;
    let per_step = rollout.problems_per_step * rollout.group_size * rollout.max_response_tokens;
    plan.config.steps * per_step as u64
}

fn as_json(plan: &Plan, model: &ModelConfig, memory: &MemoryPlan, pace: Option<Pace>) -> Value {
    let parts: serde_json::Map<String, Value> =
        memory.parts().map(|part| (part.name.to_string(), json!(part.bytes))).collect();
    json!({
        "name": plan.config.name,
        "parameters": model.n_parameters(),
        "steps": plan.config.steps,
        "optimizer_steps": plan.config.steps * plan.updates_per_step() as u64,
        "responses_per_step": plan.config.rollout.problems_per_step * plan.config.rollout.group_size,
        "response_tokens_at_most": most_tokens(plan),
        "memory_bytes": parts,
        "memory_bytes_total": memory.peak_bytes(),
        "memory_bytes_here": available(plan),
        "pace": pace.map(|pace| json!({
            "rollout_tokens_per_second": pace.rollout_rate,
            "update_tokens_per_second": pace.update_rate,
            "response_tokens_mean": pace.response_tokens_mean,
            "truncated_share": pace.truncated_share,
            "seconds": pace.seconds(plan),
        })),
        "notes": plan.notes(),
    })
}

/// Available main memory, or all memory of the plan's GPU, in bytes; `None` if this machine lacks the device.
fn available(plan: &Plan) -> Option<u64> {
    match plan.device() {
        DeviceName::Cpu => machine::memory().map(|memory| memory.available),
        DeviceName::Cuda { ordinal } => cuda::probe().gpus.get(ordinal).map(|gpu| gpu.memory_bytes as u64),
    }
}

fn print_lines(plan: &Plan, model: &ModelConfig, memory: &MemoryPlan, pace: Option<Pace>) {
    let config = &plan.config;
    let rollout = &config.rollout;
    let source = match &config.model {
        ModelSource::Builtin => "built in".to_string(),
        ModelSource::Path { path } => path.clone(),
        ModelSource::Random { shape, .. } => format!("random {shape}"),
    };
    let kind = |table: &toml::Table, key: &str| {
        table.get(key).and_then(toml::Value::as_str).unwrap_or("own").to_string()
    };
    line(
        "run",
        &format!("{}: {} on {}", config.name, kind(&config.objective, "preset"), kind(&config.task, "kind")),
    );
    line(
        "model",
        &format!("{source}, {}, {} parameters", model.family.name(), grouped(model.n_parameters())),
    );
    line(
        "steps",
        &format!(
            "{} of {} problems x {} responses, {} optimizer steps each",
            grouped(config.steps),
            rollout.problems_per_step,
            rollout.group_size,
            plan.updates_per_step()
        ),
    );
    line(
        "tokens",
        &format!(
            "prompts to {}, responses to {}: at most {} sampled in all",
            grouped(rollout.max_prompt_tokens as u64),
            grouped(rollout.max_response_tokens as u64),
            grouped(most_tokens(plan))
        ),
    );
    let mut name = "memory";
    for part in memory.parts() {
        line(name, &format!("{:<13} {:>10}", part.name, size(part.bytes)));
        name = "";
    }
    let here = available(plan);
    let beside = here.map_or(String::new(), |bytes| format!(" of {} available here", size(bytes)));
    line("", &format!("{:<13} {:>10}{beside}", "together", size(memory.peak_bytes())));
    if here.is_some_and(|bytes| memory.peak_bytes() > bytes) {
        let recompute = match config.update.recompute {
            RecomputeChoice::Nothing => "set update.recompute=auto, or ",
            RecomputeChoice::Inputs => "set update.recompute=layers, or ",
            RecomputeChoice::Auto | RecomputeChoice::Layers => "",
        };
        line("", &format!("does not fit here: {recompute}lower update.microbatch_tokens or rollout.kv_mib"));
    }
    if let Some(pace) = pace {
        print_pace(plan, pace);
    }
    for note in plan.notes() {
        line("note", &note);
    }
}

fn print_pace(plan: &Plan, pace: Pace) {
    let time = clock::span(Duration::from_secs_f64(pace.seconds(plan).min(1e12)));
    let bound = if pace.truncated_share > 0.0 { "at least " } else { "about " };
    line("time", &format!("{bound}{time}, if responses keep to {:.0} tokens", pace.response_tokens_mean));
    line(
        "",
        &format!(
            "measured with {} problems: rollout {:.0} tokens/s, update {:.0} tokens/s",
            pace.n_problems, pace.rollout_rate, pace.update_rate
        ),
    );
    if pace.truncated_share > 0.0 {
        line(
            "",
            &format!("{:.0} % of those responses were cut at their limit", 100.0 * pace.truncated_share),
        );
    }
}

fn line(name: &str, value: &str) {
    println!("{name:<8} {value}");
}
