//! What a step records, as a run writes it and as a replay compares it.

use super::Trainer;
use super::steps::{Evaluation, StepResult};
use crate::error::Result;
use crate::lab::evaluation::Evaluated;
use crate::learn::canary;
use crate::learn::carried::Carried;
use crate::plan::config::Plan;
use crate::run::is_due;
use crate::run::meter::memory_bytes;
use crate::run::records::{explored_records, has_time_outs, metrics, response_records, silenced_records};
use stapo_core::record::{EvalRecord, Metrics, Record};

/// What the records of a step take from the steps before.
pub struct Recorder {
    /// The metrics of the first step, and of the last one.
    first: Option<Metrics>,
    last: Option<Metrics>,
    /// The evaluation before the first step, until the first step writes it down.
    before: Option<Evaluated>,
    /// Whether an earlier step had no contrast between rewards, of which a run warns once.
    had_no_contrast: bool,
    /// Response tokens sampled since the start of the run.
    tokens_total: u64,
}

/// The records of a step.
pub struct Recorded {
    /// Without the times, which are known when the step is done.
    pub metrics: Metrics,
    /// The files of the step by their names in the run folder, with their texts.
    pub files: Vec<(String, String)>,
}

impl Recorder {
    /// Of a run that has made the steps of `history`.
    pub fn from_history(history: &[Metrics]) -> Self {
        let sampled = history.iter().map(|m| m.n_sampled.unwrap_or(m.n_tokens) as u64);
        let total = history.last().and_then(|m| m.tokens_total);
        Self {
            first: history.first().cloned(),
            last: history.last().cloned(),
            before: None,
            had_no_contrast: history.iter().any(|m| m.equal_rewards_share == Some(1.0)),
            tokens_total: total.unwrap_or_else(|| sampled.sum()),
        }
    }

    /// Takes the evaluation of a run that has made no step. Returns the files of its samples and episodes.
    pub(super) fn start(&mut self, before: Evaluation) -> Vec<(String, String)> {
        self.before = Some(before.evaluated);
        let files = [file("benchmarks", 0, &before.samples), file("episodes", 0, &before.episodes)];
        files.into_iter().flatten().collect()
    }

    pub(super) fn record(&mut self, plan: &Plan, trainer: &Trainer, result: StepResult) -> Result<Recorded> {
        let StepResult { rolled, learned, state_sha256, evaluation } = result;
        let (learner, model) = (&trainer.learner, &trainer.learner.model);
        let step = learner.counters.step;
        let mut metrics = metrics(plan, step, rolled, learned);
        self.tokens_total += metrics.n_sampled.unwrap_or(0) as u64;
        metrics.tokens_total = Some(self.tokens_total);
        metrics.n_updates = Some(learner.counters.n_updates);
        metrics.decoding = trainer.meter.take_decoding();
        if plan.config.rollout.top_k.is_some() {
            metrics.extra.insert("distribution".to_string(), "kept".into());
        }
        if let Some(chosen) = trainer.memory().chosen() {
            metrics.extra.insert("memory".to_string(), serde_json::json!(chosen));
        }
        metrics.entropy_coefficient = Carried::read(&learner.loop_state)?.controls.entropy_coefficient;
        if let Some(before) = self.before.take() {
            metrics.eval_accuracy_before = before.held_out;
            metrics.benchmarks_before = before.benchmarks;
        }
        metrics.state_sha256 = state_sha256;
        let mut samples: Vec<EvalRecord> = Vec::new();
        let mut episodes = rolled.episodes.clone();
        if let Some(evaluation) = evaluation {
            metrics.eval_accuracy = evaluation.evaluated.held_out;
            metrics.benchmarks = evaluation.evaluated.benchmarks;
            samples = evaluation.samples;
            episodes.extend(evaluation.episodes);
        }
        metrics.memory_bytes = memory_bytes(model.policy.device());
        metrics.warnings = canary::warnings(plan, self.first.as_ref(), self.last.as_ref(), &metrics);
        if !self.had_no_contrast {
            metrics.warnings.extend(canary::no_contrast(plan, &metrics, &rolled.batch));
        }
        self.had_no_contrast |= metrics.equal_rewards_share == Some(1.0);
        metrics.warnings.extend(canary::answers_left_to_grader(plan, step, &rolled.batch, model)?);
        let has_responses = step == 1
            || is_due(step, plan.config.record.responses_every_steps)
            || has_time_outs(plan, rolled);
        let responses = if has_responses {
            file("rollouts", step, &response_records(plan, step, model, rolled, learned)?)
        } else {
            None
        };
        let files = [
            file("benchmarks", step, &samples),
            file("tokens", step, &silenced_records(step, model, learned)?),
            file("explored", step, &explored_records(step, model, learned)?),
            file("episodes", step, &episodes),
            responses,
        ];
        self.first.get_or_insert_with(|| metrics.clone());
        self.last = Some(metrics.clone());
        Ok(Recorded { metrics, files: files.into_iter().flatten().collect() })
    }
}

/// A file of a part with the records of a step; none if there are no records.
fn file(part: &str, step: u64, records: &[impl Record]) -> Option<(String, String)> {
    let name = format!("{part}/step-{step:06}.jsonl");
    (!records.is_empty()).then(|| (name, records.iter().map(Record::to_line).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::metrics;

    fn step(step: u64, tokens_total: Option<u64>, n_sampled: Option<usize>, equal: f64) -> Metrics {
        let equal_rewards_share = Some(equal);
        Metrics { tokens_total, n_sampled, equal_rewards_share, n_tokens: 1000, ..metrics(step, 0.5, 0.3) }
    }

    #[test]
    fn a_recorder_goes_on_from_what_the_run_has_recorded() {
        let fresh = Recorder::from_history(&[]);
        assert_eq!((fresh.tokens_total, fresh.had_no_contrast, fresh.first.is_none()), (0, false, true));
        let history = [step(1, Some(50), Some(50), 1.0), step(2, Some(120), Some(70), 0.5)];
        let found = Recorder::from_history(&history);
        assert_eq!((found.tokens_total, found.had_no_contrast), (120, true));
        let steps = (found.first.unwrap().step, found.last.unwrap().step);
        assert_eq!(steps, (1, 2), "drift is measured from the first step");
        assert!(!Recorder::from_history(&history[1..]).had_no_contrast);
        // An earlier program recorded no total, and before that no tokens of replaced groups.
        let earlier = [step(1, None, Some(1500), 0.5), step(2, None, None, 0.5)];
        assert_eq!(Recorder::from_history(&earlier).tokens_total, 2500);
    }

    #[test]
    fn a_step_without_records_has_no_file() {
        assert_eq!(file("benchmarks", 7, &[] as &[Metrics]), None);
        let (name, text) = file("benchmarks", 7, &[step(1, None, None, 0.5)]).unwrap();
        assert_eq!((name.as_str(), text.lines().count()), ("benchmarks/step-000007.jsonl", 1));
    }
}
