//! Lengths that benchmarks give to responses.

use stapo_ops::rng::RngKey;

/// A log-normal distribution of response lengths, for [`Engine::submit_with_lengths`](super::Engine::submit_with_lengths).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForcedLengths {
    pub mean: f64,
    /// Standard deviation of the logarithm.
    pub sigma: f64,
}

impl ForcedLengths {
    /// The length of each sample, a function of the engine's seed, the problem and the sample's number.
    pub fn draw(self, seed: u64, problem: u64, n_samples: u32) -> Vec<usize> {
        let key = RngKey::new(seed).derive(problem);
        let length = |sample: u32| {
            let normal = key.normal(u64::from(sample));
            let logarithm = self.mean.ln() - self.sigma * self.sigma / 2.0 + self.sigma * normal;
            (logarithm.exp().round() as usize).max(1)
        };
        (0..n_samples).map(length).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_their_mean_whatever_their_spread() {
        assert_eq!(ForcedLengths { mean: 100.0, sigma: 0.0 }.draw(1, 2, 3), [100; 3]);
        assert_eq!(ForcedLengths { mean: 0.1, sigma: 0.0 }.draw(1, 2, 1), [1]);
        let drawn = ForcedLengths { mean: 1000.0, sigma: 0.5 }.draw(1, 2, 4000);
        let mean = drawn.iter().sum::<usize>() as f64 / 4000.0;
        assert!((mean / 1000.0 - 1.0).abs() < 0.04, "{mean}");
        let logs: Vec<f64> = drawn.iter().map(|n| (*n as f64).ln()).collect();
        let middle = logs.iter().sum::<f64>() / 4000.0;
        let variance = logs.iter().map(|log| (log - middle).powi(2)).sum::<f64>() / 3999.0;
        assert!((variance.sqrt() - 0.5).abs() < 0.03, "{variance}");
    }
}
