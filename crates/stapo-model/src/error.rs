//! Why a file or model was refused.

use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

/// `location` is the file and, where known, the key or tensor in the file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{}: {reason}", path.display())]
    Io { path: PathBuf, reason: io::Error },
    /// The file breaks its own format: truncated, overlapping, of another format than its name says.
    #[error("{location}: {problem}")]
    Malformed { location: String, problem: String },
    /// The file is valid, but needs a feature that this engine does not have.
    #[error("{location}: {problem}{hint}")]
    Unsupported { location: String, problem: String, hint: Hint },
    /// Two parts of a model do not fit each other: a shape and the config, a tokenizer and the vocabulary.
    #[error("{location}: {problem}{hint}")]
    Mismatch { location: String, problem: String, hint: Hint },
    /// A folder to be written exists and is not empty.
    #[error("{location}: exists and is not empty")]
    Exists { location: String },
    /// A file, key or tensor that is needed is missing.
    #[error("{location}: {problem}{hint}")]
    Missing { location: String, problem: String, hint: Hint },
    /// The device has too little memory for the weights.
    #[error("{0}")]
    OutOfMemory(stapo_ops::OutOfMemory),
    /// The chat template refused the conversation, or is broken.
    #[error("{location}: chat template: {problem}{hint}")]
    Template { location: String, problem: String, hint: Hint },
}

/// The remedy, printed on a separate line; empty if there is no remedy to give.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hint(pub String);

impl Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { Ok(()) } else { write!(f, "\nhint: {}", self.0) }
    }
}

impl From<&str> for Hint {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl From<String> for Hint {
    fn from(text: String) -> Self {
        Self(text)
    }
}

impl Error {
    pub(crate) fn io(path: &Path, reason: io::Error) -> Self {
        Self::Io { path: path.to_owned(), reason }
    }

    pub(crate) fn malformed(location: impl Display, problem: impl Into<String>) -> Self {
        Self::Malformed { location: location.to_string(), problem: problem.into() }
    }

    pub(crate) fn unsupported(
        location: impl Display,
        problem: impl Into<String>,
        hint: impl Into<Hint>,
    ) -> Self {
        Self::Unsupported { location: location.to_string(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn mismatch(
        location: impl Display,
        problem: impl Into<String>,
        hint: impl Into<Hint>,
    ) -> Self {
        Self::Mismatch { location: location.to_string(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn missing(location: impl Display, problem: impl Into<String>, hint: impl Into<Hint>) -> Self {
        Self::Missing { location: location.to_string(), problem: problem.into(), hint: hint.into() }
    }
}
