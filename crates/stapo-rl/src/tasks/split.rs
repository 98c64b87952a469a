//! The split into training and held-out problems, a function of the problem's text alone.

use super::error::TaskError;
use stapo_core::random::Key;

/// The two sides of the split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    Train,
    HeldOut,
}

impl Split {
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::HeldOut => "held-out",
        }
    }
}

/// A 64-bit hash (FNV-1a) of a text's words. White space does not count, so copies of a problem that differ in white
/// space are on the same side of the split.
pub(crate) fn content_hash(text: &str) -> u64 {
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut feed = |byte: u8| hash = (hash ^ u64::from(byte)).wrapping_mul(PRIME);
    for word in text.split_whitespace() {
        word.bytes().for_each(&mut feed);
        feed(b' ');
    }
    hash
}

/// The side of the problem whose text has this hash. The side does not depend on a run's seed.
pub(crate) fn split_of(hash: u64, held_out_share: f64) -> Split {
    if Key::new(hash).uniform() < held_out_share { Split::HeldOut } else { Split::Train }
}

pub(crate) fn check_share(key: &'static str, share: f64) -> Result<(), TaskError> {
    if (0.0..=1.0).contains(&share) {
        return Ok(());
    }
    Err(TaskError::setting(key, format!("{share} is not a share"), "a number from 0 to 1"))
}
