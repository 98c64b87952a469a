//! Lengths of prompts and responses that a plan is made for.

use stapo_core::stats::distribution::{normal_cdf, normal_quantile};

/// Mean lengths, and how response lengths are spread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lengths {
    pub prompt_mean: f64,
    pub response_mean: f64,
    /// No response is longer.
    pub response_limit: usize,
    /// Standard deviation of the logarithm of a response's length.
    pub spread: f64,
}

/// The default spread. Responses to mathematical problems are spread by 0.4 to 0.8.
pub const SPREAD: f64 = 0.5;

/// Quantiles that stand for all responses where no response is simulated by itself.
const N_QUANTILES: usize = 512;

impl Lengths {
    /// The lengths of `n` responses in ascending order: quantiles of a log-normal distribution that is cut at the limit
    /// and has the wanted mean after the cut.
    pub fn responses(&self, n: usize) -> Vec<usize> {
        let limit = self.response_limit as f64;
        let scores: Vec<f64> = (0..n).map(|i| normal_quantile((i as f64 + 0.5) / n as f64)).collect();
        let length = |log_median: f64, score: f64| (log_median + self.spread * score).exp().min(limit);
        let wanted = self.response_mean.clamp(1.0, limit) * n as f64;
        // The mean grows with the median, and lies between that of medians far below 1 and far above the limit.
        let mut low = -1.0 - 4.0 * self.spread;
        let mut high = limit.ln() + 4.0 * self.spread + 1.0;
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            let sum: f64 = scores.iter().map(|score| length(middle, *score)).sum();
            if sum < wanted {
                low = middle;
            } else {
                high = middle;
            }
        }
        scores.iter().map(|score| (length(high, *score).round() as usize).max(1)).collect()
    }

    /// These lengths with responses of a log-normal distribution that has the given mean before the cut at the limit.
    #[must_use]
    pub fn forced(self, mean: f64, spread: f64) -> Lengths {
        let limit = self.response_limit as f64;
        // The mean of min(X, limit): the part of the mean below the limit, and the limit as often as X is above.
        let response_mean = if spread > 0.0 {
            let score = (limit.ln() - mean.ln() + spread * spread / 2.0) / spread;
            mean * normal_cdf(score - spread) + limit * normal_cdf(-score)
        } else {
            mean.min(limit)
        };
        Lengths { response_mean: response_mean.max(1.0), spread, ..self }
    }

    /// Tokens of a prompt and its response on average.
    pub fn sequence_mean(&self) -> f64 {
        self.prompt_mean + self.response_mean
    }

    /// The length of equal sequences that would cost attention as much per token as the spread ones do.
    pub fn attention_length(&self) -> f64 {
        let lengths: Vec<f64> =
            self.responses(N_QUANTILES).iter().map(|length| self.prompt_mean + *length as f64).collect();
        lengths.iter().map(|length| length * length).sum::<f64>() / lengths.iter().sum::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(response_mean: f64, response_limit: usize) -> Lengths {
        Lengths { prompt_mean: 100.0, response_mean, response_limit, spread: SPREAD }
    }

    #[test]
    fn responses_have_the_mean_and_keep_to_the_limit() {
        for (mean, limit) in [(290.0, 1024), (290.0, 300), (4000.0, 15360), (30.0, 96), (3.0, 1 << 22)] {
            let responses = lengths(mean, limit).responses(1024);
            let found = responses.iter().sum::<usize>() as f64 / 1024.0;
            assert!((found / mean - 1.0).abs() < 0.01, "{mean} of {limit}: {found}");
            assert!(responses.is_sorted() && responses[1023] <= limit && responses[0] >= 1);
        }
        let wide = lengths(1.0, 15360).forced(4000.0, 0.8);
        assert!((wide.response_mean - 3875.0).abs() < 30.0, "{}", wide.response_mean);
        assert_eq!(lengths(1.0, 300).forced(290.0, 0.0).response_mean, 290.0);
        let longest = wide.responses(1024).iter().filter(|&&length| length == 15360).count();
        assert!((5..30).contains(&longest), "{longest} of 1,024 responses reach the limit");
        assert_eq!(lengths(96.0, 96).responses(3), [96, 96, 96]);
        assert_eq!(lengths(500.0, 96).responses(2), [96, 96]);
        assert_eq!(lengths(1.0, 1).responses(1), [1]);
    }

    #[test]
    fn spread_makes_attention_dearer_than_equal_lengths_do() {
        let spread = lengths(4000.0, 15360);
        // For a log-normal without a cut the mean of squares is exp(0.25) times the square of the mean.
        assert!(spread.attention_length() > 1.15 * spread.sequence_mean());
        assert!(spread.attention_length() < 1.30 * spread.sequence_mean());
        let equal = lengths(96.0, 96);
        assert!((equal.attention_length() - equal.sequence_mean()).abs() < 1e-9);
    }
}
