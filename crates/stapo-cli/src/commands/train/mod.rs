//! `stapo train`

mod screen;

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::option::threads;
use crate::shared::program::{PROGRAM, writer};
use crate::shared::run_folder::{self, Use};
use crate::shared::stop;
use anyhow::{Result, bail};
use screen::Screen;
use stapo_core::record::{Metrics, StopReason};
use stapo_rl::device::{DeviceName, cuda};
use stapo_rl::run::Run;
use stapo_rl::train::{Interrupted, Outcome, Trainer, train};
use stapo_rl::{Plan, identity};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

/// Trains a policy by reinforcement learning.
///
/// Without a config it runs STAPO on the built-in model and task, on the CPU, in minutes. Ctrl-C finishes the step,
/// saves, and says how to go on; a second one ends at once, and the run can still go on from its last checkpoint.
#[derive(clap::Args)]
pub struct Args {
    /// What to run, as TOML; absent keys keep the defaults of the built-in run.
    config: Option<PathBuf>,

    /// Changes one value of the config, as in rollout.group_size=16; may be repeated. With --resume: steps, evaluation,
    /// record and canaries, and what no bit depends on.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// The run folder; by default runs/<time>-<name>.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Goes on with an interrupted run, to the same bits as if it had not been.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "out"])]
    resume: Option<PathBuf>,

    /// Goes on although the plan, the data, the model or the verifier changed since the run was saved, and records it.
    #[arg(long, requires = "resume")]
    accept_changes: bool,

    /// Ends with the process that writes to standard input, as an experiment's runs do.
    #[arg(long, hide = true)]
    tied: bool,

    /// Prints metrics as JSON lines on standard output instead of a view on standard error.
    #[arg(long)]
    json: bool,

    /// cpu, cuda or cuda:N, in place of the config's.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,

    /// Threads on the CPU; all cores by default. The results are the same bits for every number.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let stop = stop::on_signals()?;
    if args.tied {
        stop::tie_to_parent(&stop)?;
    }
    let (plan, mut run, mut trainer) = match &args.resume {
        Some(folder) => reopen(args, folder)?,
        None => begin(args)?,
    };
    allow_command::warn(&trainer.task);
    allow_command::record(plan.rewards.iter().map(|reward| &reward.verifier));
    for text in run.warnings() {
        eprintln!("warning: {text}");
    }
    if let Some(chosen) = trainer.memory().chosen() {
        eprintln!("memory: {chosen}");
    }
    let history: Vec<Metrics> = Run::read_metrics(run.folder())?;
    let mut screen = Screen::new(&plan, run.folder(), &history, args.json, stop.clone());
    // A GPU that is lost unwinds out of the loop, and the run folder should tell.
    let outcome = cuda::guard(|| train(&plan, &mut run, &mut trainer, &mut screen));
    let outcome = match outcome {
        Ok(outcome) => outcome?,
        Err(lost) => {
            // Where the event cannot be written, the error that ended the run is shown all the same.
            let _ = run.record_stop(StopReason::Error, &lost.to_string());
            return Err(lost.into());
        }
    };
    screen.finish(outcome)?;
    let is_stopped = outcome == Outcome::Stopped;
    Ok(if is_stopped { ExitCode::from(stop.exit_status()) } else { ExitCode::SUCCESS })
}

fn begin(args: &Args) -> Result<(Plan, Run, Trainer)> {
    let (text, plan) = run_folder::read_plan(args.config.as_deref(), &settings(args))?;
    let folder = args.out.clone().unwrap_or_else(|| default_folder(&plan.config.name));
    if folder.exists() {
        bail!(stapo_rl::Error::exists(&folder));
    }
    for note in plan.notes() {
        eprintln!("note: {note}");
    }
    // The model and the task are opened before the run folder is made, so that a bad config leaves no folder behind.
    let device = run_folder::device(plan.device(), args.threads, Use::of(&plan))?;
    let trainer = Trainer::new(&plan, &device, args.allow.of_config(args.config.as_deref()))?;
    let identity = identity::of_plan(&plan, PROGRAM)?;
    let run = Run::create(&folder, &text, &plan.to_toml(), identity, &writer(plan.device()))?;
    Ok((plan, run, trainer))
}

fn reopen(args: &Args, folder: &Path) -> Result<(Plan, Run, Trainer)> {
    let interrupted = Interrupted::open(folder, &settings(args), args.accept_changes, PROGRAM)?;
    for error in &interrupted.reopening.refused {
        eprintln!("warning: {error}; going back to the checkpoint before");
    }
    let plan = &interrupted.plan;
    let device = run_folder::device(plan.device(), args.threads, Use::of(plan))?;
    let writer = writer(plan.device());
    Ok(interrupted.resume(&writer, &device, args.allow.of_run())?)
}

/// The settings of the command line: `--set`, and `--device` as one of them.
fn settings(args: &Args) -> Vec<String> {
    let device = args.device.map(|device| format!("device={device}"));
    args.set.iter().cloned().chain(device).collect()
}

/// `runs/<UTC time>-<name>`, with a number appended if that folder exists.
fn default_folder(name: &str) -> PathBuf {
    let stem = format!("{}-{name}", crate::shared::clock::stamp(SystemTime::now()));
    let numbered = (2..).map(|n| Path::new("runs").join(format!("{stem}-{n}")));
    std::iter::once(Path::new("runs").join(&stem))
        .chain(numbered)
        .find(|folder| !folder.exists())
        .unwrap_or_default()
}
