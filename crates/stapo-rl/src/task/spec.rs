//! The keys of a task in a config.

use super::arithmetic::ArithmeticSpec;
use super::countdown::CountdownSpec;
use super::verifier_spec::VerifierSpec;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The source of problems and the verifier of answers: `kind` and the keys of that kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum TaskSpec {
    Arithmetic(ArithmeticSpec),
    Countdown(CountdownSpec),
    /// One JSON object per line.
    Jsonl(RowsSpec),
    Parquet(RowsSpec),
}

impl TaskSpec {
    pub fn verifier(&self) -> &VerifierSpec {
        match self {
            Self::Arithmetic(spec) => &spec.verifier,
            Self::Countdown(spec) => &spec.verifier,
            Self::Jsonl(spec) | Self::Parquet(spec) => &spec.verifier,
        }
    }

    pub(crate) fn verifier_mut(&mut self) -> &mut VerifierSpec {
        match self {
            Self::Arithmetic(spec) => &mut spec.verifier,
            Self::Countdown(spec) => &mut spec.verifier,
            Self::Jsonl(spec) | Self::Parquet(spec) => &mut spec.verifier,
        }
    }

    /// True where every problem has a worked solution.
    pub fn has_solutions(&self) -> bool {
        match self {
            Self::Arithmetic(_) | Self::Countdown(_) => true,
            Self::Jsonl(spec) | Self::Parquet(spec) => spec.solution_field.is_some(),
        }
    }
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
    /// The field of a worked solution, which a teacher reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub solution_field: Option<String>,
    /// With `#row`, ids are numbers of rows: `gsm8k-1`, `gsm8k-2`, ...
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id_field: Option<String>,
    #[serde(default)]
    pub missing_answers: MissingAnswers,
    /// The share of problems, chosen by the hash of the text, that are held out of training. 1 holds out all problems.
    #[serde(default = "default_held_out_share")]
    pub held_out_share: f64,
    /// A Jinja template over `problem`, `id` and the row's fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    #[serde(default)]
    pub verifier: VerifierSpec,
}

impl RowsSpec {
    /// A file with the default of every other key.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            problem_field: None,
            answer_field: None,
            solution_field: None,
            id_field: None,
            missing_answers: MissingAnswers::default(),
            held_out_share: default_held_out_share(),
            template: None,
            verifier: VerifierSpec::default(),
        }
    }
}

/// How rows without a reference are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingAnswers {
    /// The file is refused with an error that names the first such row.
    #[default]
    Refuse,
    /// Such rows are left out and counted.
    Drop,
}

fn default_held_out_share() -> f64 {
    0.05
}
