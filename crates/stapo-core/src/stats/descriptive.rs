//! Plain summaries of a series.

use super::StatsError;
use super::error::{all_finite, at_least, same_length};

/// Arithmetic mean of at least one finite value.
pub fn mean(values: &[f64]) -> Result<f64, StatsError> {
    at_least("values", 1, values.len())?;
    all_finite("values", values)?;
    Ok(mean_of(values))
}

/// Quantile by linear interpolation between order statistics at place q (n - 1) (Hyndman, Fan 1996, type 7; the
/// default of R and `NumPy`). Values in any order, finite.
pub fn quantile(values: &[f64], q: f64) -> Result<f64, StatsError> {
    at_least("values", 1, values.len())?;
    all_finite("values", values)?;
    if !(0.0..=1.0).contains(&q) {
        return Err(StatsError::OutOfRange { what: "q", value: q, expected: "a number from 0 to 1" });
    }
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    Ok(quantile_sorted(&sorted, q))
}

/// [`quantile`] of values already in ascending order; for loops that take many quantiles of one series.
///
/// # Panics
/// When `sorted` is empty or `q` is outside 0..=1.
pub fn quantile_sorted<T: Copy + Into<f64>>(sorted: &[T], q: f64) -> f64 {
    assert!(!sorted.is_empty(), "quantile_sorted: no values, expected at least one");
    assert!((0.0..=1.0).contains(&q), "quantile_sorted: q = {q}, expected 0 to 1");
    let rank = q * (sorted.len() - 1) as f64;
    let below = rank.floor();
    let low: f64 = sorted[below as usize].into();
    let high: f64 = sorted[rank.ceil() as usize].into();
    between(low, high, rank - below)
}

/// [`quantile`] without sorting, in linear time: `values` are reordered. `None` for an empty slice.
///
/// # Panics
/// When `q` is outside 0..=1.
pub fn quantile_in_place(values: &mut [f64], q: f64) -> Option<f64> {
    assert!((0.0..=1.0).contains(&q), "quantile_in_place: q = {q}, expected 0 to 1");
    let rank = q * values.len().checked_sub(1)? as f64;
    let below = rank.floor();
    let (_, &mut low, above) = values.select_nth_unstable_by(below as usize, f64::total_cmp);
    let next = above.iter().copied().min_by(f64::total_cmp).unwrap_or(low);
    let fraction = rank - below;
    Some(if fraction == 0.0 { low } else { between(low, next, fraction) })
}

/// Interpolates from the nearer end, so that equal neighbours give exactly their value and q = 1 the maximum.
fn between(low: f64, high: f64, fraction: f64) -> f64 {
    if fraction < 0.5 { low + (high - low) * fraction } else { high - (high - low) * (1.0 - fraction) }
}

/// The share of the highest value that a spread must exceed: smaller differences are rounding.
const ROUNDING: f64 = 1e-9;

/// True if values differ by more than rounding: by more than 1e-9 of the highest.
pub fn has_spread(values: impl Iterator<Item = f64>) -> bool {
    let start = (f64::INFINITY, f64::NEG_INFINITY);
    let (lowest, highest) = values.fold(start, |(low, high), x| (low.min(x), high.max(x)));
    // The difference of two finite values can overflow to infinity, which is a spread.
    highest - lowest > ROUNDING * highest.abs()
}

/// Area under the piecewise linear curve through (x, y), x not decreasing. One point has area 0.
pub fn area_under_curve(x: &[f64], y: &[f64]) -> Result<f64, StatsError> {
    same_length("x and y", x.len(), y.len())?;
    at_least("x", 1, x.len())?;
    all_finite("x", x)?;
    all_finite("y", y)?;
    if let Some(i) = x.windows(2).position(|w| w[1] < w[0]) {
        return Err(StatsError::NotSorted { index: i + 1, previous: x[i], value: x[i + 1] });
    }
    Ok(x.windows(2).zip(y.windows(2)).map(|(x, y)| (x[1] - x[0]) * 0.5 * (y[0] + y[1])).sum())
}

/// `-max |H(t+1) - H(t)|` over a series of entropies: 0 is perfectly stable, large negative is a jump.
pub fn entropy_stability(entropies: &[f64]) -> Result<f64, StatsError> {
    at_least("entropies", 2, entropies.len())?;
    all_finite("entropies", entropies)?;
    Ok(-entropies.windows(2).map(|w| (w[1] - w[0]).abs()).fold(0.0, f64::max))
}

/// Mean of values known to be finite and not empty.
pub(super) fn mean_of(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Unbiased variance, divisor n - 1, of values known to be finite and at least two.
pub(super) fn variance_of(values: &[f64]) -> f64 {
    squares_about(values, mean_of(values)) / (values.len() - 1) as f64
}

/// Sum of squared distances from `center`.
pub(super) fn squares_about(values: &[f64], center: f64) -> f64 {
    values.iter().map(|v| (v - center).powi(2)).sum()
}
