//! A keyed permutation that needs no table.

use stapo_core::random::Key;

const N_ROUNDS: u64 = 6;

/// The image of `position`, which is below `n`, under a permutation of 0..n that `key` selects: a Feistel network over
/// an even number of bits, applied until the result is below `n` (cycle walking, Black and Rogaway 2002).
pub(crate) fn image(position: u64, n: u64, key: Key) -> u64 {
    debug_assert!(position < n, "permutation of {n} asked for {position}");
    let bits = u64::BITS - (n - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1_u64 << half) - 1;
    let mut index = position;
    loop {
        let (mut left, mut right) = (index >> half, index & mask);
        for round in 0..N_ROUNDS {
            (left, right) = (right, left ^ (key.with(round).with(right).bits() & mask));
        }
        index = left << half | right;
        if index < n {
            return index;
        }
    }
}
