//! What rank 0 does in a run besides training: it writes the run folder, shows the run to its observer and decides when to
//! save and when to end.

use super::recorder::Recorder;
use super::report::{Decision, StepReport};
use super::steps::{Evaluation, Role, StepResult};
use super::{Outcome, Trainer, Watch};
use crate::error::Result;
use crate::lab::evaluation::changed_questions;
use crate::learn::canary;
use crate::plan::config::{Keeping, Plan};
use crate::run::best::BestSoFar;
use crate::run::records::set_times;
use crate::run::{AnswerJournal, Run, is_due};
use stapo_core::record::{EventKind, Metrics, PhaseSeconds};
use std::time::Instant;

pub(super) struct Leader<'a> {
    plan: &'a Plan,
    run: &'a mut Run,
    watch: &'a mut dyn Watch,
    recorder: Recorder,
    best: BestSoFar,
    /// When this process began, and the seconds that earlier processes worked on the run.
    began: Instant,
    seconds_before: f64,
}

impl<'a> Leader<'a> {
    /// Reads what the run has done so far, and warns of what its user should know.
    pub fn open(
        plan: &'a Plan,
        run: &'a mut Run,
        trainer: &mut Trainer,
        watch: &'a mut dyn Watch,
    ) -> Result<Self> {
        let history = Run::read_metrics::<Metrics>(run.folder())?;
        let last = history.last();
        trainer.open_benchmarks(plan)?;
        if plan.replays_answers() {
            trainer.recorded.write_to(AnswerJournal::open(run.folder())?);
        }
        let mut warnings = canary::switched_off(plan);
        warnings.extend(trainer.warnings.iter().cloned());
        warnings.extend(changed_questions(trainer.benchmarks.as_deref().unwrap_or_default(), &history));
        let mut leader = Self {
            plan,
            best: BestSoFar::from_history(plan, &history),
            recorder: Recorder::from_history(&history),
            began: Instant::now(),
            seconds_before: last.and_then(|m| m.wall_seconds).unwrap_or(0.0),
            run,
            watch,
        };
        for text in warnings {
            leader.warn(&text)?;
        }
        Ok(leader)
    }

    fn warn(&mut self, text: &str) -> Result<()> {
        self.run.record(EventKind::Warning, text)?;
        self.watch.warned(text);
        Ok(())
    }

    /// Why the run ends before its last step, by what its settings wait for.
    fn early_end(&self, step: u64) -> Option<Outcome> {
        let ends = [
            (self.best.is_exhausted(), Outcome::NoImprovement),
            (self.best.is_idle(), Outcome::NothingLearned),
        ];
        let has_steps = step < self.plan.config.steps;
        ends.into_iter().find(|end| has_steps && end.0).map(|end| end.1)
    }

    /// Saves where a checkpoint is due, or the step was the best or the last, and ends the run where nothing is left to do.
    fn decision(&mut self, trainer: &Trainer, metrics: &Metrics, is_stopped: bool) -> Decision {
        let config = &self.plan.config;
        let step = metrics.step;
        let target = config.evaluation.target_accuracy;
        let is_reached =
            metrics.eval_accuracy.zip(target).is_some_and(|(accuracy, target)| accuracy >= target);
        let is_best = self.best.stepped(metrics);
        let early_end = self.early_end(step);
        let is_last = step == config.steps;
        let is_end = is_reached || early_end.is_some() || is_stopped || is_last;
        let outcome = match (is_reached, is_last) {
            (true, _) => Some(Outcome::TargetReached),
            (_, true) => None,
            _ => early_end.or(is_stopped.then_some(Outcome::Stopped)),
        };
        let is_saved = is_end || is_best || is_due(step, config.record.checkpoint_every_steps);
        Decision { saving: is_saved.then(|| trainer.learner.saving(self.run)), outcome }
    }
}

impl Role for Leader<'_> {
    type Written = Metrics;

    fn begin(&mut self, trainer: &Trainer, before: Option<Evaluation>) -> Result<Option<Decision>> {
        if let Some(before) = before {
            self.best.started(&before.evaluated);
            self.watch.started(&before.evaluated);
            for (name, text) in self.recorder.start(before) {
                self.run.write_record(&name, &text)?;
            }
            trainer.recorded.recorded_up_to(0)?;
        }
        let step = trainer.learner.counters.step;
        let saving = Some(trainer.learner.saving(self.run));
        Ok(Some(Decision { saving, outcome: self.early_end(step) }))
    }

    fn abandoned(&mut self, trainer: &Trainer, signal: i32) -> Option<Decision> {
        self.watch.asked_elsewhere(signal);
        let saving = Some(trainer.learner.saving(self.run));
        Some(Decision { saving, outcome: Some(Outcome::Stopped) })
    }

    fn write(&mut self, trainer: &Trainer, result: StepResult) -> Result<Metrics> {
        let recorded = self.recorder.record(self.plan, trainer, result)?;
        for (name, text) in &recorded.files {
            self.run.write_record(name, text)?;
        }
        Ok(recorded.metrics)
    }

    fn signal(&self) -> Option<i32> {
        None
    }

    fn decide(
        &mut self,
        trainer: &Trainer,
        mut metrics: Metrics,
        seconds: PhaseSeconds,
        reports: &[StepReport],
    ) -> Result<Option<Decision>> {
        let wall_seconds = self.seconds_before + self.began.elapsed().as_secs_f64();
        set_times(&mut metrics, seconds, wall_seconds);
        if reports.len() > 1 {
            metrics.extra.insert("ranks".to_string(), serde_json::json!(reports));
        }
        if let Some(seconds) = trainer.meter.take_loading() {
            metrics.extra.insert("judge_load_seconds".to_string(), seconds.into());
        }
        let signal = reports.iter().find_map(|report| report.signal);
        if let Some(signal) = signal {
            self.watch.asked_elsewhere(signal);
        }
        self.run.add_metrics(&metrics)?;
        trainer.recorded.recorded_up_to(metrics.step)?;
        self.watch.stepped(&metrics);
        for text in &metrics.warnings {
            self.warn(text)?;
        }
        let is_stopped = self.watch.wants_stop() || signal.is_some();
        let decision = self.decision(trainer, &metrics, is_stopped);
        Ok(Some(decision))
    }

    fn folder(&mut self) -> Option<(&mut Run, Keeping)> {
        self.run.set_best(self.best.best().cloned());
        Some((self.run, self.plan.config.record.keeping()))
    }
}
