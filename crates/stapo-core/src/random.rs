//! Counter-based randomness: a number is a pure function of its key, so results do not depend on order, threads
//! or batch composition.

/// Increment of `SplitMix64`: 2^64 divided by the golden ratio, odd (Steele, Lea, Flood 2014).
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// Names one random number: a seed followed by any counters (step, problem, sample, position, ...).
///
/// `Key::new(s).with(a).with(b)` is the number at place `b` of the `SplitMix64` stream that starts at the number at
/// place `a` of the stream of seed `s`. Equal keys give equal numbers on every machine; the order of the counters
/// matters, so `.with(1).with(2)` and `.with(2).with(1)` are unrelated. Extending a kept prefix costs one mixing step
/// per added counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    pub const fn new(seed: u64) -> Self {
        Self(splitmix64(0, seed))
    }

    /// The key with one more counter.
    #[must_use]
    pub const fn with(self, counter: u64) -> Self {
        Self(splitmix64(self.0, counter))
    }

    /// 64 random bits.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Uniform in [0, 1): the multiples of 2^-53, all equally likely.
    pub const fn uniform(self) -> f64 {
        const STEP: f64 = 1.0 / (1_u64 << 53) as f64;
        (self.0 >> 11) as f64 * STEP
    }

    /// Puts the values into a random order, every order as likely as any other (Fisher, Yates). Place k draws by the counter k.
    pub fn shuffle<T>(self, values: &mut [T]) {
        for place in (1..values.len()).rev() {
            values.swap(place, self.with(place as u64).below(place as u64 + 1) as usize);
        }
    }

    /// Uniform in 0..n without bias (Lemire 2019: multiply, keep the high word, redraw where the low word falls in
    /// the uneven rest).
    ///
    /// # Panics
    /// When `n` is 0: an empty range has no member.
    pub const fn below(self, n: u64) -> u64 {
        assert!(n > 0, "Key::below: n is 0, expected at least 1");
        let mut draw = self;
        loop {
            let product = draw.0 as u128 * n as u128;
            let low = product as u64;
            // 2^64 mod n is below n, so a low word of at least n needs no division.
            if low >= n || low >= n.wrapping_neg() % n {
                return (product >> 64) as u64;
            }
            draw = draw.with(0);
        }
    }
}

/// Output number `counter` of the `SplitMix64` generator whose state is `state`.
const fn splitmix64(state: u64, counter: u64) -> u64 {
    let mut z = state.wrapping_add(GAMMA.wrapping_mul(counter.wrapping_add(1)));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests;
