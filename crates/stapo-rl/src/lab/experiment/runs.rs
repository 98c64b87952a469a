//! The finished runs of an experiment.

use crate::plan::config::CanaryConfig;
use stapo_core::record::Metrics;

/// An arm with its finished runs, at least one.
pub struct ArmRuns<'a> {
    pub name: &'a str,
    pub runs: Vec<SeedRun<'a>>,
}

/// A run with at least one step, and the canaries of its plan.
#[derive(Clone, Copy)]
pub struct SeedRun<'a> {
    pub seed: u64,
    pub metrics: &'a [Metrics],
    pub canaries: &'a CanaryConfig,
}

/// Held-out accuracies by step; step 0 is before training.
pub fn held_out(metrics: &[Metrics]) -> Vec<(f64, f64)> {
    let before = metrics.first().and_then(|m| m.eval_accuracy_before).map(|accuracy| (0.0, accuracy));
    let later = metrics.iter().filter_map(|m| m.eval_accuracy.map(|accuracy| (m.step as f64, accuracy)));
    before.into_iter().chain(later).collect()
}
