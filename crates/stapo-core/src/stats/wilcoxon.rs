//! Wilcoxon's signed-rank test.

use super::distribution::normal_cdf;
use super::error::{all_finite, at_least};
use super::permutation::{exact_on_lattice, lattice};
use super::{Method, StatsError, Test};

/// Nonzero differences up to which the distribution is exact.
const MAX_EXACT: usize = 50;

/// Wilcoxon signed-rank test, two-sided (Wilcoxon 1945). Zero differences are dropped, equal sizes share their mean
/// rank; the statistic is the smaller of the rank sums of the positive and the negative differences.
///
/// Up to 50 nonzero differences the p value is exact: over all signs of the ranks at hand, ties included. Above, the
/// normal approximation with tie and continuity correction:
/// `z = (|R+ - n (n + 1) / 4| - 1/2) / sqrt(n (n + 1)(2 n + 1) / 24 - sum (t^3 - t) / 48)`.
/// No nonzero difference gives p = 1.
pub fn wilcoxon_signed_rank(differences: &[f64]) -> Result<Test, StatsError> {
    at_least("differences", 1, differences.len())?;
    all_finite("differences", differences)?;
    let nonzero: Vec<f64> = differences.iter().copied().filter(|d| *d != 0.0).collect();
    let ranks = signed_double_ranks(&nonzero);
    let positive: i64 = ranks.iter().map(|&rank| rank.max(0)).sum();
    let negative: i64 = -ranks.iter().map(|&rank| rank.min(0)).sum::<i64>();
    let statistic = 0.5 * positive.min(negative) as f64;
    let exact = if ranks.len() <= MAX_EXACT { exact_on_lattice(&ranks) } else { None };
    Ok(match exact {
        Some(p_value) => Test { statistic, p_value, method: Method::Exact },
        None => Test {
            statistic,
            p_value: approximate(&ranks, positive.abs_diff(negative)),
            method: Method::NormalApproximation,
        },
    })
}

/// Twice the rank of each |difference| (an integer, ties included), with the sign of the difference. Sizes that are
/// the same multiple of some 1 / q are ties even where their floating point values differ.
fn signed_double_ranks(nonzero: &[f64]) -> Vec<i64> {
    let sizes: Vec<f64> = match lattice(nonzero) {
        Some(steps) => steps.iter().map(|s| s.unsigned_abs() as f64).collect(),
        None => nonzero.iter().map(|d| d.abs()).collect(),
    };
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by(|&a, &b| sizes[a].total_cmp(&sizes[b]));
    let mut ranks = vec![0; sizes.len()];
    let mut first = 0;
    for tied in order.chunk_by(|&a, &b| sizes[a] == sizes[b]) {
        // Ranks first + 1 ..= first + tied: twice their mean is the sum of the two ends.
        let double_rank = (2 * first + tied.len() + 1) as i64;
        for &i in tied {
            ranks[i] = if nonzero[i] > 0.0 { double_rank } else { -double_rank };
        }
        first += tied.len();
    }
    ranks
}

/// `gap` is |2 R+ - 2 R-|, which is 4 |R+ - n (n + 1) / 4|.
fn approximate(ranks: &[i64], gap: u64) -> f64 {
    let n = ranks.len() as f64;
    let mut sizes: Vec<u64> = ranks.iter().map(|r| r.unsigned_abs()).collect();
    sizes.sort_unstable();
    let ties: f64 = sizes
        .chunk_by(|a, b| a == b)
        .map(|tied| {
            let t = tied.len() as f64;
            t * t * t - t
        })
        .sum();
    let variance = n * (n + 1.0) * (2.0 * n + 1.0) / 24.0 - ties / 48.0;
    let distance = (0.25 * gap as f64 - 0.5).max(0.0);
    2.0 * normal_cdf(-distance / variance.sqrt())
}
