//! The settings of a YAML file, each by its path.

use anyhow::{Context, Result, bail};
use saphyr::{LoadableYamlNode, Scalar, Yaml};
use std::path::Path;
use toml::Value;

/// The values of a file by their dotted paths, in the order of the file. Values that are null are left out.
pub fn read(path: &Path) -> Result<Vec<(String, Value)>> {
    let named = || format!("file {}", path.display());
    let text = stapo_rl::untrusted::read_text(path).with_context(named)?;
    let documents = Yaml::load_from_str(&text).with_context(named)?;
    let mut found = Vec::new();
    match documents.first() {
        Some(Yaml::Mapping(_)) => leaves("", &documents[0], &mut found),
        _ => {
            bail!("{}: holds no settings\nhint: a YAML file with lines such as `num_generations: 8`", named())
        }
    }
    Ok(found)
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
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        let text = "lr: 1e-6\nlow: -5e-1\nquoted: \"-2e-6\"\nname: inf\nsteps: 3\nnone: null\nactor:\n  on: true\n  lens: [1, 2.5]\n";
        std::fs::write(&path, text).unwrap();
        let expected = [
            ("lr", Value::Float(1e-6)),
            ("low", Value::Float(-0.5)),
            ("quoted", Value::Float(-2e-6)),
            ("name", Value::String("inf".into())),
            ("steps", Value::Integer(3)),
            ("actor.on", Value::Boolean(true)),
            ("actor.lens", Value::Array(vec![Value::Integer(1), Value::Float(2.5)])),
        ];
        assert_eq!(read(&path).unwrap(), expected.map(|(key, value)| (key.to_string(), value)));
    }
}
