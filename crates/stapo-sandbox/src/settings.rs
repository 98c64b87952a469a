//! How programs are kept apart from the machine, and what they may use.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// Why no program can be run. A program's own failure is an [`Outcome`](crate::Outcome), never an error.
#[derive(Debug, Error)]
#[error("sandbox: {problem}\nhint: {remedy}")]
pub struct SandboxError {
    pub problem: String,
    pub remedy: String,
}

impl SandboxError {
    pub(crate) fn new(problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { problem: problem.into(), remedy: remedy.into() }
    }
}

/// How strongly programs are kept apart, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Namespaces with a file system that holds the interpreter only, besides all that `Filters` has.
    #[default]
    Namespaces,
    /// seccomp and Landlock: no sockets and no files but the interpreter's. Process numbers, file names and times of
    /// this machine can be seen.
    Filters,
    /// Limits alone. A program can read what the user can read.
    None,
}

impl Level {
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Filters => "filters",
            Self::None => "none",
        }
    }
}

/// What the kernel gave to a jail.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers {
    pub level: Level,
    /// Why there are no namespaces.
    pub without_namespaces: Option<String>,
    /// Whether Landlock limits access to files.
    pub has_landlock: bool,
    /// Whether seccomp limits system calls.
    pub has_seccomp: bool,
}

/// What one program may use. Every limit has an [`End`](crate::End) of its own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Limits {
    /// Processor time in seconds.
    pub cpu_seconds: f64,
    /// Wall-clock time in seconds; 0 for ten times the processor time, so that a busy machine changes no
    /// verdict.
    pub wall_seconds: f64,
    /// Address space in MiB.
    pub memory_mib: u64,
    /// The private `/tmp` in MiB; a single file may fill it.
    pub tmp_mib: u64,
    /// Bytes of standard output and standard error together, beyond those that a test expects.
    pub output_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cpu_seconds: 3.0, wall_seconds: 0.0, memory_mib: 512, tmp_mib: 16, output_bytes: 64 << 10 }
    }
}

impl Limits {
    /// The longest time between the start of a program and its end.
    pub fn wall(&self) -> Duration {
        let seconds = if self.wall_seconds > 0.0 { self.wall_seconds } else { 10.0 * self.cpu_seconds };
        Duration::from_secs_f64(seconds)
    }

    pub(crate) fn check(&self) -> Result<(), SandboxError> {
        let refuse = |key: &str, value: String, expected: &str| {
            Err(SandboxError::new(format!("{key}: {value}"), format!("{key}: {expected}")))
        };
        if !(self.cpu_seconds > 0.0 && self.cpu_seconds <= 3600.0) {
            return refuse("cpu_seconds", self.cpu_seconds.to_string(), "above 0 and up to 3600");
        }
        if !(self.wall_seconds >= 0.0 && self.wall_seconds <= 36000.0) {
            return refuse("wall_seconds", self.wall_seconds.to_string(), "0, or up to 36000");
        }
        if self.memory_mib < 64 {
            return refuse(
                "memory_mib",
                self.memory_mib.to_string(),
                "at least 64, which an interpreter takes",
            );
        }
        if self.tmp_mib == 0 {
            return refuse("tmp_mib", "0".into(), "at least 1");
        }
        Ok(())
    }
}

/// The clock that a program reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Clock {
    /// Begins at the same moment in every program, moves on by a millisecond with each reading, and makes sleeping
    /// instant.
    #[default]
    Frozen,
    /// The machine's.
    Real,
}

/// A language other than Python: commands that build and run a program. `{source}` and `{program}` stand for the paths
/// of the source and of what the build wrote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Language {
    /// The file name of the source, whose ending compilers read: `main.c`.
    pub source: String,
    /// The command that builds the program; empty for an interpreted language.
    #[serde(default)]
    pub build: Vec<String>,
    /// The command that runs the program.
    pub run: Vec<String>,
    /// Files and folders that the commands read besides the system's libraries.
    #[serde(default)]
    pub reads: Vec<PathBuf>,
}

/// What a [`Pool`](crate::Pool) is opened with.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The Python interpreter: a path, or a name on the PATH.
    pub python: PathBuf,
    /// Modules that interpreters import before the first program; programs then import them at no cost.
    pub imports: Vec<String>,
    pub limits: Limits,
    /// The seed of Python's `random` and of what `os.urandom` gives.
    pub seed: u64,
    pub clock: Clock,
    /// `None` for Python.
    pub language: Option<Language>,
    /// Programs that run at the same time; 0 for one on each core.
    pub n_workers: usize,
    /// The level to begin with; a weaker one is taken where the machine cannot give it.
    pub strongest: Level,
    /// Whether programs run even at [`Level::None`].
    pub unsafe_code: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            python: "python3".into(),
            imports: Vec::new(),
            limits: Limits::default(),
            seed: 0,
            clock: Clock::default(),
            language: None,
            n_workers: 0,
            strongest: Level::default(),
            unsafe_code: false,
        }
    }
}
