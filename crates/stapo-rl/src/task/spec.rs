//! Tasks as a config writes them.

use super::arithmetic::ArithmeticSpec;
use super::countdown::CountdownSpec;
use super::verifier_spec::VerifierSpec;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Where problems come from and how answers are judged: `kind` and the keys of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskSpec {
    Arithmetic(ArithmeticSpec),
    Countdown(CountdownSpec),
    /// One JSON object per line.
    Jsonl(RowsSpec),
    Parquet(RowsSpec),
}

impl Default for TaskSpec {
    fn default() -> Self {
        Self::Arithmetic(ArithmeticSpec::default())
    }
}

/// A file of problems. Fields are names, or paths such as `reward_model.ground_truth`, `prompt[].content` (the one
/// message of the user, or the only element) and `choices[0]`. Fields not given are recognised by the names that
/// GSM8K, MATH, DAPO-Math-17k and verl's files use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RowsSpec {
    pub path: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem_field: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer_field: Option<String>,
    /// `#row` numbers the rows instead: `gsm8k-1`, `gsm8k-2`, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id_field: Option<String>,
    #[serde(default)]
    pub missing_answers: MissingAnswers,
    /// Share of the problems, by the hash of their text, that training never sees. 1 keeps all of a benchmark.
    #[serde(default = "default_held_out_share")]
    pub held_out_share: f64,
    /// Jinja over `problem`, `id` and the row's fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    #[serde(default)]
    pub verifier: VerifierSpec,
}

impl RowsSpec {
    /// A file with everything else at its default.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            problem_field: None,
            answer_field: None,
            id_field: None,
            missing_answers: MissingAnswers::default(),
            held_out_share: default_held_out_share(),
            template: None,
            verifier: VerifierSpec::default(),
        }
    }
}

/// What becomes of rows without a reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingAnswers {
    /// The file is refused, and the first such row named.
    #[default]
    Refuse,
    /// They are left out and counted.
    Drop,
}

fn default_held_out_share() -> f64 {
    0.05
}
