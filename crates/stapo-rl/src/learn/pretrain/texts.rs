//! The texts of supervised training: worked solutions of a task, or the rows of a file.

use super::file_rows::{FileRows, Place, RowKind};
use super::file_texts::FileTexts;
use super::recorded::RecordedTexts;
use super::rows::TextRow;
use super::sequence::{TextEncoder, TextSequence};
use crate::error::{Error, Result};
use crate::plan::config::PlanError;
use crate::policy::loaded::LoadedModel;
use crate::reward::Programs;
use crate::tasks::{DataPath, Mistakes, Split, Task, TaskSpec};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Map;
use stapo_core::preference::Side;
use stapo_core::random::Key;
use std::path::Path;
use std::sync::Arc;
use toml::{Table, Value};

/// The source of the texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TextsSpec {
    /// Worked solutions of generated problems, with mistakes.
    Solutions {
        /// The task whose problems are solved.
        #[schemars(with = "TaskSpec")]
        task: Table,
        /// How often the solutions are wrong.
        #[serde(default)]
        mistakes: Mistakes,
    },
    /// A better and a worse solution of each of some generated problems, for `stapo prefer`. Both differ in their mistakes
    /// alone.
    SolutionPairs {
        /// The task whose problems are solved.
        #[schemars(with = "TaskSpec")]
        task: Table,
        /// Pairs.
        rows: u64,
        /// The share of pairs that are not learned from.
        #[serde(default)]
        held_out_share: f64,
        /// How often the chosen solutions are wrong.
        chosen: Mistakes,
        /// How often the rejected solutions are wrong.
        #[serde(default)]
        rejected: Mistakes,
    },
    /// A file with one JSON object per line.
    Jsonl(FileTexts),
    /// A Parquet file.
    Parquet(FileTexts),
    /// Files of any format that is read.
    File(FileTexts),
    /// Responses that a training run recorded.
    Rollouts(RecordedTexts),
    /// Several sources, each with a share of the examples.
    Mixture {
        /// The sources.
        parts: Vec<PartSpec>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartSpec {
    /// The part's share of all examples, relative to the shares of the other parts.
    pub share: f64,
    /// The texts of the part.
    pub texts: TextsSpec,
}

impl Default for TextsSpec {
    fn default() -> Self {
        let task = Table::from_iter([("kind".to_string(), Value::String("arithmetic".to_string()))]);
        TextsSpec::Solutions { task, mistakes: Mistakes::default() }
    }
}

impl TextsSpec {
    pub(super) fn count_rows(&self, wanted: RowKind) -> Result<Option<(u64, u64, f64)>> {
        match self {
            TextsSpec::Jsonl(spec) | TextsSpec::Parquet(spec) | TextsSpec::File(spec) => {
                let (n_rows, n_bytes) = FileRows::count(spec, wanted)?;
                Ok(Some((n_rows, n_bytes, spec.held_out_share)))
            }
            TextsSpec::Solutions { .. }
            | TextsSpec::SolutionPairs { .. }
            | TextsSpec::Rollouts(_)
            | TextsSpec::Mixture { .. } => Ok(None),
        }
    }

    /// The task of the texts; in a mixture, that of the first part with a task.
    pub(super) fn task(&self) -> Option<&Table> {
        match self {
            TextsSpec::Solutions { task, .. } | TextsSpec::SolutionPairs { task, .. } => Some(task),
            TextsSpec::Jsonl(_) | TextsSpec::Parquet(_) | TextsSpec::File(_) | TextsSpec::Rollouts(_) => None,
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
    File(Box<FileRows>),
    /// Each part with the sum of the shares up to and including the part.
    Mixture(Vec<(f64, Texts)>),
}

impl Texts {
    /// Opens the texts. Every row of a file is rendered and counted once: rows of more than `max_tokens` tokens are
    /// refused or left out.
    pub fn open(spec: &TextsSpec, wanted: RowKind, model: &LoadedModel, max_tokens: usize) -> Result<Self> {
        match spec {
            TextsSpec::SolutionPairs { task, rows, held_out_share, chosen, rejected } => {
                let task = TaskSpec::read("data.task", task.clone()).map_err(PlanError::from)?;
                let task = Task::open_with(&task, Programs::Never)?;
                let spec = FileTexts::generated(*held_out_share);
                let place_path: Arc<Path> = Arc::from(Path::new("solution pairs"));
                let (mut places, mut pairs) = (Vec::new(), Vec::new());
                for number in 0..*rows {
                    pairs.push(solution_pair(&task, number, chosen, rejected)?);
                    places.push(Place { path: place_path.clone(), number });
                }
                let file = FileRows::collect(&spec, (places, pairs), &encoder(model)?, max_tokens)?;
                Ok(Texts::File(Box::new(file)))
            }
            TextsSpec::Solutions { task, mistakes } => {
                let task = TaskSpec::read("data.task", task.clone()).map_err(PlanError::from)?;
                Ok(Texts::Solutions {
                    task: Box::new(Task::open_with(&task, Programs::Never)?),
                    mistakes: *mistakes,
                })
            }
            TextsSpec::Jsonl(file) | TextsSpec::Parquet(file) | TextsSpec::File(file) => {
                let encoder = encoder(model)?.with_arguments(file);
                Ok(Texts::File(Box::new(FileRows::open(file, wanted, &encoder, max_tokens)?)))
            }
            TextsSpec::Rollouts(recorded) => {
                let spec = FileTexts::generated(recorded.held_out_share);
                let file = FileRows::collect(&spec, recorded.read(model)?, &encoder(model)?, max_tokens)?;
                Ok(Texts::File(Box::new(file)))
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
                    Ok((sum, Texts::open(&part.texts, wanted, model, max_tokens)?))
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

    /// The sequences of the rows that are not learned from; none if the texts are not one file with such rows.
    pub(super) fn held_out(&self, model: &LoadedModel) -> Result<Vec<TextSequence>> {
        let Texts::File(file) = self else { return Ok(Vec::new()) };
        let rows: Vec<&TextRow> = file.held_out().iter().collect();
        Ok(encoder(model)?.with_arguments(&file.spec).sequences(&rows)?.concat())
    }

    /// The tokens of the longest sequence; `None` if texts are made while they are learned.
    pub(super) fn longest(&self) -> Option<usize> {
        match self {
            Texts::Solutions { .. } => None,
            Texts::File(file) => Some(file.longest()),
            Texts::Mixture(parts) => {
                parts.iter().try_fold(0, |most, (_, part)| Some(part.longest()?.max(most)))
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

    /// The first file whose rows have answers: prompts with responses, or conversations.
    pub fn file_with_answers(&self) -> Option<&DataPath> {
        match self {
            Texts::File(file) => file.has_answers().then_some(&file.spec.path),
            Texts::Solutions { .. } => None,
            Texts::Mixture(parts) => parts.iter().find_map(|(_, part)| part.file_with_answers()),
        }
    }

    /// What the user should know about the files.
    pub fn warnings(&self) -> Vec<String> {
        match self {
            Texts::Solutions { .. } => Vec::new(),
            Texts::File(file) => file.warnings.clone(),
            Texts::Mixture(parts) => parts.iter().flat_map(|(_, part)| part.warnings()).collect(),
        }
    }
}

/// Two solutions of the training problem of that number. The seeds of their mistakes differ from each other.
fn solution_pair(task: &Task, number: u64, chosen: &Mistakes, rejected: &Mistakes) -> Result<TextRow> {
    let problem = task.problem(0, Split::Train, number)?;
    let sides = [(Side::Chosen, chosen), (Side::Rejected, rejected)];
    let solved = sides.iter().enumerate().map(|(idx, (side, mistakes))| {
        let seed = Key::new(mistakes.seed).with(number).with(idx as u64).bits();
        let response = task.solution(&problem, &Mistakes { seed, ..**mistakes })?;
        Ok((*side, TextRow::Pair { prompt: problem.prompt.clone(), response }))
    });
    Ok(TextRow::Judged { sides: solved.collect::<Result<_>>()?, margin: 0.0 })
}

pub(super) fn encoder(model: &LoadedModel) -> Result<TextEncoder<'_>> {
    Ok(TextEncoder {
        tokenizer: model.tokenizer()?,
        template: model.template.as_ref(),
        stops: &model.stops,
        chat_arguments: Map::new(),
    })
}
