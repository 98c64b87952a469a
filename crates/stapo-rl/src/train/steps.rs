//! The steps of a run as all ranks make them together. Every message between ranks is sent from here, in one order for all
//! roles: two orders would let ranks wait for each other for ever.

use super::report::{Decision, StepReport};
use super::{Outcome, Trainer};
use crate::error::{Error, Result};
use crate::lab::evaluation::Evaluated;
use crate::learn::constants::RolledOut;
use crate::learn::update::Learned;
use crate::plan::config::{Keeping, Plan};
use crate::run::meter::Phase;
use crate::run::{Run, is_due};
use stapo_core::record::{EpisodeRecord, EvalRecord, PhaseSeconds};

/// An evaluation, with the samples of its benchmarks and what environments answered in held-out episodes.
pub(super) struct Evaluation {
    pub evaluated: Evaluated,
    pub samples: Vec<EvalRecord>,
    pub episodes: Vec<EpisodeRecord>,
}

/// What all ranks know of a step that they have made.
pub(super) struct StepResult<'a> {
    pub rolled: &'a RolledOut,
    pub learned: &'a [Learned<'a>],
    /// The hash of the state after the step, where the plan asks for one.
    pub state_sha256: Option<String>,
    pub evaluation: Option<Evaluation>,
}

/// What one rank does on its own in a step: rank 0 writes the run folder and decides. A role sends no message.
pub(super) trait Role {
    /// What the role keeps of a step until all ranks have reported.
    type Written;

    /// Takes the evaluation of a run that has made no step, where the plan asks for one, and says how the run continues.
    fn begin(&mut self, trainer: &Trainer, before: Option<Evaluation>) -> Result<Option<Decision>>;
    /// Takes the signal for which a rollout was abandoned, and says what is saved.
    fn abandoned(&mut self, trainer: &Trainer, signal: i32) -> Option<Decision>;
    fn write(&mut self, trainer: &Trainer, result: StepResult) -> Result<Self::Written>;
    /// The number of the signal that asked this rank to stop.
    fn signal(&self) -> Option<i32>;
    /// Takes this rank's seconds and the reports of all, and says what comes after the step. Rank 0 decides for all; the
    /// others say nothing.
    fn decide(
        &mut self,
        trainer: &Trainer,
        written: Self::Written,
        seconds: PhaseSeconds,
        reports: &[StepReport],
    ) -> Result<Option<Decision>>;
    /// The run folder and what is kept of its checkpoints, on rank 0.
    fn folder(&mut self) -> Option<(&mut Run, Keeping)>;
}

/// Makes the steps from the trainer's to the plan's last, or until rank 0 ends the run.
pub(super) fn make_steps<R: Role>(plan: &Plan, trainer: &mut Trainer, role: &mut R) -> Result<Outcome> {
    trainer.open_benchmarks(plan)?;
    let is_fresh = trainer.learner.counters.step == 0;
    if is_fresh {
        trainer.learner.check_finite()?;
    }
    let before = if is_fresh && plan.config.evaluation.at_start {
        match trainer.evaluate(plan) {
            Err(Error::Abandoned { signal }) => {
                role.abandoned(trainer, signal);
                return Ok(Outcome::Stopped);
            }
            evaluation => Some(evaluation?),
        }
    } else {
        None
    };
    let decision = role.begin(trainer, before)?;
    let mut end = carry_out(plan, trainer, role, decision)?;
    trainer.learner.prepare_saving(role.folder().map(|(run, _)| run));
    while end.is_none() && trainer.learner.counters.step < plan.config.steps {
        end = step(plan, trainer, role)?;
    }
    Ok(end.unwrap_or(Outcome::Done))
}

/// Makes one step. Returns how the run ended, where this step ends it before the last.
fn step<R: Role>(plan: &Plan, trainer: &mut Trainer, role: &mut R) -> Result<Option<Outcome>> {
    trainer.meter.set_step(trainer.learner.counters.step + 1);
    let rolled = match trainer.roll_out(plan) {
        Err(Error::Abandoned { signal }) => {
            let decision = role.abandoned(trainer, signal);
            return carry_out(plan, trainer, role, decision);
        }
        rolled => rolled?,
    };
    let learned = trainer.learn(plan, &rolled)?;
    trainer.meter.enter(Phase::Record);
    let (state_sha256, evaluation) = measure(plan, trainer)?;
    trainer.meter.enter(Phase::Record);
    let result = StepResult { rolled: &rolled, learned: &learned, state_sha256, evaluation };
    let written = role.write(trainer, result)?;
    let seconds = trainer.meter.take();
    let report = StepReport::since_last(&mut trainer.learner, &seconds, role.signal());
    let reports = report.gather(&**trainer.ranks())?;
    let decision = role.decide(trainer, written, seconds, &reports)?;
    carry_out(plan, trainer, role, decision)
}

/// The state hash and the evaluation of a step that has them. A state that is not finite is refused before it is hashed or
/// evaluated.
fn measure(plan: &Plan, trainer: &mut Trainer) -> Result<(Option<String>, Option<Evaluation>)> {
    let config = &plan.config;
    let step = trainer.learner.counters.step;
    let is_hashed = is_due(step, config.record.state_hash_every_steps);
    let is_evaluated = is_due(step, config.evaluation.every_steps) || step == config.steps;
    if is_hashed || is_evaluated {
        trainer.learner.check_finite()?;
    }
    let state_sha256 = if is_hashed { Some(trainer.learner.state_hash()?) } else { None };
    let evaluation = if is_evaluated { Some(trainer.evaluate(plan)?) } else { None };
    Ok((state_sha256, evaluation))
}

/// Does what rank 0 has decided.
fn carry_out<R: Role>(
    plan: &Plan,
    trainer: &mut Trainer,
    role: &mut R,
    decision: Option<Decision>,
) -> Result<Option<Outcome>> {
    let Decision { saving, outcome } = Decision::share(decision, &**trainer.ranks())?;
    let is_end = outcome.is_some() || trainer.learner.counters.step >= plan.config.steps;
    if trainer.learner.part.is_under_way()
        && (is_end || saving.is_some() || trainer.learner.is_written_by_all()?)
    {
        trainer.meter.enter(Phase::CheckpointWait);
        trainer.learner.land_part(role.folder().map(|(run, _)| run))?;
    }
    if let Some((run, _)) = role.folder() {
        run.settle_if_landed()?;
        if saving.is_some() && run.step_in_flight().is_some() {
            trainer.meter.enter(Phase::CheckpointWait);
            run.settle()?;
        }
    }
    if let Some(saving) = saving {
        trainer.meter.enter(Phase::Checkpoint);
        trainer.learner.save_on_all_ranks(saving, role.folder())?;
        if is_end {
            trainer.learner.land_part(role.folder().map(|(run, _)| run))?;
        }
    }
    Ok(outcome)
}

/// A rank with no folder and no display.
pub(super) struct Follower<'a> {
    pub asked_to_stop: &'a dyn Fn() -> Option<i32>,
}

impl Role for Follower<'_> {
    type Written = ();

    fn begin(&mut self, _: &Trainer, _: Option<Evaluation>) -> Result<Option<Decision>> {
        Ok(None)
    }

    fn abandoned(&mut self, _: &Trainer, _: i32) -> Option<Decision> {
        None
    }

    fn write(&mut self, _: &Trainer, _: StepResult) -> Result<()> {
        Ok(())
    }

    fn signal(&self) -> Option<i32> {
        (self.asked_to_stop)()
    }

    fn decide(&mut self, _: &Trainer, (): (), _: PhaseSeconds, _: &[StepReport]) -> Result<Option<Decision>> {
        Ok(None)
    }

    fn folder(&mut self) -> Option<(&mut Run, Keeping)> {
        None
    }
}
