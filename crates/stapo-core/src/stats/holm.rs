//! Several tests at once.

use super::StatsError;

/// Adjusted p values (Holm 1979), in the order given: with p sorted ascending, `max over j <= i of (m - j) p_j` (j from
/// 0), at most 1. Rejecting those at or below alpha keeps the chance of any false rejection at or below alpha, whatever
/// the dependence between the tests. An empty list gives an empty list.
pub fn holm(p_values: &[f64]) -> Result<Vec<f64>, StatsError> {
    if let Some(&value) = p_values.iter().find(|p| !(0.0..=1.0).contains(*p)) {
        return Err(StatsError::OutOfRange { what: "p value", value, expected: "a number from 0 to 1" });
    }
    let mut order: Vec<usize> = (0..p_values.len()).collect();
    order.sort_by(|&a, &b| p_values[a].total_cmp(&p_values[b]));
    let mut adjusted = vec![0.0; p_values.len()];
    let mut least = 0.0_f64;
    for (place, &test) in order.iter().enumerate() {
        let factor = (p_values.len() - place) as f64;
        least = least.max(factor * p_values[test]).min(1.0);
        adjusted[test] = least;
    }
    Ok(adjusted)
}
