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

/// As `span`, for a predicted time, which may be longer than a clock can count.
pub fn span_of_seconds(seconds: f64) -> String {
    span(Duration::from_secs_f64(seconds.min(1e12)))
}

/// Time left at the mean pace of the steps that are done.
pub fn time_left(elapsed: Duration, n_done: u64, n_left: u64) -> Duration {
    elapsed / n_done.max(1) as u32 * n_left as u32
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
        assert_eq!(
            (span_of_seconds(3725.0), span_of_seconds(f64::MAX)),
            ("1 h 2 min".into(), span_of_seconds(1e12))
        );
    }

    #[test]
    fn the_time_left_goes_on_at_the_pace_of_what_is_done() {
        let minute = Duration::from_secs(60);
        assert_eq!(time_left(minute, 4, 240), 60 * minute);
        assert_eq!((time_left(minute, 0, 2), time_left(minute, 4, 0)), (2 * minute, Duration::ZERO));
    }
}
