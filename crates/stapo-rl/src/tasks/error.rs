use std::path::PathBuf;
use thiserror::Error;

/// Why a task cannot be opened, gives no problem or cannot judge. Each error names the thing, the value and the remedy.
#[derive(Debug, Error)]
pub enum TaskError {
    /// A value of the spec that is refused.
    #[error("task {key}: {problem}\nhint: {remedy}")]
    Setting { key: &'static str, problem: String, remedy: String },
    /// A file that cannot be read, or that holds no problem.
    #[error("task file {}: {problem}\nhint: {remedy}", path.display())]
    File { path: PathBuf, problem: String, remedy: String },
    /// A row of a file that is not a problem. Lines and rows count from 1.
    #[error("task file {}, {unit} {number}: {problem}\nhint: {remedy}", path.display())]
    Row { path: PathBuf, unit: &'static str, number: u64, problem: String, remedy: String },
    /// A prompt template that does not compile, or fails on a problem.
    #[error("task template {template:?}: {problem}\nhint: {remedy}")]
    Template { template: String, problem: String, remedy: String },
    /// A problem was requested from a split without problems.
    #[error("task: the {split} split holds no problem\nhint: {remedy}")]
    EmptySplit { split: &'static str, remedy: &'static str },
    /// Worked solutions exist for generated problems of the same task only.
    #[error("task: no worked solution for problem {id:?}: {problem}\nhint: {remedy}")]
    NoSolution { id: String, problem: String, remedy: &'static str },
    /// The external verifier failed; `place` names the first sample without a verdict.
    #[error("verifier {program}, {place}: {problem}\nhint: {remedy}")]
    Verifier { program: String, place: String, problem: String, remedy: String },
}

impl TaskError {
    pub(crate) fn setting(key: &'static str, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Setting { key, problem: problem.into(), remedy: remedy.into() }
    }
}
