//! What the readers of all formats give rows to, and the errors they share.

use crate::tasks::TaskError;
use serde_json::{Map, Value};
use std::path::Path;

/// Where a row is, for messages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowPlace<'a> {
    pub path: &'a Path,
    /// The word for a row of the file.
    pub unit: &'static str,
    /// Lines and rows count from 1.
    pub number: u64,
}

impl RowPlace<'_> {
    pub(crate) fn refuse(self, problem: impl Into<String>, remedy: impl Into<String>) -> TaskError {
        TaskError::Row {
            path: self.path.to_path_buf(),
            unit: self.unit,
            number: self.number,
            problem: problem.into(),
            remedy: remedy.into(),
        }
    }
}

/// What the receiver of a row wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    Row,
    Nothing,
}

/// Receives a row and its place.
pub(crate) type AddRow<'a> = dyn FnMut(RowPlace, Map<String, Value>) -> Result<Next, TaskError> + 'a;

pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> TaskError {
    let remedy = match error.kind() {
        std::io::ErrorKind::FileTooLarge => "split the file, or unpack it if you trust it",
        std::io::ErrorKind::InvalidData | std::io::ErrorKind::UnexpectedEof => {
            "the file is damaged or was not written to its end; get it again"
        }
        _ => {
            "path is taken from the folder the program was started in; `stapo fetch dataset OWNER/NAME` gets data sets of the hub"
        }
    };
    TaskError::File { path: path.to_path_buf(), problem: error.to_string(), remedy: remedy.into() }
}
