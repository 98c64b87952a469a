//! serde's messages in plain words.

/// The first line of a message of serde or toml, without the names of Rust types. The names that were expected in place
/// of an unknown one are left out: they belong in the hint.
pub(super) fn problem(message: &str) -> String {
    let line = message.lines().next().unwrap_or(message);
    let first_quoted = |rest: &str| rest.split('`').nth(1).unwrap_or_default().to_string();
    let mismatch = line.strip_prefix("invalid type: ").or_else(|| line.strip_prefix("invalid value: "));
    if let Some((got, expected)) = mismatch.and_then(|rest| rest.rsplit_once(", expected ")) {
        return format!("must be {}, not {}", wanted(expected), given(got));
    }
    if let Some(rest) = line.strip_prefix("unknown field ") {
        return format!("unknown key `{}`", first_quoted(rest));
    }
    if let Some(rest) = line.strip_prefix("unknown variant ") {
        return format!("unknown kind `{}`", first_quoted(rest));
    }
    if let Some(rest) = line.strip_prefix("missing field ") {
        return format!("the key `{}` is missing", first_quoted(rest));
    }
    line.to_string()
}

/// What was expected, without the names of Rust types.
fn wanted(expected: &str) -> &str {
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number without a sign",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" | "string" | "path string" => "a text in quotes",
        "a sequence" => "a list",
        "a map" | "map" => "a table",
        "string or table" | "variant identifier" => "the name of a kind in quotes",
        other if other.starts_with("struct ") || other.contains("enum ") => "a table",
        other => other,
    }
}

/// What was given, as the file has it.
fn given(got: &str) -> String {
    let value = ["string ", "integer ", "floating point ", "boolean ", "character "]
        .iter()
        .find_map(|kind| got.strip_prefix(kind));
    match (value, got) {
        (Some(value), _) => value.trim_matches('`').to_string(),
        (None, "map") => "a table".to_string(),
        (None, "sequence") => "a list".to_string(),
        (None, other) => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_no_type_of_rust() {
        let cases = [
            (
                "invalid type: string \"many\", expected u64",
                "must be a whole number without a sign, not \"many\"",
            ),
            ("invalid value: integer `-1`, expected usize", "must be a whole number without a sign, not -1"),
            (
                "invalid type: string \"x, expected y\", expected f64",
                "must be a number, not \"x, expected y\"",
            ),
            ("invalid type: integer `3`, expected struct Rollout", "must be a table, not 3"),
            ("invalid type: map, expected a string", "must be a text in quotes, not a table"),
            ("invalid type: integer `3`, expected internally tagged enum Model", "must be a table, not 3"),
            ("unknown field `x`, expected one of `a`, `b`", "unknown key `x`"),
            ("unknown field `x`, there are no fields", "unknown key `x`"),
            ("unknown variant `x`, expected `a` or `b`", "unknown kind `x`"),
            ("missing field `path`\nin `model`", "the key `path` is missing"),
            ("something else", "something else"),
        ];
        for (message, expected) in cases {
            assert_eq!(problem(message), expected);
        }
    }
}
