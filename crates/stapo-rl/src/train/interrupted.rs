//! Going on with an interrupted run.

use super::Trainer;
use crate::error::Result;
use crate::plan::config::{Config, Plan};
use crate::policy::identity;
use crate::ranks::{RankError, Ranks};
use crate::reward::Programs;
use crate::rollout::{AnswerUse, RecordedAnswers};
use crate::run::{Checkpoint, Reopening, Run, RunKind, part_files, recorded_answers, records_of_file};
use stapo_core::Verdict;
use stapo_core::record::{self, EpisodeRecord, Identity, Metrics, Record, ResponseRecord, Writer};
use stapo_model::Device;
use std::path::Path;

/// An interrupted run that has been locked and compared; nothing in its folder has changed.
pub struct Interrupted {
    pub plan: Plan,
    pub reopening: Reopening,
    identity: Identity,
}

impl Interrupted {
    /// Opens a run to continue with `set` applied to its plan. What changed since the checkpoint is refused by name, unless
    /// changes are accepted.
    pub fn open(folder: &Path, set: &[String], accept_changes: bool, program: &str) -> Result<Self> {
        RunKind::Training.check(folder)?;
        let resolve = |text: &str, set: &[String]| -> Result<Plan> {
            let config = Config::from_toml(text, set.iter().map(String::as_str))?;
            Ok(Plan::resolve(config)?)
        };
        let complete = |text: &str| Ok(resolve(text, &[])?.to_toml());
        let mut reopening = Reopening::open(folder, &complete)?;
        let plan = resolve(&reopening.plan_text, set)?;
        if !set.is_empty() {
            reopening.set(plan.to_toml(), &complete)?;
        }
        let identity = identity::of_plan(&plan, program)?;
        reopening.compare(&identity, accept_changes)?;
        let per_step = plan.updates_per_step() as u64;
        reopening.check_steps(plan.config.steps, plan.config.update.schedule, |steps| steps * per_step)?;
        Ok(Self { plan, reopening, identity })
    }

    /// The inputs of the run, as they are.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// The run and its trainer at the newest good checkpoint, or at the start if there is none yet. Of several ranks,
    /// rank 0 resumes, and the others call [`Trainer::restore`] without a checkpoint.
    pub fn resume(
        self,
        writer: &Writer,
        device: &Device,
        programs: Programs,
        ranks: Ranks,
    ) -> Result<(Plan, Run, Trainer)> {
        let Interrupted { plan, mut reopening, identity } = self;
        let mut trainer = Trainer::on_ranks(&plan, device, programs, ranks)?;
        let answers = if plan.replays_answers() { reopening.keep_answers()? } else { Vec::new() };
        trainer.restore_with(reopening.checkpoint.as_ref(), &answers)?;
        trainer.open_benchmarks(&plan)?;
        let run = reopening.commit::<Metrics>(identity, writer)?;
        Ok((plan, run, trainer))
    }
}

/// Responses, by problem, that the checkpoint's run recorded as over a limit of time.
fn recorded_time_outs(checkpoint: &Checkpoint) -> Result<Vec<(String, String)>> {
    let Some(run) = checkpoint.path.parent().and_then(Path::parent) else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for file in part_files(run, "rollouts")? {
        let responses: Vec<ResponseRecord> = records_of_file(&file)?;
        let late = responses.into_iter().filter(|response| response.verdict == Verdict::OverBudget);
        found.extend(late.map(|response| (response.problem_id, response.text)));
    }
    Ok(found)
}

/// The answers of environments that the checkpoint's run recorded.
fn recorded_episodes(checkpoint: &Checkpoint) -> Result<Vec<EpisodeRecord>> {
    let Some(run) = checkpoint.path.parent().and_then(Path::parent) else { return Ok(Vec::new()) };
    recorded_answers(run, checkpoint.counters.step)
}

impl Trainer {
    /// Takes over the state of a checkpoint on every rank. Rank 0 has the checkpoint, or none where the run was interrupted
    /// before its first; the others give none.
    pub fn restore(&mut self, checkpoint: Option<&Checkpoint>) -> Result<()> {
        let has_episodes = self.task.has_episodes();
        let answers =
            checkpoint.filter(|_| has_episodes).map_or_else(|| Ok(Vec::new()), recorded_episodes)?;
        self.restore_with(checkpoint, &answers)
    }

    /// As [`Trainer::restore`], with the answers of environments that the run replays.
    fn restore_with(&mut self, checkpoint: Option<&Checkpoint>, answers: &[EpisodeRecord]) -> Result<()> {
        let has_one = self.ranks().broadcast(&[u8::from(checkpoint.is_some())])?;
        if has_one.first() == Some(&1) {
            self.learner.restore_from(checkpoint)?;
        }
        if self.task.has_time_outs() {
            let recorded = checkpoint.map_or_else(|| Ok(Vec::new()), recorded_time_outs)?;
            let bytes = serde_json::to_vec(&recorded).unwrap_or_default();
            let bytes = self.ranks().broadcast(&bytes)?;
            self.task.remember_time_outs(serde_json::from_slice(&bytes).unwrap_or_default());
        }
        if self.task.has_episodes() {
            let lines: String = answers.iter().map(Record::to_line).collect();
            let lines = self.ranks().broadcast(lines.as_bytes())?;
            let read = record::parse_lines(&String::from_utf8_lossy(&lines));
            let records = read.map_err(|error| RankError { rank: 0, problem: error.to_string() })?.records;
            self.recorded = RecordedAnswers::new(records, AnswerUse::default());
        }
        Ok(())
    }
}
