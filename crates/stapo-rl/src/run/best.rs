//! The best evaluation of a run, how long ago it was, and for how long nothing has been learned.

use crate::lab::evaluation::Evaluated;
use crate::plan::config::{HELD_OUT, Plan};
use stapo_core::record::{BenchmarkScore, Best, Extra, Metrics, SCHEMA};
use std::collections::BTreeMap;

/// The best evaluation so far by `evaluation.best`. Everything follows from the metrics of a run, so a resume needs no
/// state of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct BestSoFar {
    metric: String,
    patience: Option<u64>,
    best: Option<Best>,
    /// Evaluations since the best.
    n_since: u64,
    idle_patience: Option<u64>,
    /// Steps in a row, up to the last, in which every group had equal rewards.
    n_idle: u64,
}

impl BestSoFar {
    /// Of a run that has made the steps of `history`.
    pub fn from_history(plan: &Plan, history: &[Metrics]) -> Self {
        let evaluation = &plan.config.evaluation;
        let mut best = Self {
            metric: evaluation.best.clone(),
            patience: evaluation.patience,
            best: None,
            n_since: 0,
            idle_patience: evaluation.idle_patience,
            n_idle: 0,
        };
        if let Some(first) = history.first() {
            best.take(0, first.eval_accuracy_before, &first.benchmarks_before);
        }
        for metrics in history {
            best.stepped(metrics);
        }
        best
    }

    /// Takes the evaluation before the first step.
    pub fn started(&mut self, before: &Evaluated) {
        self.take(0, before.held_out, &before.benchmarks);
    }

    /// Takes the rewards of a step and its evaluation, where the step has one. True for the best evaluation so far.
    pub fn stepped(&mut self, metrics: &Metrics) -> bool {
        let is_idle = metrics.equal_rewards_share == Some(1.0);
        self.n_idle = if is_idle { self.n_idle + 1 } else { 0 };
        self.take(metrics.step, metrics.eval_accuracy, &metrics.benchmarks)
    }

    fn take(
        &mut self,
        step: u64,
        held_out: Option<f64>,
        benchmarks: &BTreeMap<String, BenchmarkScore>,
    ) -> bool {
        let of_benchmark = || benchmarks.get(&self.metric).map(|score| score.accuracy);
        let value = if self.metric == HELD_OUT { held_out } else { of_benchmark() };
        let Some(value) = value else { return false };
        let is_better = self.best.as_ref().is_none_or(|best| value > best.value);
        if is_better {
            let metric = self.metric.clone();
            self.best = Some(Best { schema: SCHEMA, step, metric, value, extra: Extra::new() });
            self.n_since = 0;
        } else {
            self.n_since += 1;
        }
        is_better
    }

    pub fn best(&self) -> Option<&Best> {
        self.best.as_ref()
    }

    /// True if `evaluation.patience` evaluations in a row were no better than the best.
    pub fn is_exhausted(&self) -> bool {
        self.patience.is_some_and(|patience| self.n_since >= patience)
    }

    /// True if every group had equal rewards in the last `evaluation.idle_patience` steps.
    pub fn is_idle(&self) -> bool {
        self.idle_patience.is_some_and(|patience| self.n_idle >= patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::Config;
    use crate::testing::metrics;

    #[test]
    fn only_steps_in_a_row_without_a_contrast_are_idle() {
        let mut config = Config::default();
        config.evaluation.idle_patience = Some(2);
        let plan = Plan::resolve(config).unwrap();
        let is_idle = |shares: &[Option<f64>]| {
            let step = |(i, share): (usize, &Option<f64>)| Metrics {
                equal_rewards_share: *share,
                ..metrics(i as u64 + 1, 0.5, 0.3)
            };
            BestSoFar::from_history(&plan, &shares.iter().enumerate().map(step).collect::<Vec<_>>()).is_idle()
        };
        assert!(is_idle(&[Some(0.5), Some(1.0), Some(1.0)]));
        assert!(!is_idle(&[Some(1.0), Some(0.99), Some(1.0)]), "one step since the last with a contrast");
        assert!(!is_idle(&[Some(1.0), Some(1.0), Some(0.99)]));
        assert!(!is_idle(&[None, None, None]), "records without the share tell nothing");
    }

    #[test]
    fn evaluations_are_counted_from_the_best_and_an_equal_one_is_no_better() {
        let mut config = Config::default();
        config.evaluation.patience = Some(2);
        let plan = Plan::resolve(config).unwrap();
        let run = |accuracies: &[f64]| {
            let step = |(idx, accuracy): (usize, &f64)| metrics(idx as u64 + 1, *accuracy, 0.3);
            BestSoFar::from_history(&plan, &accuracies.iter().enumerate().map(step).collect::<Vec<_>>())
        };
        let named = |best: &BestSoFar| best.best().map(|best| (best.step, best.value));
        let equal = run(&[0.4, 0.4, 0.4]);
        assert_eq!((named(&equal), equal.is_exhausted()), (Some((1, 0.4)), true));
        let risen = run(&[0.4, 0.3, 0.5, 0.5]);
        assert_eq!((named(&risen), risen.is_exhausted()), (Some((3, 0.5)), false), "one since the best");
        assert!(run(&[0.4, 0.3, 0.5, 0.5, 0.1]).is_exhausted());
        // A step without an evaluation is no evaluation without a better one.
        let mut steps: Vec<Metrics> = (1..=4).map(|step| metrics(step, 0.4, 0.3)).collect();
        steps[1].eval_accuracy = None;
        steps[2].eval_accuracy = None;
        assert!(!BestSoFar::from_history(&plan, &steps).is_exhausted());
        steps[0].eval_accuracy_before = Some(0.4);
        let from_start = BestSoFar::from_history(&plan, &steps);
        assert_eq!((named(&from_start), from_start.is_exhausted()), (Some((0, 0.4)), true));
    }
}
