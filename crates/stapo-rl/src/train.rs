//! The training loop.

use crate::canary;
use crate::carried::Carried;
use crate::config::{Config, Plan, PlanError};
use crate::constants::{RolledOut, Scorers};
use crate::error::{Error, Result};
use crate::identity;
use crate::learner::Learner;
use crate::loaded_model::LoadedModel;
use crate::memory::{self, MemoryPlan};
use crate::records::{Phases, explored_records, metrics, response_records, silenced_records};
use crate::rollout::{ForeignRollouts, held_out_accuracy, roll_out};
use crate::run::{Reopening, Run, is_due};
use crate::run_memory::RunMemory;
use crate::task::{Programs, Task};
use crate::teacher::Teacher;
use crate::update::{Learned, MinibatchContext, learn};
use stapo_core::record::{EventKind, Identity, Metrics, StopReason, Writer};
use stapo_model::Device;
use stapo_model::decoder::Policy;
use stapo_model::optimizer::Optimizer;
use std::path::Path;

/// Observes a run step by step, and may end the run.
pub trait Watch {
    /// Receives the held-out accuracy before the first step.
    fn started(&mut self, accuracy: f64);
    fn stepped(&mut self, metrics: &Metrics);
    fn warned(&mut self, text: &str);
    /// Called after every step; true saves and ends the run.
    fn wants_stop(&mut self) -> bool;
    /// Why the observer ended the run, such as the name of a signal.
    fn stop_reason(&self) -> String {
        "asked to stop".to_string()
    }
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
    /// What a distillation learns from.
    teacher: Option<Teacher>,
    /// Rollouts that another engine sampled, for a run that does not sample its own.
    foreign: Option<ForeignRollouts>,
    /// The memory of rollouts and updates, kept from step to step.
    memory: RunMemory,
}

impl Trainer {
    /// The state before the first step.
    pub fn new(plan: &Plan, device: &Device, programs: Programs) -> Result<Self> {
        // The task is opened first: a verifier program that may not start is refused before a model is loaded.
        let further = plan.rewards.iter().skip(1).map(|reward| &reward.verifier);
        let task = Task::with_verifiers(&plan.task, further, programs)?;
        let free = device.memory().map(|(free, _)| free as u64);
        let shape = memory::shape(&plan.config.model)?;
        let planned = memory::resolve(plan, &shape, &memory::frozen(plan)?, free);
        memory::check(&planned, device)?;
        let model = LoadedModel::open(&plan.config.model, device)?;
        model.check(plan)?;
        let reference = reference(plan, &model, device)?;
        let teacher = Teacher::open(plan, &model, &task, device)?;
        let foreign = ForeignRollouts::open(plan, &model, &task)?;
        let optimizer = Optimizer::new(&model.policy, plan.optimizer())?;
        let (memory, gradients) = RunMemory::new(plan, planned, &model.policy)?;
        let learner = Learner::with_gradients(model, optimizer, gradients);
        Ok(Self { learner, task, reference, teacher, foreign, memory })
    }

    /// What the run takes of its device's memory, and what the settings left to the program became.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory.planned
    }

    /// Samples the rollout batch of the next step.
    pub fn roll_out(&mut self, plan: &Plan) -> Result<RolledOut> {
        let Learner { model, counters, .. } = &self.learner;
        let step = counters.step + 1;
        let position = counters.position;
        let sampled = match &self.foreign {
            Some(foreign) => {
                foreign.roll_out(self.memory.score(), model, &self.task, plan, step, position)?
            }
            None => roll_out(model, self.memory.sample(), &self.task, plan, step, position)?,
        };
        canary::check_verdicts(plan, step, &sampled.batch)?;
        let (reference, teacher) = (self.reference.as_ref(), self.teacher.as_ref());
        let scorers = Scorers { pass: self.memory.score(), model, reference, teacher };
        RolledOut::prepare(scorers, &self.task, plan, step, sampled)
    }

    /// Share of right answers on held-out problems with the present weights.
    fn held_out_accuracy(&mut self, plan: &Plan) -> Result<f64> {
        let Learner { model, counters, .. } = &self.learner;
        held_out_accuracy(model, self.memory.sample(), &self.task, plan, counters.step)
    }

    /// Adds the state hash and the held-out accuracy to the metrics of a step that has them. A state that is not finite
    /// is refused before it is hashed or evaluated.
    fn measure(&mut self, plan: &Plan, metrics: &mut Metrics) -> Result<()> {
        let step = metrics.step;
        let is_hashed = is_due(step, plan.config.record.state_hash_every_steps);
        let is_evaluated = is_due(step, plan.config.evaluation.every_steps) || step == plan.config.steps;
        if is_hashed || is_evaluated {
            self.learner.check_finite()?;
        }
        if is_hashed {
            metrics.state_sha256 = Some(self.learner.state_hash());
        }
        if is_evaluated {
            metrics.eval_accuracy = Some(self.held_out_accuracy(plan)?);
        }
        Ok(())
    }

    /// Makes all optimizer steps of one rollout batch, which completes the training step. With reuse, the batch is used
    /// several times, until the gate closes.
    pub fn learn<'a>(&mut self, plan: &Plan, rolled: &'a RolledOut) -> Result<Vec<Learned<'a>>> {
        let step = self.learner.counters.step + 1;
        let mut carried = Carried::read(&self.learner.loop_state)?;
        let passes = self.memory.update(&mut self.learner.gradients);
        let mut learned: Vec<Learned> = Vec::new();
        let minibatches = rolled.minibatches(plan);
        let uses =
            (0..plan.max_uses()).flat_map(|use_idx| minibatches.iter().map(move |own| (use_idx, *own)));
        let updates = uses.flat_map(|own| (0..plan.objective.n_passes()).map(move |pass| (own, pass)));
        for ((use_idx, minibatch), pass) in updates {
            let is_on_policy = learned.is_empty() && !plan.has_behavior_of_sampler();
            let context = MinibatchContext { step, use_idx, is_on_policy, pass };
            let update = learn(&mut self.learner, passes, &mut carried, plan, minibatch, context)?;
            canary::check_learned(plan, step, is_on_policy, &update)?;
            let is_gated = update.is_gated();
            learned.push(update);
            if is_gated {
                break;
            }
        }
        carried.write(plan, &mut self.learner.loop_state);
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

/// Trains from the trainer's step to the plan's last step, and records how the run ended.
pub fn train(plan: &Plan, run: &mut Run, trainer: &mut Trainer, watch: &mut dyn Watch) -> Result<Outcome> {
    let outcome = train_steps(plan, run, trainer, watch);
    // Where the event cannot be written, the caller learns of the error that ended the run.
    let _ = match &outcome {
        Ok(Outcome::Done) => run.record_stop(StopReason::Done, ""),
        Ok(Outcome::TargetReached) => run.record_stop(StopReason::TargetReached, ""),
        Ok(Outcome::Stopped) => run.record_stop(StopReason::Signal, &watch.stop_reason()),
        Err(error) => record_error(run, error),
    };
    outcome
}

fn record_error(run: &mut Run, error: &Error) -> Result<()> {
    let text = error.to_string();
    if let Error::Canary { .. } = error {
        run.record(EventKind::Canary, &text)?;
    }
    run.record_stop(StopReason::Error, &text)
}

fn train_steps(plan: &Plan, run: &mut Run, trainer: &mut Trainer, watch: &mut dyn Watch) -> Result<Outcome> {
    let mut first = Run::read_metrics::<Metrics>(run.folder())?.into_iter().next();
    for text in canary::switched_off(plan) {
        run.record(EventKind::Warning, &text)?;
        watch.warned(&text);
    }
    let mut accuracy_before = None;
    let n_kept = plan.config.record.keep_checkpoints;
    if trainer.learner.counters.step == 0 {
        trainer.learner.check_finite()?;
        let accuracy = trainer.held_out_accuracy(plan)?;
        accuracy_before = Some(accuracy);
        watch.started(accuracy);
    }
    trainer.learner.save(run, n_kept)?;
    while trainer.learner.counters.step < plan.config.steps {
        let mut phases = Phases::start();
        let rolled = trainer.roll_out(plan)?;
        phases.rolled_out(rolled.n_sampled);
        let learned = trainer.learn(plan, &rolled)?;
        phases.updated(&learned);

        let mut metrics = metrics(plan, trainer.learner.counters.step, &rolled, &learned, &phases);
        metrics.entropy_coefficient =
            Carried::read(&trainer.learner.loop_state)?.controls.entropy_coefficient;
        metrics.eval_accuracy_before = accuracy_before.take();
        if let Some(chosen) = trainer.memory().chosen() {
            metrics.extra.insert("memory".to_string(), serde_json::json!(chosen));
        }
        trainer.measure(plan, &mut metrics)?;
        write_records(plan, run, &trainer.learner.model, &learned, metrics.step)?;
        run.add_metrics(&metrics)?;
        watch.stepped(&metrics);
        for text in canary::warnings(plan, first.as_ref(), &metrics, &rolled.batch) {
            run.record(EventKind::Warning, &text)?;
            watch.warned(&text);
        }

        let step = metrics.step;
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

/// Writes what a step records besides its metrics.
fn write_records(plan: &Plan, run: &Run, model: &LoadedModel, learned: &[Learned], step: u64) -> Result<()> {
    run.write_silenced(step, &silenced_records(step, model, learned)?)?;
    run.write_explored(step, &explored_records(step, model, learned)?)?;
    if step == 1 || is_due(step, plan.config.record.responses_every_steps) {
        let n = plan.config.record.responses;
        run.write_responses(step, &response_records(plan, step, model, learned, n)?)?;
    }
    Ok(())
}

/// An interrupted run that has been locked and compared; nothing in its folder has changed.
pub struct Interrupted {
    pub plan: Plan,
    pub reopening: Reopening,
    identity: Identity,
}

impl Interrupted {
    /// Opens a run to go on with `set` applied to its plan. What changed since the checkpoint is refused by name, unless
    /// changes are accepted.
    pub fn open(folder: &Path, set: &[String], accept_changes: bool, program: &str) -> Result<Self> {
        let resolve = |text: &str, set: &[String]| -> Result<Plan> {
            let config = Config::from_toml(text, set.iter().map(String::as_str)).map_err(PlanError::from)?;
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
        reopening.check_steps(plan.config.steps)?;
        Ok(Self { plan, reopening, identity })
    }

    /// The run and its trainer at the newest good checkpoint, or at the start where there is none yet.
    pub fn resume(
        self,
        writer: &Writer,
        device: &Device,
        programs: Programs,
    ) -> Result<(Plan, Run, Trainer)> {
        let Interrupted { plan, reopening, identity } = self;
        let mut trainer = Trainer::new(&plan, device, programs)?;
        if let Some(checkpoint) = &reopening.checkpoint {
            trainer.learner.restore(checkpoint)?;
        }
        let run = reopening.commit::<Metrics>(identity, writer)?;
        Ok((plan, run, trainer))
    }
}
