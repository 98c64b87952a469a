//! Programs as answers: how the tests of a program ended, and what kinds of tokens a program has.

mod category;

pub use category::{TokenCategory, category_in_response};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the tests of a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProgramEnd {
    /// All tests passed.
    Passed,
    /// The program ran, and a test did not accept what it gave.
    FailedTest,
    /// The program raised an exception, ended itself or did not build, before its tests.
    Crashed,
    TimeOut,
    Memory,
    Output,
    /// The program tried to start another process.
    Processes,
    FileSize,
    /// The response holds no program.
    NoProgram,
}

impl ProgramEnd {
    /// The end in words, for tables.
    pub fn label(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::FailedTest => "failed a test",
            Self::Crashed => "crashed",
            Self::TimeOut => "timed out",
            Self::Memory => "out of memory",
            Self::Output => "too much output",
            Self::Processes => "started a process",
            Self::FileSize => "too large a file",
            Self::NoProgram => "no program",
        }
    }
}

/// The program of a response, and what its tests showed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramRun {
    /// Empty if the response holds no program.
    pub source: String,
    pub end: ProgramEnd,
    /// The first test that failed, with what happened instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_test: Option<String>,
    /// The beginning of what the program printed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub printed: String,
    /// Processor time. It differs from one run of the program to the next, so a replay does not compare it.
    pub cpu_seconds: f64,
}

impl ProgramRun {
    /// The most bytes of `printed` and of `failing_test`.
    pub const MAX_TEXT_BYTES: usize = 2000;

    /// The run with texts that a record can hold: what is longer is cut, with a marker.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        self.printed = bound(self.printed);
        self.failing_test = self.failing_test.map(bound);
        self
    }
}

fn bound(text: String) -> String {
    let cut = (0..=ProgramRun::MAX_TEXT_BYTES.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
    let (kept, rest) = text.split_at(cut.unwrap_or(0));
    if rest.is_empty() { text } else { format!("{kept} ... ({} more bytes)", rest.len()) }
}

#[cfg(test)]
mod tests;
