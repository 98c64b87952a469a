//! Reading run folders without writing them: the plan, and the records of each part.

use super::check_tree;
use super::columns::Columns;
use crate::error::{Error, Result};
use crate::plan::config::FileKind;
use stapo_core::ObjectiveSpec;
use stapo_core::record::{self, Record, ResponseRecord};
use stapo_core::settings;
use stapo_model::files::{read_lines, read_text};
use std::fs;
use std::path::{Path, PathBuf};
use toml::Table;

/// The text of `plan.toml`. A folder with links or pipes inside is refused.
pub fn plan_text(run: &Path) -> Result<String> {
    let refuse = |problem: &str| Error::NotARun { folder: run.to_owned(), problem: problem.to_string() };
    if !run.is_dir() {
        return Err(refuse("no such folder"));
    }
    check_tree(run)?;
    let path = run.join("plan.toml");
    if path.symlink_metadata().is_err() {
        return Err(refuse("no plan.toml, so this is no run folder"));
    }
    read_text(&path).map_err(|error| Error::io(&path, error))
}

/// What a run is made by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    /// `stapo train`.
    Training,
    /// `stapo sft`, `stapo prefer` and `stapo pretrain`.
    Supervised,
}

impl RunKind {
    /// The kind of a run with that plan.
    pub fn of_plan(plan: &Table) -> Self {
        if FileKind::Supervised.key_in(plan).is_some() { Self::Supervised } else { Self::Training }
    }

    /// Refuses a run of another kind. A plan that cannot be read is left to the reader of its keys.
    pub fn check(self, run: &Path) -> Result<()> {
        let Some(plan) = plan_text(run).ok().and_then(|text| settings::parse(&text).ok()) else {
            return Ok(());
        };
        let shown = run.display();
        let (problem, remedy) = match (self, Self::of_plan(&plan)) {
            (Self::Training, Self::Supervised) => (
                "was written by stapo sft, prefer or pretrain; this command reads runs of stapo train",
                format!("stapo sft --resume {shown} continues it; generate and eval take --model {shown}"),
            ),
            (Self::Supervised, Self::Training) => (
                "was written by stapo train; this command reads runs of stapo sft, prefer and pretrain",
                format!("stapo train --resume {shown} continues it"),
            ),
            _ => return Ok(()),
        };
        Err(Error::NoRun { folder: run.to_owned(), problem: problem.to_string(), remedy })
    }
}

/// The numbers of `metrics.jsonl`, without a torn last line.
pub fn read_columns(run: &Path) -> Result<Columns> {
    let path = run.join("metrics.jsonl");
    let text = read_lines(&path).map_err(|error| Error::io(&path, error))?;
    let mut columns = Columns::default();
    // A last line without its end is what a killed writer leaves, or one that is still writing.
    for line in text.split_inclusive('\n').filter(|line| line.ends_with('\n')) {
        columns.add(line.as_bytes());
    }
    match columns.problem {
        Some(problem) => Err(Error::Metrics { path: run.to_owned(), problem }),
        None => Ok(columns),
    }
}

/// The records of one part of a run (`rollouts`, `tokens`, ..) in order of its files; empty if the part is absent.
pub fn records<R: Record>(run: &Path, part: &str) -> Result<Vec<R>> {
    let mut found = Vec::new();
    for path in part_files(run, part)? {
        found.extend(records_of_file(&path)?);
    }
    Ok(found)
}

/// The JSON lines files of a part but `events.jsonl`, in order of their names.
pub fn part_files(run: &Path, part: &str) -> Result<Vec<PathBuf>> {
    let folder = run.join(part);
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(&folder).map_err(|error| Error::io(&folder, error))?;
    let is_lines =
        |path: &PathBuf| path.extension().is_some_and(|e| e == "jsonl") && !path.ends_with("events.jsonl");
    let mut files: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).filter(is_lines).collect();
    files.sort();
    Ok(files)
}

/// The step of a file of a part, as 10 of `step-000010.jsonl`.
pub fn step_of(path: &Path) -> Option<u64> {
    path.file_stem()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

pub fn records_of_file<R: Record>(path: &Path) -> Result<Vec<R>> {
    let text = read_lines(path).map_err(|error| Error::io(path, error))?;
    Ok(record::parse_lines(&text).map_err(|error| Error::record(path, &error))?.records)
}

/// The responses of a file of a run with that objective, with all columns checked.
pub fn responses_of_file(path: &Path, objective: &ObjectiveSpec) -> Result<Vec<ResponseRecord>> {
    let text = read_lines(path).map_err(|error| Error::io(path, error))?;
    let read = record::parse_responses(&text, objective);
    let responses = read.map_err(|error| Error::record(path, &error))?.records;
    for (idx, response) in responses.iter().enumerate() {
        check_columns(response).map_err(|problem| Error::Response {
            path: path.to_owned(),
            number: idx + 1,
            problem,
        })?;
    }
    Ok(responses)
}

/// Checks that all columns have one length, so that every token index is valid in every column, and that given tokens
/// are between the tokens of the columns.
fn check_columns(response: &ResponseRecord) -> std::result::Result<(), String> {
    let tokens = &response.tokens;
    let n = tokens.id.len();
    let columns = [
        ("text", tokens.text.len()),
        ("logp", tokens.logp.len()),
        ("behavior_logp", tokens.behavior_logp.len()),
        ("entropy", tokens.entropy.len()),
        ("collision", tokens.collision.len()),
        ("ratio", tokens.ratio.len()),
        ("kept", tokens.kept.len()),
        ("silenced_by", tokens.silenced_by.len()),
        ("clipped", tokens.clipped.len()),
        ("is_candidate", tokens.is_candidate.len()),
    ];
    let optional = [("weight", tokens.weight.len()), ("alternatives", tokens.alternatives.len())];
    for (column, len) in columns.into_iter().chain(optional.into_iter().filter(|(_, len)| *len > 0)) {
        if len != n {
            return Err(format!("column {column} has {len} entries, id has {n}"));
        }
    }
    let is_in_order = response.given.is_sorted_by(|a, b| a.after < b.after);
    match response.given.iter().find(|given| !is_in_order || given.after > n) {
        Some(given) => Err(format!("given tokens after {} of {n} tokens, or not in order", given.after)),
        None => Ok(()),
    }
}
