//! Prompt templates: Jinja with the variables `problem`, `id` and the fields of the row.

use super::TaskError;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, UndefinedBehavior};
use serde_json::Map;
use std::collections::BTreeMap;

const NAME: &str = "prompt";
/// The most template instructions per prompt; a loop over a few thousand items fits.
const FUEL: u64 = 200_000;
/// The longest prompt that a template may write.
const MAX_PROMPT_BYTES: usize = 4 << 20;

/// A compiled prompt template. An unknown variable is an error.
pub(crate) struct Template {
    environment: Environment<'static>,
    source: String,
}

impl Template {
    pub(crate) fn new(source: &str) -> Result<Self, TaskError> {
        let broken_syntax = |error: minijinja::Error| {
            broken(source, &error, "Jinja syntax; `{{ problem }}` inserts the problem")
        };
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().keep_trailing_newline(true).build().map_err(broken_syntax)?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_fuel(Some(FUEL));
        environment.add_template_owned(NAME, source.to_string()).map_err(broken_syntax)?;
        Ok(Self { environment, source: source.to_string() })
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
        let rendered = self
            .environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from(variables)))
            .map_err(|error| broken(&self.source, &error, &hint))?;
        if rendered.is_empty() || rendered.len() > MAX_PROMPT_BYTES {
            return Err(TaskError::Template {
                template: self.source.clone(),
                problem: format!(
                    "problem {id:?} gives {} bytes, expected 1 to {MAX_PROMPT_BYTES}",
                    rendered.len()
                ),
                remedy: "`{{ problem }}` inserts the problem; check the other fields it inserts".into(),
            });
        }
        Ok(rendered)
    }
}

fn broken(source: &str, error: &minijinja::Error, hint: &str) -> TaskError {
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    let problem = format!("{}{detail}", error.kind());
    TaskError::Template { template: source.to_string(), problem, remedy: hint.to_string() }
}
