//! The texts of pretraining: worked solutions of a task, or the lines of a file.

use crate::error::{Error, Result};
use crate::task::{Mistakes, Programs, Split, Task, TaskSpec};
use serde::{Deserialize, Serialize};
use stapo_core::random::Key;
use stapo_core::settings;
use std::fs;
use std::path::PathBuf;
use toml::{Table, Value};

/// The source of the texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TextsSpec {
    /// Worked solutions of generated problems, with mistakes.
    Solutions {
        task: Table,
        #[serde(default)]
        mistakes: Mistakes,
    },
    /// One JSON object per line, with a prompt and a response, or with a text in `response_field` alone.
    Jsonl { path: PathBuf, prompt_field: Option<String>, response_field: String },
    /// Several sources, each with a share of the examples.
    Mixture { parts: Vec<PartSpec> },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PartSpec {
    /// The part's share of all examples, relative to the shares of the other parts.
    pub share: f64,
    pub texts: TextsSpec,
}

impl Default for TextsSpec {
    fn default() -> Self {
        let task = Table::from_iter([("kind".to_string(), Value::String("arithmetic".to_string()))]);
        TextsSpec::Solutions { task, mistakes: Mistakes::default() }
    }
}

impl TextsSpec {
    /// The task of the texts; in a mixture, that of the first part with a task.
    pub(super) fn task(&self) -> Option<&Table> {
        match self {
            TextsSpec::Solutions { task, .. } => Some(task),
            TextsSpec::Jsonl { .. } => None,
            TextsSpec::Mixture { parts } => parts.iter().find_map(|part| part.texts.task()),
        }
    }
}

/// The random stream that chooses the part of an example.
const MIXTURE_STREAM: u64 = 3;

/// One text: a prompt, and the response that has a loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    pub prompt: String,
    pub response: String,
}

/// Open texts. An example is a pure function of seed and position.
pub enum Texts {
    Solutions {
        task: Box<Task>,
        mistakes: Mistakes,
    },
    Lines(Vec<Example>),
    /// Each part with the sum of the shares up to and including the part.
    Mixture(Vec<(f64, Texts)>),
}

impl Texts {
    pub fn open(spec: &TextsSpec) -> Result<Self> {
        match spec {
            TextsSpec::Solutions { task, mistakes } => {
                let task: TaskSpec =
                    settings::read("texts.task", task.clone()).map_err(crate::config::PlanError::from)?;
                Ok(Texts::Solutions {
                    task: Box::new(Task::open_with(&task, Programs::Never)?),
                    mistakes: *mistakes,
                })
            }
            TextsSpec::Jsonl { path, prompt_field, response_field } => {
                let text = fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
                let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
                let examples = lines
                    .map(|(idx, line)| {
                        read_line(line, prompt_field.as_deref(), response_field)
                            .map_err(|problem| Error::Text { path: path.clone(), line: idx + 1, problem })
                    })
                    .collect::<Result<Vec<Example>>>()?;
                if examples.is_empty() {
                    let problem = "no examples: the file is empty".to_string();
                    return Err(Error::Text { path: path.clone(), line: 1, problem });
                }
                Ok(Texts::Lines(examples))
            }
            TextsSpec::Mixture { parts } => {
                let is_share = |part: &PartSpec| part.share.is_finite() && part.share > 0.0;
                if parts.is_empty() || !parts.iter().all(is_share) {
                    return Err(Error::Misfit {
                        key: "texts.parts",
                        problem: "expected at least one part, each with a share above 0".into(),
                        remedy: "[[texts.parts]] with share = 0.5 and texts = { kind = ... }",
                    });
                }
                let mut sum = 0.0;
                let open = |part: &PartSpec| {
                    sum += part.share;
                    Ok((sum, Texts::open(&part.texts)?))
                };
                Ok(Texts::Mixture(parts.iter().map(open).collect::<Result<_>>()?))
            }
        }
    }

    /// The example at `position`. A file repeats in epochs, each in an own order.
    pub fn example(&self, seed: u64, position: u64) -> Result<Example> {
        match self {
            Texts::Solutions { task, mistakes } => {
                let problem = task.problem(seed, Split::Train, position)?;
                let mistakes = Mistakes { seed: Key::new(mistakes.seed).with(position).bits(), ..*mistakes };
                let response = task.solution(&problem, &mistakes)?;
                Ok(Example { prompt: problem.prompt, response })
            }
            Texts::Lines(examples) => {
                let n = examples.len() as u64;
                let order =
                    crate::task::rows::permutation::image(position % n, n, Key::new(seed).with(position / n));
                Ok(examples[order as usize].clone())
            }
            Texts::Mixture(parts) => {
                let whole = parts.last().map_or(0.0, |(sum, _)| *sum);
                let at = Key::new(seed).with(MIXTURE_STREAM).with(position).uniform() * whole;
                let part = parts.iter().position(|(sum, _)| at < *sum).unwrap_or(parts.len() - 1);
                parts[part].1.example(seed, position)
            }
        }
    }
}

fn read_line(
    line: &str,
    prompt_field: Option<&str>,
    response_field: &str,
) -> std::result::Result<Example, String> {
    let value: serde_json::Value = serde_json::from_str(line).map_err(|e| format!("not JSON: {e}"))?;
    let field = |name: &str| {
        value
            .get(name)
            .and_then(serde_json::Value::as_str)
            .map(str::to_owned)
            .ok_or(format!("no text `{name}`"))
    };
    Ok(Example { prompt: prompt_field.map_or(Ok(String::new()), field)?, response: field(response_field)? })
}
