//! Counter-based randomness: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, 2011).
//!
//! A number is a function of its key and its counter, so it does not depend on what else runs, in which order, or on
//! how many threads.

#[cfg(test)]
mod tests;

/// The two words of a Philox key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RngKey(u64);

impl RngKey {
    pub fn new(seed: u64) -> RngKey {
        RngKey(seed)
    }

    /// An independent key for a purpose or a step: the 64-bit finaliser of MurmurHash3 over key and `stream`.
    #[must_use]
    pub fn derive(self, stream: u64) -> RngKey {
        let mut x = self.0 ^ stream.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        RngKey(x ^ (x >> 33))
    }

    /// The key itself, for an op that hashes it with its positions.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Uniform in `[0, 1)`, a multiple of 2^-53, for token `position` of sample `sample` of problem `problem`.
    pub fn uniform(self, problem: u64, sample: u32, position: u32) -> f64 {
        let [a, b, ..] = self.block([problem as u32, (problem >> 32) as u32, sample, position]);
        let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }

    /// Standard normal number `idx`, by the method of Box and Muller.
    pub fn normal(self, idx: u64) -> f64 {
        let [a, b, c, d] = self.block([idx as u32, (idx >> 32) as u32, 0, 0]);
        let unit = |high: u32, low: u32| {
            ((u64::from(high) << 32 | u64::from(low)) >> 11) as f64 / (1u64 << 53) as f64
        };
        let radius = (-2.0 * (1.0 - unit(a, b)).ln()).sqrt();
        radius * (std::f64::consts::TAU * unit(c, d)).cos()
    }

    /// Ten rounds of Philox over the counter.
    pub fn block(self, counter: [u32; 4]) -> [u32; 4] {
        let mut key = [self.0 as u32, (self.0 >> 32) as u32];
        let mut x = counter;
        for _ in 0..10 {
            let a = u64::from(x[0]) * 0xd251_1f53;
            let b = u64::from(x[2]) * 0xcd9e_8d57;
            x = [(b >> 32) as u32 ^ x[1] ^ key[0], b as u32, (a >> 32) as u32 ^ x[3] ^ key[1], a as u32];
            key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
        }
        x
    }
}
