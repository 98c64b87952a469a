//! Rows whose fields have a value that `only` asks for.

use super::field::FieldPath;
use crate::tasks::TaskError;
use serde_json::Value;
use std::collections::BTreeMap;

/// The fields that `only` names, each with the values asked for.
pub(super) struct Chosen(Vec<(FieldPath, Vec<String>)>);

impl Chosen {
    pub(super) fn new(only: &BTreeMap<String, Vec<String>>) -> Result<Self, TaskError> {
        let field = |(written, values): (&String, &Vec<String>)| {
            let path = FieldPath::parse(written);
            let path =
                path.map_err(|problem| TaskError::setting("only", problem, "only = { NAME = VALUE }"))?;
            Ok((path, values.clone()))
        };
        Ok(Self(only.iter().map(field).collect::<Result<_, TaskError>>()?))
    }

    /// Why a row is left out.
    pub(super) fn refuse(&self, row: &Value) -> Option<String> {
        self.0.iter().find_map(|(path, asked)| {
            let found = match path.get(row) {
                Ok(value) if asked.iter().any(|asked| is(value, asked)) => return None,
                Ok(value) => value.to_string(),
                Err(problem) => problem,
            };
            Some(format!("{} is to be one of {asked:?}: {found}", path.written()))
        })
    }
}

/// Whether a value is the one asked for: the same text, number or truth.
fn is(value: &Value, asked: &str) -> bool {
    match value {
        Value::String(text) => text == asked,
        Value::Number(number) => asked.parse().is_ok_and(|asked: f64| number.as_f64() == Some(asked)),
        Value::Bool(flag) => asked.parse() == Ok(*flag),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(only: &[(&str, &[&str])], row: &Value) -> Option<String> {
        let values = |values: &[&str]| values.iter().map(ToString::to_string).collect();
        let only = only.iter().map(|(field, asked)| ((*field).to_string(), values(asked))).collect();
        Chosen::new(&only).unwrap().refuse(row)
    }

    #[test]
    fn a_row_is_chosen_if_every_field_has_one_of_its_values() {
        let only: [(&str, &[&str]); 3] =
            [("extra.split", &["train", "test"]), ("level", &["2", "3"]), ("is_clean", &["true"])];
        let row =
            |split: &str, level: Value| json!({"extra": {"split": split}, "level": level, "is_clean": true});
        for level in [json!(3), json!(3.0), json!("3"), json!(2)] {
            assert_eq!(refused(&only, &row("test", level)), None);
        }
        for level in [json!(4), json!("3.0"), json!(3.5), json!(null), json!(["3"])] {
            assert!(refused(&only, &row("test", level)).is_some());
        }
        assert_eq!(
            refused(&only, &row("dev", json!(3))).unwrap(),
            r#"extra.split is to be one of ["train", "test"]: "dev""#
        );
        let absent = json!({"extra": {"split": "test"}, "is_clean": true});
        assert_eq!(refused(&only, &absent).unwrap(), r#"level is to be one of ["2", "3"]: no field "level""#);
        let untrue = json!({"extra": {"split": "test"}, "level": 3, "is_clean": false});
        assert!(refused(&only, &untrue).unwrap().starts_with("is_clean"));
        assert_eq!(refused(&[], &absent), None);
    }
}
