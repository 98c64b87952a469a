//! Prompt templates: Jinja with the variables `problem`, `id` and the fields of the row.

use super::error::TaskError;
use minijinja::value::{Serde, Value};
use rayon::prelude::*;
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

/// Problems that one thread renders at a time.
const CHUNK: usize = 64;

/// What a template is filled with.
pub(super) struct Question<'a> {
    pub(super) id: &'a str,
    pub(super) problem: &'a str,
    /// The variables besides `id` and `problem`.
    pub(super) fields: &'a Map<String, serde_json::Value>,
}

/// A checked prompt template. An unknown variable is an error.
pub(crate) struct Template(Jinja);

impl Template {
    pub(crate) fn new(source: &str) -> Result<Self, TaskError> {
        let hint = "Jinja syntax; `{{ problem }}` inserts the problem";
        let template = Jinja::new(source.to_string(), Dialect::Prompt);
        template.map(Self).map_err(|refused| broken(source, refused, hint))
    }

    /// The prompt of one problem; `fields` holds the variables besides `id` and `problem`.
    pub(super) fn render(
        &self,
        id: &str,
        problem: &str,
        fields: &Map<String, serde_json::Value>,
    ) -> Result<String, TaskError> {
        self.fill(id, variables(problem, fields))
    }

    /// The prompts of many problems, faster than one by one, computed on all cores.
    pub(super) fn render_all(&self, questions: &[Question]) -> Result<Vec<String>, TaskError> {
        let chunks: Vec<Result<Vec<String>, TaskError>> =
            questions.par_chunks(CHUNK).map(|chunk| self.render_chunk(chunk)).collect();
        Ok(chunks.into_iter().collect::<Result<Vec<_>, _>>()?.concat())
    }

    fn render_chunk(&self, questions: &[Question]) -> Result<Vec<String>, TaskError> {
        let rendering = |question: &Question| {
            let mut variables = variables(question.problem, question.fields);
            variables.insert("id", Value::from(question.id));
            (Value::from(variables), LIMITS)
        };
        let renderings: Vec<(Value, Limits)> = questions.iter().map(rendering).collect();
        match self.0.render_all(&renderings) {
            Ok(prompts) if prompts.iter().all(|prompt| !prompt.is_empty()) => Ok(prompts),
            // One of the problems is refused; one by one, the error names it.
            _ => questions.iter().map(|one| self.render(one.id, one.problem, one.fields)).collect(),
        }
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

fn variables<'a>(problem: &'a str, fields: &'a Map<String, serde_json::Value>) -> BTreeMap<&'a str, Value> {
    let mut variables: BTreeMap<&str, Value> =
        fields.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))).collect();
    variables.insert("problem", Value::from(problem));
    variables
}

fn broken(source: &str, refused: Refused, hint: &str) -> TaskError {
    let remedy = if refused.hint.is_empty() { hint.to_string() } else { format!("{}; {hint}", refused.hint) };
    TaskError::Template { template: source.to_string(), problem: refused.problem, remedy }
}
