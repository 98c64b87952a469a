//! A mixture of sources with given weights, in which the source of a position is a pure function of seed and position.

use super::permutation;
use crate::tasks::TaskError;
use stapo_core::random::Key;

/// Positions over which the shares are exact.
const BLOCK: u64 = 1000;
const STREAM: u64 = 4;

/// Every block of 1000 positions has the same number of positions for each source, in an order that the seed decides.
#[derive(Debug)]
pub(super) struct Mixture {
    /// Positions of a block that each source has; their sum is the block.
    n_of_source: Vec<u64>,
}

impl Mixture {
    /// Shares in proportion to the weights, rounded so that the largest remainders are rounded up.
    pub(super) fn new(weights: &[f64], n_sources: usize) -> Result<Self, TaskError> {
        let refuse = |problem: String| {
            Err(TaskError::setting(
                "weights",
                problem,
                "a number above 0 for each entry of path, in the same order",
            ))
        };
        if weights.len() != n_sources {
            return refuse(format!("{} weights for {n_sources} entries of path", weights.len()));
        }
        if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0)) {
            return refuse(format!("{weight} is no weight"));
        }
        let sum: f64 = weights.iter().sum();
        let exact: Vec<f64> = weights.iter().map(|weight| weight / sum * BLOCK as f64).collect();
        let mut n_of_source: Vec<u64> = exact.iter().map(|share| *share as u64).collect();
        let mut by_remainder: Vec<usize> = (0..n_sources).collect();
        by_remainder.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()));
        let n_left = BLOCK.saturating_sub(n_of_source.iter().sum()) as usize;
        by_remainder.iter().take(n_left).for_each(|&source| n_of_source[source] += 1);
        if let Some(source) = n_of_source.iter().position(|&n| n == 0) {
            return refuse(format!("{} is less than a thousandth of all weights together", weights[source]));
        }
        Ok(Self { n_of_source })
    }

    /// The source of a position, and how many positions before it have the same source.
    pub(super) fn source(&self, seed: u64, position: u64) -> (usize, u64) {
        let block = position / BLOCK;
        let mut image = permutation::image(position % BLOCK, BLOCK, Key::new(seed).with(STREAM).with(block));
        for (source, &n) in self.n_of_source.iter().enumerate() {
            if image < n {
                return (source, block * n + image);
            }
            image -= n;
        }
        unreachable!("the shares of a block have its length as their sum")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_remainders_are_rounded_up() {
        let shares = |weights: &[f64]| Mixture::new(weights, weights.len()).unwrap().n_of_source;
        assert_eq!(shares(&[1.2, 1.7, 997.1]), [1, 2, 997]);
        assert_eq!(shares(&[1.0, 1.0, 1.0]), [334, 333, 333]);
        assert_eq!(shares(&[3.0, 1.0]), [750, 250]);
        let small = Mixture::new(&[0.4, 999.6], 2).unwrap_err().to_string();
        assert!(small.contains("0.4 is less than a thousandth"), "{small}");
    }
}
