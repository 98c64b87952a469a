//! The paired permutation test: the null distribution of paired differences under sign flips.

use super::bootstrap::Resampling;
use super::error::{all_finite, at_least};
use super::{Method, StatsError, Test};
use crate::random::Key;

/// Largest denominator q tried when looking for a lattice k / q under the differences.
const MAX_DENOMINATOR: u32 = 4096;
/// Additions above which the exact distribution on a lattice gives way to random draws.
const EXACT_COST: u64 = 200_000_000;
/// Most differences off any lattice whose sign patterns are enumerated: 2^19 patterns and their mirror images.
const MAX_ENUMERATED: usize = 20;

/// Paired permutation test of the mean of one difference per question (Fisher 1935): under "no difference" each sign is
/// as likely as its opposite. Two-sided: `p = P(|sum s_i d_i| >= |sum d_i|)` over all signs.
///
/// Exact where the differences are multiples of some 1 / q, q up to 4096, as shares of samples are (by convolution, for
/// thousands of questions), or where there are at most 20 of them; otherwise `(1 + hits) / (1 + n_resamples)` over
/// random signs (Phipson, Smyth 2010). Zero differences change nothing. The statistic is the mean difference.
pub fn paired_permutation(differences: &[f64], resampling: &Resampling) -> Result<Test, StatsError> {
    at_least("differences", 1, differences.len())?;
    all_finite("differences", differences)?;
    resampling.check()?;
    let statistic = super::descriptive::mean_of(differences);
    let nonzero: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    let exact = lattice(&nonzero)
        .and_then(|steps| exact_on_lattice(&steps))
        .or_else(|| (nonzero.len() <= MAX_ENUMERATED).then(|| enumerated(&nonzero)));
    let (p_value, method) = match exact {
        Some(p_value) => (p_value, Method::Exact),
        None => (drawn(&nonzero, resampling), Method::MonteCarlo),
    };
    Ok(Test { statistic, p_value, method })
}

/// The differences as multiples of one 1 / q with the smallest q, if there is one: integers have exact sums and ties
/// where k / n in floating point has not.
pub(super) fn lattice(differences: &[f64]) -> Option<Vec<i64>> {
    let on_lattice = |d: f64, q: f64| {
        let step = (d * q).round();
        (d == 0.0) == (step == 0.0) && step.abs() < 1e6 && (d * q - step).abs() <= 1e-9 * step.abs()
    };
    (1..=MAX_DENOMINATOR)
        .map(f64::from)
        .find(|&q| differences.iter().all(|&d| on_lattice(d, q)))
        .map(|q| differences.iter().map(|d| (d * q).round() as i64).collect())
}

/// `P(|sum s_i d_i| >= |sum d_i|)` from the distribution of the sum of the positive terms, built one difference at a
/// time; `None` if that costs more than [`EXACT_COST`] additions.
pub(super) fn exact_on_lattice(steps: &[i64]) -> Option<f64> {
    let divisor = steps.iter().fold(0, |g, s| greatest_common_divisor(g, s.unsigned_abs())).max(1);
    let sizes: Vec<u64> = steps.iter().map(|s| s.unsigned_abs() / divisor).collect();
    let total: u64 = sizes.iter().sum();
    if total.saturating_mul(sizes.len() as u64) > EXACT_COST {
        return None;
    }
    let observed = steps.iter().sum::<i64>().unsigned_abs() / divisor;
    let mut chances = vec![0.0; total as usize + 1];
    chances[0] = 1.0;
    let mut reach = 0;
    for size in sizes.iter().map(|&s| s as usize) {
        reach += size;
        for sum in (0..=reach).rev() {
            let shifted = if sum >= size { chances[sum - size] } else { 0.0 };
            chances[sum] = 0.5 * (chances[sum] + shifted);
        }
    }
    // The signed sum is 2 positive - total; its distribution is symmetric about 0.
    if observed == 0 {
        return Some(1.0);
    }
    let low_tail: f64 = chances.iter().take(((total - observed) / 2) as usize + 1).sum();
    Some((2.0 * low_tail).clamp(f64::MIN_POSITIVE, 1.0))
}

/// `P(|sum s_i d_i| >= |sum d_i|)` by all sign patterns. The first sign is fixed, since patterns come in mirrored
/// pairs.
fn enumerated(differences: &[f64]) -> f64 {
    let Some((&first, rest)) = differences.split_first() else { return 1.0 };
    let threshold = reach(differences);
    let n_patterns = 1_u64 << rest.len();
    let n_hits =
        (0..n_patterns).filter(|&pattern| signed_sum(first, rest, pattern).abs() >= threshold).count();
    n_hits as f64 / n_patterns as f64
}

/// `P(|sum s_i d_i| >= |sum d_i|)` estimated from random signs.
fn drawn(differences: &[f64], resampling: &Resampling) -> f64 {
    let threshold = reach(differences);
    let seed = Key::new(resampling.seed);
    let n_hits = (0..resampling.n_resamples)
        .filter(|&resample| {
            let key = seed.with(resample as u64);
            let sum: f64 = differences
                .chunks(64)
                .enumerate()
                .map(|(word, chunk)| signed_sum(0.0, chunk, key.with(word as u64).bits()))
                .sum();
            sum.abs() >= threshold
        })
        .count();
    (1 + n_hits) as f64 / (1 + resampling.n_resamples) as f64
}

/// |sum d|, lowered by the rounding error that an equally large sum may carry.
fn reach(differences: &[f64]) -> f64 {
    let sum: f64 = differences.iter().sum();
    let size: f64 = differences.iter().map(|d| d.abs()).sum();
    sum.abs() - 1e-12 * size
}

/// `start` plus the values, those whose bit of `pattern` is set taken negative.
fn signed_sum(start: f64, values: &[f64], pattern: u64) -> f64 {
    values
        .iter()
        .enumerate()
        .fold(start, |sum, (i, value)| f64::from_bits(value.to_bits() ^ ((pattern >> i & 1) << 63)) + sum)
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests;
