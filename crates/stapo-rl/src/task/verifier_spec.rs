//! Verifiers as a config writes them.

use serde::{Deserialize, Serialize};
use stapo_verify::{Fallback, Mode, Order, Rules};
use std::path::PathBuf;

/// How a response becomes a verdict.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum VerifierSpec {
    /// The math grader, by one of its rules.
    Rule(RuleSpec),
    /// An expression over given numbers that reaches a target; references read `2,3,5,7:24`.
    Countdown(CountdownRule),
    /// A program that stays running and answers one line of JSON per sample.
    Command(CommandSpec),
}

impl Default for VerifierSpec {
    fn default() -> Self {
        Self::Rule(RuleSpec::default())
    }
}

/// How the box is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CountdownRule {
    pub number_use: NumberUse,
}

/// How often each given number must be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NumberUse {
    #[default]
    ExactlyOnce,
    AtMostOnce,
}

/// The grader's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuleSpec {
    pub mode: Mode,
    pub order: Order,
    pub fallback: Fallback,
}

impl From<RuleSpec> for Rules {
    fn from(spec: RuleSpec) -> Self {
        Self { mode: spec.mode, order: spec.order, fallback: spec.fallback }
    }
}

/// An external verifier. Per sample it reads `{"sample", "id", "prompt", "response", "reference"}` as one line on
/// standard input and writes one line, in the same order: `{"verdict": "right"}` (or `wrong`, `no_answer`,
/// `unparsable`, `over_budget`), or `{"reward": 0.5}`, or both. A reward alone is `right` above 0 and `wrong`
/// otherwise. `answer` and `reason` may stand beside them, and so may `sample` (a number that counts from 0) and
/// `id`, which are then compared: a program that repeats `sample` can never be read out of step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommandSpec {
    pub program: PathBuf,
    #[serde(default)]
    pub args: Vec<String>,
    /// The longest silence before the next answer.
    #[serde(default = "default_sample_seconds")]
    pub sample_seconds: f64,
    /// The longest time for all samples of one call.
    #[serde(default = "default_batch_seconds")]
    pub batch_seconds: f64,
    /// The longest line it may write.
    #[serde(default = "default_max_line_bytes")]
    pub max_line_bytes: usize,
}

impl CommandSpec {
    /// A program with default limits.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self {
            program: program.into(),
            args: Vec::new(),
            sample_seconds: default_sample_seconds(),
            batch_seconds: default_batch_seconds(),
            max_line_bytes: default_max_line_bytes(),
        }
    }
}

fn default_sample_seconds() -> f64 {
    30.0
}

fn default_batch_seconds() -> f64 {
    600.0
}

fn default_max_line_bytes() -> usize {
    1 << 20
}
