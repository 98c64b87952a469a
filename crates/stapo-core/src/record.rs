//! Line formats of the run directory, which the trainer writes and every other command reads.
//!
//! Every record carries `schema`. Within a schema, keys are only ever added: a reader keeps unknown keys in `extra` and
//! writes these keys back, so older programs read and copy newer files. A record that an older program would misread has
//! a higher schema, and a reader refuses records whose schema is higher than [`Record::NEWEST_SCHEMA`].

mod best;
pub mod catalogue;
mod event;
mod experiment;
mod identity;
mod manifest;
mod metrics;
mod tokens;

pub use best::Best;
pub use event::{Event, EventKind, LockRecord, StopReason, Writer};
pub use experiment::{Arm, Experiment};
pub use identity::{ABSENT, Change, Identity, changed_inputs};
pub use manifest::{AcceptedChange, BuildRecord, FileHash, Manifest, StepFiles, StepHash};
pub use metrics::{
    BenchmarkScore, DecodingRecord, EntropyChange, EntropyQuantiles, EpisodeMetrics, HeldOutPairs,
    JudgeMetrics, LengthQuantiles, Metrics, PhaseSeconds, PreferenceMetrics, PretrainMetrics, RankingMetrics,
    ReuseRecord, ReusedUpdate, TokensPerSecond,
};
pub use tokens::{
    Alternative, EpisodeRecord, EvalRecord, GivenTokens, ResponseRecord, TokenColumns, TokenRecord,
};

use crate::objective::ObjectiveSpec;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use thiserror::Error;

/// The schema of all records but responses with given tokens ([`ResponseRecord::SCHEMA_WITH_GIVEN`]).
pub const SCHEMA: u32 = 1;

/// Keys that this program does not know, which are written back unchanged.
pub type Extra = Map<String, Value>;

/// Why a record could not be read. `line` counts from 1.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RecordError {
    #[error("line {line}: not JSON: {problem}")]
    Json { line: usize, problem: String },
    #[error("line {line}: no `schema` number, so this is no record of a run")]
    NoSchema { line: usize },
    #[error(
        "line {line}: schema {found}, this program reads up to {newest}\nhint: a newer stapo wrote it; update this one"
    )]
    TooNew { line: usize, found: u64, newest: u32 },
    #[error("line {line}: {problem}")]
    Fields { line: usize, problem: String },
}

/// A record of the run directory.
pub trait Record: Serialize + DeserializeOwned {
    /// The highest schema of these records that this program reads.
    const NEWEST_SCHEMA: u32 = SCHEMA;

    /// The record as one line of JSON that ends in a newline.
    fn to_line(&self) -> String;
}

fn json_line(record: &impl Serialize) -> String {
    let mut line = serde_json::to_string(record).expect("records hold only what JSON can");
    line.push('\n');
    line
}

/// The bodies are compiled in this crate, which release builds optimise; a body of the trait would be compiled by its callers.
macro_rules! records {
    ($($record:ty),*) => { $(impl Record for $record {
        fn to_line(&self) -> String {
            json_line(self)
        }
    })* };
}

records!(
    Metrics,
    StepFiles,
    PretrainMetrics,
    TokenRecord,
    EpisodeRecord,
    EvalRecord,
    Experiment,
    BuildRecord,
    Event,
    Best,
    LockRecord
);

impl Record for ResponseRecord {
    const NEWEST_SCHEMA: u32 = Self::SCHEMA_WITH_GIVEN;

    fn to_line(&self) -> String {
        json_line(self)
    }
}

/// A record of one step.
pub trait Stepped: Record {
    fn step(&self) -> u64;
    /// The hash of the state after the step, where the step has one.
    fn state_sha256(&self) -> Option<&str>;
}

impl Stepped for Metrics {
    fn step(&self) -> u64 {
        self.step
    }

    fn state_sha256(&self) -> Option<&str> {
        self.state_sha256.as_deref()
    }
}

impl Stepped for PretrainMetrics {
    fn step(&self) -> u64 {
        self.step
    }

    fn state_sha256(&self) -> Option<&str> {
        self.state_sha256.as_deref()
    }
}

/// The records of a file with one record per line.
#[derive(Debug, Clone, PartialEq)]
pub struct Lines<R> {
    pub records: Vec<R>,
    /// True if the file ends in part of a line, because the writer was killed. `records` does not hold that part.
    pub torn: bool,
}

/// Reads one record.
pub fn parse<R: Record>(text: &str) -> Result<R, RecordError> {
    parse_line(1, text)
}

/// Reads all records of a file. Blank lines are skipped; a last line that has no newline and does not parse is torn.
pub fn parse_lines<R: Record>(text: &str) -> Result<Lines<R>, RecordError> {
    let mut records = Vec::new();
    for (idx, line) in text.split_inclusive('\n').enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        match parse_line(idx + 1, line) {
            Ok(record) => records.push(record),
            Err(RecordError::Json { .. }) if !line.ends_with('\n') => {
                return Ok(Lines { records, torn: true });
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Lines { records, torn: false })
}

/// Reads the responses of a file of `rollouts/`. `objective` is the run's: in files written without the column
/// `is_candidate`, the column is derived from the objective.
pub fn parse_responses(text: &str, objective: &ObjectiveSpec) -> Result<Lines<ResponseRecord>, RecordError> {
    let mut lines = parse_lines::<ResponseRecord>(text)?;
    for response in &mut lines.records {
        response.derive_candidates(objective);
    }
    Ok(lines)
}

fn parse_line<R: Record>(line: usize, text: &str) -> Result<R, RecordError> {
    let json = |e: serde_json::Error| RecordError::Json { line, problem: e.to_string() };
    let value: Value = serde_json::from_str(text).map_err(json)?;
    match value.get("schema").and_then(Value::as_u64) {
        None => Err(RecordError::NoSchema { line }),
        Some(found) if found > u64::from(R::NEWEST_SCHEMA) => {
            Err(RecordError::TooNew { line, found, newest: R::NEWEST_SCHEMA })
        }
        Some(_) => {
            serde_json::from_value(value).map_err(|e| RecordError::Fields { line, problem: e.to_string() })
        }
    }
}

#[cfg(test)]
mod tests;
