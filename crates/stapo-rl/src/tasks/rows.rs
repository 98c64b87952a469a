//! Files of problems, read once and checked row by row.

mod field;
mod jsonl;
mod layout;
mod parquet;
pub(crate) mod permutation;

use super::split::{check_share, content_hash, split_of};
use super::template::Question;
use super::wording::Wording;
use super::{MissingAnswers, RowsSpec, Split, TaskError};
use crate::reward::verdict::Verifier;
pub(crate) use field::FieldPath;
pub(crate) use jsonl::read as read_json_lines;
use layout::RowLayout;
pub(crate) use layout::turns;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use stapo_core::Problem;
use stapo_core::random::Key;
use std::collections::HashMap;
use std::path::Path;

/// A teacher's prompt.
pub(super) const TEACHER_TEMPLATE: &str =
    "{{ prompt }}\n\nA reference solution:\n{{ solution }}\n\nNow write a solution of your own.";
const TRAIN_STREAM: u64 = 2;
/// Problems that are rendered together.
const PENDING: usize = 4096;

/// The format of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Format {
    Jsonl,
    Parquet,
}

impl Format {
    /// The word for a row of the file, in messages.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Jsonl => "line",
            Self::Parquet => "row",
        }
    }

    pub(crate) fn read(self, path: &Path, add: &mut AddRow) -> Result<(), TaskError> {
        match self {
            Self::Jsonl => jsonl::read(path, add),
            Self::Parquet => parquet::read(path, add),
        }
    }
}

/// Receives the number of a row, from 1, and the row's fields.
pub(crate) type AddRow<'a> = dyn FnMut(u64, Map<String, Value>) -> Result<(), TaskError> + 'a;

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
    /// `None` where ids are numbers of rows.
    pub id_field: Option<String>,
}

/// Which rows of a file stay in memory as they are, beside the problems made of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeptRows {
    All,
    None,
}

pub(super) struct ProblemRows {
    train: Vec<Problem>,
    held_out: Vec<Problem>,
    /// Worked solutions by id; empty without `solution_field`.
    solutions: HashMap<String, String>,
    /// Whole rows by id; empty unless they are kept.
    whole: HashMap<String, Map<String, Value>>,
    census: FileCensus,
}

impl ProblemRows {
    pub(super) fn open(
        spec: &RowsSpec,
        format: Format,
        verifier: &Verifier,
        kept: KeptRows,
    ) -> Result<Self, TaskError> {
        check_share("held_out_share", spec.held_out_share)?;
        let mut collected = Collected::new(spec, format, kept)?;
        format.read(&spec.path, &mut |number, row| collected.add(number, row))?;
        let mut rows = collected.finish()?;
        rows.check_references(verifier);
        rows.refuse_all_unreadable(spec)?;
        Ok(rows)
    }

    /// The training problem at `position`. Each epoch is a permutation of the problems, keyed by `seed`.
    pub(super) fn train(&self, seed: u64, position: u64) -> Result<&Problem, TaskError> {
        let n = self.n_train();
        if n == 0 {
            let remedy = "lower held_out_share of the task below 1";
            return Err(TaskError::EmptySplit { split: Split::Train.name(), remedy });
        }
        let epoch = Key::new(seed).with(TRAIN_STREAM).with(position / n);
        Ok(&self.train[permutation::image(position % n, n, epoch) as usize])
    }

    pub(super) fn n_train(&self) -> u64 {
        self.train.len() as u64
    }

    pub(super) fn held_out(&self) -> &[Problem] {
        &self.held_out
    }

    /// The worked solution of a problem; `None` where the file has none.
    pub(super) fn solution(&self, id: &str) -> Option<&str> {
        self.solutions.get(id).map(String::as_str)
    }

    /// The whole row of a problem; `None` where rows are not kept.
    pub(super) fn row(&self, id: &str) -> Option<&Map<String, Value>> {
        self.whole.get(id)
    }

    /// Training problems, then held-out ones.
    pub(super) fn all(&self) -> impl Iterator<Item = &Problem> {
        self.train.iter().chain(&self.held_out)
    }

    /// Leaves problems out; `is_left_out` has the order of [`ProblemRows::all`].
    pub(super) fn leave_out(&mut self, is_left_out: &[bool]) {
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
                    path: spec.path.clone(),
                    problem: format!("the verifier can read none of its references; {first}"),
                    remedy: "answer_field: the field with the bare answer; verifier: the rule that fits it"
                        .into(),
                })
            }
            _ => Ok(()),
        }
    }
}

/// The rows read so far.
struct Collected<'a> {
    spec: &'a RowsSpec,
    format: Format,
    kept: KeptRows,
    wording: Wording,
    /// Found at the first row.
    layout: Option<RowLayout>,
    /// The hash of the reference by the hash of the conversation.
    reference_of: HashMap<u64, u64>,
    row_of_id: HashMap<String, u64>,
    /// Problems that are not rendered yet, their splits, and the fields of their rows.
    pending: Vec<(Problem, Split, Map<String, Value>)>,
    rows: ProblemRows,
}

impl<'a> Collected<'a> {
    fn new(spec: &'a RowsSpec, format: Format, kept: KeptRows) -> Result<Self, TaskError> {
        Ok(Self {
            spec,
            format,
            kept,
            wording: Wording::new(spec.template(), spec.system.as_deref())?,
            layout: None,
            reference_of: HashMap::new(),
            row_of_id: HashMap::new(),
            pending: Vec::new(),
            rows: ProblemRows {
                train: Vec::new(),
                held_out: Vec::new(),
                solutions: HashMap::new(),
                whole: HashMap::new(),
                census: FileCensus::default(),
            },
        })
    }

    fn add(&mut self, number: u64, row: Map<String, Value>) -> Result<(), TaskError> {
        let refuse = |(problem, remedy): (String, String)| TaskError::Row {
            path: self.spec.path.clone(),
            unit: self.format.unit(),
            number,
            problem,
            remedy,
        };
        let row = Value::Object(row);
        if self.layout.is_none() {
            let layout = RowLayout::recognise(self.spec, &row).map_err(refuse)?;
            layout.name_fields(&mut self.rows.census);
            self.layout = Some(layout);
        }
        let Some(layout) = &self.layout else { return Ok(()) };
        let found = layout.read(&row, number, &self.spec.path).map_err(refuse)?;
        self.rows.census.n_rows += 1;
        let (hash, question) = (found.conversation_hash(), found.question_hash());
        let reference = match (found.reference, self.spec.missing_answers) {
            (Ok(reference), _) => reference,
            (Err(_), MissingAnswers::Drop) => {
                self.rows.census.n_without_answer += 1;
                return Ok(());
            }
            (Err((problem, remedy)), MissingAnswers::Refuse) => {
                let remedy = format!("{remedy}; missing_answers = \"drop\" leaves such rows out");
                return Err(refuse((problem, remedy)));
            }
        };
        let reference_hash = content_hash(&reference);
        if let Some(&earlier) = self.reference_of.get(&hash) {
            self.rows.census.n_duplicates += 1;
            self.rows.census.n_conflicts += u64::from(earlier != reference_hash);
            return Ok(());
        }
        if let Some(earlier) = self.row_of_id.insert(found.id.clone(), number) {
            let problem = format!(
                "id {:?} is that of {} {earlier}, with another problem",
                found.id,
                self.format.unit()
            );
            return Err(refuse((problem, "give each problem its own id, or id_field = \"#row\"".into())));
        }
        self.reference_of.insert(hash, reference_hash);
        if let Some(solution) = found.solution {
            self.rows.solutions.insert(found.id.clone(), solution);
        }
        let Value::Object(fields) = row else { return Ok(()) };
        if self.kept == KeptRows::All {
            self.rows.whole.insert(found.id.clone(), fields.clone());
        }
        let earlier_turns = self.wording.turns(&found.earlier_turns);
        let problem = Problem { id: found.id, earlier_turns, prompt: found.problem, reference };
        self.pending.push((problem, split_of(question, self.spec.held_out_share), fields));
        if self.pending.len() < PENDING { Ok(()) } else { self.render_pending() }
    }

    /// Renders the prompts of the pending problems, and adds them to their splits.
    fn render_pending(&mut self) -> Result<(), TaskError> {
        let questions: Vec<Question> = self
            .pending
            .iter()
            .map(|(problem, _, fields)| Question { id: &problem.id, problem: &problem.prompt, fields })
            .collect();
        let prompts = self.wording.prompts(&questions)?;
        for ((problem, split, _), prompt) in std::mem::take(&mut self.pending).into_iter().zip(prompts) {
            let problem = Problem { prompt, ..problem };
            match split {
                Split::Train => self.rows.train.push(problem),
                Split::HeldOut => self.rows.held_out.push(problem),
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<ProblemRows, TaskError> {
        self.render_pending()?;
        let refuse = |problem: String, remedy: &str| {
            Err(TaskError::File { path: self.spec.path.clone(), problem, remedy: remedy.into() })
        };
        let n_train = self.rows.train.len() as u64;
        let n_held_out = self.rows.held_out.len() as u64;
        let share = self.spec.held_out_share;
        if n_train + n_held_out == 0 {
            return refuse("holds no problem".into(), "one problem per row; see the file's beginning");
        }
        if n_held_out == 0 && share > 0.0 {
            let problem = format!("held_out_share {share} of its {n_train} problems is none");
            return refuse(problem, "raise held_out_share, or set it to 0 and evaluate on another file");
        }
        if n_train == 0 && share < 1.0 {
            let problem = format!("held_out_share {share} of its {n_held_out} problems is all of them");
            return refuse(problem, "lower held_out_share, or set it to 1 to evaluate only");
        }
        self.rows.census.n_train = n_train;
        self.rows.census.n_held_out = n_held_out;
        Ok(self.rows)
    }
}
