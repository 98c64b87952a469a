//! The head of a reward model: one number for each scored row, and back. The rows are few, so the host computes them, in the
//! same order on every device.

use super::accumulate::Accumulate;
use super::arena::Arena;
use super::layout::ArenaLayout;
use super::policy::Policy;
use stapo_ops::{Float, Write};

/// `[R]`: the rows that the stack left in the arena times the head's weight, each summed in f64 in the order of the columns.
pub fn forward<T: Float>(policy: &Policy<T>, layout: &ArenaLayout, arena: &mut Arena<T>) -> Vec<f64> {
    let weight = policy.weights.head().view().to_vec();
    let rows = arena.hidden(layout).to_vec();
    let score = |row: &[T]| row.iter().zip(&weight).map(|(x, w)| x.to_f64() * w.to_f64()).sum();
    rows.chunks_exact(weight.len()).map(score).collect()
}

/// Leaves the gradient of the normed rows in the arena and adds to the head's. Every element of the latter is one chain over the
/// rows in order. Shape: `d_scores` `[R]`.
pub fn backward<T: Float>(
    policy: &Policy<T>,
    layout: &ArenaLayout,
    arena: &mut Arena<T>,
    d_scores: &[T],
    gradients: &mut impl Accumulate<T>,
) {
    let (n_rows, n_given) = (layout.n_scored, d_scores.len());
    assert_eq!(n_rows, n_given, "backward: {n_rows} scored rows, {n_given} derivatives");
    let weight = policy.weights.head().view().to_vec();
    let mut views = arena.head_backward(layout);
    if let Some((mut d_weight, write)) = gradients.head() {
        let mut sum = match write {
            Write::Set => vec![T::ZERO; weight.len()],
            Write::Add => d_weight.reborrow().into_view().to_vec(),
        };
        for (row, d_score) in views.normed.to_vec().chunks_exact(weight.len()).zip(d_scores) {
            for (sum, x) in sum.iter_mut().zip(row) {
                *sum += *d_score * *x;
            }
        }
        d_weight.write(&sum);
    }
    let d_rows: Vec<T> = d_scores.iter().flat_map(|d_score| weight.iter().map(|w| *d_score * *w)).collect();
    views.d_normed.write(&d_rows);
    gradients.head_done();
}
