//! The texts of supervised training: worked solutions of a task, or the rows of a file.

use super::file_rows::FileRows;
use super::sequence::{TextEncoder, TextSequence};
use crate::config::PlanError;
use crate::error::{Error, Result};
use crate::loaded_model::LoadedModel;
use crate::task::{Mistakes, Programs, Split, Task, TaskSpec};
use serde::{Deserialize, Serialize};
use serde_json::Map;
use stapo_core::random::Key;
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
    /// One JSON object per line.
    Jsonl(FileTexts),
    Parquet(FileTexts),
    /// Several sources, each with a share of the examples.
    Mixture {
        parts: Vec<PartSpec>,
    },
}

/// A file of conversations, of prompts with responses, or of texts alone. Fields not given are recognised by the names
/// that common data sets use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileTexts {
    pub path: PathBuf,
    /// The field of a list of messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messages_field: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_field: Option<String>,
    /// Without `prompt_field`, the field of a text that has a loss as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_field: Option<String>,
    /// Renders prompts and responses with the model's chat template. Lists of messages are always rendered.
    #[serde(default)]
    pub chat: bool,
    /// Further variables of the chat template.
    #[serde(default)]
    pub chat_arguments: Table,
    /// The system message of conversations that have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system: Option<String>,
    /// What happens to rows with more tokens than a micro-batch or the model takes.
    #[serde(default)]
    pub long_rows: LongRows,
}

/// How rows that are too long are treated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LongRows {
    /// The run is refused before its first step, with their number and the longest named.
    #[default]
    Refuse,
    /// Such rows are left out and counted.
    Drop,
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
            TextsSpec::Jsonl(_) | TextsSpec::Parquet(_) => None,
            TextsSpec::Mixture { parts } => parts.iter().find_map(|part| part.texts.task()),
        }
    }
}

/// The random stream that chooses the part of an example.
const MIXTURE_STREAM: u64 = 3;

/// Open texts. The sequences of an example are a pure function of seed and position.
pub enum Texts {
    Solutions {
        task: Box<Task>,
        mistakes: Mistakes,
    },
    File(FileRows),
    /// Each part with the sum of the shares up to and including the part.
    Mixture(Vec<(f64, Texts)>),
}

impl Texts {
    /// Opens the texts. Every row of a file is rendered and counted once: rows of more than `max_tokens` tokens are
    /// refused or left out.
    pub fn open(spec: &TextsSpec, model: &LoadedModel, max_tokens: usize) -> Result<Self> {
        match spec {
            TextsSpec::Solutions { task, mistakes } => {
                let task = TaskSpec::read("data.task", task.clone()).map_err(PlanError::from)?;
                Ok(Texts::Solutions {
                    task: Box::new(Task::open_with(&task, Programs::Never)?),
                    mistakes: *mistakes,
                })
            }
            TextsSpec::Jsonl(file) | TextsSpec::Parquet(file) => {
                let is_parquet = matches!(spec, TextsSpec::Parquet(_));
                let encoder = encoder(model)?.with_arguments(file);
                Ok(Texts::File(FileRows::open(file, is_parquet, &encoder, max_tokens)?))
            }
            TextsSpec::Mixture { parts } => {
                let is_share = |part: &PartSpec| part.share.is_finite() && part.share > 0.0;
                if parts.is_empty() || !parts.iter().all(is_share) {
                    return Err(Error::Misfit {
                        key: "data.parts",
                        problem: "expected at least one part, each with a share above 0".into(),
                        remedy: "[[data.parts]] with share = 0.5 and texts = { kind = ... }",
                    });
                }
                let mut sum = 0.0;
                let open = |part: &PartSpec| {
                    sum += part.share;
                    Ok((sum, Texts::open(&part.texts, model, max_tokens)?))
                };
                Ok(Texts::Mixture(parts.iter().map(open).collect::<Result<_>>()?))
            }
        }
    }

    /// The sequences of the example at `position`. A file repeats in epochs, each in an own order.
    pub fn sequences(&self, model: &LoadedModel, seed: u64, position: u64) -> Result<Vec<TextSequence>> {
        match self {
            Texts::Solutions { task, mistakes } => {
                let problem = task.problem(seed, Split::Train, position)?;
                let mistakes = Mistakes { seed: Key::new(mistakes.seed).with(position).bits(), ..*mistakes };
                let response = task.solution(&problem, &mistakes)?;
                Ok(vec![encoder(model)?.pair(&problem.prompt, &response)?])
            }
            Texts::File(file) => {
                let encoder = encoder(model)?.with_arguments(&file.spec);
                Ok(encoder.sequences(&[file.row(seed, position)])?.concat())
            }
            Texts::Mixture(parts) => {
                let whole = parts.last().map_or(0.0, |(sum, _)| *sum);
                let at = Key::new(seed).with(MIXTURE_STREAM).with(position).uniform() * whole;
                let part = parts.iter().position(|(sum, _)| at < *sum).unwrap_or(parts.len() - 1);
                parts[part].1.sequences(model, seed, position)
            }
        }
    }

    /// The file, where the texts are one file.
    pub fn file(&self) -> Option<&FileRows> {
        match self {
            Texts::File(file) => Some(file),
            Texts::Solutions { .. } | Texts::Mixture(_) => None,
        }
    }

    /// What the user should know about the files.
    pub fn warnings(&self) -> Vec<String> {
        match self {
            Texts::Solutions { .. } => Vec::new(),
            Texts::File(file) => file.warning.iter().cloned().collect(),
            Texts::Mixture(parts) => parts.iter().flat_map(|(_, part)| part.warnings()).collect(),
        }
    }
}

fn encoder(model: &LoadedModel) -> Result<TextEncoder<'_>> {
    Ok(TextEncoder {
        tokenizer: model.tokenizer()?,
        template: model.template.as_ref(),
        stops: &model.stops,
        chat_arguments: Map::new(),
    })
}
