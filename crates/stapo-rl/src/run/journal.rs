//! `records.jsonl`: the hashes of the files that each step wrote besides its line of `metrics.jsonl`. A checkpoint seals both
//! files up to its step, so that a run that was killed, and has no receipt, continues only with the records that it wrote.

use super::hashes::{hash_bytes, hash_file, hash_or_length};
use crate::error::{Error, Result};
use crate::run::disk::{Appended, sha256_hex, write_whole};
use stapo_core::record::{self, ABSENT, Change, Extra, FileHash, Record, SCHEMA, StepFiles};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The parts of a run folder that hold one file per recorded step.
pub(super) const PARTS: [&str; 3] = ["rollouts", "tokens", "explored"];

/// Parts that only some runs have: the samples of evaluations on benchmarks, and the answers of environments.
pub(super) const OPTIONAL_PARTS: [&str; 2] = ["benchmarks", "episodes"];

/// All parts that hold one file per step.
pub(super) fn parts() -> impl Iterator<Item = &'static str> {
    PARTS.into_iter().chain(OPTIONAL_PARTS)
}

pub(super) const JOURNAL: &str = "records.jsonl";
pub(super) const METRICS: &str = "metrics.jsonl";

/// The open file, to which each step adds a line.
#[derive(Debug)]
pub struct Journal {
    lines: Appended,
    /// What the lines list.
    listed: BTreeMap<String, FileHash>,
    /// What was written since the last line.
    pending: Vec<FileHash>,
}

impl Journal {
    pub fn open(folder: &Path) -> Result<Self> {
        let path = folder.join(JOURNAL);
        let lines = Appended::open(&path)?;
        let listed = listed(&path)?;
        Ok(Self { lines, listed, pending: Vec::new() })
    }

    /// Takes note of a file that was written. The evaluation before the first step may be made again, to the same samples.
    pub fn note(&mut self, name: &str, content: &[u8]) {
        let file = hash_bytes(name, content);
        if self.listed.get(name) != Some(&file) {
            self.pending.push(file.clone());
            self.listed.insert(name.to_string(), file);
        }
    }

    /// Adds the line of a step, where the step wrote a file.
    pub fn add_step(&mut self, step: u64) -> Result<()> {
        let files = std::mem::take(&mut self.pending);
        if files.is_empty() {
            return Ok(());
        }
        self.lines.add(line(step, files).as_bytes())
    }

    /// The file as this process wrote it, which is on disk when the function returns.
    pub fn synced(&mut self) -> Result<FileHash> {
        self.lines.sync()?;
        Ok(self.lines.written())
    }

    /// Every file that was written, and this one.
    pub fn written(&self) -> impl Iterator<Item = FileHash> {
        let files = self.listed.values().filter(|file| file.sha256 != ABSENT).cloned();
        files.chain([self.lines.written()])
    }
}

fn line(step: u64, files: Vec<FileHash>) -> String {
    StepFiles { schema: SCHEMA, step, files, extra: Extra::new() }.to_line()
}

/// The files that the journal at a path lists, by name.
fn listed(path: &Path) -> Result<BTreeMap<String, FileHash>> {
    let text = fs::read(path).map_err(|e| Error::io(path, e))?;
    listed_in(&text).map_err(|e| Error::record(path, &e))
}

/// The files that a text of `records.jsonl` lists, by name.
fn listed_in(text: &[u8]) -> std::result::Result<BTreeMap<String, FileHash>, record::RecordError> {
    let lines: Vec<StepFiles> = record::parse_lines(&String::from_utf8_lossy(text))?.records;
    let files = lines.into_iter().flat_map(|line| line.files);
    Ok(files.map(|file| (file.name.clone(), file)).collect())
}

/// What of the records up to a checkpoint is not as the checkpoint has sealed them. `last` is the checkpoint's line of
/// metrics, with which a missing or changed last line is repaired and which therefore counts as there. Files that are the
/// `same` as in the folder's receipt have been hashed.
pub(super) fn changes(
    folder: &Path,
    step: u64,
    sealed: &[FileHash],
    last: Option<&str>,
    same: &BTreeMap<String, FileHash>,
) -> Result<Vec<Change>> {
    let mut found = Vec::new();
    let with_name = |name: &str| sealed.iter().find(|file| file.name == name);
    if let Some(metrics) = with_name(METRICS) {
        let last = last.map_or(String::new(), |line| format!("{line}\n"));
        let text = fs::read(folder.join(METRICS)).unwrap_or_default();
        let before = (metrics.n_bytes as usize).saturating_sub(last.len());
        // A file that lacks more than its last line is refused by whoever reads its steps.
        if let Some(before) = text.get(..before) {
            let after = sha256_hex(&[before, last.as_bytes()].concat());
            found.push(Change::of_file(METRICS, &metrics.sha256, after));
        }
    }
    let Some(journal) = with_name(JOURNAL) else { return Ok(Vec::new()) };
    let text = fs::read(folder.join(JOURNAL)).unwrap_or_default();
    let text = text.get(..journal.n_bytes as usize).unwrap_or(&text);
    found.push(Change::of_file(JOURNAL, &journal.sha256, sha256_hex(text)));
    let mut recorded = listed_in(text).unwrap_or_default();
    for (name, path) in records_up_to(folder, step) {
        let before = recorded.remove(&name);
        let has_length = |file: &FileHash| fs::metadata(&path).is_ok_and(|found| found.len() == file.n_bytes);
        let after = match (same.get(&name), &before) {
            (Some(hashed), _) => hashed.clone(),
            (None, Some(file)) if has_length(file) => hash_file(&name, &path)?,
            (None, _) => hash_or_length(&name, &path)?,
        };
        found.push(Change::of_file(&name, before.map_or(ABSENT.into(), |file| file.sha256), after.sha256));
    }
    found.extend(recorded.into_values().map(|file| Change::of_file(&file.name, file.sha256, ABSENT)));
    found.retain(|change| change.before != change.after);
    Ok(found)
}

/// The records of all steps up to one, by their names in the folder.
fn records_up_to(folder: &Path, step: u64) -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for part in parts() {
        let Ok(entries) = fs::read_dir(folder.join(part)) else { continue };
        for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            let Some(file) = path.file_name().and_then(|name| name.to_str()) else { continue };
            let number =
                file.strip_prefix("step-").and_then(|name| name.strip_suffix(".jsonl")?.parse().ok());
            if number.is_some_and(|number: u64| number <= step) {
                found.insert(format!("{part}/{file}"), path);
            }
        }
    }
    found
}

/// Cuts the journal to what a checkpoint has sealed, and adds what is there instead of it: the files that differ, or all
/// where nothing was sealed or the journal itself differs.
pub(super) fn cut(folder: &Path, step: u64, sealed: &[FileHash], changes: &[Change]) -> Result<()> {
    let path = folder.join(JOURNAL);
    let text = fs::read(&path).unwrap_or_default();
    let journal = sealed.iter().find(|file| file.name == JOURNAL);
    let kept = journal.and_then(|journal| text.get(..journal.n_bytes as usize));
    let kept = kept.filter(|kept| journal.is_some_and(|journal| sha256_hex(kept) == journal.sha256));
    let files: Vec<FileHash> = match kept {
        // The evaluation before the first step is made again.
        None if step == 0 => Vec::new(),
        None => {
            let there = records_up_to(folder, step).into_iter();
            there.map(|(name, path)| hash_file(&name, &path)).collect::<Result<_>>()?
        }
        Some(_) => {
            let names = changes.iter().filter_map(Change::file).filter(|name| name.contains('/'));
            let absent = |name: &str| FileHash { name: name.into(), n_bytes: 0, sha256: ABSENT.into() };
            let found = |name: &str| match folder.join(name) {
                path if path.exists() => hash_file(name, &path),
                _ => Ok(absent(name)),
            };
            names.map(found).collect::<Result<_>>()?
        }
    };
    let mut content = kept.unwrap_or_default().to_vec();
    if !files.is_empty() {
        content.extend(line(step, files).into_bytes());
    }
    if content == text { Ok(()) } else { write_whole(&path, &content) }
}
