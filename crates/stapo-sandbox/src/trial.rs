//! Programs to run, and tests of programs.

use crate::{End, Outcome};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A program to run with its standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    pub source: &'a str,
    pub stdin: &'a str,
}

/// A program and the tests that it must pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Trial {
    pub source: String,
    pub checks: Checks,
}

/// Tests of a program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Checks {
    /// Statements, each a test, that call what the program defines. `setup` runs before them.
    Asserts { setup: String, tests: Vec<String> },
    /// Source that defines `check(candidate)`, called with the program's `entry_point`: one test. `prelude` is source that
    /// the tests may rely on and that the program cannot change, such as the functions of the prompt.
    Check { prelude: String, test: String, entry_point: String },
    /// Calls of one function with expected values.
    Calls { entry_point: String, calls: Vec<Call>, atol: f64, unordered: bool },
    /// Standard input with the expected standard output. `checker` is Python source that defines
    /// `check(input, output, expected)`; without it, outputs are equal where their words are, line by line.
    Streams { pairs: Vec<(String, String)>, checker: Option<String> },
}

impl Checks {
    /// The number of tests.
    pub fn n_tests(&self) -> usize {
        match self {
            Self::Asserts { tests, .. } => tests.len(),
            Self::Check { .. } => 1,
            Self::Calls { calls, .. } => calls.len(),
            Self::Streams { pairs, .. } => pairs.len(),
        }
    }
}

/// A call of a function and what it must return.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Call {
    /// Positional arguments, as JSON.
    pub args: Vec<Value>,
    /// A JSON value, where a tuple equals a list; or, where `is_literal`, a string that holds a Python literal.
    pub expected: Value,
    #[serde(default)]
    pub is_literal: bool,
}

/// The result of one test.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TestResult {
    pub passed: bool,
    /// For a failed test: the test and what happened instead, in one line.
    pub message: String,
}

/// What tests found about a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Tested {
    /// One result per test, in order.
    pub tests: Vec<TestResult>,
    pub outcome: Outcome,
}

impl Tested {
    /// Results where none of the tests ran, or none of those after `tests`, because the program ended.
    pub(crate) fn cut_short(mut tests: Vec<TestResult>, n_tests: usize, outcome: Outcome) -> Self {
        let message = match &outcome.end {
            End::Finished => "the tests did not end".to_string(),
            end => format!("the program {end}"),
        };
        tests.resize(n_tests.max(1), TestResult { passed: false, message });
        Self { tests, outcome }
    }
}
