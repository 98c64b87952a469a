//! Typed values from the keys of a JSON object.

use crate::error::{Error, Result};
use crate::json;
use serde_json::{Map, Value};

/// A value for a message; a long value is named by its kind.
pub(super) fn abbreviated(value: &Value) -> String {
    let text = value.to_string();
    if text.len() <= 60 { text } else { json::kind(value).to_owned() }
}

/// Reads typed values from one JSON object. null counts as absent; errors name the key and the value.
#[derive(Clone, Copy)]
pub(super) struct ObjectReader<'a> {
    pub location: &'a str,
    pub prefix: &'a str,
    pub keys: &'a Map<String, Value>,
}

impl<'a> ObjectReader<'a> {
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.keys.get(key).filter(|value| !value.is_null())
    }

    pub fn whole(&self, key: &str) -> Result<usize> {
        self.optional_whole(key)?.ok_or_else(|| self.absent(key))
    }

    pub fn optional_whole(&self, key: &str) -> Result<Option<usize>> {
        let read = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.typed(key, "a whole number", read)
    }

    /// A list with one entry for each of `n` layers.
    pub fn list(&self, key: &str, n: usize) -> Result<Option<&'a [Value]>> {
        let Some(list) = self.typed(key, "a list", |value| value.as_array().map(Vec::as_slice))? else {
            return Ok(None);
        };
        if list.len() != n {
            let problem = format!("has {} entries for {n} layers", list.len());
            return Err(Error::mismatch(self.path(key), problem, "is this the config of another model?"));
        }
        Ok(Some(list))
    }

    /// A list of numbers.
    pub fn numbers(&self, key: &str) -> Result<Vec<f64>> {
        let read = |value: &Value| value.as_array()?.iter().map(Value::as_f64).collect::<Option<Vec<f64>>>();
        self.typed(key, "a list of numbers", read)?.ok_or_else(|| self.absent(key))
    }

    pub fn number(&self, key: &str) -> Result<f64> {
        self.optional_number(key)?.ok_or_else(|| self.absent(key))
    }

    pub fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let wrong =
            || Error::malformed(self.path(key), format!("is {}, expected {expected}", abbreviated(value)));
        read(value).map(Some).ok_or_else(wrong)
    }

    fn absent(&self, key: &str) -> Error {
        Error::missing(self.path(key), "is missing", "is this the config.json of a language model?")
    }

    pub fn path(&self, key: &str) -> String {
        let dot = if self.prefix.is_empty() { "" } else { "." };
        format!("{}: {}{dot}{key}", self.location, self.prefix)
    }
}

/// The ids under `key`, which may hold one, several or none.
pub(crate) fn token_ids(location: &str, key: &str, value: Option<&Value>) -> Result<Vec<u32>> {
    let one = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            Error::malformed(
                format!("{location}: {key}"),
                format!("is {value}, expected a token id or a list of them"),
            )
        })
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(one).collect(),
        Some(value) => Ok(vec![one(value)?]),
    }
}
