//! `stapo pretrain`

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::option::threads;
use crate::shared::program::{PROGRAM, writer};
use crate::shared::run_folder::Use;
use crate::shared::stop::{self, Stop};
use crate::shared::{clock, run_folder};
use anyhow::{Context, Result, bail};
use stapo_core::record::{PretrainMetrics, Record};
use stapo_rl::device::{Device, DeviceName};
use stapo_rl::identity;
use stapo_rl::model_files::{Existing, ExportOptions, Precision};
use stapo_rl::pretrain::{
    InterruptedPretraining, PretrainConfig, Pretrainer, WatchPretrain, export_policy, pretrain,
};
use stapo_rl::run::{Run, hash_file};
use stapo_rl::untrusted::read_text;
use std::io::{ErrorKind, Write, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
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
    #[arg(short, long, value_name = "DIR", required_unless_present = "resume")]
    out: Option<PathBuf>,

    /// Goes on with an interrupted run.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "out"])]
    resume: Option<PathBuf>,

    /// Goes on although the plan, the texts or the model changed since the run was saved, and records it.
    #[arg(long, requires = "resume")]
    accept_changes: bool,

    /// Prints metrics as JSON lines on standard output.
    #[arg(long)]
    json: bool,

    /// cpu, cuda or cuda:N.
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceName::Cpu)]
    device: DeviceName,

    /// Threads on the CPU; all cores by default. The results are the same bits for every number.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let stop = stop::on_signals()?;
    let device = run_folder::device(args.device, args.threads, Use::Training)?;
    // A fresh model's files, which are exported with the trained weights.
    let scratch = tempfile::tempdir().context("temporary folder")?;
    let (config, mut run, mut pretrainer) = match (&args.resume, &args.out) {
        (Some(folder), _) => reopen(args, folder, scratch.path(), &device)?,
        (None, Some(folder)) => begin(args, folder, scratch.path(), &device)?,
        (None, None) => bail!("no run folder\nhint: name one with --out"),
    };
    let mut view = PretrainView {
        json: args.json,
        steps: config.steps,
        started: Instant::now(),
        n_seen: 0,
        stop: stop.clone(),
        output_error: None,
    };
    if let Some(task) = &pretrainer.task {
        allow_command::warn(task);
    }
    if let Some(task) = config.evaluation_task()? {
        allow_command::record([task.verifier()]);
    }
    for text in run.warnings() {
        eprintln!("warning: {text}");
    }
    pretrain(&config, &mut run, &mut pretrainer, &mut view)?;
    let folder = run.folder().display();
    if pretrainer.learner.counters.step < config.steps {
        eprintln!(
            "stopped after {} steps; go on with stapo pretrain --resume {folder}",
            pretrainer.learner.counters.step
        );
        return Ok(ExitCode::from(stop.exit_status()));
    }
    let options =
        ExportOptions { precision: Precision::Bf16, existing: Existing::Replace, ..ExportOptions::default() };
    let model = run.folder().join("model");
    let trained = &pretrainer.learner.model;
    export_policy(&model, &trained.policy, &trained.companions, &options)?;
    let weights = hash_file("weights", &model.join("model.safetensors"))?;
    eprintln!("model {}: {} bytes of weights, sha256 {}", model.display(), weights.n_bytes, weights.sha256);
    if let Some(error) = view.output_error {
        bail!(
            "standard output: {error}\nhint: nothing of the run is lost; its metrics are in {folder}/metrics.jsonl"
        );
    }
    Ok(ExitCode::SUCCESS)
}

type Opened = (PretrainConfig, Run, Pretrainer);

fn begin(args: &Args, folder: &Path, start: &Path, device: &Device) -> Result<Opened> {
    let text = match &args.config {
        Some(path) => read_text(path).with_context(|| format!("config {}", path.display()))?,
        None => include_str!("../../../../configs/base.toml").to_string(),
    };
    let config = PretrainConfig::from_toml(&text, args.set.iter().map(String::as_str))?;
    if folder.exists() {
        bail!(stapo_rl::Error::exists(folder));
    }
    let identity = identity::of_pretraining(&config, args.device, PROGRAM)?;
    // The model and the texts are opened before the run folder is made, so that a bad config leaves no folder behind.
    let programs = args.allow.of_config(args.config.as_deref());
    let pretrainer = Pretrainer::new(&config, start, device, programs)?;
    let run = Run::create(folder, &text, &config.to_toml(), identity, &writer(args.device))?;
    Ok((config, run, pretrainer))
}

fn reopen(args: &Args, folder: &Path, start: &Path, device: &Device) -> Result<Opened> {
    let identity = |config: &PretrainConfig| identity::of_pretraining(config, args.device, PROGRAM);
    let interrupted = InterruptedPretraining::open(folder, &args.set, args.accept_changes, identity)?;
    for error in &interrupted.reopening.refused {
        eprintln!("warning: {error}; going back to the checkpoint before");
    }
    Ok(interrupted.resume(&writer(args.device), start, device, args.allow.of_run())?)
}

struct PretrainView {
    json: bool,
    steps: u64,
    started: Instant,
    n_seen: u32,
    stop: Stop,
    /// The first failed write of metrics to standard output.
    output_error: Option<std::io::Error>,
}

impl WatchPretrain for PretrainView {
    fn stepped(&mut self, metrics: &PretrainMetrics) {
        self.n_seen += 1;
        if self.json {
            // A failed write does not end the run; a full disk is told at its end, a reader that left is not.
            let written = stdout().write_all(metrics.to_line().as_bytes());
            let failed = written.err().filter(|error| error.kind() != ErrorKind::BrokenPipe);
            self.output_error = self.output_error.take().or(failed);
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
        self.stop.is_raised()
    }

    fn stop_reason(&self) -> String {
        self.stop.name()
    }
}
