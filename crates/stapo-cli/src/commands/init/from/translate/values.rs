//! The values that translations are made of.

use super::Translation::{self, Keys, Nothing, Refused};
use toml::{Table, Value};

pub fn one(key: &str, value: Value) -> Translation {
    Keys(vec![(key.to_string(), value)])
}

/// A default as the docs write it.
pub fn parsed(text: &str) -> Value {
    let number = || text.parse().map(Value::Integer).or_else(|_| text.parse().map(Value::Float)).ok();
    number().or_else(|| text.parse().ok().map(Value::Boolean)).unwrap_or_else(|| Value::from(text))
}

pub fn of_kind(kind: &str) -> Value {
    Value::Table(Table::from_iter([("kind".to_string(), Value::from(kind))]))
}

/// What divides the sum over the tokens of a response, whatever its length.
pub fn constant_length(length: f64) -> Value {
    let pairs = [("kind".to_string(), Value::from("constant")), ("length".to_string(), length.into())];
    Value::Table(Table::from_iter(pairs))
}

/// The penalty of long responses that falls to -1 over the last tokens.
pub fn overlong(longest: f64, buffer: f64) -> Translation {
    let pairs = [("max_tokens", longest), ("buffer_tokens", buffer)];
    let pairs = pairs.into_iter().map(|(key, n)| (key.to_string(), Value::Integer(n as i64)));
    one("rollout.overlong", Value::Table(pairs.collect()))
}

/// A factor on that penalty, which has none here.
pub fn overlong_factor(name: &str, value: &Value) -> Translation {
    match as_number(value) {
        Some(1.0) => Nothing,
        _ => Refused(format!("`{name}` = {value}: the penalty of the longest responses is 1 here")),
    }
}

pub fn as_number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}
