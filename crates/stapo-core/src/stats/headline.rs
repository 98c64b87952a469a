//! The relative gain that a paper's abstract quotes.

use super::StatsError;
use super::error::{all_finite, at_least};

/// A method against its baselines at one model size, each the average over the benchmarks.
#[derive(Clone, Debug, PartialEq)]
pub struct Contest {
    pub method: f64,
    pub baselines: Vec<f64>,
}

/// Relative gain over the best baseline at each size, averaged over the sizes: 0.1149 is 11.49 %.
pub fn headline_gain(contests: &[Contest]) -> Result<f64, StatsError> {
    at_least("contests", 1, contests.len())?;
    let mut sum = 0.0;
    for contest in contests {
        at_least("baselines", 1, contest.baselines.len())?;
        all_finite("baselines", &contest.baselines)?;
        all_finite("method", &[contest.method])?;
        let best = contest.baselines.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        if best <= 0.0 {
            return Err(StatsError::OutOfRange {
                what: "best baseline",
                value: best,
                expected: "a positive average",
            });
        }
        sum += contest.method / best - 1.0;
    }
    Ok(sum / contests.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_table_gives_the_published_gains() {
        // Averages over the six benchmarks of arXiv 2602.15620 at 1.7B, 8B and 14B: GRPO, 20-Entropy and JustRL as
        // baselines, STAPO as the method.
        let table = |rows: [([f64; 3], f64); 3]| {
            rows.map(|(baselines, method)| Contest { method, baselines: baselines.to_vec() })
        };
        let at_1_0 = table([
            ([29.92, 29.60, 31.10], 36.85),
            ([56.24, 57.63, 50.70], 60.96),
            ([61.49, 60.77, 55.74], 67.76),
        ]);
        let at_0_7 = table([
            ([31.04, 33.05, 34.73], 36.74),
            ([55.26, 58.00, 56.42], 60.18),
            ([60.53, 64.53, 66.71], 67.80),
        ]);
        let percent = |contests: &[Contest]| format!("{:.2}", 100.0 * headline_gain(contests).unwrap());
        assert_eq!(percent(&at_1_0), "11.49");
        assert_eq!(percent(&at_0_7), "3.73");
    }

    #[test]
    fn no_contest_and_no_positive_baseline_are_refused() {
        assert!(headline_gain(&[]).is_err());
        assert!(headline_gain(&[Contest { method: 1.0, baselines: vec![] }]).is_err());
        assert!(headline_gain(&[Contest { method: 1.0, baselines: vec![0.0] }]).is_err());
    }
}
