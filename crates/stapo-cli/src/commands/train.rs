//! `stapo train`

mod progress;
mod screen;

use crate::shared::allow_command::{self, AllowCommand};
use crate::shared::machine::free_disk;
use crate::shared::model::Fetch;
use crate::shared::option::threads;
use crate::shared::program::PROGRAM;
use crate::shared::ranks::{self, Joined, RankFlags};
use crate::shared::stop::{GivesUp, Stop};
use crate::shared::tensorboard::EventFile;
use crate::shared::units::size;
use crate::shared::{run_folder, shipped, stop};
use anyhow::{Result, bail};
use screen::Screen;
use stapo_core::record::{EventKind, Metrics, StopReason};
use stapo_rl::Plan;
use stapo_rl::device::{DeviceName, cuda};
use stapo_rl::lab::evaluation::Evaluated;
use stapo_rl::plan::disk::DiskPlan;
use stapo_rl::policy::identity;
use stapo_rl::run::Run;
use stapo_rl::run::meter::Phase;
use stapo_rl::train::{Interrupted, Outcome, Trainer, Watch, follow, train};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Trains a policy by reinforcement learning.
///
/// Without a config it runs STAPO on the built-in model and task, on the CPU, in minutes. Ctrl-C finishes the step,
/// saves, and prints the command that continues the run. A second Ctrl-C ends at once; --resume then continues from the
/// last checkpoint.
#[derive(clap::Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is a flag of the command line")]
pub struct Args {
    /// What to run: a TOML file, whose absent keys keep the defaults of the built-in run, or a shipped config by name,
    /// such as grpo; --list names them.
    config: Option<PathBuf>,

    /// The model to train, instead of the config's: a Hugging Face folder, a GGUF file, a run folder (its newest
    /// checkpoint), RUN@STEP, builtin, or a name on the hub such as Qwen/Qwen3-0.6B.
    #[arg(long, value_name = "MODEL")]
    model: Option<String>,

    #[command(flatten)]
    fetch: Fetch,

    /// Changes one value of the config, as in rollout.group_size=16; may be repeated. With --resume: steps, evaluation,
    /// record and canaries, and keys that do not affect results.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,

    /// The run folder; by default runs/TIME-NAME.
    #[arg(short, long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Writes event files for TensorBoard while training, into the folder tensorboard of the run.
    #[arg(long)]
    tensorboard: bool,

    /// Continues an interrupted run. The result has the same bits as that of an uninterrupted run.
    #[arg(long, value_name = "RUN", conflicts_with_all = ["config", "out"])]
    resume: Option<PathBuf>,

    /// Continues although the plan, the data, the model or the verifier changed since the run was saved, and records the
    /// change.
    #[arg(long, requires = "resume")]
    accept_changes: bool,

    /// Lists the shipped configs and ends.
    #[arg(long, exclusive = true)]
    list: bool,

    /// Ends with the process that writes to standard input, as an experiment's runs do.
    #[arg(long, hide = true)]
    tied: bool,

    /// Prints metrics as JSON lines on standard output instead of a view on standard error.
    #[arg(long)]
    json: bool,

    /// cpu, cuda or cuda:N, instead of the config's.
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,

    /// Threads on the CPU; all cores by default. The number of threads does not change results.
    #[arg(long, value_parser = threads)]
    threads: Option<usize>,

    #[command(flatten)]
    allow: AllowCommand,

    #[command(flatten)]
    ranks: RankFlags,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    if args.list {
        shipped::print(&shipped::CONFIGS);
        return Ok(ExitCode::SUCCESS);
    }
    let stop = stop::on_signals()?;
    if args.tied {
        stop::tie_to_parent(&stop)?;
    }
    ranks::work_until_asked(
        &args.ranks,
        &stop,
        |joined| lead(args, joined, &stop),
        |joined| follow_lead(args, joined, &stop),
    )
}

/// What every rank but the first does: the same steps without a folder or a display.
fn follow_lead(args: &Args, joined: &Joined, stop: &Stop) -> Result<ExitCode> {
    let plan = if args.resume.is_some() {
        let text = joined.ranks.broadcast(&[])?;
        run_folder::resolved(&String::from_utf8_lossy(&text))?
    } else {
        let (_, mut plan) = read_plan(args)?;
        args.fetch.pin(&mut plan)?;
        plan
    };
    let (device, ranks, _) = joined.open(&plan, args.threads, || identity::of_plan(&plan, PROGRAM))?;
    let programs = match args.resume {
        Some(_) => args.allow.of_run(),
        None => args.allow.of_config(args.config.as_deref()),
    };
    let mut trainer = Trainer::on_ranks(&plan, &device, programs, ranks)?;
    if args.resume.is_some() {
        trainer.restore(None)?;
    }
    trainer.open_benchmarks(&plan)?;
    stop.show_by(|_, _| ());
    heed(stop, &mut trainer);
    let outcome = follow(&plan, &mut trainer, &|| stop.is_raised().then(|| stop.signal()))?;
    let is_signalled = outcome == Outcome::Stopped && stop.is_raised();
    Ok(if is_signalled { ExitCode::from(stop.exit_status()) } else { ExitCode::SUCCESS })
}

/// What a process that trains alone does, and rank 0 of several.
fn lead(args: &Args, joined: &Joined, stop: &Stop) -> Result<ExitCode> {
    let (plan, mut run, mut trainer) = match &args.resume {
        Some(folder) => reopen(args, folder, joined)?,
        None => begin(args, joined, stop)?,
    };
    heed(stop, &mut trainer);
    let verifiers = plan.rewards.iter().map(|reward| &reward.verifier);
    allow_command::announce(Some(&trainer.task), verifiers, plan.config.environment.as_ref(), run.warnings());
    if let Some(chosen) = trainer.memory().chosen() {
        eprintln!("memory: {chosen}");
    }
    for text in trainer.task.warnings() {
        run.record(EventKind::Warning, &text)?;
    }
    let history: Vec<Metrics> = Run::read_metrics(run.folder())?;
    let events = args.tensorboard.then(|| EventFile::begin(run.folder(), &history)).transpose()?;
    let meter = trainer.meter();
    let screen = Screen::new(&plan, run.folder(), &history, meter, args.json, stop.clone());
    let mut watch = TrainWatch { screen, events, stop: stop.clone() };
    // A GPU that is lost unwinds out of the loop, and the run folder should record it.
    let outcome = cuda::guard(|| train(&plan, &mut run, &mut trainer, &mut watch));
    let outcome = match outcome {
        Ok(outcome) => outcome?,
        Err(lost) => {
            // Where the event cannot be written, the error that ended the run is shown all the same.
            let _ = run.settle();
            let _ = run.record_stop(StopReason::Error, &lost.to_string()).and_then(|()| run.seal());
            return Err(lost.into());
        }
    };
    watch.screen.finish(outcome, Run::read_best(run.folder())?.as_ref())?;
    let is_stopped = outcome == Outcome::Stopped;
    Ok(if is_stopped { ExitCode::from(stop.exit_status()) } else { ExitCode::SUCCESS })
}

/// Lets a signal abandon what is being sampled: all of it before this process has trained, and a rollout where it is urgent.
fn heed(stop: &Stop, trainer: &mut Trainer) {
    let (asked, meter) = (stop.clone(), trainer.meter());
    let abandon = trainer.abandon_when(move || asked.request());
    stop.give_up_by(move || match meter.now().map(|moment| moment.phase) {
        _ if !abandon.has_trained() => GivesUp::Everything,
        Some(Phase::Rollout | Phase::Environment | Phase::Grade) => GivesUp::IfUrgent,
        _ => GivesUp::Nothing,
    });
    stop.begin_work();
}

/// Shows a run, and writes its steps for TensorBoard where this is asked for.
struct TrainWatch {
    screen: Screen,
    events: Option<EventFile>,
    stop: Stop,
}

impl Watch for TrainWatch {
    fn started(&mut self, before: &Evaluated) {
        self.screen.started(before);
    }

    fn stepped(&mut self, metrics: &Metrics) {
        self.screen.stepped(metrics);
        // The event file can be made from the metrics at any time, so a failure to write it does not end the run.
        if let Some(Err(error)) = self.events.as_mut().map(|events| events.add(metrics)) {
            self.screen
                .warned(&format!("TensorBoard: {error:#}; stapo report --tensorboard makes the file later"));
            self.events = None;
        }
    }

    fn warned(&mut self, text: &str) {
        self.screen.warned(text);
    }

    fn wants_stop(&mut self) -> bool {
        self.screen.wants_stop()
    }

    fn waits_for_checkpoint(&mut self, step: u64) {
        self.screen.waits_for_checkpoint(step);
    }

    fn stop_reason(&self) -> String {
        self.screen.stop_reason()
    }

    fn asked_elsewhere(&mut self, signal: i32) {
        self.stop.raise(signal);
    }
}

fn begin(args: &Args, joined: &Joined, stop: &Stop) -> Result<(Plan, Run, Trainer)> {
    let (text, mut plan) = read_plan(args)?;
    let folder = run_folder::new_folder(args.out.as_deref(), &plan.config.name)?;
    let notes = plan.notes();
    for note in &notes {
        eprintln!("note: {note}");
    }
    args.fetch.pin(&mut plan)?;
    // The model and the task are opened before the run folder is made, so that a bad config leaves no folder behind.
    let (device, ranks, identity) = joined.open(&plan, args.threads, || identity::of_plan(&plan, PROGRAM))?;
    let programs = args.allow.of_config(args.config.as_deref());
    let mut trainer = Trainer::on_ranks(&plan, &device, programs, ranks)?;
    trainer.open_benchmarks(&plan)?;
    let disk = disk_warning(&plan, &trainer, &folder)?;
    if let Some(text) = &disk {
        eprintln!("warning: {text}");
    }
    stop.begin_work();
    let mut run = Run::create(&folder, &text, &plan.to_toml(), identity, &joined.writer(plan.device()))?;
    for note in notes.iter().chain(&disk) {
        run.record(EventKind::Warning, note)?;
    }
    Ok((plan, run, trainer))
}

fn reopen(args: &Args, folder: &Path, joined: &Joined) -> Result<(Plan, Run, Trainer)> {
    let interrupted = Interrupted::open(folder, &settings(args), args.accept_changes, PROGRAM)?;
    run_folder::warn_of_refused(&interrupted.reopening);
    let plan = &interrupted.plan;
    joined.ranks.broadcast(plan.to_toml().as_bytes())?;
    let (device, ranks, _) = joined.open(plan, args.threads, || Ok(interrupted.identity().clone()))?;
    let writer = joined.writer(plan.device());
    Ok(interrupted.resume(&writer, &device, args.allow.of_run(), ranks)?)
}

/// Refuses a run whose first checkpoint has no room on the disk; returns a word where later ones have none.
fn disk_warning(plan: &Plan, trainer: &Trainer, folder: &Path) -> Result<Option<String>> {
    let keep = plan.config.record.keep_checkpoints;
    free_disk(folder).map_or(Ok(None), |free| compare_disk(trainer.disk(plan), free, keep, folder))
}

fn compare_disk(planned: DiskPlan, free: u64, keep: usize, folder: &Path) -> Result<Option<String>> {
    let DiskPlan { first_bytes, most_bytes, n_most } = planned;
    if most_bytes <= free {
        return Ok(None);
    }
    let text = format!(
        "the disk of {} has {} free, and the run will keep up to {n_most} checkpoints of {}, {} in all (record.keep_checkpoints = {keep}, the best one, and the one being written)",
        folder.display(),
        size(free),
        size(first_bytes),
        size(most_bytes)
    );
    if first_bytes > free {
        bail!(
            "{text}: not even the first one fits\nhint: free {} or name a folder on another disk with --out; a lower record.keep_checkpoints helps only later ones",
            size(first_bytes - free)
        );
    }
    Ok(Some(format!("{text}; a lower record.keep_checkpoints or record.optimizer = \"last\" takes less")))
}

fn read_plan(args: &Args) -> Result<(String, Plan)> {
    run_folder::read_plan(args.config.as_deref(), &settings(args), |source| args.fetch.shape(source))
}

/// The settings of the command line: `--set`, and `--device` and `--model` as two of them.
fn settings(args: &Args) -> Vec<String> {
    let device = args.device.map(|device| format!("device={device}"));
    let model = args.model.as_ref().map(|model| format!("model={}", toml::Value::String(model.clone())));
    args.set.iter().cloned().chain(device).chain(model).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_checkpoint_without_room_is_refused_and_later_ones_are_told() {
        let planned = DiskPlan { first_bytes: 3 << 30, most_bytes: 12 << 30, n_most: 4 };
        let compare = |free: u64| compare_disk(planned, free, 2, Path::new("runs/a"));
        assert_eq!(compare(12 << 30).unwrap(), None);
        let warning = compare((12 << 30) - 1).unwrap().unwrap();
        assert!(
            warning.contains("up to 4 checkpoints of 3.0 GiB, 12.0 GiB in all (record.keep_checkpoints = 2"),
            "{warning}"
        );
        assert!(warning.ends_with("record.optimizer = \"last\" takes less"), "{warning}");
        assert!(compare(3 << 30).unwrap().is_some());
        let refused = compare(2 << 30).unwrap_err().to_string();
        assert!(refused.contains("not even the first one fits\nhint: free 1.0 GiB"), "{refused}");
    }

    #[derive(clap::Parser)]
    struct Given {
        #[command(flatten)]
        args: Args,
    }

    /// Later settings win, so that a flag of its own stands above the same key in `--set`.
    #[test]
    fn flags_of_their_own_come_after_the_settings() {
        let words =
            ["train", "--device", "cuda:1", "--set", "device=cpu", "--model", "a b", "--set", "steps=3"];
        let given = <Given as clap::Parser>::parse_from(words).args;
        let expected = ["device=cpu", "steps=3", "device=cuda:1", "model=\"a b\""];
        assert_eq!(settings(&given), expected);
        let none = <Given as clap::Parser>::parse_from(["train"]).args;
        assert_eq!(settings(&none), [""; 0]);
        let (_, plan) = read_plan(
            &<Given as clap::Parser>::parse_from(["train", "--device", "cpu", "--set", "steps=3"]).args,
        )
        .unwrap();
        assert_eq!((plan.config.steps, plan.device()), (3, DeviceName::Cpu));
    }
}
