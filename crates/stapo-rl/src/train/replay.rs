//! Steps made again, to be compared with what a run recorded of them.

use super::Trainer;
use super::recorder::{Recorded, Recorder};
use super::steps::StepResult;
use crate::error::Result;
use crate::plan::config::Plan;
use crate::run::best::BestSoFar;
use stapo_core::record::{Best, Metrics};

/// A step that was made again.
pub struct Replayed {
    /// The hash of the state after the step.
    pub state_hash: String,
    /// What the run records of such a step, on rank 0.
    pub recorded: Option<Recorded>,
}

/// The best evaluation of a run with these metrics.
pub fn best_of(plan: &Plan, history: &[Metrics]) -> Option<Best> {
    BestSoFar::from_history(plan, history).best().cloned()
}

impl Trainer {
    /// Evaluates as a run does before its first step, on every rank. Rank 0 has the recorder. Returns the files of samples and
    /// episodes.
    pub fn replay_start(
        &mut self,
        plan: &Plan,
        recorder: Option<&mut Recorder>,
    ) -> Result<Vec<(String, String)>> {
        self.open_benchmarks(plan)?;
        let before = self.evaluate(plan)?;
        Ok(recorder.map(|recorder| recorder.start(before)).unwrap_or_default())
    }

    /// Makes one step, followed by an evaluation on request, on every rank. Rank 0 has the recorder.
    pub fn replay_step(
        &mut self,
        plan: &Plan,
        recorder: Option<&mut Recorder>,
        evaluates: bool,
    ) -> Result<Replayed> {
        let rolled = self.roll_out(plan)?;
        let learned = self.learn(plan, &rolled)?;
        let state_hash = self.learner.state_hash()?;
        let evaluation = if evaluates {
            self.open_benchmarks(plan)?;
            Some(self.evaluate(plan)?)
        } else {
            None
        };
        let result = StepResult {
            rolled: &rolled,
            learned: &learned,
            state_sha256: Some(state_hash.clone()),
            evaluation,
        };
        let recorded = recorder.map(|recorder| recorder.record(plan, self, result)).transpose()?;
        Ok(Replayed { state_hash, recorded })
    }
}
