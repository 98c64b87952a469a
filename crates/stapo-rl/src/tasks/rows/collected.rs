//! Collects the rows of the files as problems, and checks each.

use super::chosen::Chosen;
use super::layout::RowLayout;
use super::mixture::Mixture;
use super::{DataFile, FileCensus, KeptRows, ProblemRows, RowPlace};
use crate::reward::VerifierSpec;
use crate::reward::code::CodeTests;
use crate::tasks::split::{content_hash, split_of};
use crate::tasks::template::Question;
use crate::tasks::wording::Wording;
use crate::tasks::{MissingAnswers, RowsSpec, Split, TaskError};
use serde_json::{Map, Value};
use stapo_core::Problem;
use std::collections::HashMap;
use std::path::PathBuf;

/// Problems that are rendered together.
const PENDING: usize = 4096;

/// The rows read so far.
pub(super) struct Collected<'a> {
    spec: &'a RowsSpec,
    chosen: Chosen,
    /// Why the first row that `only` left out was left out.
    left_out: Option<String>,
    kept: KeptRows,
    wording: Wording,
    file: Option<OpenFile>,
    /// How many files have had this name, in different folders.
    n_files_of_stem: HashMap<String, usize>,
    /// The hash of the reference by the hash of the conversation.
    reference_of: HashMap<u64, u64>,
    /// The place of each id's row: its file, by number, and its number there.
    place_of_id: HashMap<String, (usize, u64)>,
    paths: Vec<PathBuf>,
    pending: Vec<Pending>,
    rows: ProblemRows,
}

/// The file that is read.
struct OpenFile {
    /// Begins the ids of its rows.
    stem: String,
    /// Found at the first row, because files may have different fields.
    layout: RowLayout,
}

/// A problem that is not rendered yet.
struct Pending {
    problem: Problem,
    split: Split,
    fields: Map<String, Value>,
    entry_idx: usize,
}

impl<'a> Collected<'a> {
    pub(super) fn new(spec: &'a RowsSpec, kept: KeptRows) -> Result<Self, TaskError> {
        let n_entries = spec.path.entries().len();
        let mixture =
            (!spec.weights.is_empty()).then(|| Mixture::new(&spec.weights, n_entries)).transpose()?;
        Ok(Self {
            spec,
            chosen: Chosen::new(&spec.only)?,
            left_out: None,
            kept,
            wording: Wording::new(spec.template(), spec.system.as_deref())?,
            file: None,
            n_files_of_stem: HashMap::new(),
            reference_of: HashMap::new(),
            place_of_id: HashMap::new(),
            paths: Vec::new(),
            pending: Vec::new(),
            rows: ProblemRows {
                train: Vec::new(),
                n_train_of_entry: vec![0; n_entries],
                mixture,
                held_out: Vec::new(),
                solutions: HashMap::new(),
                whole: HashMap::new(),
                census: FileCensus::default(),
            },
        })
    }

    /// Takes the first row of a file as the pattern of all its rows.
    fn open(&mut self, file: &DataFile, row_place: RowPlace, row: &Value) -> Result<OpenFile, TaskError> {
        let layout = RowLayout::recognise(self.spec, row)
            .map_err(|(problem, remedy)| row_place.refuse(problem, remedy))?;
        if self.paths.is_empty() {
            layout.name_fields(&mut self.rows.census);
        }
        self.paths.push(file.path.clone());
        let stem = file.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let n = self.n_files_of_stem.entry(stem.clone()).or_default();
        *n += 1;
        Ok(OpenFile { stem: if *n == 1 { stem } else { format!("{stem}.{n}") }, layout })
    }

    pub(super) fn add(
        &mut self,
        file: &DataFile,
        row_place: RowPlace,
        row: Map<String, Value>,
    ) -> Result<(), TaskError> {
        let row = Value::Object(row);
        if let Some(why) = self.chosen.refuse(&row) {
            self.left_out.get_or_insert(format!("{} {}: {why}", row_place.unit, row_place.number));
            return Ok(());
        }
        let refuse = |(problem, remedy): (String, String)| row_place.refuse(problem, remedy);
        let open = match self.file.take().filter(|_| self.paths.last() == Some(&file.path)) {
            Some(open) => open,
            None => self.open(file, row_place, &row)?,
        };
        let default_id = || format!("{}-{}", open.stem, row_place.number);
        let found = open.layout.read(&row, &default_id).map_err(refuse)?;
        if let (VerifierSpec::Code(_), Some(fields)) = (&self.spec.verifier, row.as_object()) {
            let remedy =
                "the verifier `code` needs tests in every row: test_list, test with entry_point, or tests";
            CodeTests::from_row(fields).map_err(|problem| refuse((problem, remedy.to_string())))?;
        }
        self.file = Some(open);
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
        self.refuse_used_id(&found.id, row_place)?;
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
        let split = split_of(question, self.spec.held_out_share);
        self.pending.push(Pending { problem, split, fields, entry_idx: file.entry_idx });
        if self.pending.len() < PENDING { Ok(()) } else { self.render_pending() }
    }

    fn refuse_used_id(&mut self, id: &str, row_place: RowPlace) -> Result<(), TaskError> {
        let here = (self.paths.len() - 1, row_place.number);
        let Some((file, number)) = self.place_of_id.insert(id.to_string(), here) else { return Ok(()) };
        let path = if file == here.0 { String::new() } else { format!(" of {}", self.paths[file].display()) };
        let problem = format!("id {id:?} is that of {} {number}{path}, with another problem", row_place.unit);
        Err(row_place.refuse(problem, "give each problem its own id, or id_field = \"#row\""))
    }

    /// Renders the prompts of the pending problems, and adds them to their splits.
    fn render_pending(&mut self) -> Result<(), TaskError> {
        let questions: Vec<Question> = self
            .pending
            .iter()
            .map(|Pending { problem, fields, .. }| Question {
                id: &problem.id,
                problem: &problem.prompt,
                fields,
            })
            .collect();
        let prompts = self.wording.prompts(&questions)?;
        for (pending, prompt) in std::mem::take(&mut self.pending).into_iter().zip(prompts) {
            let problem = Problem { prompt, ..pending.problem };
            match pending.split {
                Split::Train => {
                    self.rows.n_train_of_entry[pending.entry_idx] += 1;
                    self.rows.train.push(problem);
                }
                Split::HeldOut => self.rows.held_out.push(problem),
            }
        }
        Ok(())
    }

    pub(super) fn finish(mut self) -> Result<ProblemRows, TaskError> {
        self.render_pending()?;
        let refuse = |problem: String, remedy: &str| {
            Err(TaskError::File { path: self.spec.path.to_string().into(), problem, remedy: remedy.into() })
        };
        let n_train = self.rows.train.len() as u64;
        let n_held_out = self.rows.held_out.len() as u64;
        let share = self.spec.held_out_share;
        if n_train + n_held_out == 0 {
            return match &self.left_out {
                None => refuse("holds no problem".into(), "one problem per row"),
                Some(why) => refuse(
                    format!("holds no problem that `only` chooses; the first row left out: {why}"),
                    "only = { FIELD = [VALUES] } with fields and values that rows have",
                ),
            };
        }
        if n_held_out == 0 && share > 0.0 {
            let problem =
                format!("held_out_share {share} of its {n_train} problems is less than one problem");
            return refuse(problem, "raise held_out_share, or set it to 0 and evaluate on another file");
        }
        if n_train == 0 && share < 1.0 {
            let problem = format!("held_out_share {share} of its {n_held_out} problems is all of them");
            return refuse(problem, "lower held_out_share, or set it to 1 to evaluate only");
        }
        self.rows.check_mixture(self.spec)?;
        self.rows.census.n_train = n_train;
        self.rows.census.n_held_out = n_held_out;
        Ok(self.rows)
    }
}
