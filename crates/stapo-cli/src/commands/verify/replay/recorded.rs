//! What a run recorded of its steps, compared with the same steps made again.

use crate::shared::program::PROGRAM;
use anyhow::{Context, Result};
use serde_json::{Map, Value};
use stapo_core::record::{self, Event, EventKind, Manifest, Metrics, Record};
use stapo_rl::Plan;
use stapo_rl::run::{Checkpoint, Run, is_due, read_events};
use stapo_rl::train::{Replayed, best_of};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Keys of metrics that differ from one making of a step to the next: times, rates and memory. State hashes are compared
/// for every step.
const UNREPEATED: [&str; 8] = [
    "seconds",
    "wall_seconds",
    "tokens_per_second",
    "memory_bytes",
    "memory",
    "ranks",
    "decoding",
    "state_sha256",
];

/// Keys of metrics that an evaluation gives.
const EVALUATED: [&str; 4] = ["eval_accuracy", "eval_accuracy_before", "benchmarks", "benchmarks_before"];

/// The lines of a file of samples without what differs from one run of a program to the next: its processor time, and how far
/// it came before a time-out, which a replay takes from the record.
fn repeated(text: &str) -> Vec<Value> {
    let repeated = |line: &str| {
        let mut value: Value = serde_json::from_str(line).unwrap_or_else(|_| line.into());
        let Some(record) = value.as_object_mut() else { return value };
        let program = record.get_mut("program").and_then(Value::as_object_mut);
        match program.map(|program| (program.remove("cpu_seconds"), program.get("end"))) {
            Some((_, Some(end))) if end == "time_out" => drop(record.remove("program")),
            _ => {}
        }
        value
    };
    text.lines().map(repeated).collect()
}

/// The parts of a run folder with one file per step.
const PARTS: [&str; 5] = ["rollouts", "tokens", "explored", "episodes", "benchmarks"];

pub(super) struct RecordedRun {
    folder: PathBuf,
    manifest: Manifest,
    history: Vec<Metrics>,
    /// The lines of `metrics.jsonl` as they are written.
    lines: BTreeMap<u64, Map<String, Value>>,
    events: Vec<Event>,
    /// The state hashes of the kept checkpoints.
    checkpoints: BTreeMap<u64, String>,
}

impl RecordedRun {
    pub fn read(run: &Path, manifest: Manifest) -> Result<Self> {
        let path = run.join("metrics.jsonl");
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let history = record::parse_lines::<Metrics>(&text).context(path.display().to_string())?.records;
        let values = text.lines().filter_map(|line| serde_json::from_str::<Map<String, Value>>(line).ok());
        let lines = values.filter_map(|line| Some((line.get("step")?.as_u64()?, line))).collect();
        let checkpoints = Checkpoint::list(run)?;
        let checkpoints = checkpoints.iter().filter_map(|path| Checkpoint::recorded_hash(path)).collect();
        let events = read_events(run)?;
        Ok(Self { folder: run.to_owned(), manifest, history, lines, events, checkpoints })
    }

    /// The metrics of the steps before one.
    pub fn history_before(&self, step: u64) -> &[Metrics] {
        let n = self.history.iter().take_while(|metrics| metrics.step < step).count();
        &self.history[..n]
    }

    /// Whether the run evaluated after a step, or should have.
    pub fn evaluates(&self, plan: &Plan, step: u64) -> bool {
        let has_recorded = self
            .lines
            .get(&step)
            .is_some_and(|line| ["eval_accuracy", "benchmarks"].iter().any(|key| line.contains_key(*key)));
        let is_due = is_due(step, plan.config.evaluation.every_steps) || step == plan.config.steps;
        has_recorded || is_due && !self.was_changed_after(step, "evaluation.")
    }

    /// Whether settings of a table were changed after a step, so that the step was recorded with others.
    fn was_changed_after(&self, step: u64, table: &str) -> bool {
        let names =
            self.events.iter().filter(|event| event.event == EventKind::Setting && event.step >= step);
        names.filter_map(|event| event.change.as_ref()).any(|change| change.name.starts_with(table))
    }

    /// Compares a step with what the run recorded of it. Returns how many things differ.
    pub fn compare(&self, step: u64, replayed: &Replayed) -> Result<usize> {
        let mut n_different = self.compare_state(step, &replayed.state_hash);
        let Some(again) = &replayed.recorded else { return Ok(n_different) };
        n_different += self.compare_metrics(step, &again.metrics);
        let mut parts = PARTS.to_vec();
        let tables = [("record.", "rollouts"), ("evaluation.", "benchmarks"), ("canaries.", "warnings")];
        for (table, part) in tables.into_iter().filter(|(table, _)| self.was_changed_after(step, table)) {
            // The file of a step's episodes holds those of its evaluation too.
            parts.retain(|compared| *compared != part && (part, *compared) != ("benchmarks", "episodes"));
            let left_out = if part == "benchmarks" { "evaluations" } else { part };
            println!("step {step}: {left_out} NOT compared, since settings of {table}* were changed later");
        }
        n_different += self.compare_files(step, &again.files, &parts)?;
        if n_different == 0 {
            println!("step {step}: the same, {}", replayed.state_hash);
        }
        Ok(n_different)
    }

    /// Compares a state with the manifest, the metrics and the checkpoint of the step.
    fn compare_state(&self, step: u64, found: &str) -> usize {
        let in_manifest = self.manifest.steps.iter().find(|hash| hash.step == step);
        let in_metrics = self.lines.get(&step).and_then(|line| line.get("state_sha256")?.as_str());
        let recorded = [
            ("manifest.json", in_manifest.map(|hash| hash.sha256.as_str())),
            ("metrics.jsonl", in_metrics),
            ("its checkpoint", self.checkpoints.get(&step).map(String::as_str)),
        ];
        let known: Vec<(&str, &str)> =
            recorded.into_iter().filter_map(|(name, hash)| Some((name, hash?))).collect();
        if known.is_empty() {
            println!("step {step}: no hash recorded");
        }
        let different = known.iter().filter(|(_, hash)| *hash != found);
        for (name, hash) in different.clone() {
            println!("step {step}: DIFFERENT, recorded {hash} in {name}, replayed {found}");
        }
        different.count()
    }

    fn compare_metrics(&self, step: u64, again: &Metrics) -> usize {
        let Some(line) = self.lines.get(&step) else {
            println!("step {step}: DIFFERENT, metrics.jsonl has no line of it");
            return 1;
        };
        let again: Map<String, Value> = serde_json::from_str(&again.to_line()).unwrap_or_default();
        let has_other_evaluation = self.was_changed_after(step, "evaluation.");
        let has_other_canaries = self.was_changed_after(step, "canaries.");
        let is_left_out = |key: &str| {
            UNREPEATED.contains(&key)
                || has_other_evaluation && EVALUATED.contains(&key)
                || has_other_canaries && key == "warnings"
                // Another program may know other numbers.
                || !line.contains_key(key) && self.manifest.program != PROGRAM
        };
        let mut keys: Vec<&String> =
            line.keys().chain(again.keys()).filter(|key| !is_left_out(key)).collect();
        keys.sort();
        keys.dedup();
        let different: Vec<&String> =
            keys.into_iter().filter(|key| line.get(*key) != again.get(*key)).collect();
        let shown = |value: Option<&Value>| value.map_or("nothing".to_string(), Value::to_string);
        for key in &different {
            let (before, after) = (shown(line.get(*key)), shown(again.get(*key)));
            println!("step {step}: DIFFERENT, {key} of metrics.jsonl: recorded {before}, replayed {after}");
        }
        different.len()
    }

    /// Compares the samples and episodes of the evaluation before the first step.
    pub fn compare_start(&self, again: &[(String, String)]) -> Result<usize> {
        if self.was_changed_after(1, "evaluation.") {
            return Ok(0);
        }
        self.compare_files(0, again, &["benchmarks", "episodes"])
    }

    /// Compares the files that a step has in these parts.
    fn compare_files(&self, step: u64, again: &[(String, String)], parts: &[&str]) -> Result<usize> {
        let mut n_different = 0;
        for part in parts {
            let name = format!("{part}/step-{step:06}.jsonl");
            let path = self.folder.join(&name);
            let found = if path.is_file() {
                Some(std::fs::read_to_string(&path).with_context(|| path.display().to_string())?)
            } else {
                None
            };
            let again = again.iter().find(|(named, _)| *named == name).map(|(_, text)| text);
            if found.as_ref() != again && found.as_deref().map(repeated) != again.map(|text| repeated(text)) {
                n_different += 1;
                println!("step {step}: DIFFERENT, {name} is not what the step records");
            }
        }
        Ok(n_different)
    }

    /// Reads every kept checkpoint of a run that has no receipt to compare them with. Returns how many are bad.
    pub fn open_checkpoints(&self) -> Result<usize> {
        let refused =
            Checkpoint::list(&self.folder)?.into_iter().filter_map(|path| Checkpoint::open_kept(&path).err());
        let refused: Vec<String> = refused.map(|error| error.to_string()).collect();
        for error in &refused {
            println!("DIFFERENT, {error}");
        }
        Ok(refused.len())
    }

    /// Compares `best.json` with the best evaluation of the metrics. A run that was killed may have metrics of later steps.
    pub fn compare_best(&self, plan: &Plan) -> Result<usize> {
        let newest = self.checkpoints.keys().next_back().copied().unwrap_or_default();
        let expected = best_of(plan, self.history_before(newest + 1));
        let found = Run::read_best(&self.folder)?;
        let is_same = found == expected;
        if !is_same {
            println!("best.json: DIFFERENT, the metrics give another best evaluation");
        }
        Ok(usize::from(!is_same))
    }
}
