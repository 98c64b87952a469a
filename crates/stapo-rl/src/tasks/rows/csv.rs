//! Reads tables with a line of names: comma- or tab-separated values.

use super::receiver::{AddRow, Next, RowPlace, unreadable};
use crate::tasks::TaskError;
use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::{Map, Value};
use std::io::Read;
use std::path::Path;

/// Calls `add` for each row. Every value is a text; an empty one is null.
pub(super) fn read(path: &Path, text: impl Read, separator: u8, add: &mut AddRow) -> Result<(), TaskError> {
    let mut table = ReaderBuilder::new().delimiter(separator).from_reader(text);
    let names = table.headers().map_err(|error| broken(path, 0, error))?.clone();
    let mut record = StringRecord::new();
    for number in 1.. {
        if !table.read_record(&mut record).map_err(|error| broken(path, number, error))? {
            break;
        }
        let value = |text: &str| if text.is_empty() { Value::Null } else { Value::from(text) };
        let row: Map<String, Value> =
            names.iter().zip(&record).map(|(name, text)| (name.trim().to_string(), value(text))).collect();
        if add(RowPlace { path, unit: "row", number }, row)? == Next::Nothing {
            break;
        }
    }
    Ok(())
}

fn broken(path: &Path, number: u64, error: csv::Error) -> TaskError {
    let line = error.position().map_or(String::new(), |position| format!(" (line {})", position.line()));
    let row_place = RowPlace { path, unit: "row", number };
    match error.into_kind() {
        ErrorKind::Io(error) => unreadable(path, &error),
        ErrorKind::UnequalLengths { expected_len, len, .. } => row_place.refuse(
            format!("{len} values, but the first line has {expected_len} names{line}"),
            "put a value that has a separator or a line break in double quotes, and write a quote inside it twice",
        ),
        ErrorKind::Utf8 { err, .. } => row_place.refuse(format!("{err}{line}"), "write the file in UTF-8"),
        other => row_place.refuse(format!("{other:?}{line}"), "one line of names, then one line per row"),
    }
}
