//! `stapo pretrain`

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::run_folder::Use;
use crate::shared::{clock, run_folder, stop};
use anyhow::{Context, Result, bail};
use stapo_core::record::{Extra, Manifest, PretrainMetrics, Record, SCHEMA};
use stapo_rl::device::{Device, DeviceName};
use stapo_rl::disk::sha256_hex;
use stapo_rl::model_files::{Existing, ExportOptions, Precision};
use stapo_rl::pretrain::{PretrainConfig, Pretrainer, WatchPretrain, export_policy, pretrain};
use stapo_rl::run::Run;
use stapo_rl::task::{Programs, check_program};
use std::io::{Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Trains a model on texts, next token by next token.
///
/// Without a config it makes the built-in base model anew: a small Qwen3-shaped model learns worked solutions that are
/// wrong now and then. With `loss_on = "response"` and a model to start from, this is supervised fine-tuning. The
/// trained model ends up in RUN/model, a Hugging Face folder.
#[derive(clap::Args)]
pub struct Args {
    /// What to train on what, as TOML.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in steps=100; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// The run folder.
    #[arg(long, value_name = "DIR", required_unless_present = "resume")]
    out: Option<PathBuf>,

    /// Goes on with an interrupted run.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "set", "out"])]
    resume: Option<PathBuf>,

    /// Prints metrics as JSON lines on standard output.
    #[arg(long)]
    json: bool,

    /// cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// Threads on the CPU; all cores by default. The results are the same bits for every number.
    #[arg(long)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let device = run_folder::device(args.device, args.threads, Use::Training)?;
    let (config, mut run, mut pretrainer) = match (&args.resume, &args.out) {
        (Some(folder), _) => reopen(folder, &device, args.allow.of_run())?,
        (None, Some(folder)) => begin(args, folder, &device)?,
        (None, None) => bail!("no run folder\nhint: name one with --out"),
    };
    if let Some(task) = &pretrainer.task {
        allow_command::warn(task);
    }
    if let Some(task) = config.evaluation_task()? {
        allow_command::record(&task);
    }
    let mut view = PretrainView {
        json: args.json,
        steps: config.steps,
        started: Instant::now(),
        n_seen: 0,
        stop: stop::on_ctrl_c()?,
    };
    pretrain(&config, &mut run, &mut pretrainer, &mut view)?;
    let folder = run.folder().display();
    if pretrainer.learner.counters.step < config.steps {
        eprintln!(
            "stopped after {} steps; go on with stapo pretrain --resume {folder}",
            pretrainer.learner.counters.step
        );
        return Ok(ExitCode::from(130));
    }
    let options =
        ExportOptions { precision: Precision::Bf16, existing: Existing::Replace, ..ExportOptions::default() };
    let model = run.folder().join("model");
    let trained = &pretrainer.learner.model;
    export_policy(&model, &trained.policy, &trained.companions, &options)?;
    let weights = model.join("model.safetensors");
    let bytes = std::fs::read(&weights).with_context(|| format!("weights {}", weights.display()))?;
    eprintln!("model {}: {} bytes of weights, sha256 {}", model.display(), bytes.len(), sha256_hex(&bytes));
    Ok(ExitCode::SUCCESS)
}

fn begin(args: &Args, folder: &Path, device: &Device) -> Result<(PretrainConfig, Run, Pretrainer)> {
    let text = match &args.config {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("config {}", path.display()))?,
        None => include_str!("../../../../configs/base.toml").to_string(),
    };
    let config = PretrainConfig::from_toml(&text, args.set.iter().map(String::as_str))?;
    let programs = args.allow.of_config(args.config.as_deref());
    if let Some(task) = config.evaluation_task()? {
        check_program(&task, programs)?;
    }
    let inputs = vec![run_folder::hash_bytes("config", text.as_bytes())];
    let manifest = Manifest { schema: SCHEMA, inputs, steps: Vec::new(), extra: Extra::new() };
    let run = Run::create(folder, &text, &config.to_toml(), manifest)?;
    let pretrainer = Pretrainer::new(&config, &folder.join("start"), device, programs)?;
    pretrainer.save(&run)?;
    Ok((config, run, pretrainer))
}

fn reopen(folder: &Path, device: &Device, programs: Programs) -> Result<(PretrainConfig, Run, Pretrainer)> {
    let config = PretrainConfig::from_toml(&run_folder::plan_text(folder)?, [])?;
    let checkpoint = run_folder::newest_checkpoint(folder)?;
    let mut pretrainer = Pretrainer::new(&config, &folder.join("start"), device, programs)?;
    pretrainer.learner.restore(&checkpoint)?;
    Ok((config, Run::reopen::<PretrainMetrics>(folder, checkpoint.counters.step)?, pretrainer))
}

struct PretrainView {
    json: bool,
    steps: u64,
    started: Instant,
    n_seen: u32,
    stop: Arc<AtomicBool>,
}

impl WatchPretrain for PretrainView {
    fn stepped(&mut self, metrics: &PretrainMetrics) {
        self.n_seen += 1;
        if self.json {
            // A failed write is ignored: a closed standard output must not end the run.
            let _ = stdout().write_all(metrics.to_line().as_bytes());
            return;
        }
        let is_shown = metrics.step.is_multiple_of(10) || metrics.eval_accuracy.is_some();
        if !is_shown {
            return;
        }
        let left = self.started.elapsed() / self.n_seen * (self.steps - metrics.step.min(self.steps)) as u32;
        let held_out =
            metrics.eval_accuracy.map_or(String::new(), |a| format!("  held-out {:.1} %", 100.0 * a));
        let _ = writeln!(
            stderr(),
            "step {:>5}/{}  loss {:.4} nats  entropy {:.3} nats  grad {:.2}  {:.0} tokens/s  {} left{held_out}",
            metrics.step,
            self.steps,
            metrics.loss,
            metrics.entropy_mean,
            metrics.gradient_norm,
            metrics.tokens_per_second,
            clock::span(left),
        );
    }

    fn wants_stop(&mut self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}
