//! Reads files with one JSON object per line.

use super::AddRow;
use crate::tasks::TaskError;
use serde_json::Value;
use stapo_model::files;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// The longest line that is read.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Calls `add` for each line that is not blank, with the number of the line, from 1, and the fields.
pub(crate) fn read(path: &Path, add: &mut AddRow) -> Result<(), TaskError> {
    let mut reader = BufReader::with_capacity(1 << 16, open(path)?);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let n_bytes = reader
            .by_ref()
            .take(MAX_LINE_BYTES + 1)
            .read_until(b'\n', &mut line)
            .map_err(|error| unreadable(path, &error))?;
        if n_bytes == 0 {
            break;
        }
        let refuse = |problem: String, remedy: &str| TaskError::Row {
            path: path.to_path_buf(),
            unit: "line",
            number,
            problem,
            remedy: remedy.into(),
        };
        if n_bytes as u64 > MAX_LINE_BYTES {
            let problem = format!("longer than {MAX_LINE_BYTES} bytes");
            return Err(refuse(problem, "one JSON object per line, not one document"));
        }
        let bytes = if number == 1 { line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&line) } else { &line };
        if bytes.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(row)) => add(number, row)?,
            Ok(_) => return Err(refuse("not a JSON object".into(), "one JSON object per line")),
            Err(error) => {
                let remedy = "one JSON object per line, in UTF-8; kind = \"parquet\" for parquet files";
                return Err(refuse(error.to_string(), remedy));
            }
        }
    }
    Ok(())
}

/// Opens a file; folders, pipes and devices are refused.
pub(super) fn open(path: &Path) -> Result<File, TaskError> {
    files::open(path).map_err(|error| unreadable(path, &error))
}

pub(super) fn unreadable(path: &Path, error: &std::io::Error) -> TaskError {
    TaskError::File {
        path: path.to_path_buf(),
        problem: error.to_string(),
        remedy: "path is taken from the folder the program was started in; `stapo fetch dataset OWNER/NAME` gets data sets of the hub".into(),
    }
}
