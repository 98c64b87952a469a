//! The training loop.

mod follow;
mod interrupted;
mod report;

pub use follow::follow;
pub use interrupted::Interrupted;

use crate::error::{Error, Result};
use crate::lab::evaluation::{Benchmark, Evaluated, changed_questions, evaluate_benchmarks, open_benchmarks};
use crate::learn::canary;
use crate::learn::carried::Carried;
use crate::learn::constants::{Reference, RolledOut, Scorers};
use crate::learn::learner::Learner;
use crate::learn::memory::RunMemory;
use crate::learn::teacher::Teacher;
use crate::learn::update::{Learned, MinibatchContext, learn};
use crate::plan::config::{GradientSum, Plan};
use crate::plan::memory::{self, MemoryPlan, TrainedModel};
use crate::policy::loaded::LoadedModel;
use crate::ranks::{ExpectedLengths, Ranks, Solo, told_to_all};
use crate::reward::Programs;
use crate::rollout::{ForeignRollouts, PolicyScorer, Sampler};
use crate::run::best::BestSoFar;
use crate::run::meter::{Meter, Phase, memory_bytes};
use crate::run::records::{explored_records, metrics, response_records, set_times, silenced_records};
use crate::run::{Run, is_due};
use crate::tasks::Task;
use crate::tasks::prompting::fit_prompts;
use report::{Decision, StepReport};
use serde::{Deserialize, Serialize};
use stapo_core::record::{EvalRecord, EventKind, Metrics, StopReason};
use stapo_model::Device;
use std::sync::Arc;
use std::time::Instant;

/// Observes a run step by step, and may end the run.
pub trait Watch {
    /// Receives the evaluation before the first step.
    fn started(&mut self, before: &Evaluated);
    fn stepped(&mut self, metrics: &Metrics);
    fn warned(&mut self, text: &str);
    /// Called after every step; true saves and ends the run.
    fn wants_stop(&mut self) -> bool;
    /// Why the observer ended the run, such as the name of a signal.
    fn stop_reason(&self) -> String {
        "asked to stop".to_string()
    }
    /// Another rank was asked to stop by the signal of that number; the run saves and ends.
    fn asked_elsewhere(&mut self, _signal: i32) {}
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// All steps are done.
    Done,
    /// The target accuracy was reached.
    TargetReached,
    /// `evaluation.patience` evaluations in a row were no better than the best.
    NoImprovement,
    /// Every group had equal rewards in `evaluation.idle_patience` steps in a row.
    NothingLearned,
    /// The observer ended the run, which can be resumed.
    Stopped,
}

/// The state of a run.
pub struct Trainer {
    pub learner: Learner,
    pub task: Task,
    /// The frozen policy of a KL penalty.
    reference: Option<Reference>,
    /// What a distillation learns from.
    teacher: Option<Teacher>,
    /// Rollouts that another engine sampled, for a run that does not sample its own.
    foreign: Option<ForeignRollouts>,
    /// The memory of rollouts and updates, kept from step to step.
    pub(crate) memory: RunMemory,
    /// By which problems are dealt out to ranks.
    lengths: ExpectedLengths,
    /// What was found about the prompts at the start.
    warnings: Vec<String>,
    /// The benchmarks of the plan; `None` before they are opened.
    benchmarks: Option<Vec<Benchmark>>,
    meter: Arc<Meter>,
}

impl Trainer {
    /// The state before the first step.
    pub fn new(plan: &Plan, device: &Device, programs: Programs) -> Result<Self> {
        Self::over(plan, device, programs, Solo::ranks())
    }

    /// As [`Trainer::new`], as one of several ranks.
    pub fn over(plan: &Plan, device: &Device, programs: Programs, ranks: Ranks) -> Result<Self> {
        check_sum(plan, &ranks)?;
        // The task is opened first: a verifier program that may not start is refused before a model is loaded.
        let further = plan.rewards.iter().skip(1).map(|reward| &reward.verifier);
        let mut task = Task::with_verifiers(&plan.task, further, programs)?;
        let found = plan.config.model.find()?;
        let free = device.memory().map(|(free, _)| free as u64);
        let shape = found.shape()?;
        let trained = TrainedModel::from_plan(plan, &found, &shape)?;
        let planned = memory::resolve_for(plan, trained, &memory::frozen(plan)?, free, ranks.world());
        memory::check(&planned, device)?;
        let lora = plan.config.lora.as_ref();
        let mut model = LoadedModel::open_to_train(&found, lora, plan.config.seed, device)?;
        model.policy.share_masters(&*ranks)?;
        model.check(plan)?;
        let warnings = check_prompts(plan, &model, &mut task)?;
        let reference = Reference::open(plan, &model, device)?;
        let teacher = Teacher::open(plan, &model, &task, device)?;
        let foreign = ForeignRollouts::open(plan, &model, &task)?;
        let (memory, gradients) = RunMemory::new(plan, planned, &model.policy, &ranks)?;
        let learner = Learner::over(model, plan.optimizer(), gradients, ranks)?;
        Ok(Self {
            learner,
            task,
            reference,
            teacher,
            foreign,
            memory,
            lengths: ExpectedLengths::default(),
            warnings,
            benchmarks: None,
            meter: Arc::default(),
        })
    }

    /// What the run takes of its device's memory, and what the settings left to the program became.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory.planned
    }

    /// Counts what the trainer does, for displays.
    pub fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Opens the benchmarks of the plan, so that a missing file is told before a run begins. [`train`] opens them
    /// otherwise; replaying steps needs none.
    pub fn open_benchmarks(&mut self, plan: &Plan) -> Result<()> {
        if self.benchmarks.is_none() {
            self.benchmarks = Some(open_benchmarks(plan)?);
        }
        Ok(())
    }

    /// Samples the rollout batch of the next step.
    pub fn roll_out(&mut self, plan: &Plan) -> Result<RolledOut> {
        let Learner { model, counters, ranks, .. } = &self.learner;
        let ranks = ranks.as_ref();
        let step = counters.step + 1;
        let position = counters.position;
        let (task, meter) = (&self.task, self.meter.as_ref());
        meter.enter(Phase::Rollout);
        let sampled = if let Some(foreign) = &self.foreign {
            let mut scorer = PolicyScorer { pass: self.memory.score(), model, ranks };
            foreign.roll_out(&mut scorer, task, plan, step, position)?
        } else {
            let mut sampler = Sampler { model, memory: self.memory.sample(), task, plan, ranks, meter };
            sampler.roll_out(&mut self.lengths, step, position)?
        };
        canary::check_verdicts(plan, step, &sampled.batch)?;
        let (reference, teacher) = (self.reference.as_ref(), self.teacher.as_ref());
        let mut scorers = Scorers { pass: self.memory.score(), model, reference, teacher, ranks, meter };
        RolledOut::prepare(&mut scorers, &self.task, plan, step, sampled)
    }

    /// Evaluates the present weights on held-out problems and benchmarks. Returns the samples of benchmarks too.
    fn evaluate(&mut self, plan: &Plan) -> Result<(Evaluated, Vec<EvalRecord>)> {
        let Learner { model, counters, ranks, .. } = &self.learner;
        let (memory, meter) = (self.memory.sample(), self.meter.as_ref());
        let benchmarks = self.benchmarks.as_deref().unwrap_or_default();
        let n_samples = benchmarks.iter().map(|benchmark| benchmark.problems.len() * benchmark.n_samples);
        meter.expect(Phase::Evaluate, n_samples.sum());
        let mut sampler = Sampler { model, memory, task: &self.task, plan, ranks: ranks.as_ref(), meter };
        let held_out = sampler.held_out_accuracy(counters.step)?;
        let (scores, samples) = evaluate_benchmarks(&mut sampler, benchmarks, counters.step)?;
        Ok((Evaluated { held_out, benchmarks: scores }, samples))
    }

    /// The processes that train together.
    pub fn ranks(&self) -> &Ranks {
        &self.learner.ranks
    }

    /// Makes all optimizer steps of one rollout batch, which completes the training step. With reuse, the batch is used
    /// several times, until the gate closes.
    pub fn learn<'a>(&mut self, plan: &Plan, rolled: &'a RolledOut) -> Result<Vec<Learned<'a>>> {
        let step = self.learner.counters.step + 1;
        let mut carried = Carried::read(&self.learner.loop_state)?;
        let passes = self.memory.update(&mut self.learner.gradients);
        let mut learned: Vec<Learned> = Vec::new();
        let minibatches = rolled.minibatches(plan);
        let meter = self.meter.as_ref();
        let n_uses = plan.max_uses() * plan.objective.n_passes();
        meter.expect(Phase::Update, n_uses * rolled.batch.responses().count());
        let uses =
            (0..plan.max_uses()).flat_map(|use_idx| minibatches.iter().map(move |own| (use_idx, *own)));
        let updates = uses.flat_map(|own| (0..plan.objective.n_passes()).map(move |pass| (own, pass)));
        for ((use_idx, minibatch), pass) in updates {
            let is_on_policy = learned.is_empty() && !plan.has_behavior_of_sampler();
            let context = MinibatchContext { step, use_idx, is_on_policy, pass, meter };
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

/// Refuses several ranks for gradients that are one chain over all tokens.
fn check_sum(plan: &Plan, ranks: &Ranks) -> Result<()> {
    let world = ranks.world();
    if world == 1 || plan.sum() == GradientSum::Microbatches {
        return Ok(());
    }
    Err(Error::Misfit {
        key: "update.sum",
        problem: format!("tokens, and {world} ranks share the micro-batches"),
        remedy: "set update.sum=microbatches; a single process takes it too, with the same bits",
    })
}

/// Checks the prompts of a run before its first step; returns what the user should know.
fn check_prompts(plan: &Plan, model: &LoadedModel, task: &mut Task) -> Result<Vec<String>> {
    let left_out = fit_prompts(plan, &model.prompting(&plan.style)?, task)?;
    let is_unrendered = model.template.is_some() && !plan.style.chat;
    let unrendered = is_unrendered.then(|| {
        "the model has a chat template and rollout.chat is false, so prompts are plain text; an instruction-tuned model needs rollout.chat=true".to_string()
    });
    Ok(left_out.into_iter().chain(unrendered).collect())
}

/// Trains from the trainer's step to the plan's last step, and records how the run ended. Of several ranks, this is what rank
/// 0 does; the others [`follow`].
pub fn train(plan: &Plan, run: &mut Run, trainer: &mut Trainer, watch: &mut dyn Watch) -> Result<Outcome> {
    let ranks = Ranks::clone(trainer.ranks());
    let outcome = told_to_all(&*ranks, train_steps(plan, run, trainer, watch));
    // Where the event cannot be written, the caller learns of the error that ended the run.
    let recorded = match &outcome {
        Ok(Outcome::Done) => run.record_stop(StopReason::Done, ""),
        Ok(Outcome::TargetReached) => run.record_stop(StopReason::TargetReached, ""),
        Ok(Outcome::NoImprovement) => run.record_stop(StopReason::NoImprovement, ""),
        Ok(Outcome::NothingLearned) => run.record_stop(StopReason::NothingLearned, ""),
        Ok(Outcome::Stopped) => run.record_stop(StopReason::Signal, &watch.stop_reason()),
        Err(error) => record_error(run, error),
    };
    match recorded.and_then(|()| run.seal()) {
        Err(error) if outcome.is_ok() => watch.warned(&format!("no receipt: {error}")),
        _ => {}
    }
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
    let mut training = Training::begin(plan, run, trainer, watch)?;
    if let Some(outcome) = training.early_end() {
        return Ok(outcome);
    }
    while training.trainer.learner.counters.step < plan.config.steps {
        if let Some(outcome) = training.step()? {
            return Ok(outcome);
        }
    }
    Ok(Outcome::Done)
}

/// A run in progress.
struct Training<'a> {
    plan: &'a Plan,
    run: &'a mut Run,
    trainer: &'a mut Trainer,
    watch: &'a mut dyn Watch,
    meter: Arc<Meter>,
    /// The metrics of the first step.
    first: Option<Metrics>,
    best: BestSoFar,
    /// The evaluation before the first step, until the first step writes it down.
    before: Option<Evaluated>,
    /// Response tokens sampled since the start of the run.
    tokens_total: u64,
    /// When this process began, and the seconds that earlier processes worked on the run.
    began: Instant,
    seconds_before: f64,
}

impl<'a> Training<'a> {
    /// Evaluates a run that has made no step, and saves its state.
    fn begin(
        plan: &'a Plan,
        run: &'a mut Run,
        trainer: &'a mut Trainer,
        watch: &'a mut dyn Watch,
    ) -> Result<Self> {
        let history = Run::read_metrics::<Metrics>(run.folder())?;
        let sampled = history.iter().map(|m| m.n_sampled.unwrap_or(m.n_tokens) as u64);
        let last = history.last();
        trainer.open_benchmarks(plan)?;
        let mut warnings = canary::switched_off(plan);
        warnings.extend(trainer.warnings.iter().cloned());
        warnings.extend(changed_questions(trainer.benchmarks.as_deref().unwrap_or_default(), &history));
        let mut training = Self {
            plan,
            meter: trainer.meter(),
            best: BestSoFar::of(plan, &history),
            before: None,
            tokens_total: last.and_then(|m| m.tokens_total).unwrap_or_else(|| sampled.sum()),
            began: Instant::now(),
            seconds_before: last.and_then(|m| m.wall_seconds).unwrap_or(0.0),
            first: history.into_iter().next(),
            run,
            trainer,
            watch,
        };
        for text in warnings {
            training.warn(&text)?;
        }
        if training.trainer.learner.counters.step == 0 {
            training.trainer.learner.check_finite()?;
            let (before, samples) = training.trainer.evaluate(plan)?;
            training.run.write_benchmarks(0, &samples)?;
            training.best.started(&before);
            training.watch.started(&before);
            training.before = Some(before);
        }
        training.decide(true, training.early_end())?;
        Ok(training)
    }

    fn warn(&mut self, text: &str) -> Result<()> {
        self.run.record(EventKind::Warning, text)?;
        self.watch.warned(text);
        Ok(())
    }

    /// Makes one step. Returns how the run ended, where this step ends it before the last.
    fn step(&mut self) -> Result<Option<Outcome>> {
        let plan = self.plan;
        self.meter.set_step(self.trainer.learner.counters.step + 1);
        let rolled = self.trainer.roll_out(plan)?;
        let learned = self.trainer.learn(plan, &rolled)?;
        self.meter.enter(Phase::Record);
        let step = self.trainer.learner.counters.step;
        let mut metrics = metrics(plan, step, &rolled, &learned);
        self.measure(&mut metrics)?;
        self.meter.enter(Phase::Record);
        write_records(plan, self.run, &self.trainer.learner.model, &rolled, &learned, step)?;
        metrics.warnings = canary::warnings(plan, self.first.as_ref(), &metrics, &rolled.batch);
        let model = &self.trainer.learner.model;
        metrics.warnings.extend(canary::answers_left_to_grader(plan, step, &rolled.batch, model)?);
        metrics.memory_bytes = memory_bytes(self.trainer.learner.model.policy.device());
        let wall_seconds = self.seconds_before + self.began.elapsed().as_secs_f64();
        let asked = self.gather_reports(&mut metrics, wall_seconds)?;
        self.run.add_metrics(&metrics)?;
        self.watch.stepped(&metrics);
        for text in &metrics.warnings {
            self.warn(text)?;
        }
        self.conclude(metrics, asked)
    }

    /// Sets the times of the step, those of the other ranks included. True where another rank was asked to stop.
    fn gather_reports(&mut self, metrics: &mut Metrics, wall_seconds: f64) -> Result<bool> {
        let seconds = self.meter.take();
        let own = StepReport::of(&mut self.trainer.learner, &seconds, None);
        let reports = own.gather(&**self.trainer.ranks())?;
        set_times(metrics, seconds, wall_seconds);
        if reports.len() > 1 {
            metrics.extra.insert("ranks".to_string(), serde_json::json!(reports));
        }
        let signal = reports.iter().find_map(|report| report.signal);
        if let Some(signal) = signal {
            self.watch.asked_elsewhere(signal);
        }
        Ok(signal.is_some())
    }

    /// Adds the counts of the run, the state hash and the evaluation to the metrics of a step that has them. A state that
    /// is not finite is refused before it is hashed or evaluated.
    fn measure(&mut self, metrics: &mut Metrics) -> Result<()> {
        let learner = &self.trainer.learner;
        let config = &self.plan.config;
        let step = metrics.step;
        self.tokens_total += metrics.n_sampled.unwrap_or(0) as u64;
        metrics.tokens_total = Some(self.tokens_total);
        metrics.n_updates = Some(learner.counters.n_updates);
        if let Some(chosen) = self.trainer.memory().chosen() {
            metrics.extra.insert("memory".to_string(), serde_json::json!(chosen));
        }
        metrics.entropy_coefficient = Carried::read(&learner.loop_state)?.controls.entropy_coefficient;
        if let Some(before) = self.before.take() {
            metrics.eval_accuracy_before = before.held_out;
            metrics.benchmarks_before = before.benchmarks;
        }
        let is_hashed = is_due(step, config.record.state_hash_every_steps);
        let is_evaluated = is_due(step, config.evaluation.every_steps) || step == config.steps;
        if is_hashed || is_evaluated {
            learner.check_finite()?;
        }
        if is_hashed {
            metrics.state_sha256 = Some(learner.state_hash()?);
        }
        if is_evaluated {
            let (Evaluated { held_out, benchmarks }, samples) = self.trainer.evaluate(self.plan)?;
            self.run.write_benchmarks(step, &samples)?;
            metrics.eval_accuracy = held_out;
            metrics.benchmarks = benchmarks;
        }
        Ok(())
    }

    /// Why the run ends before its last step, by what its settings wait for.
    fn early_end(&self) -> Option<Outcome> {
        let ends = [
            (self.best.is_exhausted(), Outcome::NoImprovement),
            (self.best.is_idle(), Outcome::NothingLearned),
        ];
        let has_steps = self.trainer.learner.counters.step < self.plan.config.steps;
        ends.into_iter().find(|end| has_steps && end.0).map(|end| end.1)
    }

    /// Saves where a checkpoint is due, or the step was the best or the last, and decides whether the run ends.
    fn conclude(&mut self, metrics: Metrics, asked: bool) -> Result<Option<Outcome>> {
        let config = &self.plan.config;
        let step = metrics.step;
        let target = config.evaluation.target_accuracy;
        let is_reached =
            metrics.eval_accuracy.zip(target).is_some_and(|(accuracy, target)| accuracy >= target);
        let is_best = self.best.stepped(&metrics);
        let early_end = self.early_end();
        let is_stopped = self.watch.wants_stop() || asked;
        let is_last = step == config.steps;
        let is_end = is_reached || early_end.is_some() || is_stopped || is_last;
        let outcome = match (is_reached, is_last) {
            (true, _) => Some(Outcome::TargetReached),
            (_, true) => None,
            _ => early_end.or(is_stopped.then_some(Outcome::Stopped)),
        };
        self.decide(is_end || is_best || is_due(step, config.record.checkpoint_every_steps), outcome)?;
        if self.first.is_none() {
            self.first = Some(metrics);
        }
        Ok(outcome)
    }

    /// Tells the other ranks what comes next, and saves where this is asked for.
    fn decide(&mut self, is_saved: bool, outcome: Option<Outcome>) -> Result<()> {
        let n_sent = if is_saved { self.trainer.learner.n_sent(self.run) } else { 0 };
        Decision { n_sent, outcome }.send(&**self.trainer.ranks())?;
        if is_saved {
            self.meter.enter(Phase::Checkpoint);
            self.run.set_best(self.best.best().cloned());
            self.trainer.learner.save(self.run, self.plan.config.record.keep_checkpoints)?;
        }
        Ok(())
    }
}

/// Writes what a step records besides its metrics.
fn write_records(
    plan: &Plan,
    run: &Run,
    model: &LoadedModel,
    rolled: &RolledOut,
    learned: &[Learned],
    step: u64,
) -> Result<()> {
    run.write_silenced(step, &silenced_records(step, model, learned)?)?;
    run.write_explored(step, &explored_records(step, model, learned)?)?;
    if step == 1 || is_due(step, plan.config.record.responses_every_steps) {
        run.write_responses(step, &response_records(plan, step, model, rolled, learned)?)?;
    }
    Ok(())
}
