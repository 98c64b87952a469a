//! The tests in a row of a data file.

use serde_json::{Map, Value};
use stapo_sandbox::{Call, Checks};

/// The tests of one problem.
#[derive(Debug, Clone, PartialEq)]
pub struct CodeTests {
    pub checks: Checks,
    /// The row's `prompt`, which begins the program of a response that continues it; empty if the row has none.
    pub prompt: String,
}

impl CodeTests {
    /// Reads `test_list`, or `test` with `entry_point`, or `tests`; the error says what is missing or wrong.
    pub fn from_row(row: &Map<String, Value>) -> Result<Self, String> {
        let prompt = text(row, "prompt").unwrap_or_default().to_string();
        let checks = if let Some(list) = row.get("test_list") {
            asserts(row, list)?
        } else if let Some(test) = text(row, "test") {
            let entry_point = entry_point(row)?;
            Checks::Check { prelude: prompt.clone(), test: test.into(), entry_point }
        } else if let Some(Value::Array(tests)) = row.get("tests") {
            calls_or_streams(row, tests)?
        } else {
            return Err("no tests: looked for test_list, test with entry_point, and tests".into());
        };
        if checks.n_tests() == 0 {
            return Err("its list of tests is empty".into());
        }
        Ok(Self { checks, prompt })
    }
}

fn text<'a>(row: &'a Map<String, Value>, key: &str) -> Option<&'a str> {
    row.get(key).and_then(Value::as_str)
}

fn entry_point(row: &Map<String, Value>) -> Result<String, String> {
    text(row, "entry_point").map(str::to_string).ok_or_else(|| "field entry_point: no text".into())
}

/// Statements, after imports and code that prepares them.
fn asserts(row: &Map<String, Value>, list: &Value) -> Result<Checks, String> {
    let texts = |value: &Value, key: &str| -> Result<Vec<String>, String> {
        let texts = value.as_array().and_then(|list| {
            list.iter().map(|item| item.as_str().map(str::to_string)).collect::<Option<Vec<_>>>()
        });
        texts.ok_or_else(|| format!("field {key}: expected a list of texts"))
    };
    let mut setup = match row.get("test_imports") {
        Some(imports) => texts(imports, "test_imports")?,
        None => Vec::new(),
    };
    setup.extend(text(row, "test_setup_code").map(str::to_string));
    Ok(Checks::Asserts { setup: setup.join("\n"), tests: texts(list, "test_list")? })
}

/// Calls of a function, or pairs of standard input and output; all tests of a row are of one kind.
fn calls_or_streams(row: &Map<String, Value>, tests: &[Value]) -> Result<Checks, String> {
    let pair = |test: &Value| {
        Some((test.get("input")?.as_str()?.to_string(), test.get("output")?.as_str()?.to_string()))
    };
    if let Some(pairs) = tests.iter().map(pair).collect::<Option<Vec<_>>>() {
        let checker = text(row, "checker").map(str::to_string);
        return Ok(Checks::Streams { pairs, checker });
    }
    let call = |(idx, test): (usize, &Value)| {
        let (args, is_literal) = match (test.get("args"), test.get("input")) {
            (Some(Value::Array(args)), _) => (args, false),
            (None, Some(Value::Array(args))) => (args, true),
            _ => return Err(format!("field tests[{idx}]: expected {{args, expected}} or {{input, output}}")),
        };
        let expected =
            test.get("expected").ok_or_else(|| format!("field tests[{idx}]: no expected value"))?;
        if args.iter().chain([expected]).any(has_lost_digits) {
            return Err(format!(
                "field tests[{idx}]: a number beyond 64 bits, whose digits are lost in JSON"
            ));
        }
        if is_literal && !expected.is_string() {
            return Err(format!(
                "field tests[{idx}].expected: expected a Python literal as text next to input"
            ));
        }
        Ok(Call { args: args.clone(), expected: expected.clone(), is_literal })
    };
    Ok(Checks::Calls {
        entry_point: entry_point(row)?,
        calls: tests.iter().enumerate().map(call).collect::<Result<_, String>>()?,
        atol: row.get("atol").and_then(Value::as_f64).unwrap_or(0.0),
        unordered: row.get("unordered").and_then(Value::as_bool).unwrap_or(false),
    })
}

/// Whether a value holds a number so large that a whole number may have been read as a float.
fn has_lost_digits(value: &Value) -> bool {
    match value {
        Value::Number(number) => {
            number.is_f64() && number.as_f64().is_some_and(|x| x.abs() >= u64::MAX as f64)
        }
        Value::Array(items) => items.iter().any(has_lost_digits),
        Value::Object(fields) => fields.values().any(has_lost_digits),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(row: &Value) -> Result<Checks, String> {
        CodeTests::from_row(row.as_object().unwrap()).map(|tests| tests.checks)
    }

    #[test]
    fn rows_of_known_data_sets_are_read() {
        let row =
            json!({"test_imports": ["import math"], "test_setup_code": "x = 1", "test_list": ["assert x"]});
        let setup = "import math\nx = 1".to_string();
        assert_eq!(read(&row).unwrap(), Checks::Asserts { setup, tests: vec!["assert x".into()] });
        let row = json!({"prompt": "def f():", "test": "def check(c): pass", "entry_point": "f"});
        assert!(matches!(read(&row).unwrap(), Checks::Check { entry_point, .. } if entry_point == "f"));
        let row = json!({"entry_point": "f", "atol": 0.1, "tests": [{"input": [1], "expected": "(1,)"}]});
        let Checks::Calls { calls, atol, .. } = read(&row).unwrap() else { panic!("calls") };
        assert!(calls[0].is_literal && atol == 0.1);
        let row = json!({"entry_point": "f", "tests": [{"args": [1], "expected": [1]}], "unordered": true});
        assert!(matches!(read(&row).unwrap(), Checks::Calls { unordered: true, .. }));
        let row = json!({"tests": [{"input": "1", "output": "2"}]});
        assert!(matches!(read(&row).unwrap(), Checks::Streams { checker: None, .. }));
    }

    #[test]
    fn a_row_without_tests_says_what_is_missing() {
        let cases = [
            (json!({"answer": "1"}), "looked for test_list"),
            (json!({"test": "x"}), "entry_point"),
            (json!({"test_list": "x"}), "expected a list of texts"),
            (json!({"test_list": []}), "empty"),
            (json!({"entry_point": "f", "tests": [{"args": [1]}]}), "no expected value"),
            (json!({"entry_point": "f", "tests": [{"a": 1}]}), "tests[0]"),
            (json!({"entry_point": "f", "tests": [{"args": [[1e30]], "expected": 1}]}), "beyond 64 bits"),
        ];
        for (row, part) in cases {
            let problem = read(&row).unwrap_err();
            assert!(problem.contains(part), "{row}: {problem}");
        }
    }
}
