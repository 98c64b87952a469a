//! `stapo train`

mod screen;

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::run_folder::{self, Use, hash_bytes, hash_file};
use crate::shared::stop;
use anyhow::{Result, bail};
use screen::Screen;
use stapo_core::record::{Extra, Manifest, Metrics, SCHEMA};
use stapo_rl::Plan;
use stapo_rl::config::ModelSource;
use stapo_rl::device::{Device, DeviceName};
use stapo_rl::run::Run;
use stapo_rl::task::TaskSpec;
use stapo_rl::train::{Outcome, Trainer, resume, train};
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

    /// Changes one value of the config, as in rollout.group_size=16; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// The run folder; by default runs/<time>-<name>.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Goes on with an interrupted run, to the same bits as if it had not been.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "set", "out"])]
    resume: Option<PathBuf>,

    /// Prints metrics as JSON lines on standard output instead of a view on standard error.
    #[arg(long)]
    json: bool,

    /// cpu, cuda or cuda:N, in place of the config's.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,

    /// Threads on the CPU; all cores by default. The results are the same bits for every number.
    #[arg(long)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let (plan, mut run, mut trainer) = match &args.resume {
        Some(folder) => reopen(args, folder)?,
        None => begin(args)?,
    };
    let history: Vec<Metrics> = Run::read_metrics(run.folder())?;
    let mut screen = Screen::new(&plan, run.folder(), &history, args.json, stop::on_ctrl_c()?);
    let outcome = train(&plan, &mut run, &mut trainer, &mut screen)?;
    screen.finish(outcome)?;
    Ok(if outcome == Outcome::Stopped { ExitCode::from(130) } else { ExitCode::SUCCESS })
}

/// The device that `--device` names, else the plan's.
fn device(args: &Args, plan: &Plan) -> Result<Device> {
    run_folder::device(args.device.unwrap_or(plan.device()), args.threads, Use::of(plan))
}

fn begin(args: &Args) -> Result<(Plan, Run, Trainer)> {
    let mut set = args.set.clone();
    set.extend(args.device.map(|device| format!("device={device}")));
    let (text, plan) = run_folder::read_plan(args.config.as_deref(), &set)?;
    let folder = args.out.clone().unwrap_or_else(|| default_folder(&plan.config.name));
    if folder.exists() {
        bail!(stapo_rl::Error::RunExists { folder });
    }
    for note in plan.notes() {
        eprintln!("note: {note}");
    }
    // The model and the task are opened before the run folder is made, so that a bad config leaves no folder behind.
    let programs = args.allow.of_config(args.config.as_deref());
    let trainer = Trainer::new(&plan, &device(args, &plan)?, programs)?;
    allow_command::warn(&trainer.task);
    let run = Run::create(&folder, &text, &plan.to_toml(), manifest(&text, &plan)?)?;
    allow_command::record(&plan.task);
    Ok((plan, run, trainer))
}

fn reopen(args: &Args, folder: &Path) -> Result<(Plan, Run, Trainer)> {
    let plan = run_folder::plan(folder)?;
    let (run, trainer, refused) = resume(folder, &plan, &device(args, &plan)?, args.allow.of_run())?;
    allow_command::warn(&trainer.task);
    allow_command::record(&plan.task);
    for error in refused {
        eprintln!("warning: {error}; going back to the checkpoint before");
    }
    Ok((plan, run, trainer))
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

/// The manifest of a new run: the hashes of its config, plan, program, data and weights.
pub fn manifest(config: &str, plan: &Plan) -> Result<Manifest> {
    let mut inputs =
        vec![hash_bytes("config", config.as_bytes()), hash_bytes("plan", plan.to_toml().as_bytes())];
    if let Ok(program) = std::env::current_exe() {
        inputs.push(hash_file("program", &program)?);
    }
    if let TaskSpec::Jsonl(rows) | TaskSpec::Parquet(rows) = &plan.task {
        inputs.push(hash_file("data", &rows.path)?);
    }
    match &plan.config.model {
        ModelSource::Builtin => inputs.push(hash_bytes("weights", stapo_rl::builtin_weights())),
        ModelSource::Path { path } => inputs.extend(run_folder::hash_weights(Path::new(path))?),
    }
    Ok(Manifest { schema: SCHEMA, inputs, steps: Vec::new(), extra: Extra::new() })
}
