//! Calls in plain text: lines `CALL name(arguments)`, and fenced blocks of Python.

use super::{Call, CallProblem};
use serde_json::{Map, Value};

const CALL: &str = "CALL ";
const FENCE: &str = "```";
const PYTHON: [&str; 4] = ["python", "py", "python3", "tool_code"];

pub(super) fn calls(text: &str) -> Vec<Result<Call, CallProblem>> {
    text.lines().filter_map(|line| line.trim().strip_prefix(CALL)).map(call).collect()
}

fn call(line: &str) -> Result<Call, CallProblem> {
    let form = || CallProblem::new(format!("expected {CALL}name(arguments), found {:?}", shortened(line)));
    let (name, rest) = line.split_once('(').ok_or_else(form)?;
    let (arguments, _) = rest.rsplit_once(')').ok_or_else(form)?;
    let name = name.trim();
    if name.is_empty() || !name.chars().all(|c| c.is_alphanumeric() || c == '_') {
        return Err(form());
    }
    Ok(match keywords(arguments) {
        Some(named) => Call::named(name, named),
        None => Call::text(name, arguments),
    })
}

fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

/// Each fenced block that is marked as Python.
pub(super) fn python_blocks(text: &str) -> Vec<Result<Call, CallProblem>> {
    let mut found = Vec::new();
    // The lines of an open block; `None` inside a block of another language.
    let mut open: Option<Option<Vec<&str>>> = None;
    for line in text.lines() {
        let fence = line.trim().strip_prefix(FENCE);
        match (fence, &mut open) {
            (Some(language), None) => {
                let is_python = PYTHON.contains(&language.trim().to_ascii_lowercase().as_str());
                open = Some(is_python.then(Vec::new));
            }
            (Some(""), Some(_)) => {
                if let Some(Some(lines)) = open.take() {
                    found.push(Ok(Call::text("python", &lines.join("\n"))));
                }
            }
            (_, Some(Some(lines))) => lines.push(line),
            _ => {}
        }
    }
    if let Some(Some(_)) = open {
        found.push(Err(CallProblem::new(format!("a block {FENCE}python is not closed"))));
    }
    found
}

/// Reads `name=value, ..`, where values are written as in JSON or Python; `None` for any other text.
pub(super) fn keywords(text: &str) -> Option<Map<String, Value>> {
    let mut rest = text.trim();
    let mut found = Map::new();
    while !rest.is_empty() {
        let (name, after) = rest.split_once('=')?;
        let name = name.trim();
        let is_name = name.chars().all(|c| c.is_alphanumeric() || c == '_')
            && name.starts_with(|c: char| c.is_alphabetic() || c == '_');
        let (value, after) = value(after.trim_start())?;
        if !is_name || found.insert(name.to_string(), value).is_some() {
            return None;
        }
        rest = after.trim_start();
        if !rest.is_empty() {
            rest = rest.strip_prefix(',')?.trim_start();
        }
    }
    (!found.is_empty()).then_some(found)
}

/// The value at the start of a text, and what follows it.
fn value(text: &str) -> Option<(Value, &str)> {
    let constants = [("True", Value::Bool(true)), ("False", Value::Bool(false)), ("None", Value::Null)];
    for (word, value) in constants {
        if let Some(after) = text.strip_prefix(word) {
            return Some((value, after));
        }
    }
    if let Some(quoted) = text.strip_prefix('\'') {
        let (inside, after) = quoted.split_once('\'')?;
        return (!inside.contains('\\')).then(|| (Value::from(inside), after));
    }
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let value = values.next()?.ok()?;
    Some((value, &text[values.byte_offset()..]))
}
