//! The training loop.

use crate::canary;
use crate::config::{ModelSource, Plan};
use crate::error::{Error, Result};
use crate::learner::Learner;
use crate::loaded_model::LoadedModel;
use crate::memory;
use crate::records::{Phases, explored_records, metrics, response_records, silenced_records};
use crate::rollout::{RolledOut, held_out_accuracy, roll_out};
use crate::run::{Checkpoint, Run, is_due};
use crate::task::{Programs, Task};
use crate::update::{Learned, MinibatchContext, learn};
use stapo_core::record::Metrics;
use stapo_model::decoder::Policy;
use stapo_model::generate::EngineMemory;
use stapo_model::{Device, Pretrained};
use std::path::Path;

/// Observes a run step by step, and may end the run.
pub trait Watch {
    /// Receives the held-out accuracy before the first step.
    fn started(&mut self, accuracy: f64);
    fn stepped(&mut self, metrics: &Metrics);
    fn warned(&mut self, text: &str);
    /// Called after every step; true saves and ends the run.
    fn wants_stop(&mut self) -> bool;
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Done,
    /// The target accuracy was reached.
    TargetReached,
    /// The observer ended the run, which can be resumed.
    Stopped,
}

/// The state of a run.
pub struct Trainer {
    pub learner: Learner,
    pub task: Task,
    /// The frozen policy of a KL penalty.
    reference: Option<Policy>,
    /// The rollout engine's memory, kept from one rollout to the next.
    engine_memory: EngineMemory,
}

impl Trainer {
    /// The state before the first step.
    pub fn new(plan: &Plan, device: &Device, programs: Programs) -> Result<Self> {
        // The task is opened first: a verifier program that may not start is refused before a model is loaded.
        let task = Task::open_with(&plan.task, programs)?;
        if let ModelSource::Path { path } = &plan.config.model {
            memory::check(plan, &Pretrained::read_config(Path::new(path))?, device)?;
        }
        let model = LoadedModel::open(&plan.config.model, device)?;
        model.check(plan)?;
        let reference = reference(plan, &model, device)?;
        let learner = Learner::new(model, plan.optimizer())?;
        Ok(Self { learner, task, reference, engine_memory: EngineMemory::new() })
    }

    /// Samples the rollout batch of the next step.
    pub fn roll_out(&mut self, plan: &Plan) -> Result<RolledOut> {
        let Learner { model, counters, .. } = &self.learner;
        let step = counters.step + 1;
        let memory = &mut self.engine_memory;
        let rolled = roll_out(model, memory, &self.task, plan, step, counters.position)?;
        canary::check_verdicts(plan, step, &rolled.batch)?;
        Ok(rolled)
    }

    /// Share of right answers on held-out problems with the present weights.
    fn held_out_accuracy(&mut self, plan: &Plan) -> Result<f64> {
        let Learner { model, counters, .. } = &self.learner;
        held_out_accuracy(model, &mut self.engine_memory, &self.task, plan, counters.step)
    }

    /// Makes all optimizer steps of one rollout batch, which completes the training step.
    pub fn learn<'a>(&mut self, plan: &Plan, rolled: &'a RolledOut) -> Result<Vec<Learned<'a>>> {
        let step = self.learner.counters.step + 1;
        let mut learned = Vec::new();
        let mut rest = rolled.advantages.as_slice();
        for groups in rolled.batch.minibatches(plan.config.update.problems_per_minibatch) {
            let (advantages, after) = rest.split_at(groups.iter().map(|group| group.members.len()).sum());
            rest = after;
            for pass in 0..plan.objective.n_passes() {
                let context = MinibatchContext { step, is_on_policy: learned.is_empty(), pass };
                let reference = self.reference.as_ref();
                let update = learn(&mut self.learner, reference, plan, groups, advantages, context)?;
                canary::check_learned(plan, step, context.is_on_policy, &update)?;
                learned.push(update);
            }
        }
        self.learner.counters.step = step;
        self.learner.counters.position += rolled.n_drawn;
        Ok(learned)
    }
}

/// The frozen policy of a KL penalty; `None` for an objective without one.
fn reference(plan: &Plan, model: &LoadedModel, device: &Device) -> Result<Option<Policy>> {
    if !plan.objective.needs_reference() {
        return Ok(None);
    }
    let source = plan.config.reference.as_ref().unwrap_or(&plan.config.model);
    let policy = LoadedModel::open(source, device)?.policy;
    let own = model.policy.config().vocabulary;
    let other = policy.config().vocabulary;
    if own != other {
        return Err(Error::Misfit {
            key: "reference",
            problem: format!("has a vocabulary of {other}, the model one of {own}"),
            remedy: "a KL penalty compares distributions over the same tokens: take a reference of the same family",
        });
    }
    Ok(Some(policy))
}

/// Trains from the trainer's step to the plan's last step.
pub fn train(plan: &Plan, run: &mut Run, trainer: &mut Trainer, watch: &mut dyn Watch) -> Result<Outcome> {
    let mut first = Run::read_metrics::<Metrics>(run.folder())?.into_iter().next();
    let mut accuracy_before = None;
    let n_kept = plan.config.record.keep_checkpoints;
    if trainer.learner.counters.step == 0 {
        let accuracy = trainer.held_out_accuracy(plan)?;
        accuracy_before = Some(accuracy);
        watch.started(accuracy);
        trainer.learner.save(run, n_kept)?;
    }
    while trainer.learner.counters.step < plan.config.steps {
        let mut phases = Phases::start();
        let rolled = trainer.roll_out(plan)?;
        phases.rolled_out(rolled.n_sampled);
        let learned = trainer.learn(plan, &rolled)?;
        phases.updated(&learned);
        let step = trainer.learner.counters.step;

        let mut metrics = metrics(step, &rolled, &learned, &phases);
        metrics.eval_accuracy_before = accuracy_before.take();
        if is_due(step, plan.config.evaluation.every_steps) || step == plan.config.steps {
            metrics.eval_accuracy = Some(trainer.held_out_accuracy(plan)?);
        }
        let model = &trainer.learner.model;
        run.write_silenced(step, &silenced_records(step, model, &learned)?)?;
        run.write_explored(step, &explored_records(step, model, &learned)?)?;
        if step == 1 || is_due(step, plan.config.record.responses_every_steps) {
            let n = plan.config.record.responses;
            run.write_responses(step, &response_records(step, model, &learned, n)?)?;
        }
        if is_due(step, plan.config.record.state_hash_every_steps) {
            run.add_state_hash(step, trainer.learner.state_hash());
        }
        run.add_metrics(&metrics)?;
        watch.stepped(&metrics);
        for text in canary::warnings(plan, first.as_ref(), &metrics, &rolled.batch) {
            watch.warned(&text);
        }

        let target = plan.config.evaluation.target_accuracy;
        let is_reached =
            metrics.eval_accuracy.zip(target).is_some_and(|(accuracy, target)| accuracy >= target);
        let is_stopped = watch.wants_stop();
        let is_last = step == plan.config.steps;
        if is_reached || is_stopped || is_last || is_due(step, plan.config.record.checkpoint_every_steps) {
            trainer.learner.save(run, n_kept)?;
        }
        first = first.or(Some(metrics));
        if is_reached {
            return Ok(Outcome::TargetReached);
        }
        if is_stopped && !is_last {
            return Ok(Outcome::Stopped);
        }
    }
    Ok(Outcome::Done)
}

/// The trainer of an interrupted run at the newest good checkpoint, and the errors of newer checkpoints that were
/// refused.
pub fn resume(
    folder: &Path,
    plan: &Plan,
    device: &Device,
    programs: Programs,
) -> Result<(Run, Trainer, Vec<Error>)> {
    let (checkpoint, refused) = Checkpoint::newest(folder)?;
    let Some(checkpoint) = checkpoint else {
        let problem = match refused.first() {
            Some(error) => format!("no good checkpoint: {error}"),
            None => "no checkpoint".to_string(),
        };
        let remedy = "start the run again with another --out";
        return Err(Error::NoRun { folder: folder.to_owned(), problem, remedy });
    };
    let mut trainer = Trainer::new(plan, device, programs)?;
    trainer.learner.restore(&checkpoint)?;
    Ok((Run::reopen::<Metrics>(folder, checkpoint.counters.step)?, trainer, refused))
}
