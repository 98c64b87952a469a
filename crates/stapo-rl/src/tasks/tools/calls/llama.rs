//! Calls of Llama 3: JSON as the whole turn, or what follows `<|python_tag|>`.

use super::plain::keywords;
use super::{Call, CallProblem, from_json};
use serde_json::Value;

const TAG: &str = "<|python_tag|>";
const ENDS: [&str; 2] = ["<|eom_id|>", "<|eot_id|>"];

pub(super) fn calls(text: &str) -> Vec<Result<Call, CallProblem>> {
    let mut text = text.trim();
    for end in ENDS {
        text = text.strip_suffix(end).unwrap_or(text).trim_end();
    }
    match text.split_once(TAG) {
        Some((_, tagged)) => after_tag(tagged.trim()),
        None if text.starts_with('{') && text.contains("\"name\"") => objects(text),
        None => Vec::new(),
    }
}

/// JSON objects, `tool.call(argument="value")`, or Python.
fn after_tag(text: &str) -> Vec<Result<Call, CallProblem>> {
    if text.starts_with('{') && text.contains("\"name\"") {
        return objects(text);
    }
    let built_in = text.strip_suffix(')').and_then(|text| text.split_once(".call("));
    if let Some((tool, arguments)) = built_in
        && tool.chars().all(|c| c.is_alphanumeric() || c == '_')
        && let Some(arguments) = keywords(arguments)
    {
        return vec![Ok(Call::named(tool, arguments))];
    }
    vec![Ok(Call::text("python", text))]
}

/// JSON objects one after another, with semicolons or blanks between them.
fn objects(text: &str) -> Vec<Result<Call, CallProblem>> {
    let mut found = Vec::new();
    let mut rest = text;
    while rest.starts_with('{') {
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match values.next() {
            Some(Ok(value)) => found.push(from_json(&value)),
            Some(Err(error)) => {
                found.push(Err(CallProblem::new(format!("the call is no JSON: {error}"))));
                break;
            }
            None => break,
        }
        rest = rest[values.byte_offset()..].trim_start_matches(|c: char| c == ';' || c.is_whitespace());
    }
    found
}
