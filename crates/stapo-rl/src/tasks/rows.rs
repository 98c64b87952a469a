//! Files of problems, read once and checked row by row.

mod array;
mod chosen;
mod collected;
mod compressed;
mod csv;
mod field;
mod format;
mod jsonl;
mod layout;
mod mixture;
mod parquet;
mod paths;
pub(crate) mod permutation;
mod receiver;

use super::split::check_share;
use super::{RowsSpec, Split, TaskError};
use crate::reward::verdict::Verifier;
use collected::Collected;
pub(crate) use field::FieldPath;

pub(crate) use layout::turns;
use mixture::Mixture;
pub use paths::{DataFile, DataPath, file_kind};
pub(crate) use paths::{bare_name, is_data_file};
use rayon::prelude::*;
use receiver::Next;
pub(crate) use receiver::RowPlace;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stapo_core::Problem;
use stapo_core::random::Key;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

/// A teacher's prompt.
pub(super) const TEACHER_TEMPLATE: &str =
    "{{ prompt }}\n\nA reference solution:\n{{ solution }}\n\nNow write a solution of your own.";
const TRAIN_STREAM: u64 = 2;

/// Receives a row, its place and its file.
pub(crate) type AddFileRow<'a> =
    dyn FnMut(&DataFile, RowPlace, Map<String, Value>) -> Result<(), TaskError> + 'a;

/// Calls `add` for the rows of all files, at most `max_rows` of each entry of `path`.
pub(crate) fn read_files(
    path: &DataPath,
    max_rows: Option<u64>,
    add: &mut AddFileRow,
) -> Result<(), TaskError> {
    if max_rows == Some(0) {
        return Err(TaskError::setting("max_rows", "0 rows", "at least 1; without it, all rows are read"));
    }
    let mut n_rows = vec![0; path.entries().len()];
    for file in path.files()? {
        let is_enough = |n_rows: &[u64]| max_rows.is_some_and(|max_rows| n_rows[file.entry_idx] >= max_rows);
        if is_enough(&n_rows) {
            continue;
        }
        format::read(&file.path, &mut |row_place, row| {
            add(&file, row_place, row)?;
            n_rows[file.entry_idx] += 1;
            Ok(if is_enough(&n_rows) { Next::Nothing } else { Next::Row })
        })?;
    }
    Ok(())
}

/// The first row of the files, for those who must know the fields before a spec is complete.
pub fn first_row(path: &DataPath) -> Result<Option<Map<String, Value>>, TaskError> {
    let mut first = None;
    read_files(path, Some(1), &mut |_, _, row| {
        first.get_or_insert(row);
        Ok(())
    })?;
    Ok(first)
}

/// Calls `add` for each line of a file of JSON lines, with the number of the line, from 1.
pub(crate) fn read_json_lines(
    path: &Path,
    add: &mut dyn FnMut(u64, Map<String, Value>) -> Result<(), TaskError>,
) -> Result<(), TaskError> {
    format::read(path, &mut |row_place, row| add(row_place.number, row).map(|()| Next::Row))
}

/// Counts of a file's rows and problems.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FileCensus {
    pub n_rows: u64,
    /// Rows that were left out because they have no reference.
    pub n_without_answer: u64,
    /// Rows that were left out because an earlier row has the same problem.
    pub n_duplicates: u64,
    /// Duplicates whose reference differs from that of the earlier row.
    pub n_conflicts: u64,
    pub n_train: u64,
    pub n_held_out: u64,
    /// Problems whose reference the verifier cannot read, so that only a response written exactly so can be right.
    pub n_unreadable: u64,
    /// The reason, for the first such problem.
    pub first_unreadable: Option<String>,
    /// The fields, as given or recognised.
    pub problem_field: String,
    pub answer_field: String,
    /// `None` if ids are numbers of rows.
    pub id_field: Option<String>,
}

/// Which rows of a file stay in memory as they are, besides the problems made of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeptRows {
    All,
    None,
}

pub(super) struct ProblemRows {
    /// In the order of the entries of the spec's path.
    train: Vec<Problem>,
    /// The training problems of each entry of the spec's path.
    n_train_of_entry: Vec<usize>,
    /// Present where the spec has weights.
    mixture: Option<Mixture>,
    held_out: Vec<Problem>,
    /// Worked solutions by id; empty without `solution_field`.
    solutions: HashMap<String, String>,
    /// Whole rows by id; empty unless they are kept.
    whole: HashMap<String, Map<String, Value>>,
    census: FileCensus,
}

impl ProblemRows {
    pub(super) fn open(spec: &RowsSpec, verifier: &Verifier, kept: KeptRows) -> Result<Self, TaskError> {
        check_share("held_out_share", spec.held_out_share)?;
        let mut collected = Collected::new(spec, kept)?;
        read_files(&spec.path, spec.max_rows, &mut |file, row_place, row| {
            collected.add(file, row_place, row)
        })?;
        let mut rows = collected.finish()?;
        rows.check_references(verifier);
        rows.refuse_all_unreadable(spec)?;
        Ok(rows)
    }

    /// The training problem at `position`. Each epoch is a permutation of the problems, keyed by `seed`. In a mixture
    /// each source has its own epochs.
    pub(super) fn train(&self, seed: u64, position: u64) -> Result<&Problem, TaskError> {
        let n = self.n_train();
        if n == 0 {
            let remedy = "lower held_out_share of the task below 1";
            return Err(TaskError::EmptySplit { split: Split::Train.name(), remedy });
        }
        let key = Key::new(seed).with(TRAIN_STREAM);
        let Some(mixture) = &self.mixture else {
            return Ok(&self.train[permutation::image(position % n, n, key.with(position / n)) as usize]);
        };
        let (entry, nth) = mixture.source(seed, position);
        let Range { start, end } = self.train_of_entry(entry);
        let n = (end - start) as u64;
        let epoch = key.with(entry as u64).with(nth / n);
        Ok(&self.train[start + permutation::image(nth % n, n, epoch) as usize])
    }

    fn train_of_entry(&self, entry_idx: usize) -> Range<usize> {
        let start = self.n_train_of_entry[..entry_idx].iter().sum();
        start..start + self.n_train_of_entry[entry_idx]
    }

    /// Refuses a mixture with a source that has nothing to train on.
    fn check_mixture(&self, spec: &RowsSpec) -> Result<(), TaskError> {
        match self.empty_source() {
            Some(empty) => Err(TaskError::File {
                path: spec.path.entries()[empty].clone(),
                problem: "has a weight, and no problem to train on".into(),
                remedy: "lower held_out_share; its problems may also be copies of those of an earlier file"
                    .into(),
            }),
            None => Ok(()),
        }
    }

    /// The number of a source of the mixture that has nothing to train on.
    pub(super) fn empty_source(&self) -> Option<usize> {
        self.n_train_of_entry.iter().position(|&n| n == 0).filter(|_| self.mixture.is_some())
    }

    pub(super) fn n_train(&self) -> u64 {
        self.train.len() as u64
    }

    pub(super) fn held_out(&self) -> &[Problem] {
        &self.held_out
    }

    /// The worked solution of a problem; `None` if the file has none.
    pub(super) fn solution(&self, id: &str) -> Option<&str> {
        self.solutions.get(id).map(String::as_str)
    }

    /// The whole row of a problem; `None` if rows are not kept.
    pub(super) fn row(&self, id: &str) -> Option<&Map<String, Value>> {
        self.whole.get(id)
    }

    /// Training problems, then held-out ones.
    pub(super) fn all(&self) -> impl Iterator<Item = &Problem> {
        self.train.iter().chain(&self.held_out)
    }

    /// Leaves problems out; `is_left_out` has the order of [`ProblemRows::all`].
    pub(super) fn leave_out(&mut self, is_left_out: &[bool]) {
        let mut flags = is_left_out;
        for n in &mut self.n_train_of_entry {
            let (of_entry, rest) = flags.split_at(*n);
            *n = of_entry.iter().filter(|is_left_out| !**is_left_out).count();
            flags = rest;
        }
        let mut left_out = is_left_out.iter();
        self.train.retain(|_| left_out.next() != Some(&true));
        self.held_out.retain(|_| left_out.next() != Some(&true));
        self.census.n_train = self.train.len() as u64;
        self.census.n_held_out = self.held_out.len() as u64;
    }

    pub(super) fn census(&self) -> &FileCensus {
        &self.census
    }

    fn check_references(&mut self, verifier: &Verifier) {
        let problems: Vec<&Problem> = self.all().collect();
        let unreadable: Vec<String> = problems
            .par_iter()
            .filter_map(|problem| {
                let why = verifier.check_reference(&problem.reference).err()?;
                Some(format!("problem {:?}: {why}", problem.id))
            })
            .collect();
        self.census.n_unreadable = unreadable.len() as u64;
        self.census.first_unreadable = unreadable.into_iter().next();
    }

    fn refuse_all_unreadable(&self, spec: &RowsSpec) -> Result<(), TaskError> {
        match &self.census.first_unreadable {
            Some(first) if self.census.n_unreadable == self.n_train() + self.held_out.len() as u64 => {
                Err(TaskError::File {
                    path: spec.path.to_string().into(),
                    problem: format!("the verifier can read none of its references; {first}"),
                    remedy: "answer_field: the field with the bare answer; verifier: the rule that fits it"
                        .into(),
                })
            }
            _ => Ok(()),
        }
    }
}
