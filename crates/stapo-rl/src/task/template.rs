//! Prompt templates: Jinja with the variables `problem`, `id` and the fields of the row.

use super::TaskError;
use minijinja::value::{Serde, Value};
use serde_json::Map;
use stapo_model::template::{Dialect, Limits, Refused, Template as Jinja};
use std::collections::BTreeMap;

const LIMITS: Limits = Limits {
    // A loop over a few thousand items fits.
    steps: 600_000,
    work_bytes: 64 << 20,
    output_bytes: MAX_PROMPT_BYTES,
};
/// The longest prompt that a template may write.
const MAX_PROMPT_BYTES: usize = 4 << 20;

/// A checked prompt template. An unknown variable is an error.
pub(crate) struct Template(Jinja);

impl Template {
    pub(crate) fn new(source: &str) -> Result<Self, TaskError> {
        let hint = "Jinja syntax; `{{ problem }}` inserts the problem";
        let template = Jinja::new(source.to_string(), Dialect::Prompt);
        template.map(Self).map_err(|refused| broken(source, refused, hint))
    }

    /// The prompt of one problem; `fields` holds the variables beside `id` and `problem`.
    pub(super) fn render(
        &self,
        id: &str,
        problem: &str,
        fields: &Map<String, serde_json::Value>,
    ) -> Result<String, TaskError> {
        let mut variables: BTreeMap<&str, Value> =
            fields.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
        variables.insert("problem", Value::from(problem));
        self.fill(id, variables)
    }

    /// The text of one problem from `id` and the variables.
    pub(crate) fn fill<'a>(
        &self,
        id: &'a str,
        mut variables: BTreeMap<&'a str, Value>,
    ) -> Result<String, TaskError> {
        variables.insert("id", Value::from(id));
        let known: Vec<&str> = variables.keys().copied().collect();
        let hint = format!("variables of problem {id:?}: {}", known.join(", "));
        let prompt = self
            .0
            .render(&Value::from(variables), LIMITS)
            .map_err(|refused| broken(self.0.source(), refused, &hint))?;
        if prompt.is_empty() {
            let problem = format!("problem {id:?} gives an empty prompt");
            let remedy = "`{{ problem }}` inserts the problem; check the other fields it inserts";
            return Err(TaskError::Template {
                template: self.0.source().into(),
                problem,
                remedy: remedy.into(),
            });
        }
        Ok(prompt)
    }
}

fn broken(source: &str, refused: Refused, hint: &str) -> TaskError {
    let remedy = if refused.hint.is_empty() { hint.to_string() } else { format!("{}; {hint}", refused.hint) };
    TaskError::Template { template: source.to_string(), problem: refused.problem, remedy }
}
