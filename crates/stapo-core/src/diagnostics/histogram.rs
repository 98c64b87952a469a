//! Counts over equal bins.

use serde::{Deserialize, Serialize};

/// Equal bins over `[low, high)`; values outside are counted in `n_below` and `n_above`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Histogram {
    pub low: f64,
    pub high: f64,
    pub counts: Vec<u64>,
    pub n_below: u64,
    pub n_above: u64,
}

impl Histogram {
    /// Panics unless `low < high` and `n_bins > 0`.
    pub fn new(low: f64, high: f64, n_bins: usize) -> Self {
        assert!(low < high && n_bins > 0, "histogram: {n_bins} bins over [{low}, {high})");
        Histogram { low, high, counts: vec![0; n_bins], n_below: 0, n_above: 0 }
    }

    pub fn add(&mut self, value: f64) {
        let bin = (value - self.low) / (self.high - self.low) * self.counts.len() as f64;
        if bin < 0.0 {
            self.n_below += 1;
        } else if let Some(count) = self.counts.get_mut(bin as usize).filter(|_| value < self.high) {
            *count += 1;
        } else {
            self.n_above += 1;
        }
    }
}
