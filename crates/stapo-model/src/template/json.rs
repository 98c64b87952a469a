//! The filter `tojson`.

use super::meter::Meter;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest nesting that is written.
const MAX_DEPTH: usize = 64;
/// Widest indentation of one level.
const MAX_INDENT: usize = 16;

/// `json.dumps` as Hugging Face calls it: no escaping of non-ASCII, a space after `,` and `:`, `indent` as given.
pub(super) fn to_json(value: &Value, options: &Kwargs, meter: &Meter) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    let mut json = Json { text: String::new(), indent: indent.map(|width| width.min(MAX_INDENT)), meter };
    json.write(value, 0)?;
    Ok(json.text)
}

struct Json<'a> {
    text: String,
    indent: Option<usize>,
    meter: &'a Meter,
}

impl Json<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(refused("nested too deep"));
        }
        let (open, close) = match value.kind() {
            ValueKind::Map => ('{', '}'),
            ValueKind::Seq | ValueKind::Iterable => ('[', ']'),
            ValueKind::Undefined => return Err(refused("the value is undefined")),
            ValueKind::Plain => return Err(refused("the value is an object of the template")),
            _ => return self.write_scalar(value),
        };
        self.text.push(open);
        let mut n_items = 0;
        // Iterating over a map gives its keys.
        for item in value.try_iter()? {
            if n_items > 0 {
                self.text.push_str(if self.indent.is_some() { "," } else { ", " });
            }
            self.line_break(depth + 1)?;
            if open == '{' {
                self.write_scalar(&Value::from(item.to_string()))?;
                self.text.push_str(": ");
                self.write(&value.get_item(&item)?, depth + 1)?;
            } else {
                self.write(&item, depth + 1)?;
            }
            n_items += 1;
        }
        if n_items > 0 {
            self.line_break(depth)?;
        }
        self.text.push(close);
        Ok(())
    }

    fn line_break(&mut self, depth: usize) -> Result<(), Error> {
        let width = self.indent.map(|width| width * depth);
        // The line break, the brackets and the comma.
        self.meter.charge(8 + width.unwrap_or(0) as u64)?;
        if let Some(width) = width {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(' ', width));
        }
        Ok(())
    }

    fn write_scalar(&mut self, value: &Value) -> Result<(), Error> {
        // An escaped character takes at most six bytes.
        self.meter.charge(32 + 6 * value.as_str().map_or(0, str::len) as u64)?;
        let text = serde_json::to_string(value)
            .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
        self.text.push_str(&text);
        Ok(())
    }
}

fn refused(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {problem}"))
}
