//! What filters, methods and repetitions cost beyond reading their operands, in bytes: an upper bound of what they make
//! on the way.

use minijinja::value::{DynObject, Value};

/// A new value in a list.
const ITEM_BYTES: u64 = 64;

/// The price of `operands[0] * operands[1]`.
pub(super) fn of_repetition(operands: &[Value]) -> u64 {
    let size =
        operands.iter().map(|operand| text(operand).len() as u64 + ITEM_BYTES * n_items(operand)).sum();
    largest_number(operands).max(1).saturating_mul(size)
}

/// The price of a filter; the first operand is the value before the bar.
pub(super) fn of_filter(name: &str, operands: &[Value]) -> u64 {
    let Some((subject, arguments)) = operands.split_first() else { return 0 };
    let n_items = n_items(subject);
    match name {
        "replace" => of_replacement(operands),
        "join" => of_join(subject, arguments.first()),
        "format" => of_format(text(subject), arguments),
        "indent" => {
            let n_lines = text(subject).matches('\n').count() as u64 + 1;
            let width = largest_number(operands).saturating_add(total_text(arguments));
            n_lines.saturating_mul(width)
        }
        "split" | "lines" => ITEM_BYTES * n_items,
        "batch" | "slice" => ITEM_BYTES.saturating_mul(n_items.saturating_add(largest_number(operands))),
        // A sum of texts or lists copies what it has at every item.
        "sum" => n_items.saturating_mul(ITEM_BYTES * n_items + total_text(operands)),
        "list" | "map" | "select" | "reject" | "selectattr" | "rejectattr" | "sort" | "unique"
        | "groupby" | "dictsort" | "items" | "zip" | "min" | "max" | "first" | "last" => ITEM_BYTES * n_items,
        // Letters may grow in another case; control characters are escaped.
        _ => 4 * text(subject).len() as u64,
    }
}

/// The price of a method; the first operand is the object.
pub(super) fn of_method(name: &str, operands: &[Value]) -> u64 {
    let Some((subject, arguments)) = operands.split_first() else { return 0 };
    match name {
        "replace" => of_replacement(operands),
        "join" => arguments.first().map_or(0, |items| of_join(items, Some(subject))),
        "format" => of_format(text(subject), arguments),
        "split" | "splitlines" => {
            // A split at a text makes no more items than the text occurs; a split at white space is bounded by length.
            let n_parts = match arguments.first().map(text) {
                Some(separator) if !separator.is_empty() => {
                    text(subject).matches(separator).count() as u64 + 1
                }
                _ => n_items(subject),
            };
            ITEM_BYTES * n_parts
        }
        _ => 4 * text(subject).len() as u64,
    }
}

fn of_replacement(operands: &[Value]) -> u64 {
    match operands {
        [subject, old, new, ..] => {
            let n_found = text(subject).matches(text(old)).count() as u64;
            n_found.saturating_mul(text(new).len() as u64)
        }
        _ => 0,
    }
}

fn of_join(items: &Value, separator: Option<&Value>) -> u64 {
    let separator = separator.map_or(0, |separator| text(separator).len() as u64);
    n_items(items).saturating_mul(separator + ITEM_BYTES)
}

/// Every field of the format may be as wide as the largest number in sight, or repeat every argument.
fn of_format(format: &str, arguments: &[Value]) -> u64 {
    let n_fields = format.matches(['%', '{']).count() as u64;
    let digits = format.split(|c: char| !c.is_ascii_digit()).filter(|run| !run.is_empty());
    let width = digits.map(|run| run.parse().unwrap_or(u64::MAX)).max().unwrap_or(0);
    let argument = total_text(arguments).saturating_mul(4);
    n_fields.saturating_mul(width.max(largest_number(arguments)).saturating_add(argument))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn total_text(values: &[Value]) -> u64 {
    values.iter().map(|value| text(value).len() as u64).sum()
}

/// How many items iterating gives at most; a text gives its characters.
fn n_items(value: &Value) -> u64 {
    let of_object = value.as_object().and_then(DynObject::enumerator_len).unwrap_or(0);
    of_object.max(text(value).len()) as u64
}

/// The largest whole number among the values and the values of keyword arguments; 0 if there is none.
fn largest_number(values: &[Value]) -> u64 {
    let number = |value: &Value| value.as_i64().map_or(0, i64::unsigned_abs);
    let nested = |value: &Value| {
        let pairs = value.as_object().filter(|_| value.is_kwargs()).and_then(DynObject::try_iter_pairs);
        pairs.into_iter().flatten().map(|(_, value)| number(&value)).max().unwrap_or(0)
    };
    values.iter().map(|value| number(value).max(nested(value))).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_bounds_of_what_is_made() {
        let list = || Value::from(vec![1, 2, 3]);
        let t = |text: &str| Value::from(text);
        let n = |number: i64| Value::from(number);
        let filters: [(&str, Vec<Value>, u64); 12] = [
            // Three lines, each indented by 7 or by a text.
            ("indent", vec![t("a\nb\nc"), n(7)], 21),
            ("indent", vec![t("a\nb\nc"), t("----")], 12),
            ("replace", vec![t("aXbX"), t("X"), t("long")], 8),
            ("join", vec![list(), t("--")], 3 * (2 + 64)),
            ("format", vec![t("%s and %5d"), n(3)], 2 * 5),
            ("format", vec![t("%d %d"), n(900), t("abc")], 2 * (900 + 12)),
            ("split", vec![t("abcd")], 4 * 64),
            ("batch", vec![list(), n(10)], 13 * 64),
            ("sum", vec![list()], 3 * 3 * 64),
            ("map", vec![list()], 3 * 64),
            ("upper", vec![t("abcde")], 20),
            ("upper", vec![], 0),
        ];
        for (name, operands, expected) in filters {
            assert_eq!(of_filter(name, &operands), expected, "filter {name} {operands:?}");
        }
        let methods: [(&str, Vec<Value>, u64); 6] = [
            ("split", vec![t("a,b,c"), t(",")], 3 * 64),
            ("split", vec![t("a b")], 3 * 64),
            ("join", vec![t(", "), list()], 3 * (2 + 64)),
            ("replace", vec![t("aa"), t("a"), t("bcd")], 6),
            ("format", vec![t("{}"), t("ab")], 8),
            ("strip", vec![t("abc")], 12),
        ];
        for (name, operands, expected) in methods {
            assert_eq!(of_method(name, &operands), expected, "method {name} {operands:?}");
        }
        assert_eq!(of_repetition(&[t("abc"), n(4)]), 4 * (3 + 3 * 64));
        assert_eq!(of_repetition(&[list(), n(2), n(9)]), 9 * 3 * 64);
        assert_eq!(of_repetition(&[t("abc"), n(0)]), 3 + 3 * 64);
    }
}
