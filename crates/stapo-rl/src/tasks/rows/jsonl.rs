//! Reads files with one JSON object per line.

use super::receiver::{AddRow, Next, RowPlace, unreadable};
use crate::tasks::TaskError;
use serde_json::Value;
use std::io::{BufRead, Read};
use std::path::Path;

/// The longest line that is read.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// Calls `add` for each line that is not blank.
pub(super) fn read(path: &Path, mut text: impl BufRead, add: &mut AddRow) -> Result<(), TaskError> {
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let n_bytes = text
            .by_ref()
            .take(MAX_LINE_BYTES + 1)
            .read_until(b'\n', &mut line)
            .map_err(|error| unreadable(path, &error))?;
        if n_bytes == 0 {
            break;
        }
        let row_place = RowPlace { path, unit: "line", number };
        if n_bytes as u64 > MAX_LINE_BYTES {
            let problem = format!("longer than {MAX_LINE_BYTES} bytes");
            return Err(row_place.refuse(problem, "one JSON object per line, not one document"));
        }
        if line.trim_ascii().is_empty() {
            continue;
        }
        match serde_json::from_slice(&line) {
            Ok(Value::Object(row)) => match add(row_place, row)? {
                Next::Row => {}
                Next::Nothing => break,
            },
            Ok(_) => return Err(row_place.refuse("not a JSON object", "one JSON object per line")),
            Err(error) => {
                let remedy =
                    "one JSON object per line, in UTF-8; or a JSON array of objects, .csv, .tsv or .parquet";
                return Err(row_place.refuse(error.to_string(), remedy));
            }
        }
    }
    Ok(())
}
