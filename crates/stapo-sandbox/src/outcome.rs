//! How a program ended.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How a program ended, by which limit if by one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The program ran to its end, or answered the calls of all tests.
    Finished,
    /// The program ended itself, with an exit status.
    Exited(i32),
    /// An exception that the program did not catch.
    Raised(String),
    /// A signal, such as that of a broken pointer.
    Signal(i32),
    /// The source of a compiled language does not build.
    NotBuilt(String),
    CpuTime,
    WallTime,
    Memory,
    /// The program tried to start another process.
    Processes,
    /// A file, or `/tmp`, was full.
    FileSize,
    Output,
}

impl End {
    /// Whether the verdict depends on the machine's speed. Records keep such verdicts, and a replay takes them from there.
    pub fn is_time_out(&self) -> bool {
        matches!(self, Self::CpuTime | Self::WallTime)
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Finished => write!(f, "finished"),
            Self::Exited(status) => write!(f, "exited with status {status}"),
            Self::Raised(exception) => write!(f, "raised {exception}"),
            Self::Signal(number) => write!(f, "ended by signal {number}"),
            Self::NotBuilt(message) => write!(f, "does not build: {message}"),
            Self::CpuTime => write!(f, "went over the limit of processor time"),
            Self::WallTime => write!(f, "went over the limit of wall time"),
            Self::Memory => write!(f, "went over the limit of memory"),
            Self::Processes => write!(f, "tried to start a process"),
            Self::FileSize => write!(f, "went over the limit of file size"),
            Self::Output => write!(f, "went over the limit of output"),
        }
    }
}

/// What a program did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub end: End,
    /// Standard output, cut with a marker at the limit.
    pub stdout: String,
    /// Standard error, cut with a marker at the limit.
    pub stderr: String,
    /// Processor time.
    pub cpu_seconds: f64,
}
