//! The training loop.

mod interrupted;
mod leader;
mod recorder;
mod replay;
mod report;
mod steps;

pub use interrupted::Interrupted;
pub use recorder::{Recorded, Recorder};
pub use replay::{Replayed, best_of};

use crate::error::{Error, Result};
use crate::lab::evaluation::{Benchmark, Evaluated, evaluate_benchmarks, open_benchmarks};
use crate::learn::canary;
use crate::learn::carried::Carried;
use crate::learn::constants::{Reference, RolledOut, Scorers};
use crate::learn::learner::Learner;
use crate::learn::memory::{Drafter, RunMemory};
use crate::learn::teacher::Teacher;
use crate::learn::update::{Learned, MinibatchContext, learn};
use crate::plan::config::{GradientSum, Plan};
use crate::plan::disk::DiskPlan;
use crate::plan::memory::{self, MemoryPlan, TrainedModel};
use crate::policy::loaded::LoadedModel;
use crate::ranks::{Ranks, Solo, fail_on_all_ranks};
use crate::reward::Programs;
use crate::rollout::{
    RecordedAnswers, RolloutContext, RolloutSource, Sampler, VerifierHome, open_source, reward_scores,
};
use crate::run::meter::{Meter, Phase};
use crate::run::{Abandon, PartFiles, Run, StopRequest};
use crate::tasks::Task;
use crate::tasks::prompting::fit_prompts;
use leader::Leader;
use serde::{Deserialize, Serialize};
use stapo_core::record::{EventKind, Metrics, StopReason};
use stapo_model::Device;
use std::sync::Arc;
use std::thread;
use steps::{Evaluation, Follower, make_steps};

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
    /// The run has ended, and the checkpoint of that step is still being written.
    fn waits_for_checkpoint(&mut self, _step: u64) {}
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
    pub(crate) source: Box<dyn RolloutSource>,
    /// Which programs of verifiers and environments may start.
    programs: Programs,
    /// Answers of environments in steps that are made again.
    pub recorded: RecordedAnswers,
    /// The memory of rollouts and updates, kept from step to step.
    pub(crate) memory: RunMemory,
    /// What was found about the prompts at the start.
    warnings: Vec<String>,
    /// The benchmarks of the plan; `None` before they are opened.
    benchmarks: Option<Vec<Benchmark>>,
    meter: Arc<Meter>,
    abandon: Arc<Abandon>,
}

impl Trainer {
    /// The state before the first step.
    pub fn new(plan: &Plan, device: &Device, programs: Programs) -> Result<Self> {
        Self::on_ranks(plan, device, programs, Solo::ranks())
    }

    /// As [`Trainer::new`], as one of several ranks.
    pub fn on_ranks(plan: &Plan, device: &Device, programs: Programs, ranks: Ranks) -> Result<Self> {
        refuse_token_sums_on_ranks(plan, &ranks)?;
        // The task is opened first: a verifier program that may not start is refused before a model is loaded.
        let further = plan.rewards.iter().skip(1).map(|reward| &reward.verifier);
        let environment = plan.config.environment.as_ref();
        let mut task = Task::with_environment(&plan.task, further, environment, programs)?;
        let found = plan.config.model.find()?;
        let free = device.memory().map(|(free, _)| free as u64);
        let shape = found.shape()?;
        let trained = TrainedModel::from_plan(plan, &found, &shape)?;
        let planned = memory::resolve_for(plan, trained, &memory::frozen(plan)?, free, ranks.world());
        memory::check(&planned, device)?;
        let lora = plan.config.lora.as_ref();
        let mut model = LoadedModel::open_to_train(&found, lora, plan.config.seed, device)?;
        model.policy.fit_longest(plan.longest_sequence());
        model.policy.share_masters(&*ranks)?;
        model.check(plan)?;
        let warnings = check_prompts(plan, &model, &mut task)?;
        let reference = Reference::open(plan, &model, device)?;
        let teacher = Teacher::open(plan, &model, &task, device)?;
        let drafter = Drafter::open(plan, &model, device)?;
        let (mut memory, gradients) = RunMemory::new(plan, planned, &model.policy, &ranks)?;
        memory.draft_with(drafter);
        let meter: Arc<Meter> = Arc::default();
        let region = memory.region().map(|region| (region, &meter));
        task.load_model_judges(VerifierHome { device, region })?;
        let source = open_source(plan, &model, &task)?;
        let learner = Learner::on_ranks(model, plan.optimizer(), gradients, ranks)?;
        Ok(Self {
            learner,
            task,
            reference,
            teacher,
            source,
            programs,
            recorded: RecordedAnswers::default(),
            memory,
            warnings,
            benchmarks: None,
            meter,
            abandon: Arc::default(),
        })
    }

    /// Looks for requests to stop while it samples, and ends the run with the state of the last step where a rollout is
    /// abandoned. Returns what says so.
    pub fn abandon_when(
        &mut self,
        look: impl Fn() -> Option<StopRequest> + Send + Sync + 'static,
    ) -> Arc<Abandon> {
        self.abandon = Arc::new(Abandon::when(look));
        Arc::clone(&self.abandon)
    }

    /// What the run takes of its device's memory, and what the settings left to the program became.
    pub fn memory(&self) -> &MemoryPlan {
        &self.memory.planned
    }

    /// What the checkpoints of a run of this plan take on the disk.
    pub fn disk(&self, plan: &Plan) -> DiskPlan {
        let Learner { model, optimizer, .. } = &self.learner;
        let (weights, moments) = optimizer.n_stored_bytes(&model.policy);
        DiskPlan::new(plan, weights as u64, moments as u64)
    }

    /// Counts what the trainer does, for displays.
    pub fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Opens the benchmarks of the plan, so that a missing file is refused before a run begins. [`train`] opens them
    /// otherwise; replaying steps needs none.
    pub fn open_benchmarks(&mut self, plan: &Plan) -> Result<()> {
        if self.benchmarks.is_none() {
            self.benchmarks = Some(open_benchmarks(plan, self.programs)?);
        }
        Ok(())
    }

    /// Samples the rollout batch of the next step.
    pub fn roll_out(&mut self, plan: &Plan) -> Result<RolledOut> {
        let due = self.learner.part.take_due();
        let Learner { model, optimizer, counters, ranks, .. } = &self.learner;
        let ranks = ranks.as_ref();
        let step = counters.step + 1;
        let (task, meter) = (&self.task, self.meter.as_ref());
        let mut carried = Carried::read(&self.learner.loop_state)?;
        meter.enter(Phase::Rollout);
        let mut sample = || {
            let memory = &mut self.memory;
            let (abandon, counters, recorded) = (&*self.abandon, *counters, &self.recorded);
            let mut training =
                RolloutContext { model, memory, task, plan, counters, ranks, recorded, meter, abandon };
            let mut sampled = self.source.next(&mut training)?;
            reward_scores(plan, &mut sampled.batch, &mut carried.scores);
            canary::check_verdicts(plan, step, &sampled.batch)?;
            let (reference, teacher) = (self.reference.as_ref(), self.teacher.as_ref());
            let mut scorers = Scorers { pass: self.memory.score(), model, reference, teacher, ranks, meter };
            RolledOut::prepare(&mut scorers, &self.task, plan, step, sampled)
        };
        // A rollout only reads weights, so that a checkpoint without a copy of the state is written during it.
        let (rolled, written) = thread::scope(|scope| {
            let write = |files: &PartFiles| files.write_in_place(&model.policy, optimizer);
            let writing = due.as_ref().map(|files| scope.spawn(move || write(files)));
            let rolled = sample();
            let written = writing.map(|writing| {
                meter.enter(Phase::CheckpointWait);
                writing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            (rolled, written)
        });
        if let Some(written) = written {
            self.learner.part.ended(written);
        }
        if rolled.is_ok() && plan.scored_reward().is_some() {
            carried.write(plan, &mut self.learner.loop_state);
        }
        rolled
    }

    /// Evaluates the present weights on held-out problems and benchmarks. Returns the samples of benchmarks too.
    fn evaluate(&mut self, plan: &Plan) -> Result<Evaluation> {
        let Learner { model, counters, ranks, .. } = &self.learner;
        let (memory, meter) = (self.memory.sample(), self.meter.as_ref());
        let benchmarks = self.benchmarks.as_deref().unwrap_or_default();
        let n_samples = benchmarks.iter().map(|benchmark| benchmark.problems.len() * benchmark.n_samples);
        meter.expect(Phase::Evaluate, n_samples.sum());
        let (task, recorded, ranks) = (&self.task, &self.recorded, ranks.as_ref());
        let counters = *counters;
        // An evaluation after a step belongs to that step, which is finished.
        let never = Abandon::default();
        let abandon = if self.abandon.has_trained() { &never } else { &*self.abandon };
        let mut sampler = Sampler { model, memory, task, plan, counters, ranks, recorded, meter, abandon };
        let (held_out, episodes) = sampler.held_out_accuracy()?;
        let (scores, samples) = evaluate_benchmarks(&mut sampler, benchmarks, counters.step)?;
        Ok(Evaluation { evaluated: Evaluated { held_out, benchmarks: scores }, samples, episodes })
    }

    /// The processes that train together.
    pub fn ranks(&self) -> &Ranks {
        &self.learner.ranks
    }

    /// Makes all optimizer steps of one rollout batch, which completes the training step. With reuse, the batch is used
    /// several times, until the gate closes.
    pub fn learn<'a>(&mut self, plan: &Plan, rolled: &'a RolledOut) -> Result<Vec<Learned<'a>>> {
        self.abandon.set_trained();
        let step = self.learner.counters.step + 1;
        let mut carried = Carried::read(&self.learner.loop_state)?;
        let passes = self.memory.update(&mut self.learner.gradients);
        let mut learned: Vec<Learned> = Vec::new();
        let minibatches = rolled.minibatches(plan);
        let meter = self.meter.as_ref();
        let n_uses = plan.max_uses() * plan.objective.n_passes();
        meter.expect(Phase::Update, n_uses * rolled.batch.responses().count());
        let uses = (0..plan.max_uses())
            .flat_map(|use_idx| minibatches.iter().map(move |minibatch| (use_idx, *minibatch)));
        let updates = uses.flat_map(|used| (0..plan.objective.n_passes()).map(move |pass| (used, pass)));
        for ((use_idx, minibatch), pass) in updates {
            let context = MinibatchContext { step, use_idx, pass, meter };
            let update = learn(&mut self.learner, passes, &mut carried, plan, minibatch, context)?;
            canary::check_learned(plan, step, &update)?;
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
fn refuse_token_sums_on_ranks(plan: &Plan, ranks: &Ranks) -> Result<()> {
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
    let tools = task.tool_schemas().cloned();
    let prompting = model.prompting(&plan.style)?.with_tools(tools.as_ref());
    let left_out = fit_prompts(plan, &prompting, task)?;
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
    let outcome = fail_on_all_ranks(&*ranks, lead(plan, run, trainer, watch));
    // After an error too the checkpoint that is being written is completed.
    let settled = run.settle();
    let outcome = outcome.and_then(|outcome| settled.map(|()| outcome));
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

fn lead(plan: &Plan, run: &mut Run, trainer: &mut Trainer, watch: &mut dyn Watch) -> Result<Outcome> {
    let mut leader = Leader::open(plan, run, trainer, watch)?;
    let outcome = make_steps(plan, trainer, &mut leader)?;
    if let Some(step) = run.step_in_flight() {
        watch.waits_for_checkpoint(step);
        trainer.meter.enter(Phase::CheckpointWait);
        run.settle()?;
    }
    Ok(outcome)
}

/// The part in [`train`] of every rank but the first, which has no folder and no display: the same steps, until rank 0 ends
/// the run. `asked_to_stop` gives the number of the signal that asked this process to stop.
pub fn follow(
    plan: &Plan,
    trainer: &mut Trainer,
    asked_to_stop: &dyn Fn() -> Option<i32>,
) -> Result<Outcome> {
    let ranks = Ranks::clone(trainer.ranks());
    fail_on_all_ranks(&*ranks, make_steps(plan, trainer, &mut Follower { asked_to_stop }))
}
