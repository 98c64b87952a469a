//! Exact arithmetic, with the grader's reading of expressions and its numbers.

use super::calls::as_text;
use super::{Observation, Tool, ToolSchema};
use crate::tasks::error::TaskError;
use serde_json::{Map, Value};
use stapo_verify::{Mode, Verdict, grade_answer};

/// What stays in an exact result: functions and constants without a rational value.
const NAMES: [&str; 9] = ["sqrt", "pi", "e", "sin", "cos", "tan", "ln", "log", "exp"];

pub(super) struct Calculator {
    schema: ToolSchema,
}

impl Calculator {
    pub(super) fn new() -> Self {
        let description = "Computes the exact value of an arithmetic expression.";
        let parameters = [("expression", "an expression such as (12+34)*56 or 7/3 or sqrt(2)")];
        Self { schema: ToolSchema::of_strings("calculator", description, &parameters) }
    }
}

impl Tool for Calculator {
    fn schema(&self) -> &ToolSchema {
        &self.schema
    }

    fn call(
        &self,
        arguments: &Map<String, Value>,
        _: &[Map<String, Value>],
    ) -> Result<Observation, TaskError> {
        let expression = arguments.get("expression").map(as_text).unwrap_or_default();
        Ok(match value(&expression) {
            Ok(value) => Observation::answer(value),
            Err(problem) => Observation::failure(format!("error: {problem}")),
        })
    }
}

/// The exact value in plain notation. The grader is asked to compare the expression with 0, and shows what it read.
fn value(expression: &str) -> Result<String, String> {
    let graded = grade_answer(expression, "0", Mode::Math);
    let answer = graded.answer.unwrap_or_default();
    match graded.verdict {
        Verdict::Right => return Ok("0".into()),
        Verdict::NoAnswer => return Err("there is no expression".into()),
        Verdict::OverBudget => return Err("the calculation is too large".into()),
        Verdict::Unparsable => {
            let reason = graded.reason.trim_start_matches("the answer cannot be read: ").to_string();
            return Err(format!("the expression cannot be read: {reason}"));
        }
        Verdict::Wrong => {}
    }
    let is_foreign = |c: char| !(c.is_ascii_alphanumeric() || " +-*/^().".contains(c));
    let mut names = answer.split(|c: char| !c.is_ascii_alphabetic()).filter(|name| !name.is_empty());
    if answer.contains('…') {
        Err("the value has too many digits".into())
    } else if answer.ends_with("/0") {
        Err("division by zero".into())
    } else if answer.contains(is_foreign) || names.any(|name| !NAMES.contains(&name)) {
        Err("the expression is not arithmetic".into())
    } else {
        Ok(answer)
    }
}
