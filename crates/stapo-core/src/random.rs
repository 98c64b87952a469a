//! Counter-based randomness: a number is a pure function of a key and a counter, so it does not depend on the order,
//! the thread or the batch it is asked in.

/// 64 random bits for a place in a stream: the SplitMix64 finaliser (Steele et al. 2014) folded over the counter.
pub fn bits(key: u64, counter: &[u64]) -> u64 {
    counter.iter().fold(mix(key.wrapping_add(GOLDEN)), |state, &word| {
        mix(state.wrapping_add(GOLDEN) ^ mix(word.wrapping_add(GOLDEN)))
    })
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
