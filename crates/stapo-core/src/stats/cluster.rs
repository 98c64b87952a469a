//! Means whose standard errors are clustered by question, and their intervals.

use serde::{Deserialize, Serialize};

use super::descriptive::{mean_of, squares_about, variance_of};
use super::distribution::{normal_quantile, t_quantile};
use super::error::{all_finite, at_least, open_unit};
use super::{Estimate, Interval, StatsError};

/// Level of the intervals inside an [`Estimate`]; [`t_interval`] gives others.
pub const LEVEL: f64 = 0.95;

/// The scores of one question's samples, reduced to their number, mean and sum of squares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuestionScores {
    n_samples: usize,
    mean: f64,
    /// Sum of squared distances of the samples from `mean`.
    squares: f64,
}

impl QuestionScores {
    /// Refuses a question without samples and scores that are not finite.
    pub fn new(scores: &[f64]) -> Result<Self, StatsError> {
        at_least("scores", 1, scores.len())?;
        all_finite("scores", scores)?;
        let mean = mean_of(scores);
        Ok(Self { n_samples: scores.len(), mean, squares: squares_about(scores, mean) })
    }

    pub(super) fn of_proportion(n_samples: usize, n_correct: usize) -> Self {
        let mean = n_correct as f64 / n_samples as f64;
        Self { n_samples, mean, squares: n_correct as f64 * (1.0 - mean) }
    }

    pub fn n_samples(&self) -> usize {
        self.n_samples
    }

    pub fn mean(&self) -> f64 {
        self.mean
    }
}

/// Mean over questions of the mean over samples; a question counts once however many samples it has.
///
/// With m the mean of the Q question means `m_q`, the squared standard error is `sum (m_q - m)^2 / (Q (Q - 1))`. That
/// is the cluster-robust variance with the CR1 factor Q / (Q - 1) of a regression on a constant with weights `1 / n_q`
/// (Liang, Zeger 1986; for evaluations Miller 2024); the standard error holds whatever the dependence within a
/// question. Interval: t with Q - 1 degrees of freedom.
pub fn clustered_mean(questions: &[QuestionScores]) -> Result<Estimate, StatsError> {
    let means: Vec<f64> = questions.iter().map(QuestionScores::mean).collect();
    let n_samples = questions.iter().map(QuestionScores::n_samples).sum();
    Ok(Estimate { n_samples, ..mean_estimate(&means)? })
}

/// Mean of one finite value per question (or per seed), with standard error s / sqrt(n) and the t interval.
pub fn mean_estimate(values: &[f64]) -> Result<Estimate, StatsError> {
    at_least("values", 1, values.len())?;
    all_finite("values", values)?;
    let n = values.len();
    let value = mean_of(values);
    let standard_error = (n > 1).then(|| (variance_of(values) / n as f64).sqrt());
    let interval = match standard_error {
        Some(error) => Some(t_interval(value, error, (n - 1) as f64, LEVEL)?),
        None => None,
    };
    Ok(Estimate { value, standard_error, interval, n_questions: n, n_samples: n })
}

/// `value +- t standard_error`, t the quantile of Student's t at (1 + level) / 2.
pub fn t_interval(value: f64, standard_error: f64, freedom: f64, level: f64) -> Result<Interval, StatsError> {
    all_finite("value", &[value])?;
    open_unit("level", level)?;
    if !(standard_error.is_finite() && standard_error >= 0.0) {
        return Err(StatsError::OutOfRange {
            what: "standard_error",
            value: standard_error,
            expected: "a finite number not below 0",
        });
    }
    if freedom.is_nan() || freedom <= 0.0 {
        return Err(StatsError::OutOfRange { what: "freedom", value: freedom, expected: "a number above 0" });
    }
    let half = t_quantile(0.5 + 0.5 * level, freedom) * standard_error;
    Ok(Interval { low: value - half, high: value + half, level })
}

/// Interval of a proportion from independent trials (Wilson 1927, without continuity correction). Stays inside 0..1
/// and has width even at 0 and at n successes. Samples of one question are not independent trials.
pub fn wilson(n_success: usize, n_trials: usize, level: f64) -> Result<Interval, StatsError> {
    if n_trials == 0 || n_success > n_trials {
        return Err(StatsError::Count { n_samples: n_trials, n_correct: n_success });
    }
    open_unit("level", level)?;
    Ok(wilson_of_share(n_success as f64 / n_trials as f64, n_trials as f64, level))
}

fn wilson_of_share(share: f64, n: f64, level: f64) -> Interval {
    let z = normal_quantile(0.5 + 0.5 * level);
    let shrink = 1.0 / (1.0 + z * z / n);
    let center = shrink * (share + z * z / (2.0 * n));
    let half = shrink * z * (share * (1.0 - share) / n + z * z / (4.0 * n * n)).sqrt();
    // At a share of 0 or 1 center and half cancel exactly in theory, but not in floating point.
    let low = if share == 0.0 { 0.0 } else { center - half };
    let high = if share == 1.0 { 1.0 } else { center + half };
    Interval { low, high, level }.within(0.0, 1.0)
}

/// [`mean_estimate`] of values that lie in 0..1. Where all are equal (every question failed, say) the t interval would
/// have no width. A proportion varies at most like one trial per question, so Wilson's interval with one trial per
/// question replaces the t interval there.
pub(super) fn proportion_estimate(values: &[f64], n_samples: usize) -> Result<Estimate, StatsError> {
    let mut estimate = Estimate { n_samples, ..mean_estimate(values)? };
    let alike = values.iter().all(|v| *v == values[0]);
    if alike && values.len() > 1 {
        estimate.value = values[0];
        estimate.standard_error = Some(0.0);
        estimate.interval = Some(wilson_of_share(values[0], values.len() as f64, LEVEL));
    } else {
        estimate.interval = estimate.interval.map(|interval| interval.within(0.0, 1.0));
    }
    Ok(estimate)
}

/// Spread of scores, split into questions and samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct VarianceComponents {
    /// Variance over questions of a question's true mean.
    pub between: f64,
    /// Variance over samples around their question's true mean.
    pub within: f64,
    /// Mean over questions of 1 / samples.
    pub inverse_samples: f64,
}

/// Moments estimate: `within` pools the sample variances by their degrees of freedom; the variance of the question
/// means estimates `between + within * inverse_samples` (Searle et al. 1992, unweighted means), and
/// `between` is what is left, never below 0. Needs two questions, and one question with two samples.
pub fn variance_components(questions: &[QuestionScores]) -> Result<VarianceComponents, StatsError> {
    at_least("questions", 2, questions.len())?;
    let repeats: usize = questions.iter().map(|q| q.n_samples - 1).sum();
    at_least("samples beyond the first of a question", 1, repeats)?;
    let within = questions.iter().map(|q| q.squares).sum::<f64>() / repeats as f64;
    let inverse_samples =
        questions.iter().map(|q| 1.0 / q.n_samples as f64).sum::<f64>() / questions.len() as f64;
    let means: Vec<f64> = questions.iter().map(QuestionScores::mean).collect();
    let between = (variance_of(&means) - within * inverse_samples).max(0.0);
    Ok(VarianceComponents { between, within, inverse_samples })
}
