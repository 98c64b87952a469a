//! Countdown: join the given numbers with + - * / to reach a target. A right answer to `2,3,5,7:24=` is
//! `3*5=15,15+7=22,22+2=24,\boxed{3*5+7+2}`; only the box is judged.

mod play;

use super::arithmetic::{Mistakes, Operator};
use super::drawn::DrawnProblem;
use super::error::TaskError;
use super::split::check_share;
use crate::reward::spec::{CountdownRule, VerifierSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, json};
use stapo_core::random::Key;
use std::fmt;

pub(super) const TEMPLATE: &str = "{{ problem }}=";
/// Worked solutions search all ways of joining the numbers; six numbers have about 20 million.
const MAX_NUMBERS: usize = 6;
const MAX_VALUE: i64 = 1_000_000;

/// The form of the problems. Every problem has a solution that uses all numbers and has no fraction or negative number
/// as an intermediate result. Template variables besides `problem`: `numbers` and `target`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CountdownSpec {
    /// The fewest numbers of a problem.
    pub min_numbers: usize,
    /// The most numbers of a problem.
    pub max_numbers: usize,
    /// Numbers are from 1 to `max_number`.
    pub max_number: i64,
    /// Targets are from 1 to `max_target`.
    pub max_target: i64,
    /// The share of problems, chosen by the hash of the text, that are held out of training.
    pub held_out_share: f64,
    /// The size of the held-out set; the set is smaller where there are fewer such problems.
    pub n_held_out: usize,
    /// A Jinja template over `problem`; by default the problem as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The system message of every conversation; none by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// How responses are judged.
    pub verifier: VerifierSpec,
}

impl Default for CountdownSpec {
    fn default() -> Self {
        Self {
            min_numbers: 3,
            max_numbers: 4,
            max_number: 20,
            max_target: 99,
            held_out_share: 0.05,
            n_held_out: 500,
            template: None,
            system: None,
            verifier: VerifierSpec::Countdown(CountdownRule::default()),
        }
    }
}

impl CountdownSpec {
    pub(super) fn check(&self) -> Result<(), TaskError> {
        if self.min_numbers < 2 || self.min_numbers > self.max_numbers || self.max_numbers > MAX_NUMBERS {
            let problem = format!("from {} to {}", self.min_numbers, self.max_numbers);
            let remedy = format!("2 <= min_numbers <= max_numbers <= {MAX_NUMBERS}");
            return Err(TaskError::setting("min_numbers, max_numbers", problem, remedy));
        }
        for (key, value) in [("max_number", self.max_number), ("max_target", self.max_target)] {
            if !(1..=MAX_VALUE).contains(&value) {
                let remedy = format!("a number from 1 to {MAX_VALUE}");
                return Err(TaskError::setting(key, value.to_string(), remedy));
            }
        }
        check_share("held_out_share", self.held_out_share)
    }

    /// One attempt at a problem: random numbers, joined at random; `None` if the result is not a valid target. The
    /// count of numbers depends on `shape` alone.
    pub(super) fn draw(&self, shape: Key, attempt: Key) -> Option<DrawnProblem> {
        let choices = (self.max_numbers - self.min_numbers) as u64 + 1;
        let n_numbers = self.min_numbers + shape.with(0).below(choices) as usize;
        let numbers: Vec<i64> = (0..n_numbers as u64)
            .map(|idx| 1 + attempt.with(0).with(idx).below(self.max_number as u64) as i64)
            .collect();
        let target = play::join_at_random(&numbers, attempt.with(1))?;
        if !(1..=self.max_target).contains(&target) {
            return None;
        }
        let puzzle = Puzzle { numbers, target };
        let fields: Map<_, _> =
            [("numbers".to_string(), json!(puzzle.numbers)), ("target".to_string(), json!(target))]
                .into_iter()
                .collect();
        Some(DrawnProblem { problem: puzzle.to_string(), reference: puzzle.to_string(), fields })
    }
}

/// A problem, whose text has the form `2,3,5,7:24`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Puzzle {
    pub(crate) numbers: Vec<i64>,
    pub(crate) target: i64,
}

impl Puzzle {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (numbers, target) = text.split_once(':')?;
        let numbers: Vec<i64> =
            numbers.split(',').map(|number| number.trim().parse().ok()).collect::<Option<_>>()?;
        Some(Self { numbers, target: target.trim().parse().ok()? })
    }
}

impl fmt::Display for Puzzle {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let numbers: Vec<String> = self.numbers.iter().map(ToString::to_string).collect();
        write!(f, "{}:{}", numbers.join(","), self.target)
    }
}

/// The worked solution of a problem, with the mistakes that `key` draws.
pub(super) fn solution(problem: &str, mistakes: &Mistakes, key: Key) -> Option<String> {
    let puzzle = Puzzle::parse(problem)?;
    let solvable = (2..=MAX_NUMBERS).contains(&puzzle.numbers.len())
        && puzzle.numbers.iter().all(|number| (1..=MAX_VALUE).contains(number));
    solvable.then(|| play::write(&puzzle, mistakes, key))
}

/// The operators in the order in which a search tries these, rotated by `turn`.
fn operators_from(turn: u64) -> impl Iterator<Item = Operator> {
    (0..4).map(move |idx| Operator::ALL[((idx + turn) % 4) as usize])
}
