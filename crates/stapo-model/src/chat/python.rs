//! Functions, filters and tags that templates written for Python's Jinja rely on.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};

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
#[allow(clippy::needless_pass_by_value, reason = "the shape of a filter")]
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let mut text = String::new();
    write_json(value, indent, 0, &mut text)?;
    Ok(text)
}

/// Deepest nesting that `tojson` writes; the limit protects the stack.
const MAX_DEPTH: usize = 64;

fn write_json(value: &Value, indent: Option<usize>, depth: usize, out: &mut String) -> Result<(), Error> {
    let refused = |problem: &str| Error::new(ErrorKind::InvalidOperation, format!("tojson: {problem}"));
    if depth > MAX_DEPTH {
        return Err(refused("nested too deep"));
    }
    let (open, close) = match value.kind() {
        ValueKind::Map => ('{', '}'),
        ValueKind::Seq | ValueKind::Iterable => ('[', ']'),
        ValueKind::Undefined => return Err(refused("the value is undefined")),
        _ => return write_scalar(value, out),
    };
    let line_break = |depth: usize, out: &mut String| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width.min(16) * depth));
        }
    };
    out.push(open);
    let mut n_items = 0;
    // Iterating over a map gives its keys.
    for item in value.try_iter()? {
        if n_items > 0 {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        line_break(depth + 1, out);
        if open == '{' {
            write_scalar(&Value::from(item.to_string()), out)?;
            out.push_str(": ");
            write_json(&value.get_item(&item)?, indent, depth + 1, out)?;
        } else {
            write_json(&item, indent, depth + 1, out)?;
        }
        n_items += 1;
    }
    if n_items > 0 {
        line_break(depth, out);
    }
    out.push(close);
    Ok(())
}

fn write_scalar(value: &Value, out: &mut String) -> Result<(), Error> {
    let text =
        serde_json::to_string(value).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    out.push_str(&text);
    Ok(())
}

/// `source` with Hugging Face's tags `{% generation %}` and `{% endgeneration %}`, which mark the assistant's tokens
/// and render nothing, replaced by a condition that always holds, with the same control of white space.
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
