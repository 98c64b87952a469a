//! What the arms of an experiment spend for an accuracy: responses and seconds.

use super::runs::{ArmRuns, held_out};
use serde::Serialize;
use stapo_core::record::Metrics;

/// What one arm spent. Curves are means over the seeds of the arm.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cost {
    /// The last accuracy of the arm that the experiment names as `reach`.
    pub target_accuracy: f64,
    /// The time in which the fastest arm was done.
    pub equal_seconds: f64,
    /// Responses sampled by a whole run, and seconds of its rollouts and updates; evaluations are not counted.
    pub responses: f64,
    pub seconds: f64,
    /// What was spent when the curve of held-out accuracy first reached the target, interpolated between evaluations;
    /// absent where the arm never did.
    pub responses_to_target: Option<f64>,
    pub seconds_to_target: Option<f64>,
    /// Held-out accuracy after `equal_seconds`.
    pub accuracy_at_equal_seconds: f64,
}

/// A point of a mean curve.
#[derive(Debug, Clone, Copy)]
struct CostPoint {
    accuracy: f64,
    responses: f64,
    seconds: f64,
}

/// What each arm spent, and what it had spent when it had the last accuracy of the arm `reach`. `None` if that arm has
/// no run, or where some run has no evaluation or was written without counts of responses.
pub(super) fn costs(arms: &[ArmRuns<'_>], reach: &str) -> Option<Vec<Cost>> {
    let curves: Vec<Vec<CostPoint>> = arms.iter().map(mean_curve).collect::<Option<_>>()?;
    let ends: Vec<CostPoint> = curves.iter().map(|curve| curve.last().copied()).collect::<Option<_>>()?;
    let target_accuracy = ends[arms.iter().position(|arm| arm.name == reach)?].accuracy;
    let equal_seconds = ends.iter().map(|end| end.seconds).fold(f64::INFINITY, f64::min);
    let cost = |(curve, end): (&Vec<CostPoint>, &CostPoint)| {
        let at_target = first_at(curve, target_accuracy, |point| point.accuracy);
        let at_time = first_at(curve, equal_seconds, |point| point.seconds);
        Cost {
            target_accuracy,
            equal_seconds,
            responses: end.responses,
            seconds: end.seconds,
            responses_to_target: at_target.map(|point| point.responses),
            seconds_to_target: at_target.map(|point| point.seconds),
            accuracy_at_equal_seconds: at_time.map_or(end.accuracy, |point| point.accuracy),
        }
    };
    Some(curves.iter().zip(&ends).map(cost).collect())
}

/// The mean over seeds at the evaluations that all runs of an arm have.
fn mean_curve(arm: &ArmRuns<'_>) -> Option<Vec<CostPoint>> {
    let curves: Vec<Vec<CostPoint>> = arm.runs.iter().map(|run| curve(run.metrics)).collect::<Option<_>>()?;
    let n_points = curves.iter().map(Vec::len).min().filter(|&n| n > 0)?;
    let mean = |place: usize, of: &dyn Fn(&CostPoint) -> f64| {
        curves.iter().map(|curve| of(&curve[place])).sum::<f64>() / curves.len() as f64
    };
    let point = |place| CostPoint {
        accuracy: mean(place, &|point| point.accuracy),
        responses: mean(place, &|point| point.responses),
        seconds: mean(place, &|point| point.seconds),
    };
    Some((0..n_points).map(point).collect())
}

/// Held-out accuracy of a run against what had been spent.
fn curve(metrics: &[Metrics]) -> Option<Vec<CostPoint>> {
    let mut spent = vec![(0.0, 0.0)];
    for step in metrics {
        let (responses, seconds) = *spent.last()?;
        spent.push((responses + step.n_responses? as f64, seconds + step.working_seconds()?));
    }
    let steps: Vec<u64> = std::iter::once(0).chain(metrics.iter().map(|step| step.step)).collect();
    let point = |(step, accuracy): (f64, f64)| {
        let idx = steps.iter().position(|&at| at as f64 == step)?;
        Some(CostPoint { accuracy, responses: spent[idx].0, seconds: spent[idx].1 })
    };
    held_out(metrics).into_iter().map(point).collect()
}

/// Where a curve first has `target` in the coordinate `of`, interpolated; `None` if it never has.
fn first_at(curve: &[CostPoint], target: f64, of: impl Fn(&CostPoint) -> f64) -> Option<CostPoint> {
    let idx = curve.iter().position(|point| of(point) >= target)?;
    let after = curve[idx];
    let Some(before) = idx.checked_sub(1).map(|idx| curve[idx]) else { return Some(after) };
    let share = (target - of(&before)) / (of(&after) - of(&before));
    let between = |a: f64, b: f64| a + share * (b - a);
    Some(CostPoint {
        accuracy: between(before.accuracy, after.accuracy),
        responses: between(before.responses, after.responses),
        seconds: between(before.seconds, after.seconds),
    })
}
