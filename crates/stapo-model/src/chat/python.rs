//! What templates written for Python's Jinja expect to find.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde_json::Value as Json;
use std::fmt::Write;

/// Marks an error that the template itself raised.
pub(super) const RAISED: &str = "raised: ";

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    environment.add_filter("tojson", to_json);
}

/// `json.dumps` as Hugging Face calls it: no escaping of non-ASCII, a space after `,` and `:`, `indent` as given.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    if value.kind() == ValueKind::Undefined {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson of an undefined value"));
    }
    let json =
        serde_json::to_value(value).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let mut text = String::new();
    write_json(&json, indent, 0, &mut text);
    Ok(text)
}

fn write_json(value: &Json, indent: Option<usize>, depth: usize, out: &mut String) {
    // Writing to a string cannot fail.
    let scalar = |value: &dyn std::fmt::Display, out: &mut String| _ = write!(out, "{value}");
    let n_items = match value {
        Json::Array(items) => items.len(),
        Json::Object(map) => map.len(),
        other => return scalar(other, out),
    };
    let (open, close) = if value.is_array() { ('[', ']') } else { ('{', '}') };
    let line_break = |depth: usize, out: &mut String| {
        if let Some(width) = indent.filter(|_| n_items > 0) {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width.min(64) * depth));
        }
    };
    let separate = |item_idx: usize, out: &mut String| {
        if item_idx > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        line_break(depth + 1, out);
    };
    out.push(open);
    match value {
        Json::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                separate(i, out);
                write_json(item, indent, depth + 1, out);
            }
        }
        Json::Object(map) => {
            for (i, (key, item)) in map.iter().enumerate() {
                separate(i, out);
                scalar(&Json::from(key.as_str()), out);
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
        }
        _ => {}
    }
    line_break(depth, out);
    out.push(close);
}

/// Hugging Face's `{% generation %}` .. `{% endgeneration %}` marks which tokens are the assistant's. They render
/// nothing; here they become a condition that always holds, with the same control of white space.
pub(super) fn without_generation_marks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            out.push_str(tag);
            return out;
        };
        let (tag, after) = tag.split_at(end + 2);
        let word = tag[2..end].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+');
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}
