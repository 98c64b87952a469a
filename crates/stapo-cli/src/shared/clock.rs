//! Formatting of times for people.

use stapo_rl::run::utc;
use std::time::{Duration, SystemTime};

/// UTC as `20260215-093007`, for folder names that sort.
pub fn stamp(at: SystemTime) -> String {
    utc(at).trim_end_matches('Z').replace(['-', ':'], "").replace('T', "-")
}

/// `3 s`, `4 min 5 s`, `2 h 3 min`.
pub fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s} s"),
        (h, m, _) => format!("{h} h {m} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    #[test]
    fn stamps_are_utc_and_know_leap_years() {
        let at = |seconds| stamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101-000000");
        assert_eq!(at(951_827_696), "20000229-123456");
        assert_eq!(at(1_794_700_799), "20261114-235959");
        assert_eq!(span(Duration::from_secs(65)), "1 min 5 s");
    }
}
