//! Reads Parquet files, with nested lists and groups.

mod pages;

use super::receiver::{AddRow, Next, RowPlace};
use crate::tasks::TaskError;
use pages::Chunks;
use parquet::errors::ParquetError;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row};
use serde_json::{Map, Value};
use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Calls `add` for each row.
pub(super) fn read(path: &Path, file: File, add: &mut AddRow) -> Result<(), TaskError> {
    let broken = |problem: String| {
        TaskError::File {
        path: path.to_path_buf(),
        problem,
        remedy: "a whole Parquet file, uncompressed or with snappy, zstd, gzip or lz4; no other file may be called .parquet".into(),
    }
    };
    let file = guarded(|| Chunks::open(file)).map_err(broken)?;
    let mut number = 0;
    for group_idx in 0..file.n_groups() {
        let group = file.group(group_idx);
        let mut rows = guarded(|| RowIter::from_row_group(None, &group)).map_err(broken)?;
        while let Some(row) = guarded(|| rows.next().transpose()).map_err(broken)? {
            number += 1;
            if add(RowPlace { path, unit: "row", number }, fields(&row))? == Next::Nothing {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The result of the Parquet reader. A panic of the reader, which a corrupt file can cause, becomes an error.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("is corrupt".into()),
    }
}

fn fields(row: &Row) -> Map<String, Value> {
    row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect()
}

/// A field as JSON. Bytes that are valid UTF-8 are text, because old writers do not mark texts as such.
fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => Value::from(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        Field::Float16(value) => Value::from(f32::from(*value)),
        Field::Float(value) => Value::from(*value),
        Field::Double(value) => Value::from(*value),
        Field::Str(text) => Value::from(text.as_str()),
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).map_or(Value::Null, Value::from),
        Field::Group(row) => Value::Object(fields(row)),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let key = |field: &Field| match value(field) {
                Value::String(text) => text,
                other => other.to_string(),
            };
            Value::Object(map.entries().iter().map(|(name, field)| (key(name), value(field))).collect())
        }
        Field::Decimal(_)
        | Field::Date(_)
        | Field::TimeMillis(_)
        | Field::TimeMicros(_)
        | Field::TimestampMillis(_)
        | Field::TimestampMicros(_) => Value::from(field.to_string()),
    }
}
