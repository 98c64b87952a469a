//! Rank correlation.

use super::StatsError;
use super::error::{all_finite, at_least, same_length};

/// Spearman's correlation: Pearson's of the ranks, equal values sharing their mean rank. `None` if all values of a side
/// are equal, which leaves no order to agree with.
pub fn spearman(x: &[f64], y: &[f64]) -> Result<Option<f64>, StatsError> {
    same_length("x and y", x.len(), y.len())?;
    at_least("pairs", 2, x.len())?;
    all_finite("x", x)?;
    all_finite("y", y)?;
    let (x, y) = (centred_ranks(x), centred_ranks(y));
    let product = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let size = (product(&x, &x) * product(&y, &y)).sqrt();
    Ok((size > 0.0).then(|| (product(&x, &y) / size).clamp(-1.0, 1.0)))
}

/// The rank of each value minus the mean of all ranks.
fn centred_ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let middle = 0.5 * (values.len() as f64 + 1.0);
    let mut ranks = vec![0.0; values.len()];
    let mut first = 0;
    for tied in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let rank = first as f64 + 0.5 * (tied.len() as f64 + 1.0);
        for &idx in tied {
            ranks[idx] = rank - middle;
        }
        first += tied.len();
    }
    ranks
}
