//! Reads Parquet files, with nested lists and groups.

use super::AddRow;
use super::jsonl::open;
use crate::tasks::TaskError;
use parquet::errors::ParquetError;
use parquet::file::serialized_reader::SerializedFileReader;
use parquet::record::{Field, Row};
use serde_json::{Map, Value};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// Calls `add` for each row, with the number of the row, from 1, and the fields.
pub(super) fn read(path: &Path, add: &mut AddRow) -> Result<(), TaskError> {
    let broken = |problem: String| TaskError::File {
        path: path.to_path_buf(),
        problem,
        remedy: "a whole parquet file, uncompressed or with snappy; kind = \"jsonl\" for JSON lines".into(),
    };
    let file = open(path)?;
    let mut rows = guarded(|| Ok(SerializedFileReader::new(file)?.into_iter())).map_err(broken)?;
    for number in 1.. {
        match guarded(|| rows.next().transpose()).map_err(broken)? {
            Some(row) => add(number, fields(&row))?,
            None => break,
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
