//! JSON from untrusted files: bounded in size and depth, and no object may have a key twice.

use crate::error::{Error, Result};
use crate::files;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;
use std::io::Read;
use std::path::Path;

/// Reads the object in `path`, of at most `max_bytes`.
pub(crate) fn read_object(path: &Path, max_bytes: u64) -> Result<Map<String, Value>> {
    parse_object(&path.display().to_string(), &read_bytes(path, max_bytes)?)
}

/// The object that `bytes` spell; `location` names the bytes in errors. A key that appears twice is refused, because
/// readers differ in which of the two values they take.
pub(crate) fn parse_object(location: &str, bytes: &[u8]) -> Result<Map<String, Value>> {
    let text = std::str::from_utf8(bytes)
        .map_err(|e| Error::malformed(location, format!("not UTF-8 at byte {}", e.valid_up_to())))?;
    let Unique(value) =
        serde_json::from_str(text).map_err(|e| Error::malformed(location, format!("not JSON: {e}")))?;
    match value {
        Value::Object(map) => Ok(map),
        other => Err(Error::malformed(location, format!("is {}, expected a JSON object", kind(&other)))),
    }
}

/// The bytes of `path`, at most `max_bytes`. The size is checked while reading: a file may grow.
pub(crate) fn read_bytes(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let file = files::open(path).map_err(|e| Error::io(path, e))?;
    let mut bytes = Vec::new();
    file.take(max_bytes + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, e))?;
    if bytes.len() as u64 > max_bytes {
        return Err(Error::malformed(
            path.display(),
            format!("more than {max_bytes} bytes, too large for what it is"),
        ));
    }
    Ok(bytes)
}

/// What a value is, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// A JSON value in which no object has a key twice.
struct Unique(Value);

impl<'de> Deserialize<'de> for Unique {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        UniqueKeys.deserialize(deserializer).map(Unique)
    }
}

struct UniqueKeys;

impl<'de> DeserializeSeed<'de> for UniqueKeys {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> std::result::Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> std::result::Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> std::result::Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> std::result::Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> std::result::Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> std::result::Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_unit<E>(self) -> std::result::Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> std::result::Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(UniqueKeys)? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> std::result::Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(A::Error::custom(format!("key {key:?} appears twice")));
            }
            map.insert(key, entries.next_value_seed(UniqueKeys)?);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_key_that_appears_twice_is_refused_at_any_depth() {
        let parsed = |text: &str| parse_object("x", text.as_bytes()).map_err(|error| error.to_string());
        assert_eq!(parsed(r#"{"a": [{"b": 1}, {"b": 2}], "b": {"a": null}}"#).map(|map| map.len()), Ok(2));
        for text in
            [r#"{"a": 1, "a": 1}"#, r#"{"a": [[{"a": 1, "a": 2}]]}"#, r#"{"b": {"c": {"a": 1, "a": 1}}}"#]
        {
            assert!(parsed(text).unwrap_err().contains("key \"a\" appears twice"), "{text}");
        }
        assert!(parsed("[1]").unwrap_err().contains("is a list, expected a JSON object"));
        assert!(
            parse_object("x", b"{\"a\": \"\xff\"}").unwrap_err().to_string().contains("not UTF-8 at byte 7")
        );
    }

    #[test]
    fn numbers_texts_and_lists_stay_what_they_are() {
        let value = json!({"whole": -3, "large": u64::MAX, "part": 0.5, "text": "é\n", "no": null, "yes": true, "list": [1, "a"]});
        let parsed = parse_object("x", value.to_string().as_bytes()).unwrap();
        assert_eq!(Value::Object(parsed), value);
    }

    #[test]
    fn a_file_may_be_as_long_as_the_limit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"{\"a\": 1}").unwrap();
        assert_eq!(read_object(file.path(), 8).unwrap()["a"], 1);
        let refused = read_object(file.path(), 7).unwrap_err().to_string();
        assert!(refused.contains("more than 7 bytes"), "{refused}");
    }
}
