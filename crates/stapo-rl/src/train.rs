//! The loop.

use crate::canary;
use crate::config::{Model, Plan};
use crate::error::{Error, Result};
use crate::estimate;
use crate::policy::Student;
use crate::rollout::{RolledOut, held_out_accuracy, roll_out};
use crate::run::{Checkpoint, Counters, Run, is_due, state_hash};
use crate::task::Task;
use crate::telling::{Phases, explored_records, metrics, response_records, silenced_records};
use crate::update::{Learned, Learner, Turn, learn};
use stapo_core::record::Metrics;
use stapo_model::decoder::{Gradients, Policy};
use stapo_model::optimizer::Optimizer;
use stapo_model::{Device, Pretrained};
use std::path::Path;

/// Whoever looks at a run while it goes, and may end it.
pub trait Watch {
    /// Held-out accuracy before the first step.
    fn started(&mut self, accuracy: f64);
    fn stepped(&mut self, metrics: &Metrics);
    fn warned(&mut self, text: &str);
    /// Asked after every step; the run is saved when this says true.
    fn wants_stop(&mut self) -> bool;
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Done,
    /// The target accuracy was reached.
    TargetReached,
    /// It was asked to stop, and can go on.
    Stopped,
}

/// Everything that changes in a run.
pub struct Trainer {
    pub student: Student,
    pub task: Task,
    optimizer: Optimizer,
    gradients: Gradients,
    reference: Option<Policy>,
    pub counters: Counters,
}

impl Trainer {
    /// The state before the first step. `base` is where a built-in model is unpacked.
    pub fn new(plan: &Plan, base: &Path, device: &Device) -> Result<Self> {
        if let Model::Path { path } = &plan.config.model {
            estimate::check(plan, &Pretrained::read_config(Path::new(path))?, device)?;
        }
        let student = Student::open(&plan.config.model, base, device)?;
        student.check(plan)?;
        let reference = reference(plan, &student, base, device)?;
        Ok(Self {
            optimizer: Optimizer::new(&student.policy, plan.optimizer())?,
            gradients: Gradients::zeros(&student.policy)?,
            task: Task::open(&plan.task)?,
            student,
            reference,
            counters: Counters::default(),
        })
    }

    /// The state of a checkpoint.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.restore(&mut self.student.policy, &mut self.optimizer)?;
        self.counters = checkpoint.counters;
        Ok(())
    }

    /// Hash of weights, optimizer state and counters.
    pub fn state_hash(&self) -> String {
        state_hash(self.counters, &self.student.policy, &self.optimizer)
    }

    fn save(&self, plan: &Plan, run: &Run) -> Result<()> {
        let keep = plan.config.record.keep_checkpoints;
        Checkpoint::save(run.folder(), self.counters, &self.student.policy, &self.optimizer, keep)?;
        run.write_manifest()
    }

    /// Samples the rollout batch of the next step.
    pub fn roll_out(&self, plan: &Plan) -> Result<RolledOut> {
        let step = self.counters.step + 1;
        let rolled = roll_out(&self.student, &self.task, plan, step, self.counters.position)?;
        canary::check_verdicts(plan, step, &rolled.batch)?;
        Ok(rolled)
    }

    /// All optimizer steps of one rollout batch: the step is done.
    pub fn learn<'a>(&mut self, plan: &Plan, rolled: &'a RolledOut) -> Result<Vec<Learned<'a>>> {
        let step = self.counters.step + 1;
        let mut learned = Vec::new();
        for groups in rolled.batch.minibatches(plan.config.update.problems_per_minibatch) {
            for pass in 0..plan.objective.n_passes() {
                let turn = Turn { step, is_on_policy: learned.is_empty(), pass };
                let mut learner = Learner {
                    policy: &mut self.student.policy,
                    optimizer: &mut self.optimizer,
                    gradients: &mut self.gradients,
                    reference: self.reference.as_ref(),
                };
                let update = learn(&mut learner, plan, groups, turn, &mut self.counters)?;
                canary::check_learned(plan, step, turn.is_on_policy, &update)?;
                learned.push(update);
            }
        }
        self.counters.step = step;
        self.counters.position += rolled.n_drawn;
        Ok(learned)
    }
}

/// The frozen policy of a KL penalty, where the objective has one.
fn reference(plan: &Plan, student: &Student, base: &Path, device: &Device) -> Result<Option<Policy>> {
    if !plan.objective.needs_reference() {
        return Ok(None);
    }
    let model = plan.config.reference.as_ref().unwrap_or(&plan.config.model);
    let policy = Student::open(model, base, device)?.policy;
    let (own, other) = (student.policy.config().vocabulary, policy.config().vocabulary);
    if own != other {
        return Err(Error::Misfit {
            key: "reference",
            problem: format!("has a vocabulary of {other}, the model one of {own}"),
            remedy: "a KL penalty compares distributions over the same tokens: take a reference of the same family",
        });
    }
    Ok(Some(policy))
}

/// Trains from where `trainer` is to the end of the plan.
pub fn train(plan: &Plan, run: &mut Run, trainer: &mut Trainer, watch: &mut dyn Watch) -> Result<Outcome> {
    let mut first = Run::read_metrics::<Metrics>(run.folder())?.into_iter().next();
    let mut accuracy_before = None;
    if trainer.counters.step == 0 {
        let accuracy = held_out_accuracy(&trainer.student, &trainer.task, plan, 0)?;
        accuracy_before = Some(accuracy);
        watch.started(accuracy);
        trainer.save(plan, run)?;
    }
    while trainer.counters.step < plan.config.steps {
        let mut phases = Phases::start();
        let rolled = trainer.roll_out(plan)?;
        phases.rolled_out(rolled.n_sampled);
        let learned = trainer.learn(plan, &rolled)?;
        phases.updated(&learned);
        let step = trainer.counters.step;

        let mut metrics = metrics(step, &rolled, &learned, &phases);
        metrics.eval_accuracy_before = accuracy_before.take();
        if is_due(step, plan.config.evaluation.every_steps) || step == plan.config.steps {
            metrics.eval_accuracy = Some(held_out_accuracy(&trainer.student, &trainer.task, plan, step)?);
        }
        run.write_silenced(step, &silenced_records(step, &trainer.student, &learned)?)?;
        run.write_explored(step, &explored_records(step, &trainer.student, &learned)?)?;
        if step == 1 || is_due(step, plan.config.record.responses_every_steps) {
            let n = plan.config.record.responses;
            run.write_responses(step, &response_records(step, &trainer.student, &learned, n)?)?;
        }
        if is_due(step, plan.config.record.state_hash_every_steps) {
            run.add_state_hash(step, trainer.state_hash());
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
            trainer.save(plan, run)?;
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

/// The trainer of a run that was interrupted, and why newer checkpoints than its own were refused.
pub fn resume(folder: &Path, plan: &Plan, device: &Device) -> Result<(Run, Trainer, Vec<Error>)> {
    let (checkpoint, refused) = Checkpoint::newest(folder)?;
    let Some(checkpoint) = checkpoint else {
        let problem = match refused.first() {
            Some(error) => format!("no good checkpoint: {error}"),
            None => "no checkpoint".to_string(),
        };
        let remedy = "start the run again with another --out";
        return Err(Error::NoRun { folder: folder.to_owned(), problem, remedy });
    };
    let mut trainer = Trainer::new(plan, &base_folder(folder, plan), device)?;
    trainer.restore(&checkpoint)?;
    Ok((Run::reopen::<Metrics>(folder, checkpoint.counters.step)?, trainer, refused))
}

/// Where a run keeps the built-in model it started from.
pub fn base_folder(run: &Path, plan: &Plan) -> std::path::PathBuf {
    match plan.config.model {
        Model::Builtin => run.join("base"),
        Model::Path { .. } => run.to_owned(),
    }
}
