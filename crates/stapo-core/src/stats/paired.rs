//! Two arms on the same questions.

use serde::{Deserialize, Serialize};

use super::bootstrap::{Bootstrapped, Resampling, mean_replicates};
use super::cluster::t_interval;
use super::descriptive::{mean_of, variance_of};
use super::distribution::t_two_sided;
use super::error::{all_finite, at_least, same_length};
use super::holm::holm;
use super::permutation::paired_permutation;
use super::power::{PairedDesign, detectable};
use super::wilcoxon::wilcoxon_signed_rank;
use super::{Interval, Method, StatsError, Test};

/// Differences `candidate - baseline` per question: their mean, intervals and p values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairedComparison {
    pub n_questions: usize,
    /// Questions on which the candidate scores higher, lower, the same.
    pub n_better: usize,
    pub n_worse: usize,
    pub n_equal: usize,
    /// Mean of candidate minus baseline.
    pub difference: f64,
    pub standard_error: f64,
    /// Student's t with `n_questions - 1` degrees of freedom.
    pub interval: Interval,
    pub bootstrap_interval: Interval,
    /// The p value to report, and to adjust over benchmarks with [`holm`](super::holm()).
    pub p_permutation: f64,
    pub permutation_method: Method,
    pub p_wilcoxon: f64,
    pub p_t: f64,
    pub p_bootstrap: f64,
    /// The true difference these questions and samples would find in 80 % of repetitions at alpha 0.05.
    pub minimum_detectable_effect: f64,
}

/// A method against one of several arms.
#[derive(Debug, Clone, PartialEq)]
pub struct AgainstArm {
    /// Seeds take the place of questions; positive where the method is better.
    pub paired: PairedComparison,
    /// `p_permutation` adjusted over all arms that could be compared (Holm).
    pub p_adjusted: f64,
}

/// Compares a method with each of several arms by one (seed, value) per run, paired by seed. `None` for an arm that
/// shares fewer than two seeds with the method.
pub fn compare_by_seed(
    method: &[(u64, f64)],
    arms: &[Vec<(u64, f64)>],
    resampling: &Resampling,
) -> Result<Vec<Option<AgainstArm>>, StatsError> {
    let mut compared = Vec::new();
    for arm in arms {
        let partner = |seed: u64| method.iter().find(|(own, _)| *own == seed).map(|(_, value)| *value);
        let pairs = arm.iter().filter_map(|(seed, value)| Some((*value, partner(*seed)?)));
        let (baseline, candidate): (Vec<f64>, Vec<f64>) = pairs.unzip();
        compared.push(match baseline.len() {
            0 | 1 => None,
            _ => Some(compare_paired(&baseline, &candidate, resampling)?),
        });
    }
    let p: Vec<f64> = compared.iter().flatten().map(|paired| paired.p_permutation).collect();
    let mut adjusted = holm(&p)?.into_iter();
    let against = |paired: Option<PairedComparison>| {
        let paired = paired?;
        Some(AgainstArm { paired, p_adjusted: adjusted.next()? })
    };
    Ok(compared.into_iter().map(against).collect())
}

/// Compares two arms by one finite value per question (avg@k shares, say), the questions in the same order. Needs two
/// questions.
pub fn compare_paired(
    baseline: &[f64],
    candidate: &[f64],
    resampling: &Resampling,
) -> Result<PairedComparison, StatsError> {
    same_length("baseline and candidate", baseline.len(), candidate.len())?;
    at_least("questions", 2, baseline.len())?;
    all_finite("baseline", baseline)?;
    all_finite("candidate", candidate)?;
    let differences: Vec<f64> = baseline.iter().zip(candidate).map(|(a, b)| b - a).collect();
    let n_questions = differences.len();
    let variance = variance_of(&differences);
    let standard_error = (variance / n_questions as f64).sqrt();
    let difference = mean_of(&differences);
    let permutation = paired_permutation(&differences, resampling)?;
    let (bootstrapped, p_bootstrap) = paired_bootstrap(&differences, resampling)?;
    Ok(PairedComparison {
        n_questions,
        n_better: differences.iter().filter(|d| **d > 0.0).count(),
        n_worse: differences.iter().filter(|d| **d < 0.0).count(),
        n_equal: differences.iter().filter(|d| **d == 0.0).count(),
        difference,
        standard_error,
        interval: t_interval(difference, standard_error, (n_questions - 1) as f64, resampling.level)?,
        bootstrap_interval: bootstrapped.bca,
        p_permutation: permutation.p_value,
        permutation_method: permutation.method,
        p_wilcoxon: wilcoxon_signed_rank(&differences)?.p_value,
        p_t: paired_t(&differences)?.p_value,
        p_bootstrap,
        minimum_detectable_effect: detectable(
            variance,
            n_questions as u64,
            PairedDesign::ALPHA,
            PairedDesign::POWER,
        ),
    })
}

/// Paired t test (Student 1908): `t = mean / (s / sqrt(n))`, n - 1 degrees of freedom. Differences without spread give
/// p = 1 where they are 0, else p = 0 and the largest finite t.
pub fn paired_t(differences: &[f64]) -> Result<Test, StatsError> {
    at_least("differences", 2, differences.len())?;
    all_finite("differences", differences)?;
    let n = differences.len() as f64;
    let mean = mean_of(differences);
    let error = (variance_of(differences) / n).sqrt();
    all_finite("mean and standard error", &[mean, error])?;
    let t = if mean == 0.0 { 0.0 } else { (mean / error).clamp(-f64::MAX, f64::MAX) };
    Ok(Test { statistic: t, p_value: t_two_sided(t, n - 1.0), method: Method::StudentT })
}

/// Bootstrap of the mean difference by question, and its two-sided p value: twice the smaller share of replicates at or
/// beyond 0 on either side, the observed one counted on both, at most 1 (Efron, Tibshirani 1993, ch. 15).
pub fn paired_bootstrap(
    differences: &[f64],
    resampling: &Resampling,
) -> Result<(Bootstrapped, f64), StatsError> {
    let (bootstrapped, replicates) = mean_replicates(differences, resampling)?;
    let n_not_above = replicates.partition_point(|r| *r <= 0.0);
    let n_not_below = replicates.len() - replicates.partition_point(|r| *r < 0.0);
    let smaller = (1 + n_not_above.min(n_not_below)) as f64 / (1 + replicates.len()) as f64;
    Ok((bootstrapped, (2.0 * smaller).min(1.0)))
}
