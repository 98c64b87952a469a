//! A shuffle without a table: place `position` of a permutation that the key chooses.

use stapo_core::random::Key;

const N_ROUNDS: u64 = 6;

/// The image of `position` under the permutation of 0..n that `key` names: a Feistel network over the next even
/// number of bits, walked until it lands inside (Black and Rogaway 2002). `position` is below `n`.
pub(crate) fn image(position: u64, n: u64, key: Key) -> u64 {
    debug_assert!(position < n, "permutation of {n} asked for {position}");
    let bits = u64::BITS - (n - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1_u64 << half) - 1;
    let mut place = position;
    loop {
        let (mut left, mut right) = (place >> half, place & mask);
        for round in 0..N_ROUNDS {
            (left, right) = (right, left ^ (key.with(round).with(right).bits() & mask));
        }
        place = left << half | right;
        if place < n {
            return place;
        }
    }
}
