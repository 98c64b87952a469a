//! Guess a number: the problem says a range, and the number is known to the environment `guess` alone.

use super::drawn::DrawnProblem;
use super::error::TaskError;
use super::split::check_share;
use crate::reward::spec::VerifierSpec;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};
use stapo_core::random::Key;

pub(super) const TEMPLATE: &str =
    "I think of a whole number from {{ low }} to {{ high }}. Guess it; I answer higher or lower.";
const MAX_VALUE: i64 = 1_000_000_000;

/// The range of the numbers. Template variables: `low` and `high`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct GuessSpec {
    /// The smallest number.
    pub low: i64,
    /// The largest number.
    pub high: i64,
    /// The share of numbers that are held out of training.
    pub held_out_share: f64,
    /// The size of the held-out set; the set is smaller where there are fewer such numbers.
    pub n_held_out: usize,
    /// A Jinja template over `low` and `high`; by default a sentence in English.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The system message of every conversation; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// How a last turn is judged where no environment judges.
    pub verifier: VerifierSpec,
}

impl Default for GuessSpec {
    fn default() -> Self {
        Self {
            low: 1,
            high: 100,
            held_out_share: 0.1,
            n_held_out: 500,
            template: None,
            system: None,
            verifier: VerifierSpec::default(),
        }
    }
}

impl GuessSpec {
    pub(super) fn check(&self) -> Result<(), TaskError> {
        let range = -MAX_VALUE..=MAX_VALUE;
        if self.low >= self.high || !range.contains(&self.low) || !range.contains(&self.high) {
            let remedy = format!("low below high, both from {} to {MAX_VALUE}", -MAX_VALUE);
            return Err(TaskError::setting("low, high", format!("{} and {}", self.low, self.high), remedy));
        }
        check_share("held_out_share", self.held_out_share)
    }

    /// The problem that `attempt` draws. Its name holds the number, so that numbers are held out; its prompt does not.
    pub(super) fn draw(&self, attempt: Key) -> DrawnProblem {
        let n_numbers = (self.high - self.low) as u64 + 1;
        let number = self.low + attempt.below(n_numbers) as i64;
        let fields =
            Map::from_iter([("low".to_string(), json!(self.low)), ("high".to_string(), json!(self.high))]);
        let problem = format!("{number} of {}..{}", self.low, self.high);
        DrawnProblem { problem, reference: number.to_string(), fields }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_game_has_at_least_two_numbers_and_every_one_of_them_comes_up() {
        let spec = |low, high| GuessSpec { low, high, ..GuessSpec::default() };
        for taken in [spec(1, 2), spec(-MAX_VALUE, MAX_VALUE), spec(-3, -1)] {
            assert!(taken.check().is_ok(), "{taken:?}");
        }
        for refused in [spec(2, 2), spec(3, 2), spec(-MAX_VALUE - 1, 0), spec(0, MAX_VALUE + 1)] {
            assert!(refused.check().unwrap_err().to_string().contains("low below high"), "{refused:?}");
        }
        assert!(GuessSpec { held_out_share: 1.5, ..spec(1, 2) }.check().is_err());
        let drawn: std::collections::BTreeSet<i64> =
            (0..200).map(|n| spec(-2, 2).draw(Key::new(n)).reference.parse().unwrap()).collect();
        assert_eq!(drawn, (-2..=2).collect());
    }
}
