//! The training loop of every rank but the first: the same steps, with no folder and no display. Rank 0 decides when to save
//! and when to end.

use super::report::{Decision, StepReport};
use super::{Outcome, Trainer};
use crate::error::Result;
use crate::plan::config::Plan;
use crate::ranks::{Ranks, told_to_all};
use crate::run::is_due;
use crate::run::meter::Phase;

/// Trains beside rank 0 until it ends the run. `asked_to_stop` gives the number of the
/// signal that asked this process to stop.
pub fn follow(
    plan: &Plan,
    trainer: &mut Trainer,
    asked_to_stop: &dyn Fn() -> Option<i32>,
) -> Result<Outcome> {
    let ranks = Ranks::clone(trainer.ranks());
    told_to_all(&*ranks, follow_steps(plan, trainer, asked_to_stop))
}

fn follow_steps(
    plan: &Plan,
    trainer: &mut Trainer,
    asked_to_stop: &dyn Fn() -> Option<i32>,
) -> Result<Outcome> {
    if trainer.learner.counters.step == 0 {
        trainer.learner.check_finite()?;
        trainer.evaluate(plan)?;
    }
    if let Some(outcome) = conclude(trainer)? {
        return Ok(outcome);
    }
    while trainer.learner.counters.step < plan.config.steps {
        if let Some(outcome) = step(plan, trainer, asked_to_stop)? {
            return Ok(outcome);
        }
    }
    Ok(Outcome::Done)
}

fn step(
    plan: &Plan,
    trainer: &mut Trainer,
    asked_to_stop: &dyn Fn() -> Option<i32>,
) -> Result<Option<Outcome>> {
    let rolled = trainer.roll_out(plan)?;
    trainer.learn(plan, &rolled)?;
    trainer.meter.enter(Phase::Record);
    let step = trainer.learner.counters.step;
    let is_hashed = is_due(step, plan.config.record.state_hash_every_steps);
    let is_evaluated = is_due(step, plan.config.evaluation.every_steps) || step == plan.config.steps;
    if is_hashed || is_evaluated {
        trainer.learner.check_finite()?;
    }
    if is_hashed {
        trainer.learner.state_hash()?;
    }
    if is_evaluated {
        trainer.evaluate(plan)?;
    }
    let seconds = trainer.meter.take();
    StepReport::of(&mut trainer.learner, &seconds, asked_to_stop()).gather(&**trainer.ranks())?;
    conclude(trainer)
}

/// Does what rank 0 has decided.
fn conclude(trainer: &Trainer) -> Result<Option<Outcome>> {
    let Decision { n_sent, outcome } = Decision::receive(&**trainer.ranks())?;
    trainer.learner.send_state(n_sent)?;
    Ok(outcome)
}
