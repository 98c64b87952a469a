//! One run of an experiment as a separate process, so that a crash of one run leaves the others alone.

use super::minutes::TimeLimit;
use super::show::Progress;
use crate::shared::program::PROGRAM;
use crate::shared::run_folder;
use crate::shared::run_status::{has_ended, last_turn};
use anyhow::{Context, Result, bail};
use stapo_core::record::{self, Arm, Metrics, StopReason, changed_inputs};
use stapo_core::settings::RawConfig;
use stapo_rl::plan::config::ModelSource;
use stapo_rl::policy::identity;
use stapo_rl::run::disk::rename;
use stapo_rl::run::restart;
use stapo_rl::run::{Checkpoint, Freedom, Run, freedom, plan_differences, read_events, receipt};
use stapo_rl::{Config, Plan};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

pub struct Job<'a> {
    pub folder: &'a Path,
    pub arm: &'a Arm,
    pub threads: usize,
    pub leashes: &'a Leashes,
    pub limit: Option<&'a TimeLimit<'a>>,
}

pub enum Finished {
    Done,
    /// A signal stopped the run, which has saved a checkpoint.
    Stopped,
    /// The run did not start, since it needs this time and would not have ended within the limit.
    Left(Duration),
}

impl Job<'_> {
    fn run_folder(&self) -> PathBuf {
        self.folder.join(&self.arm.run)
    }

    pub fn run(&self, view: &Progress) -> Result<Finished> {
        let out = self.run_folder();
        let state = self.state(&out)?;
        if let ArmState::Complete = state {
            return Ok(Finished::Done);
        }
        if let Some(limit) = self.limit
            && let Some(needed) = limit.too_long(self.folder, self.arm, self.config()?.steps)
        {
            return Ok(Finished::Left(needed));
        }
        let mut command = restart::command().context("starting the run")?;
        command.args(["train", "--tied", "--json", "--threads", &self.threads.to_string()]);
        if let ArmState::Interrupted = state {
            command.arg("--resume").arg(&out);
        } else {
            command.arg(self.folder.join("config.toml")).arg("--out").arg(&out);
            command.args(self.arm.settings.iter().flat_map(|setting| ["--set", setting]));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("starting the run")?;
        let leash = child.stdin.take().context("the run's standard input")?;
        let held = self.leashes.hold(leash);
        // A thread drains standard error while this one reads the metrics, so that neither pipe fills up and blocks the
        // run.
        let stderr = child.stderr.take().context("the run's standard error")?;
        let said = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = BufReader::new(stderr).read_to_string(&mut text);
            text
        });
        let stdout = child.stdout.take().context("the run's standard output")?;
        for line in BufReader::new(stdout).lines() {
            if let Ok(metrics) = record::parse::<Metrics>(&line.context("the run's metrics")?) {
                view.stepped(self.arm, &metrics);
            }
        }
        let status = child.wait().context("the run's end")?;
        self.leashes.let_go(held);
        let said = said.join().unwrap_or_default();
        match status.code() {
            Some(0) => Ok(Finished::Done),
            Some(129 | 130 | 143) => Ok(Finished::Stopped),
            Some(_) => {
                let error = said.lines().skip_while(|line| !line.starts_with("error")).collect::<Vec<_>>();
                bail!("{}", error.join("\n"))
            }
            None => bail!("killed: {status}"),
        }
    }

    /// What the arm's folder holds. A folder that cannot continue is moved aside, never removed.
    fn state(&self, out: &Path) -> Result<ArmState> {
        if !out.exists() {
            return Ok(ArmState::New);
        }
        let opened = Checkpoint::newest(out);
        let has_steps = std::fs::metadata(out.join("metrics.jsonl")).is_ok_and(|file| file.len() > 0);
        let checkpoint = match opened {
            // An interrupted start has neither a checkpoint nor a step, and continues from its plan.
            Ok((None, refused)) if refused.is_empty() && !has_steps && out.join("plan.toml").is_file() => {
                None
            }
            // A run that came to its end needs its checkpoints no more: somebody made room.
            Ok((None, refused)) if refused.is_empty() && self.is_sealed_end(out)? => None,
            Ok((Some(checkpoint), _)) => Some(checkpoint),
            Ok((None, _)) | Err(_) => {
                move_aside(out)?;
                return Ok(ArmState::New);
            }
        };
        let plan = self.check_identity(out, checkpoint.as_ref())?;
        let is_complete = checkpoint.map_or(has_steps, |checkpoint| is_complete(out, &plan, &checkpoint));
        Ok(if is_complete { ArmState::Complete } else { ArmState::Interrupted })
    }

    /// Whether the run in a folder without checkpoints has its receipt and came to the end that the experiment asks for.
    fn is_sealed_end(&self, out: &Path) -> Result<bool> {
        let Ok(plan) = run_folder::plan(out) else { return Ok(false) };
        let metrics: Vec<Metrics> = Run::read_metrics(out).unwrap_or_default();
        let Some(last) = metrics.last() else { return Ok(false) };
        let steps = plan.config.steps;
        Ok(receipt::of_folder(out).is_some()
            && has_ended(&read_events(out).unwrap_or_default(), last.step, steps)
            && steps == self.config()?.steps)
    }

    fn config(&self) -> Result<Config> {
        let config = std::fs::read_to_string(self.folder.join("config.toml"))?;
        let raw = RawConfig::new(&config, self.arm.settings.iter().map(String::as_str))?;
        Ok(Config::for_model(raw, |source| source.shape().ok())?)
    }

    /// Refuses a folder that holds the run of another arm, or of this arm with other inputs. Returns the run's plan.
    fn check_identity(&self, out: &Path, checkpoint: Option<&Checkpoint>) -> Result<Plan> {
        let mut expected = Plan::resolve(self.config()?)?;
        expected.pin_models(ModelSource::find)?;
        let found = run_folder::plan(out)?;
        let expected_text = expected.to_toml();
        let mut changes = plan_differences(&expected_text, &expected_text, &found.to_toml())?;
        changes.retain(|change| freedom(change) != Freedom::Free);
        if let Some(provenance) = checkpoint.and_then(|checkpoint| checkpoint.provenance.as_ref()) {
            let now = identity::of_plan(&expected, PROGRAM)?;
            changes.extend(changed_inputs(&provenance.identity.inputs, &now.inputs));
        }
        if !changes.is_empty() {
            let changes: Vec<String> = changes.iter().map(ToString::to_string).collect();
            bail!(
                "folder {}: holds another run than arm {:?} with seed {}\n  {}\nhint: put back what changed, or start the experiment again with another --out",
                out.display(),
                self.arm.name,
                self.arm.seed,
                changes.join("\n  ")
            );
        }
        Ok(found)
    }
}

enum ArmState {
    New,
    Interrupted,
    Complete,
}

/// Renames a folder to `NAME.aside-1`, or the next number that is free.
fn move_aside(folder: &Path) -> Result<()> {
    let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut numbered = (1..u32::MAX).map(|n| folder.with_file_name(format!("{name}.aside-{n}")));
    let free = numbered.find(|path| !path.exists());
    let aside = free.context("a free name")?;
    eprintln!("{}: no checkpoint can be read; moved to {}", folder.display(), aside.display());
    Ok(rename(folder, &aside)?)
}

/// Whether the run has all steps of its plan, or reached its target accuracy or the end of its patience, its last step is
/// saved, and the run has its receipt, which is the last it writes. A run that lacks nothing but the receipt gets one by
/// going on.
fn is_complete(run: &Path, plan: &Plan, checkpoint: &Checkpoint) -> bool {
    if receipt::of_folder(run).is_none() {
        return false;
    }
    let events = read_events(run).unwrap_or_default();
    let ended = last_turn(&events).map(|event| event.reason);
    // A program that recorded no events shows its state by its steps alone.
    let is_patient = !matches!(ended, Some(Some(StopReason::NoImprovement | StopReason::NothingLearned)));
    if is_patient && !matches!(ended, None | Some(Some(StopReason::Done | StopReason::TargetReached))) {
        return false;
    }
    let metrics: Vec<Metrics> = Run::read_metrics(run).unwrap_or_default();
    let Some(last) = metrics.last() else { return false };
    let is_reached =
        last.eval_accuracy.zip(plan.config.evaluation.target_accuracy).is_some_and(|(a, t)| a >= t);
    (last.step >= plan.config.steps || is_reached || !is_patient) && checkpoint.counters.step == last.step
}

/// The standard inputs of the runs in progress. A run ends when its input closes, and so with this process in whatever
/// way this process ends.
#[derive(Default)]
pub struct Leashes {
    held: Mutex<BTreeMap<u64, ChildStdin>>,
    n_held: AtomicU64,
}

impl Leashes {
    fn hold(&self, leash: ChildStdin) -> u64 {
        let number = self.n_held.fetch_add(1, Ordering::SeqCst);
        self.held.lock().unwrap_or_else(PoisonError::into_inner).insert(number, leash);
        number
    }

    fn let_go(&self, number: u64) {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
    }

    /// Asks every run to finish its step, save and stop, as the signal of that number does.
    pub fn stop(&self, signal: i32) {
        for leash in self.held.lock().unwrap_or_else(PoisonError::into_inner).values_mut() {
            // A run that has ended reads no more.
            let _ = writeln!(leash, "{signal}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_go_on_is_kept_under_the_next_free_name() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("arm/seed-0");
        for n in 1..=3 {
            std::fs::create_dir_all(&run).unwrap();
            std::fs::write(run.join("metrics.jsonl"), format!("{n}")).unwrap();
            move_aside(&run).unwrap();
            let aside = folder.path().join(format!("arm/seed-0.aside-{n}/metrics.jsonl"));
            assert_eq!((std::fs::read_to_string(aside).unwrap(), run.exists()), (n.to_string(), false));
        }
    }
}
