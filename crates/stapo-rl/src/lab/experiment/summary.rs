//! What the runs of an experiment say together: means over seeds, and the method paired with each baseline by seed.
//! `stapo experiment` and `stapo report` show the same [`ExperimentSummary`].

use super::collapse::Collapse;
use super::cost::{Cost, costs};
use super::runs::{ArmRuns, held_out};
use super::split_arm;
use serde::Serialize;
use stapo_core::record::Metrics;
use stapo_core::stats::{
    Estimate, PairedComparison, Resampling, StatsError, area_under_curve, compare_by_seed, entropy_stability,
    holm, mean_estimate,
};

type Result<T> = std::result::Result<T, StatsError>;

/// Which accuracy the runs are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// Accuracy on held-out problems: every run was evaluated.
    HeldOut,
    /// Accuracy of the sampled responses, where some run has no evaluation.
    Training,
}

impl Measure {
    pub fn of_runs<'a>(runs: impl IntoIterator<Item = &'a [Metrics]>) -> Self {
        let is_evaluated = |metrics: &[Metrics]| metrics.iter().any(|m| m.eval_accuracy.is_some());
        if runs.into_iter().all(is_evaluated) { Measure::HeldOut } else { Measure::Training }
    }

    pub fn name(self) -> &'static str {
        match self {
            Measure::HeldOut => "held-out accuracy",
            Measure::Training => "training accuracy",
        }
    }

    /// Accuracies by step.
    fn curve(self, metrics: &[Metrics]) -> Vec<(f64, f64)> {
        match self {
            Measure::HeldOut => held_out(metrics),
            Measure::Training => metrics.iter().map(|m| (m.step as f64, m.accuracy)).collect(),
        }
    }

    /// Where a run ended: its last evaluation, or the mean over the last tenth of its steps.
    fn result(self, curve: &[(f64, f64)]) -> f64 {
        let n = match self {
            Measure::HeldOut => 1,
            Measure::Training => curve.len().div_ceil(10).max(1),
        };
        let last = &curve[curve.len().saturating_sub(n)..];
        last.iter().map(|(_, accuracy)| accuracy).sum::<f64>() / last.len() as f64
    }
}

/// What the runs of an experiment say together.
#[derive(Debug, Clone, PartialEq)]
pub struct ExperimentSummary {
    /// The accuracy in every arm.
    pub measure: Measure,
    pub arms: Vec<ArmSummary>,
}

/// What the runs of one arm say together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ArmSummary {
    pub name: String,
    /// Seeds whose run is complete.
    pub n_runs: usize,
    /// Last accuracy, over seeds.
    pub accuracy: Estimate,
    /// Mean height of the accuracy curve; of a curve with one point, its value.
    pub area: Estimate,
    /// -max |dH| between steps, nats; 0 for a run of one step.
    pub entropy_stability: Estimate,
    pub entropy_last: Estimate,
    pub silenced_share: Estimate,
    /// Seeds whose mean entropy collapsed in some step ([`crate::plan::config::CanaryConfig::is_collapse`]).
    pub n_collapsed: usize,
    /// Seeds whose training accuracy collapsed ([`Collapse::Accuracy`]).
    pub n_collapsed_accuracy: usize,
    /// Seeds whose responses no longer ended ([`Collapse::Endings`]).
    pub n_collapsed_endings: usize,
    /// The method minus this arm in last accuracy, paired by seed; absent for the method itself and below two seeds.
    pub against: Option<PairedComparison>,
    /// The same in the stability of entropy.
    pub stability_against: Option<PairedComparison>,
    /// The permutation p value of `against`, adjusted over arms (Holm).
    pub p_adjusted: Option<f64>,
    /// What the arm spent; absent if the experiment compares no costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
}

/// The summary of every arm. `method` is the arm that the others are baselines for, within each setting of a matrix;
/// `reach` the arm whose last accuracy the costs of all arms are measured to.
pub fn summarise(
    arms: &[ArmRuns<'_>],
    method: Option<&str>,
    reach: Option<&str>,
) -> Result<ExperimentSummary> {
    let measure = Measure::of_runs(arms.iter().flat_map(|arm| &arm.runs).map(|run| run.metrics));
    let mut summaries = Vec::new();
    for arm in arms {
        summaries.push(summarise_arm(arm, measure)?);
    }
    for (summary, cost) in
        summaries.iter_mut().zip(reach.and_then(|reach| costs(arms, reach)).unwrap_or_default())
    {
        summary.cost = Some(cost);
    }
    if let Some(method) = method {
        compare_with(method, arms, measure, &mut summaries)?;
    }
    Ok(ExperimentSummary { measure, arms: summaries })
}

/// Compares the method with every other arm of the same setting, in accuracy and in the stability of entropy.
fn compare_with(
    method: &str,
    arms: &[ArmRuns<'_>],
    measure: Measure,
    summaries: &mut [ArmSummary],
) -> Result<()> {
    let of_seeds = |arm: &ArmRuns, of: &dyn Fn(&[Metrics]) -> Result<f64>| -> Result<Vec<(u64, f64)>> {
        arm.runs.iter().map(|run| Ok((run.seed, of(run.metrics)?))).collect()
    };
    let accuracy = |metrics: &[Metrics]| Ok(measure.result(&measure.curve(metrics)));
    for own in arms.iter().filter(|arm| split_arm(arm.name).0 == method) {
        let is_baseline =
            |arm: &ArmRuns| arm.name != own.name && split_arm(arm.name).1 == split_arm(own.name).1;
        let baselines: Vec<usize> = (0..arms.len()).filter(|idx| is_baseline(&arms[*idx])).collect();
        let compared = |of: &dyn Fn(&[Metrics]) -> Result<f64>| {
            let others = baselines.iter().map(|&idx| of_seeds(&arms[idx], of)).collect::<Result<Vec<_>>>()?;
            compare_by_seed(&of_seeds(own, of)?, &others, &Resampling::default())
        };
        let found = compared(&accuracy)?.into_iter().zip(compared(&stability)?);
        for (idx, (against, stability_against)) in baselines.iter().copied().zip(found) {
            summaries[idx].against = against.map(|found| found.paired);
            summaries[idx].stability_against = stability_against.map(|found| found.paired);
        }
    }
    let p: Vec<f64> = summaries.iter().filter_map(|arm| Some(arm.against?.p_permutation)).collect();
    let mut adjusted = holm(&p)?.into_iter();
    for arm in summaries.iter_mut().filter(|arm| arm.against.is_some()) {
        arm.p_adjusted = adjusted.next();
    }
    Ok(())
}

fn summarise_arm(arm: &ArmRuns<'_>, measure: Measure) -> Result<ArmSummary> {
    let over_seeds = |of: &dyn Fn(&[Metrics]) -> Result<f64>| -> Result<Estimate> {
        mean_estimate(&arm.runs.iter().map(|run| of(run.metrics)).collect::<Result<Vec<_>>>()?)
    };
    let n_collapsed = |of: Collapse| arm.runs.iter().filter(|run| of.lifetime(run).is_event).count();
    Ok(ArmSummary {
        name: arm.name.to_string(),
        n_runs: arm.runs.len(),
        accuracy: over_seeds(&|metrics| Ok(measure.result(&measure.curve(metrics))))?,
        area: over_seeds(&|metrics| mean_height(&measure.curve(metrics)))?,
        entropy_stability: over_seeds(&stability)?,
        entropy_last: over_seeds(&|metrics| Ok(metrics[metrics.len() - 1].entropy_mean))?,
        silenced_share: over_seeds(&|metrics| Ok(silenced_share(metrics)))?,
        n_collapsed: n_collapsed(Collapse::Entropy),
        n_collapsed_accuracy: n_collapsed(Collapse::Accuracy),
        n_collapsed_endings: n_collapsed(Collapse::Endings),
        against: None,
        stability_against: None,
        p_adjusted: None,
        cost: None,
    })
}

/// The area under a curve divided by its width.
fn mean_height(curve: &[(f64, f64)]) -> Result<f64> {
    let (steps, accuracies): (Vec<f64>, Vec<f64>) = curve.iter().copied().unzip();
    let width = steps.last().zip(steps.first()).map_or(0.0, |(last, first)| last - first);
    if width > 0.0 {
        Ok(area_under_curve(&steps, &accuracies)? / width)
    } else {
        Ok(accuracies.last().copied().unwrap_or(f64::NAN))
    }
}

fn stability(metrics: &[Metrics]) -> Result<f64> {
    let entropies: Vec<f64> = metrics.iter().map(|m| m.entropy_mean).collect();
    if entropies.len() < 2 { Ok(0.0) } else { entropy_stability(&entropies) }
}

fn silenced_share(metrics: &[Metrics]) -> f64 {
    let n_tokens: usize = metrics.iter().map(|m| m.n_tokens).sum();
    let n_silenced: usize = metrics.iter().map(|m| m.n_silenced).sum();
    n_silenced as f64 / n_tokens.max(1) as f64
}
