//! The list of runs, kept up to date by looking at lengths and times of files before reading anything.

use super::lines::open_plain;
use super::sampled::{N_SPARKS, evaluated_steps, sampled};
use super::status::{Facts, Status, StatusKind, status};
use crate::shared::discover::{Below, Found, below};
use crate::shared::notes::{self, Notes, RunNote};
use rayon::prelude::*;
use serde::Serialize;
use stapo_core::record::catalogue::{self, Metric};
use stapo_core::record::{self, Event, Experiment};
use stapo_rl::run::{check_tree, read_events};
use stapo_rl::untrusted::read_text;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const MAX_EXPERIMENT_BYTES: u64 = 16 << 20;
/// The numbers that the list shows, each as a sparkline.
pub const LISTED: [Metric; 5] = [
    catalogue::EVAL_ACCURACY,
    catalogue::ACCURACY,
    catalogue::REWARD_MEAN,
    catalogue::ENTROPY_MEAN,
    catalogue::RESPONSE_TOKENS_MEAN,
];
const MAX_EVENT_BYTES: u64 = 32 << 20;
/// A run that was written so lately, or that is running, is looked at each time.
const ACTIVE_SECONDS: u64 = 600;

/// Which runs are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// Runs that may be growing, which are few.
    Active,
    /// Every run, and folders that are new or gone.
    Everything,
}

/// One run in the list.
#[derive(Debug, Clone, Serialize, PartialEq)]
pub struct Row {
    pub id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experiment: Option<String>,
    /// Arm and seed within the experiment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arm: Option<String>,
    pub seed: Option<u64>,
    pub status: Status,
    pub step: u64,
    pub steps: Option<u64>,
    /// Seconds until the last step, while the run is running.
    pub seconds_left: Option<f64>,
    /// Seconds since 1970 of the last line.
    pub written: u64,
    /// The last value of each number that the list shows.
    pub last: BTreeMap<&'static str, f64>,
    /// Values over the run, oldest first.
    pub sparks: BTreeMap<&'static str, Vec<f32>>,
    /// Changes whenever the files of the run do.
    pub stamp: String,
    pub n_warnings: usize,
    /// Whether the run has records of `stapo eval`.
    pub is_evaluated: bool,
    #[serde(flatten)]
    pub note: RunNote,
}

/// Length and time of a file; absent files have none.
type FileStamp = Option<(u64, SystemTime)>;

/// What is kept of a run between two looks at it.
#[derive(Debug)]
struct Known {
    found: Found,
    metrics: FileStamp,
    events_stamp: FileStamp,
    plan_stamp: FileStamp,
    events: Vec<Event>,
    problem: Option<String>,
    row: Row,
    seconds_per_step: Option<f64>,
    /// Steps between evaluations.
    evaluates_every: u64,
    /// Evaluations of this run that lie elsewhere.
    evaluations: Vec<PathBuf>,
}

/// All runs below a folder.
#[derive(Debug)]
pub struct Index {
    root: PathBuf,
    host: String,
    runs: BTreeMap<String, Known>,
    experiments: BTreeMap<String, (FileStamp, Option<Experiment>)>,
    /// The notes of the folders that hold runs.
    notes: BTreeMap<PathBuf, (FileStamp, Notes)>,
    /// Evaluations outside of runs, with the run that each names.
    evaluations: BTreeMap<PathBuf, Option<PathBuf>>,
}

/// What changed since the last look.
#[derive(Debug, Default)]
pub struct Changes {
    pub rows: Vec<Row>,
    pub gone: Vec<String>,
}

impl Index {
    pub fn new(root: &Path, host: String) -> Self {
        Self {
            root: root.to_owned(),
            host,
            runs: BTreeMap::new(),
            experiments: BTreeMap::new(),
            notes: BTreeMap::new(),
            evaluations: BTreeMap::new(),
        }
    }

    /// Looks at runs and returns the rows that changed.
    pub fn refresh(&mut self, look: Look) -> Changes {
        let mut changes = Changes::default();
        if look == Look::Everything {
            let Below { runs: found, evaluations } = below(&self.root);
            self.read_experiments(&found);
            self.read_notes(&found);
            self.read_evaluations(evaluations);
            self.runs.retain(|id, _| {
                let is_there = found.contains_key(id);
                if !is_there {
                    changes.gone.push(id.clone());
                }
                is_there
            });
            for (id, found) in found {
                let known = self.runs.entry(id.clone()).or_insert_with(|| Known::new(&id, found.clone()));
                known.found = found;
            }
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let (host, experiments) = (&self.host, &self.experiments);
        let (root, notes, evaluations) = (&self.root, &self.notes, &self.evaluations);
        let looked =
            self.runs.par_iter_mut().filter(|(_, known)| look == Look::Everything || known.is_active(now));
        changes.rows = looked
            .filter_map(|(_, known)| {
                let is_changed = known.look()
                    | known.take_arm(experiments)
                    | known.take_status(host)
                    | known.take_note(root, notes)
                    | known.take_evaluations(evaluations);
                is_changed.then(|| known.row.clone())
            })
            .collect();
        changes
    }

    pub fn rows(&self) -> Vec<&Row> {
        self.runs.values().map(|known| &known.row).collect()
    }

    /// The folder of a run. Ids come from the folder itself, so no id leads out of it.
    pub fn folder(&self, id: &str) -> Option<PathBuf> {
        self.runs.get(id).map(|known| known.found.folder.clone())
    }

    pub fn events(&self, id: &str) -> &[Event] {
        self.runs.get(id).map_or(&[], |known| &known.events)
    }

    /// The evaluations of a run that lie outside of it.
    pub fn evaluations(&self, id: &str) -> &[PathBuf] {
        self.runs.get(id).map_or(&[], |known| &known.evaluations)
    }

    /// The folder of an experiment.
    pub fn experiment_folder(&self, id: &str) -> Option<PathBuf> {
        self.experiments
            .contains_key(id)
            .then(|| if id == "." { self.root.clone() } else { self.root.join(id) })
    }

    fn read_experiments(&mut self, found: &BTreeMap<String, Found>) {
        let mut ids: Vec<&String> = found.values().filter_map(|found| found.experiment.as_ref()).collect();
        ids.dedup();
        for id in ids {
            let folder = if id == "." { self.root.clone() } else { self.root.join(id) };
            let stamp = stamp(&folder.join("experiment.json"));
            if self.experiments.get(id).is_none_or(|(known, _)| *known != stamp) {
                self.experiments.insert(id.clone(), (stamp, experiment(&folder)));
            }
        }
    }
}

impl Index {
    fn read_notes(&mut self, found: &BTreeMap<String, Found>) {
        let homes = found.values().filter_map(|found| notes_on(&self.root, found));
        let folders: BTreeSet<PathBuf> = homes.map(|(folder, _)| folder).collect();
        for folder in folders {
            let stamp = stamp(&folder.join(notes::FILE));
            if self.notes.get(&folder).is_none_or(|(known, _)| *known != stamp) {
                let read = Notes::read(&folder).unwrap_or_default();
                self.notes.insert(folder, (stamp, read));
            }
        }
    }

    /// Takes the evaluations below the folder, and those of `evals` next to it, where `stapo eval` writes by default.
    fn read_evaluations(&mut self, mut found: Vec<PathBuf>) {
        let root = std::path::absolute(&self.root).ok();
        let default_folder = root.and_then(|root| Some(root.parent()?.join("evals")));
        let default_folder = default_folder.filter(|path| path.is_dir());
        found.extend(default_folder.into_iter().flat_map(|folder| below(&folder).evaluations));
        self.evaluations.retain(|path, _| found.contains(path));
        for path in found {
            self.evaluations.entry(path.clone()).or_insert_with(|| evaluated_run(&path));
        }
    }
}

/// The folder with the notes on a run, and the run's name there.
fn notes_on(root: &Path, found: &Found) -> Option<(PathBuf, String)> {
    let absolute = |path: &Path| std::path::absolute(path).ok();
    let experiment =
        found.experiment.as_ref().map(|id| if id == "." { root.to_owned() } else { root.join(id) });
    let experiment = experiment.and_then(|folder| absolute(&folder));
    notes::home(&absolute(&found.folder)?, experiment.as_deref())
}

/// The run that an evaluation is of, as `eval.json` names it.
fn evaluated_run(folder: &Path) -> Option<PathBuf> {
    let text = read_text(&folder.join("eval.json")).ok()?;
    let plan: serde_json::Value = serde_json::from_str(&text).ok()?;
    let named = plan.get("prompting_of")?.as_str()?;
    // The name is a path from where the evaluation was made, which may be another folder.
    let parts = Path::new(named).components().filter(|part| matches!(part, Component::Normal(_)));
    Some(parts.collect()).filter(|path: &PathBuf| path.components().next().is_some())
}

/// The experiment of a folder; `None` if its file cannot be read.
fn experiment(folder: &Path) -> Option<Experiment> {
    let mut text = String::new();
    let file = open_plain(&folder.join("experiment.json")).ok()?;
    file.take(MAX_EXPERIMENT_BYTES).read_to_string(&mut text).ok()?;
    record::parse(&text).ok()
}

impl Known {
    fn new(id: &str, found: Found) -> Self {
        let broken = Status { kind: StatusKind::Broken, text: String::new() };
        let row = Row {
            id: id.to_string(),
            experiment: None,
            arm: None,
            seed: None,
            status: broken,
            step: 0,
            steps: None,
            seconds_left: None,
            written: 0,
            last: BTreeMap::new(),
            sparks: BTreeMap::new(),
            stamp: String::new(),
            n_warnings: 0,
            is_evaluated: false,
            note: RunNote::default(),
        };
        Known {
            found,
            metrics: None,
            events_stamp: None,
            plan_stamp: None,
            events: Vec::new(),
            problem: None,
            row,
            seconds_per_step: None,
            evaluates_every: 0,
            evaluations: Vec::new(),
        }
    }

    /// Sets what people wrote about the run; true if it changed.
    fn take_note(&mut self, root: &Path, notes: &BTreeMap<PathBuf, (FileStamp, Notes)>) -> bool {
        let known = notes_on(root, &self.found)
            .and_then(|(folder, name)| notes.get(&folder)?.1.runs.get(&name).cloned());
        let note = known.unwrap_or_default();
        let is_changed = note != self.row.note;
        self.row.note = note;
        is_changed
    }

    /// Sets the evaluations that name this run; true if they changed.
    fn take_evaluations(&mut self, evaluations: &BTreeMap<PathBuf, Option<PathBuf>>) -> bool {
        let folder = std::path::absolute(&self.found.folder).unwrap_or_default();
        let names_this = |named: &PathBuf| folder.ends_with(named);
        let mine = evaluations.iter().filter(|(_, named)| named.as_ref().is_some_and(names_this));
        let mine: Vec<PathBuf> = mine.map(|(path, _)| path.clone()).collect();
        let is_evaluated = !mine.is_empty() || self.found.folder.join("eval").is_dir();
        let is_changed = mine != self.evaluations || is_evaluated != self.row.is_evaluated;
        (self.evaluations, self.row.is_evaluated) = (mine, is_evaluated);
        is_changed
    }

    fn is_active(&self, now: u64) -> bool {
        self.row.status.kind == StatusKind::Running || self.row.written + ACTIVE_SECONDS > now
    }

    /// Sets the arm and the seed of a run of an experiment; true if they changed.
    fn take_arm(&mut self, experiments: &BTreeMap<String, (FileStamp, Option<Experiment>)>) -> bool {
        let mut arm_of_run = (self.found.experiment.clone(), None, self.row.seed);
        if let Some(id) = &self.found.experiment
            && let Some((_, Some(experiment))) = experiments.get(id)
        {
            let below = self.row.id.strip_prefix(&format!("{id}/")).unwrap_or(&self.row.id);
            if let Some(arm) = experiment.arms.iter().find(|arm| arm.run == below) {
                arm_of_run = (Some(id.clone()), Some(arm.name.clone()), Some(arm.seed));
            }
        }
        let is_changed = (&self.row.experiment, &self.row.arm, &self.row.seed)
            != (&arm_of_run.0, &arm_of_run.1, &arm_of_run.2);
        (self.row.experiment, self.row.arm, self.row.seed) = arm_of_run;
        is_changed
    }

    /// Sets the status and the time left; true if they changed.
    fn take_status(&mut self, host: &str) -> bool {
        let status = self.status(host);
        let left = if status.kind == StatusKind::Running { self.seconds_left() } else { None };
        // The time left changes with the files, which are looked at before, or with the status.
        let is_changed = status != self.row.status;
        (self.row.status, self.row.seconds_left) = (status, left);
        is_changed
    }

    /// Reads what changed; false if nothing did.
    fn look(&mut self) -> bool {
        let folder = self.found.folder.clone();
        let stamps = ["metrics.jsonl", "events.jsonl", "plan.toml"].map(|file| stamp(&folder.join(file)));
        if stamps == [self.metrics, self.events_stamp, self.plan_stamp] {
            return false;
        }
        // A run that is new, or that could not be read before, is read as a whole.
        let reads_all = self.row.stamp.is_empty() || self.problem.is_some();
        if reads_all {
            // Links inside are refused here; later readings refuse them file by file.
            self.problem = check_tree(&folder).err().map(|error| one_line(&error.to_string()));
        }
        let is_readable = self.problem.is_none();
        if is_readable && (reads_all || stamps[2] != self.plan_stamp) {
            self.read_plan();
        }
        let has_new_events = reads_all || stamps[1] != self.events_stamp;
        if is_readable && has_new_events && stamps[1].is_some_and(|(n, _)| n <= MAX_EVENT_BYTES) {
            self.events = read_events(&folder).unwrap_or_default();
        }
        if is_readable && (reads_all || stamps[0] != self.metrics) {
            match sampled(&folder.join("metrics.jsonl")) {
                Ok(rows) => {
                    self.summarise(&rows);
                    self.draw_held_out(&folder.join("metrics.jsonl"));
                }
                Err(error) => self.problem = Some(format!("metrics.jsonl: {error}")),
            }
        }
        [self.metrics, self.events_stamp, self.plan_stamp] = stamps;
        self.row.n_warnings = self
            .events
            .iter()
            .filter(|event| {
                use stapo_core::record::EventKind::{Canary, Warning};
                matches!(event.event, Warning | Canary)
            })
            .count();
        let newest = stamps.iter().flatten().map(|(_, time)| *time).max();
        self.row.written =
            newest.and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |d| d.as_secs());
        let nanos = |stamp: FileStamp| {
            let time = stamp.and_then(|(_, time)| time.duration_since(UNIX_EPOCH).ok());
            format!(
                "{}.{}",
                stamp.map_or(0, |(n, _)| n),
                time.map_or(0, |time| time.as_nanos() % 1_000_000_000_000)
            )
        };
        self.row.stamp = stamps.map(nanos).join("-");
        true
    }

    fn read_plan(&mut self) {
        let text = read_text(&self.found.folder.join("plan.toml"));
        let table = text
            .map_err(|error| error.to_string())
            .and_then(|text| text.parse::<toml::Table>().map_err(|error| error.message().to_string()));
        match table {
            Ok(table) => {
                let whole = |key: &str| {
                    table.get(key).and_then(toml::Value::as_integer).and_then(|n| u64::try_from(n).ok())
                };
                self.row.steps = whole("steps");
                self.row.seed = whole("seed");
                let every = table.get("evaluation").and_then(|table| table.get("every_steps"));
                let every = every.and_then(toml::Value::as_integer).and_then(|n| u64::try_from(n).ok());
                self.evaluates_every = every.unwrap_or(0);
                self.problem = None;
            }
            Err(error) => self.problem = Some(one_line(&format!("plan.toml: {error}"))),
        }
    }

    /// Fills the row from lines spread over the metrics, the last ones included.
    fn summarise(&mut self, rows: &[Vec<(String, f64)>]) {
        let get =
            |row: &Vec<(String, f64)>, key: &str| row.iter().find(|(known, _)| known == key).map(|(_, v)| *v);
        self.row.step = rows.last().and_then(|row| get(row, "step")).unwrap_or(0.0) as u64;
        self.row.last.clear();
        self.row.sparks.clear();
        for Metric { key, .. } in LISTED {
            let values: Vec<f64> = rows.iter().filter_map(|row| get(row, key)).collect();
            if let Some(&last) = values.last() {
                self.row.last.insert(key, last);
                let every = values.len().div_ceil(N_SPARKS).max(1);
                let mut sparks: Vec<f32> = values.iter().rev().step_by(every).map(|v| coarse(*v)).collect();
                sparks.reverse();
                self.row.sparks.insert(key, sparks);
            }
        }
        let seconds: Vec<f64> =
            rows.iter().rev().take(20).filter_map(|row| get(row, "seconds.step")).collect();
        self.seconds_per_step =
            (!seconds.is_empty()).then(|| seconds.iter().sum::<f64>() / seconds.len() as f64);
    }

    /// Draws the held-out accuracy from the steps that were evaluated, the start included, of which the lines that are
    /// spread over a long file show a few by accident.
    fn draw_held_out(&mut self, metrics: &Path) {
        let found = evaluated_steps(metrics, self.evaluates_every, self.row.step).unwrap_or_default();
        if let Some(&last) = found.last() {
            let every = found.len().div_ceil(N_SPARKS).max(1);
            let mut sparks: Vec<f32> = found.iter().rev().step_by(every).map(|v| coarse(*v)).collect();
            sparks.reverse();
            self.row.last.insert(catalogue::EVAL_ACCURACY.key, last);
            self.row.sparks.insert(catalogue::EVAL_ACCURACY.key, sparks);
        }
    }

    fn status(&self, host: &str) -> Status {
        let written = UNIX_EPOCH + Duration::from_secs(self.row.written);
        status(&Facts {
            folder: &self.found.folder,
            events: &self.events,
            step: self.row.step,
            steps: self.row.steps,
            age: SystemTime::now().duration_since(written).unwrap_or_default(),
            seconds_per_step: self.seconds_per_step,
            host,
            problem: self.problem.as_deref(),
        })
    }

    fn seconds_left(&self) -> Option<f64> {
        Some(self.seconds_per_step? * self.row.steps?.saturating_sub(self.row.step) as f64)
    }
}

/// Four digits, which are more than a sparkline shows.
fn coarse(value: f64) -> f32 {
    format!("{value:.3e}").parse().unwrap_or(value as f32)
}

fn one_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_string()
}

fn stamp(path: &Path) -> FileStamp {
    let metadata = path.symlink_metadata().ok()?;
    Some((metadata.len(), metadata.modified().ok()?))
}

#[cfg(test)]
mod tests;
