//! The one definition of a quantile: linear interpolation, as numpy and torch default to.

/// The `q`-quantile of `values`, which are reordered; none where there are none. Linear in their number.
pub fn quantile_in_place(values: &mut [f64], q: f64) -> Option<f64> {
    let last = values.len().checked_sub(1)?;
    let place = q.clamp(0.0, 1.0) * last as f64;
    let below = place.floor() as usize;
    let (_, &mut low, above) = values.select_nth_unstable_by(below, f64::total_cmp);
    let fraction = place - below as f64;
    if fraction == 0.0 {
        return Some(low);
    }
    let high = above.iter().copied().min_by(f64::total_cmp).unwrap_or(low);
    Some(low + (high - low) * fraction)
}
