//! One run of an experiment as a process of its own, so that a crash of one run leaves the others alone.

use super::show::Progress;
use crate::shared::run_folder;
use anyhow::{Context, Result, bail};
use stapo_core::record::{self, Arm, Metrics};
use stapo_rl::run::{Checkpoint, Run};
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub struct Job<'a> {
    pub folder: &'a Path,
    pub arm: &'a Arm,
    pub threads: usize,
}

pub enum Finished {
    Done,
    /// The run was interrupted and has saved a checkpoint.
    Stopped,
}

impl Job<'_> {
    fn run_folder(&self) -> PathBuf {
        self.folder.join(&self.arm.run)
    }

    pub fn run(&self, view: &Progress) -> Result<Finished> {
        let out = self.run_folder();
        if is_complete(&out) {
            return Ok(Finished::Done);
        }
        let mut command = Command::new(std::env::current_exe().context("this program's own path")?);
        command.arg("train");
        if Checkpoint::newest(&out).is_ok_and(|(checkpoint, _)| checkpoint.is_some()) {
            command.arg("--resume").arg(&out);
        } else {
            // A folder without a checkpoint holds no finished step: the run starts anew.
            if out.exists() {
                std::fs::remove_dir_all(&out).with_context(|| out.display().to_string())?;
            }
            command.arg(self.folder.join("config.toml")).arg("--out").arg(&out);
            command.args(self.arm.settings.iter().flat_map(|setting| ["--set", setting]));
        }
        command.args(["--json", "--threads", &self.threads.to_string()]);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().context("starting the run")?;
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
        let said = said.join().unwrap_or_default();
        match status.code() {
            Some(0) => Ok(Finished::Done),
            Some(130) => Ok(Finished::Stopped),
            _ => bail!(
                "{}",
                said.lines().skip_while(|line| !line.starts_with("error")).collect::<Vec<_>>().join("\n")
            ),
        }
    }
}

/// Whether the run has all steps of its plan, or reached its target accuracy, and its last step is saved.
fn is_complete(run: &Path) -> bool {
    let Ok(plan) = run_folder::plan(run) else { return false };
    let metrics: Vec<Metrics> = Run::read_metrics(run).unwrap_or_default();
    let Some(last) = metrics.last() else { return false };
    let is_reached =
        last.eval_accuracy.zip(plan.config.evaluation.target_accuracy).is_some_and(|(a, t)| a >= t);
    let saved = Checkpoint::newest(run).ok().and_then(|(checkpoint, _)| checkpoint);
    (last.step >= plan.config.steps || is_reached) && saved.is_some_and(|c| c.counters.step == last.step)
}
