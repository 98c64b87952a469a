//! Why a file was refused.

use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};

pub type Result<T> = std::result::Result<T, Error>;

/// `place` is the file, and where it helps the key or tensor in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused.
    #[error("{}: {reason}", path.display())]
    Io { path: PathBuf, reason: io::Error },
    /// The file breaks its own format: truncated, overlapping, not what it says it is.
    #[error("{place}: {problem}")]
    Malformed { place: String, problem: String },
    /// The file is in order, but asks for something this engine does not do.
    #[error("{place}: {problem}{hint}")]
    Unsupported { place: String, problem: String, hint: Hint },
    /// Two parts of a model do not fit each other: a shape and the config, a tokenizer and the vocabulary.
    #[error("{place}: {problem}{hint}")]
    Mismatch { place: String, problem: String, hint: Hint },
    /// A folder to be written is there and holds something.
    #[error("{place}: exists and is not empty")]
    Exists { place: String },
    /// Something needed is not there.
    #[error("{place}: {problem}{hint}")]
    Missing { place: String, problem: String, hint: Hint },
    /// The device has no room for the weights.
    #[error("{0}")]
    OutOfMemory(stapo_ops::OutOfMemory),
    /// The chat template refused the conversation, or is broken.
    #[error("chat template: {problem}{hint}")]
    Template { problem: String, hint: Hint },
}

/// The remedy, printed on a line of its own; empty when there is none to give.
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

    pub(crate) fn malformed(place: impl Display, problem: impl Into<String>) -> Self {
        Self::Malformed { place: place.to_string(), problem: problem.into() }
    }

    pub(crate) fn unsupported(
        place: impl Display,
        problem: impl Into<String>,
        hint: impl Into<Hint>,
    ) -> Self {
        Self::Unsupported { place: place.to_string(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn mismatch(place: impl Display, problem: impl Into<String>, hint: impl Into<Hint>) -> Self {
        Self::Mismatch { place: place.to_string(), problem: problem.into(), hint: hint.into() }
    }

    pub(crate) fn missing(place: impl Display, problem: impl Into<String>, hint: impl Into<Hint>) -> Self {
        Self::Missing { place: place.to_string(), problem: problem.into(), hint: hint.into() }
    }
}
