//! Values on their way from a program to the tests. The program's process may write anything; only what has the form of
//! a bounded value is passed on.

use serde_json::Value;

/// The longest line that is read from a program or a tester.
pub(crate) const MAX_LINE_BYTES: usize = 4 << 20;
const MAX_DEPTH: usize = 52;

/// The reply of a program to a question of the tests, as it is passed on.
pub(crate) fn checked_reply(line: &[u8]) -> Option<Value> {
    let reply: Value = serde_json::from_slice(line).ok()?;
    if let Some(value) = reply.get("value") {
        is_value(value, 0).then(|| serde_json::json!({ "value": value }))
    } else {
        let [Value::String(kind), Value::String(text), _] = &reply.get("raised")?.as_array()?[..] else {
            return None;
        };
        Some(serde_json::json!({ "raised": [kind, text] }))
    }
}

/// Whether JSON has the form that the decoder of `zygote.py` reads.
fn is_value(value: &Value, depth: usize) -> bool {
    let all = |items: &[Value]| items.iter().all(|item| is_value(item, depth + 1));
    let Value::Array(parts) = value else {
        return !value.is_object();
    };
    let Some((tag, parts)) = parts.split_first().and_then(|(tag, parts)| Some((tag.as_str()?, parts))) else {
        return false;
    };
    if depth > MAX_DEPTH {
        return false;
    }
    match (tag, parts) {
        ("i", [Value::String(digits)]) => is_integer(digits, 16),
        ("b", [Value::String(digits)]) => {
            digits.len().is_multiple_of(2) && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        }
        ("f", [real]) => is_float(real),
        ("c", [real, imaginary]) => is_float(real) && is_float(imaginary),
        ("u", [Value::Array(points)]) => {
            points.iter().all(|point| point.as_u64().is_some_and(|point| point <= 0x0010_ffff))
        }
        ("r", [start, stop, step]) => {
            [start, stop, step].into_iter().all(Value::is_i64) && step.as_i64() != Some(0)
        }
        ("F", [Value::String(text)]) => text.split_once('/').is_some_and(|(top, bottom)| {
            is_integer(top, 10) && bottom.bytes().any(|b| b != b'0') && is_integer(bottom, 10)
        }),
        ("D", [Value::String(text)]) => {
            text.len() <= 1000
                && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
        }
        ("T", [Value::String(name)]) => name.len() <= 9,
        ("l" | "t" | "s" | "z" | "q" | "I" | "K" | "V", [Value::Array(items)]) => all(items),
        ("M", [Value::Array(items)]) => {
            let is_pair = |item: &Value| matches!(item.get(1), Some(Value::Array(pair)) if pair.len() == 2);
            items.iter().all(is_pair) && all(items)
        }
        ("d", [Value::Array(pairs)]) => {
            pairs.iter().all(|pair| matches!(pair, Value::Array(pair) if pair.len() == 2 && all(pair)))
        }
        ("h", [number, Value::String(kind)]) => number.as_u64().is_some() && kind.len() <= 400,
        _ => false,
    }
}

fn is_integer(text: &str, radix: u32) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix))
}

/// A float as `float.hex` writes it.
fn is_float(value: &Value) -> bool {
    let is_part = |byte: u8| byte.is_ascii_hexdigit() || b"+-.xpinfa".contains(&byte);
    matches!(value, Value::String(text) if text.len() <= 40 && !text.is_empty() && text.bytes().all(is_part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bounded_values_of_known_form_pass() {
        let deep = |n: usize| format!("{}0{}", r#"["l",["#.repeat(n), "]]".repeat(n));
        let passing = [
            r#"{"value": null}"#,
            r#"{"value": ["d", [["a", ["f", "0x1.8p+1"]], [1, ["t", [true]]]]]}"#,
            r#"{"value": ["h", 3, "Node"], "extra": 1}"#,
            r#"{"raised": ["ValueError", "no", null]}"#,
        ];
        for line in passing {
            assert!(checked_reply(line.as_bytes()).is_some(), "{line}");
        }
        assert!(checked_reply(format!(r#"{{"value": {}}}"#, deep(40)).as_bytes()).is_some());
        let refused = [
            "",
            "{}",
            r#"{"value": {"a": 1}}"#,
            r#"{"value": []}"#,
            r#"{"value": ["x", 1]}"#,
            r#"{"value": ["f", "__import__"]}"#,
            r#"{"value": ["r", 0, 1, 0]}"#,
            r#"{"value": ["F", "1/0"]}"#,
            r#"{"value": ["M", [1]]}"#,
            r#"{"value": ["d", [[1]]]}"#,
            r#"{"raised": ["ValueError"]}"#,
        ];
        for line in refused {
            assert!(checked_reply(line.as_bytes()).is_none(), "{line}");
        }
        assert!(checked_reply(format!(r#"{{"value": {}}}"#, deep(60)).as_bytes()).is_none());
    }
}
