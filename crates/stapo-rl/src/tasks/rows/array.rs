//! Reads a JSON array of objects, one element at a time.

use super::receiver::{AddRow, Next, RowPlace};
use crate::tasks::TaskError;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;
use std::io::BufRead;
use std::path::Path;

/// Calls `add` for each element.
pub(super) fn read(path: &Path, text: impl BufRead, add: &mut AddRow) -> Result<(), TaskError> {
    let mut rows = Elements { path, add, n_read: 0, refusal: None, is_enough: false };
    let mut json = serde_json::Deserializer::from_reader(text);
    let parsed = json.deserialize_seq(&mut rows).and_then(|()| json.end());
    match (rows.refusal, parsed) {
        (Some(refusal), _) => Err(refusal),
        (None, Err(error)) if !rows.is_enough => {
            let row_place = RowPlace { path, unit: "row", number: rows.n_read + 1 };
            Err(row_place.refuse(error.to_string(), "a JSON array of objects, in UTF-8"))
        }
        (None, _) => Ok(()),
    }
}

struct Elements<'a, 'b> {
    path: &'a Path,
    add: &'a mut AddRow<'b>,
    n_read: u64,
    /// The receiver's error, which the parser's error type cannot hold.
    refusal: Option<TaskError>,
    is_enough: bool,
}

impl<'de> Visitor<'de> for &mut Elements<'_, '_> {
    type Value = ();

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a JSON array of objects")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<(), A::Error> {
        while let Some(element) = elements.next_element()? {
            let row_place = RowPlace { path: self.path, unit: "row", number: self.n_read + 1 };
            let added = match element {
                Value::Object(row) => (self.add)(row_place, row),
                _ => Err(row_place.refuse("not a JSON object", "a JSON array of objects")),
            };
            self.n_read += 1;
            match added {
                Ok(Next::Row) => {}
                Ok(Next::Nothing) => {
                    self.is_enough = true;
                    return Err(A::Error::custom("enough rows"));
                }
                Err(refusal) => {
                    self.refusal = Some(refusal);
                    return Err(A::Error::custom("refused"));
                }
            }
        }
        Ok(())
    }
}
