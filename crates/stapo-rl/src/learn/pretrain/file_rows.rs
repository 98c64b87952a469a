//! A file of texts, read and checked before the first step.

use super::file_texts::{FileTexts, LongRows};
use super::judged::JudgedLayout;
use super::rows::{TextLayout, TextRow};
use super::sequence::TextEncoder;
use crate::error::{Error, Result};
use crate::tasks::Split;
use crate::tasks::TaskError;
use crate::tasks::rows::{permutation, read_files};
use crate::tasks::split::{check_share, content_hash, split_of};
use crate::tasks::unseen::{Unseen, unseen};
use rayon::prelude::*;
use serde_json::Value;
use stapo_core::random::Key;
use std::path::Path;
use std::sync::Arc;

/// The rows of a file that are learned from.
pub struct FileRows {
    pub spec: FileTexts,
    rows: Vec<TextRow>,
    /// Tokens of each row, all its sequences together.
    lengths: Vec<usize>,
    /// Tokens of the longest sequence, of all rows.
    longest: usize,
    /// Rows that are not learned from.
    held_out: Vec<TextRow>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// Rows that one thread renders at a time.
const CHUNK: usize = 64;

impl FileRows {
    pub(super) fn open(
        spec: &FileTexts,
        wanted: RowKind,
        encoder: &TextEncoder,
        max_tokens: usize,
    ) -> Result<Self> {
        Self::collect(spec, read(spec, wanted)?, encoder, max_tokens)
    }

    /// Checks and measures rows that were read or made.
    pub(super) fn collect(
        spec: &FileTexts,
        (places, rows): (Vec<Place>, Vec<TextRow>),
        encoder: &TextEncoder,
        max_tokens: usize,
    ) -> Result<Self> {
        check_share("data.held_out_share", spec.held_out_share)?;
        let measured = measure(encoder, &places, &rows)?;
        let warnings = check_characters(spec, encoder, &places, &rows)?.into_iter().collect();
        let mut file = Self {
            spec: spec.clone(),
            rows,
            lengths: Vec::new(),
            longest: 0,
            held_out: Vec::new(),
            warnings,
        };
        let n_rows = measured.len();
        let is_long = |row: &Measured| row.n_together > max_tokens;
        let n_long = measured.iter().filter(|row| is_long(row)).count();
        // Of several longest rows the first is named.
        let longest = measured.iter().rev().max_by_key(|row| row.n_together).filter(|_| n_long > 0);
        if let Some(&Measured { row_place: Place { ref path, number }, n_together: n_tokens, .. }) = longest {
            let path = path.to_path_buf();
            if spec.long_rows == LongRows::Refuse || n_long == n_rows {
                return Err(Error::LongRows { path, n_long, n_rows, number, n_tokens, limit: max_tokens });
            }
            file.warnings.push(format!(
                "{}: {n_long} of {n_rows} rows are left out, because they have more than {max_tokens} tokens; the longest, row {number}, has {n_tokens}",
                path.display()
            ));
        }
        let mut kept = measured.iter().map(|row| !is_long(row));
        file.rows.retain(|_| kept.next() == Some(true));
        let short = || measured.iter().filter(|row| !is_long(row));
        file.lengths = short().map(|row| row.n_tokens).collect();
        file.longest = short().map(|row| row.longest).max().unwrap_or(0);
        file.hold_out()?;
        Ok(file)
    }

    /// Takes the held-out share from the rows.
    fn hold_out(&mut self) -> Result<()> {
        let share = self.spec.held_out_share;
        if share == 0.0 {
            return Ok(());
        }
        let is_held_out =
            |row: &TextRow| split_of(content_hash(&row.parts().join("\n")), share) == Split::HeldOut;
        let rows = std::mem::take(&mut self.rows).into_iter().zip(std::mem::take(&mut self.lengths));
        let (held_out, learned): (Vec<_>, Vec<_>) = rows.partition(|(row, _)| is_held_out(row));
        (self.rows, self.lengths) = learned.into_iter().unzip();
        self.held_out = held_out.into_iter().map(|(row, _)| row).collect();
        if self.rows.is_empty() || self.held_out.is_empty() {
            let (n_learned, n_held_out) = (self.rows.len(), self.held_out.len());
            return Err(Error::Misfit {
                key: "data.held_out_share",
                problem: format!(
                    "{share}, which leaves {n_learned} rows to learn from and {n_held_out} held out"
                ),
                remedy: "a share between 0 and 1 that leaves some of each, or 0 to hold none out",
            });
        }
        Ok(())
    }

    /// The number of rows and the bytes of their texts, without a model that reads them.
    pub(super) fn count(spec: &FileTexts, wanted: RowKind) -> Result<(u64, u64)> {
        let (_, rows) = read(spec, wanted)?;
        let bytes = rows.iter().flat_map(TextRow::parts).map(|text| text.len() as u64).sum();
        Ok((rows.len() as u64, bytes))
    }

    /// All rows, those that are learned from first, and the number of these.
    pub(super) fn all(&self) -> (impl Iterator<Item = &TextRow>, usize) {
        (self.rows.iter().chain(&self.held_out), self.rows.len())
    }

    /// The rows that are not learned from.
    pub(super) fn held_out(&self) -> &[TextRow] {
        &self.held_out
    }

    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// Rows and tokens of one epoch.
    pub fn size(&self) -> (usize, usize) {
        (self.rows.len(), self.lengths.iter().sum())
    }

    /// Rows that are not learned from.
    pub fn n_held_out(&self) -> usize {
        self.held_out.len()
    }

    /// Whether rows are prompts with responses or conversations, and not texts alone.
    pub(super) fn has_answers(&self) -> bool {
        self.rows.iter().any(|row| !matches!(row, TextRow::Text(_)))
    }

    /// The row at `position`; each epoch is a permutation of the rows, keyed by `seed`.
    pub(super) fn row(&self, seed: u64, position: u64) -> &TextRow {
        &self.rows[self.row_idx(seed, position)]
    }

    /// A row by its index among [`FileRows::all`].
    pub(super) fn row_at(&self, row_idx: usize) -> &TextRow {
        self.rows.get(row_idx).unwrap_or_else(|| &self.held_out[row_idx - self.rows.len()])
    }

    /// The tokens of a row that is learned from.
    pub(super) fn n_tokens(&self, row_idx: usize) -> usize {
        self.lengths[row_idx]
    }

    /// The index of the row at `position`.
    pub(super) fn row_idx(&self, seed: u64, position: u64) -> usize {
        let n = self.rows.len() as u64;
        permutation::image(position % n, n, Key::new(seed).with(position / n)) as usize
    }

    /// Optimizer steps in which `epochs` passes are complete, each step of `batch_rows` rows or of at least
    /// `batch_tokens` tokens.
    pub fn steps_of_epochs(
        &self,
        seed: u64,
        epochs: u64,
        batch_rows: Option<usize>,
        batch_tokens: usize,
    ) -> u64 {
        let n_rows = epochs.saturating_mul(self.rows.len() as u64);
        if let Some(batch_rows) = batch_rows {
            return n_rows.div_ceil(batch_rows as u64);
        }
        let mut n_steps = 0;
        let mut n_tokens = 0;
        for position in 0..n_rows {
            if n_tokens == 0 {
                n_steps += 1;
            }
            n_tokens += self.lengths[self.row_idx(seed, position)];
            if n_tokens >= batch_tokens {
                n_tokens = 0;
            }
        }
        n_steps
    }
}

/// Refuses a file of which the model sees no row as it is; returns what the user should know of the others.
fn check_characters(
    spec: &FileTexts,
    encoder: &TextEncoder,
    places: &[Place],
    rows: &[TextRow],
) -> Result<Option<String>> {
    let texts: Vec<Vec<&str>> = rows.iter().map(TextRow::parts).collect();
    let Some(Unseen { n_texts, first, characters }) = unseen(encoder.tokenizer, &texts)? else {
        return Ok(None);
    };
    let (n_rows, Place { path, number }) = (rows.len(), &places[first]);
    if n_texts == n_rows {
        return Err(Error::UnseenRows { path: spec.path.to_string().into(), characters });
    }
    Ok(Some(format!(
        "{}: {n_texts} of {n_rows} rows have characters that the model's tokenizer has no token for, and the model does not see them: {characters}; row {number} is the first",
        path.display(),
    )))
}

/// What the rows of a file are read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowKind {
    /// Conversations, pairs or texts to learn.
    Learned,
    /// Responses that are compared or judged.
    Judged,
    /// The same, with a margin if rows have one.
    Ranked,
}

/// Where a row is.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub path: Arc<Path>,
    pub number: u64,
}

/// The fields of an open file.
enum Layout {
    Learned(TextLayout),
    Judged(JudgedLayout),
}

impl Layout {
    fn recognise(spec: &FileTexts, wanted: RowKind, row: &Value) -> std::result::Result<Self, String> {
        Ok(match wanted {
            RowKind::Learned => Layout::Learned(TextLayout::recognise(spec, row)?),
            RowKind::Judged => Layout::Judged(JudgedLayout::recognise(spec, row)?),
            RowKind::Ranked => Layout::Judged(JudgedLayout::recognise(spec, row)?.with_margin(spec, row)?),
        })
    }

    fn read(&self, spec: &FileTexts, row: &Value) -> std::result::Result<TextRow, String> {
        match self {
            Layout::Learned(layout) => layout.read(spec, row),
            Layout::Judged(layout) => layout.read(spec, row),
        }
    }
}

/// The rows and their places.
fn read(spec: &FileTexts, wanted: RowKind) -> Result<(Vec<Place>, Vec<TextRow>)> {
    let (mut places, mut rows) = (Vec::<Place>::new(), Vec::new());
    // Of the file that is read; files may have different fields.
    let mut open: Option<(Arc<Path>, Layout)> = None;
    read_files(&spec.path, spec.max_rows, &mut |file, row_place, row| {
        let refuse = |problem: String| {
            let remedy = match wanted {
                RowKind::Learned => {
                    "name the fields with data.messages_field, or data.prompt_field and data.response_field"
                }
                RowKind::Judged | RowKind::Ranked => {
                    "name the fields with data.prompt_field, data.chosen_field and data.rejected_field; for kto also with data.response_field and data.label_field"
                }
            };
            row_place.refuse(problem, remedy)
        };
        let row = Value::Object(row);
        let (path, layout) = match open.take().filter(|(path, _)| **path == *file.path) {
            Some(open) => open,
            None => (Arc::from(file.path.as_path()), Layout::recognise(spec, wanted, &row).map_err(refuse)?),
        };
        rows.push(layout.read(spec, &row).map_err(refuse)?);
        places.push(Place { path: path.clone(), number: row_place.number });
        open = Some((path, layout));
        Ok(())
    })?;
    let is_plain = |row: &TextRow| match row {
        TextRow::Judged { sides, .. } => {
            !sides.iter().any(|(_, row)| matches!(row, TextRow::Conversation(_)))
        }
        row => !matches!(row, TextRow::Conversation(_)),
    };
    if rows.is_empty() {
        return Err(TaskError::File {
            path: spec.path.to_string().into(),
            problem: "no examples: the file is empty".into(),
            remedy: "one example per row; see the file's beginning".into(),
        }
        .into());
    }
    if (spec.system.is_some() || !spec.chat_arguments.is_empty()) && rows.iter().all(is_plain) {
        return Err(Error::Misfit {
            key: "data.system",
            problem: "or chat_arguments are given, and the rows are plain texts".into(),
            remedy: "set data.chat=true, or leave them out",
        });
    }
    Ok((places, rows))
}

/// A row's place and tokens.
struct Measured {
    row_place: Place,
    /// Of all sequences together.
    n_tokens: usize,
    /// Of the sequences that share a pass: of all where they are compared, else of the longest.
    n_together: usize,
    longest: usize,
    shortest: usize,
}

/// Renders every row, on all cores. A row that cannot be rendered or has nothing to learn is refused by its number.
fn measure(encoder: &TextEncoder, places: &[Place], rows: &[TextRow]) -> Result<Vec<Measured>> {
    let chunks: Vec<Result<Vec<Measured>>> = rows
        .par_chunks(CHUNK)
        .zip(places.par_chunks(CHUNK))
        .map(|(rows, places)| {
            let all: Vec<&TextRow> = rows.iter().collect();
            let sequences = match encoder.sequences(&all) {
                Ok(sequences) => sequences,
                // One of the rows is refused; one by one, the error names it.
                Err(_) => all
                    .iter()
                    .zip(places)
                    .map(|(row, &Place { ref path, number })| {
                        let one = encoder.sequences(&[row]);
                        let path = path.to_path_buf();
                        let named = |source| Error::TextRow { path, number, source: Box::new(source) };
                        one.map(|sequences| sequences.concat()).map_err(named)
                    })
                    .collect::<Result<_>>()?,
            };
            let measured = sequences.iter().zip(places).map(|(sequences, row_place)| {
                let lengths = || sequences.iter().map(|sequence| sequence.tokens.len());
                let n_tokens = lengths().sum();
                let is_judged = sequences.iter().any(|sequence| sequence.side.is_some());
                let longest = lengths().max().unwrap_or(0);
                let n_together = if is_judged { n_tokens } else { longest };
                let shortest = lengths().min().unwrap_or(0);
                Measured { row_place: row_place.clone(), n_tokens, n_together, longest, shortest }
            });
            let measured: Vec<Measured> = measured.collect();
            match measured.iter().find(|row| row.shortest < 2) {
                Some(Measured { row_place: Place { path, number }, .. }) => {
                    Err(Error::EmptyRow { path: path.to_path_buf(), number: *number })
                }
                None => Ok(measured),
            }
        })
        .collect();
    Ok(chunks.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}
