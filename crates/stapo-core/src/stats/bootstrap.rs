//! Bootstrap intervals: questions are redrawn with replacement, each with all its samples.

use serde::{Deserialize, Serialize};

use super::cluster::LEVEL;
use super::descriptive::{mean_of, quantile_sorted, variance_of};
use super::distribution::{normal_cdf, normal_quantile};
use super::error::{all_finite, at_least, open_unit};
use super::{Interval, StatsError};
use crate::random::Key;

/// How to resample. Equal settings give equal results.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Resampling {
    pub n_resamples: usize,
    pub seed: u64,
    pub level: f64,
}

impl Default for Resampling {
    fn default() -> Self {
        Self { n_resamples: 10_000, seed: 0, level: LEVEL }
    }
}

impl Resampling {
    pub(super) fn check(&self) -> Result<(), StatsError> {
        at_least("n_resamples", 1, self.n_resamples)?;
        open_unit("level", self.level)
    }
}

/// A statistic with its bootstrap distribution's spread and intervals.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bootstrapped {
    pub value: f64,
    /// Standard deviation of the replicates.
    pub standard_error: f64,
    pub percentile: Interval,
    /// Bias-corrected and accelerated; better than `percentile` for skewed statistics and few questions.
    pub bca: Interval,
}

/// Bootstrap of any statistic of `n_questions` (at least 2) questions: `statistic` gets the indices of the questions
/// drawn, and is called once with all in order, once with each question left out, and once per resample.
pub fn bootstrap(
    n_questions: usize,
    resampling: &Resampling,
    mut statistic: impl FnMut(&[usize]) -> f64,
) -> Result<Bootstrapped, StatsError> {
    at_least("questions", 2, n_questions)?;
    let value = statistic(&(0..n_questions).collect::<Vec<_>>());
    let mut others: Vec<usize> = (1..n_questions).collect();
    let mut jackknife = vec![statistic(&others)];
    for out in 1..n_questions {
        others[out - 1] = out - 1;
        jackknife.push(statistic(&others));
    }
    let replicates = replicates(n_questions, resampling, statistic)?;
    bootstrapped(value, &replicates, &jackknife, resampling.level)
}

/// Bootstrap of the mean of one finite value per question (at least 2), and the replicates in ascending order.
pub(super) fn mean_replicates(
    values: &[f64],
    resampling: &Resampling,
) -> Result<(Bootstrapped, Vec<f64>), StatsError> {
    at_least("questions", 2, values.len())?;
    all_finite("values", values)?;
    let n = values.len() as f64;
    let value = mean_of(values);
    let jackknife: Vec<f64> = values.iter().map(|v| value + (value - v) / (n - 1.0)).collect();
    let replicates = replicates(values.len(), resampling, |questions| {
        questions.iter().map(|&q| values[q]).sum::<f64>() / n
    })?;
    Ok((bootstrapped(value, &replicates, &jackknife, resampling.level)?, replicates))
}

/// `statistic` of each resample, ascending.
fn replicates(
    n_questions: usize,
    resampling: &Resampling,
    mut statistic: impl FnMut(&[usize]) -> f64,
) -> Result<Vec<f64>, StatsError> {
    at_least("n_resamples", 2, resampling.n_resamples)?;
    resampling.check()?;
    let seed = Key::new(resampling.seed);
    let mut questions = vec![0; n_questions];
    let mut replicates = Vec::with_capacity(resampling.n_resamples);
    for resample in 0..resampling.n_resamples {
        let key = seed.with(resample as u64);
        for (draw, question) in questions.iter_mut().enumerate() {
            *question = key.with(draw as u64).below(n_questions as u64) as usize;
        }
        replicates.push(statistic(&questions));
    }
    replicates.sort_unstable_by(f64::total_cmp);
    Ok(replicates)
}

fn bootstrapped(
    value: f64,
    replicates: &[f64],
    jackknife: &[f64],
    level: f64,
) -> Result<Bootstrapped, StatsError> {
    Ok(Bootstrapped {
        value,
        percentile: percentile_interval(replicates, level)?,
        bca: bca_interval(value, replicates, jackknife, level)?,
        standard_error: variance_of(replicates).sqrt(),
    })
}

/// The quantiles (1 - level) / 2 and (1 + level) / 2 of the replicates (Efron 1979).
pub fn percentile_interval(replicates: &[f64], level: f64) -> Result<Interval, StatsError> {
    open_unit("level", level)?;
    let sorted = sorted_replicates(replicates)?;
    let tail = 0.5 * (1.0 - level);
    Ok(Interval { low: quantile_sorted(&sorted, tail), high: quantile_sorted(&sorted, 1.0 - tail), level })
}

/// Bias-corrected and accelerated interval (Efron 1987): the quantiles of the replicates at
/// `Phi(z0 + (z0 + z) / (1 - a (z0 + z)))`, z being the normal quantiles of the two probabilities of
/// [`percentile_interval`].
///
/// z0 is the normal quantile of the share of replicates below `value` (equal ones count half; the share is kept half a
/// replicate away from 0 and 1). The acceleration a is `sum d^3 / (6 (sum d^2)^(3/2))`, d being the mean of the
/// leave-one-out values `jackknife` minus each of them, and 0 where these are all equal.
pub fn bca_interval(
    value: f64,
    replicates: &[f64],
    jackknife: &[f64],
    level: f64,
) -> Result<Interval, StatsError> {
    open_unit("level", level)?;
    all_finite("value", &[value])?;
    at_least("jackknife", 2, jackknife.len())?;
    all_finite("jackknife", jackknife)?;
    let sorted = sorted_replicates(replicates)?;
    let z0 = bias_correction(value, &sorted);
    let a = acceleration(jackknife);
    let adjusted = |p: f64| {
        let z = z0 + normal_quantile(p);
        let shrink = 1.0 - a * z;
        // At and past its pole the transformation is replaced by its limit, probability 0 or 1.
        if shrink > 0.0 { normal_cdf(z0 + z / shrink) } else { f64::from(z > 0.0) }
    };
    let tail = 0.5 * (1.0 - level);
    Ok(Interval {
        low: quantile_sorted(&sorted, adjusted(tail)),
        high: quantile_sorted(&sorted, adjusted(1.0 - tail)),
        level,
    })
}

fn bias_correction(value: f64, sorted: &[f64]) -> f64 {
    let below = sorted.partition_point(|r| *r < value);
    let not_above = sorted.partition_point(|r| *r <= value);
    let n = sorted.len() as f64;
    let share = (below + not_above) as f64 / (2.0 * n);
    normal_quantile(share.clamp(0.5 / n, 1.0 - 0.5 / n))
}

fn acceleration(jackknife: &[f64]) -> f64 {
    let center = mean_of(jackknife);
    let (squares, cubes) = jackknife.iter().fold((0.0, 0.0), |(squares, cubes), value| {
        let d = center - value;
        (squares + d * d, cubes + d * d * d)
    });
    if squares > 0.0 { cubes / (6.0 * squares.powf(1.5)) } else { 0.0 }
}

fn sorted_replicates(replicates: &[f64]) -> Result<Vec<f64>, StatsError> {
    at_least("replicates", 1, replicates.len())?;
    all_finite("replicates", replicates)?;
    let mut sorted = replicates.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    Ok(sorted)
}
