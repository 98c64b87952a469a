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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A response of two sampled tokens.
    fn response() -> ResponseRecord {
        serde_json::from_value(json!({
            "schema": 2, "step": 1, "problem_id": "p", "sample_idx": 0, "prompt": "1+1=", "reference": "2",
            "text": "so 2", "verdict": "right", "reward": 1.0, "advantage": 0.5,
            "finish": {"kind": "length_limit"}, "update_idx": 0, "tau_h": null,
            "tokens": {
                "id": [3, 4], "text": ["s", "o"], "logp": [-1.0, -1.0], "behavior_logp": [-1.0, -1.0],
                "entropy": [0.1, 0.1], "collision": [0.9, 0.9], "ratio": [1.0, 1.0], "kept": [true, true],
                "silenced_by": [null, null], "clipped": [false, false], "is_candidate": [false, false],
                "d_logp": [0.0, 0.0]
            },
            "given": [{"after": 1, "id": [5], "text": "x"}, {"after": 2, "id": [5], "text": "y"}]
        }))
        .unwrap()
    }

    /// The name of a column, and what cuts it.
    type Cut = (&'static str, fn(&mut ResponseRecord));

    #[test]
    fn columns_of_other_lengths_and_given_tokens_out_of_place_are_refused() {
        assert_eq!(check_columns(&response()), Ok(()));
        let cuts: [Cut; 12] = [
            ("text", |r| r.tokens.text.truncate(1)),
            ("logp", |r| r.tokens.logp.truncate(1)),
            ("behavior_logp", |r| r.tokens.behavior_logp.push(0.0)),
            ("entropy", |r| r.tokens.entropy.clear()),
            ("collision", |r| r.tokens.collision.truncate(1)),
            ("ratio", |r| r.tokens.ratio.truncate(1)),
            ("kept", |r| r.tokens.kept.truncate(1)),
            ("silenced_by", |r| r.tokens.silenced_by.truncate(1)),
            ("clipped", |r| r.tokens.clipped.truncate(1)),
            ("is_candidate", |r| r.tokens.is_candidate.truncate(1)),
            ("weight", |r| r.tokens.weight = vec![1.0]),
            ("alternatives", |r| r.tokens.alternatives = vec![Vec::new()]),
        ];
        for (column, cut) in cuts {
            let mut damaged = response();
            cut(&mut damaged);
            let said = check_columns(&damaged).unwrap_err();
            assert!(said.starts_with(&format!("column {column} has ")), "{column}: {said}");
        }
        let mut beyond = response();
        beyond.given[1].after = 3;
        assert_eq!(check_columns(&beyond), Err("given tokens after 3 of 2 tokens, or not in order".into()));
        let mut twice = response();
        twice.given[1].after = 1;
        assert!(check_columns(&twice).unwrap_err().contains("not in order"));
    }

    #[test]
    fn only_files_of_steps_have_a_step() {
        for (path, step) in [
            ("rollouts/step-000010.jsonl", Some(10)),
            ("checkpoints/step-1234567", Some(1_234_567)),
            ("rollouts/steps-10.jsonl", None),
            ("rollouts/step-x.jsonl", None),
        ] {
            assert_eq!(step_of(Path::new(path)), step, "{path}");
        }
    }
}
