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
