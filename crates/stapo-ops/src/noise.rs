//! Random weights, drawn where they lie: models of billions of weights for benchmarks and plans, without a file.

mod cuda;
#[cfg(test)]
mod tests;

use crate::device::Backend;
use crate::{Device, Float, ViewMut};

/// The standard deviation of the sum of four uniform numbers of 16 bits: `sqrt(4 (2^32 - 1) / 12)`.
const SUM_DEVIATION: f64 = 37_837.227_237;

/// Overwrites `out` with numbers of mean 0 and the standard deviation `deviation`, each a function of `key` and its place:
/// the sum of four uniform integers of 16 bits, close to normal, times one factor. The same numbers on every device.
pub fn fill<T: Float>(device: &Device, key: u64, deviation: f64, mut out: ViewMut<'_, T>) {
    let factor = (deviation / SUM_DEVIATION) as f32;
    match device.backend() {
        Backend::Cpu(_) => {
            for (place, x) in out.host_mut().iter_mut().enumerate() {
                *x = T::from_f64(f64::from(sum(key, place as u64) * factor));
            }
        }
        Backend::Cuda(cuda) => cuda::fill(cuda, key, factor, out.cuda()),
    }
}

/// The sum of the four 16-bit parts of a hash (`SplitMix64`, Steele et al., 2014), centred. An integer that f32 holds
/// exactly.
fn sum(key: u64, place: u64) -> f32 {
    let x = key.wrapping_add(place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    let x = x ^ x >> 31;
    let total: u64 = (0..4).map(|part| x >> (16 * part) & 0xffff).sum();
    (total as i64 - 2 * 0xffff) as f32
}
