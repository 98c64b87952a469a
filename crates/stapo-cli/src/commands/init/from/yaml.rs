//! The settings of a YAML text, each by its path.

use saphyr::{LoadableYamlNode, Scalar, ScanError, Yaml};
use toml::Value;

/// The values of a text by their dotted paths, in the order of the text. Values that are null are left out; a text that is no table
/// has none.
pub fn settings(text: &str) -> Result<Vec<(String, Value)>, ScanError> {
    let mut found = Vec::new();
    if let Some(table @ Yaml::Mapping(_)) = Yaml::load_from_str(text)?.first() {
        leaves("", table, &mut found);
    }
    Ok(found)
}

/// A value of a command line; `None` for null. What a shell would fill in stays a text.
pub fn scalar(text: &str) -> Option<Value> {
    match Yaml::load_from_str(text) {
        Ok(documents) if !text.contains("${") && !text.contains("$(") => documents.first().and_then(value),
        _ => Some(Value::String(text.to_string())),
    }
}

fn leaves(path: &str, node: &Yaml, found: &mut Vec<(String, Value)>) {
    let Yaml::Mapping(mapping) = node else {
        found.extend(value(node).map(|value| (path.to_string(), value)));
        return;
    };
    // A table that is a value as a whole, with free keys.
    if path.ends_with("chat_template_kwargs") {
        found.extend(value(node).map(|value| (path.to_string(), value)));
        return;
    }
    for (key, inner) in mapping {
        if let Some(key) = key.as_str() {
            let path = if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
            leaves(&path, inner, found);
        }
    }
}

/// A value as TOML has it; `None` for null. YAML reads `1e-6` as a text, as Python's reader does, and the trainers turn it into
/// a number.
fn value(node: &Yaml) -> Option<Value> {
    match node {
        Yaml::Value(Scalar::Boolean(truth)) => Some(Value::Boolean(*truth)),
        Yaml::Value(Scalar::Integer(number)) => Some(Value::Integer(*number)),
        Yaml::Value(Scalar::FloatingPoint(number)) => Some(Value::Float(number.into_inner())),
        Yaml::Value(Scalar::String(text)) => {
            let is_number = text.starts_with(|c: char| c.is_ascii_digit() || c == '-');
            let number = text.parse::<f64>().ok().filter(|_| is_number).map(Value::Float);
            Some(number.unwrap_or_else(|| Value::String(text.to_string())))
        }
        Yaml::Sequence(list) => Some(Value::Array(list.iter().filter_map(value).collect())),
        Yaml::Mapping(mapping) => {
            let pairs =
                mapping.iter().filter_map(|(key, inner)| Some((key.as_str()?.to_string(), value(inner)?)));
            Some(Value::Table(pairs.collect()))
        }
        Yaml::Tagged(_, inner) => value(inner),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `1e-6` and `-5e-1` are texts in YAML 1.1, and `inf` and a name stay texts.
    #[test]
    fn numbers_that_yaml_reads_as_texts_are_numbers() {
        let text = "lr: 1e-6\nlow: -5e-1\nquoted: \"-2e-6\"\nname: inf\nsteps: 3\nnone: null\nactor:\n  on: true\n  lens: [1, 2.5]\n";
        let expected = [
            ("lr", Value::Float(1e-6)),
            ("low", Value::Float(-0.5)),
            ("quoted", Value::Float(-2e-6)),
            ("name", Value::String("inf".into())),
            ("steps", Value::Integer(3)),
            ("actor.on", Value::Boolean(true)),
            ("actor.lens", Value::Array(vec![Value::Integer(1), Value::Float(2.5)])),
        ];
        assert_eq!(settings(text).unwrap(), expected.map(|(key, value)| (key.to_string(), value)));
    }
    #[test]
    fn values_of_a_command_line_are_those_of_yaml_but_for_what_a_shell_fills_in() {
        let text = |text: &str| Some(Value::String(text.into()));
        for (written, expected) in [
            ("1e-6", Some(Value::Float(1e-6))),
            ("True", Some(Value::Boolean(true))),
            ("[a, 'b']", Some(Value::Array(vec!["a".into(), "b".into()]))),
            ("null", None),
            ("", None),
            ("[${A}]", text("[${A}]")),
            ("$(date)", text("$(date)")),
            ("a: [", text("a: [")),
        ] {
            assert_eq!(scalar(written), expected, "{written}");
        }
    }
}
