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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::study::tests::{metrics, run};
    use serde_json::json;

    /// A run of two steps by this program, whose setting of a table was changed after step 1.
    fn recorded(program: &str, changed: &str) -> RecordedRun {
        let line = |step: u64| match json!(metrics(step, &json!({}))) {
            Value::Object(line) => (step, line),
            other => panic!("{other}"),
        };
        let manifest =
            json!({"schema": 1, "inputs": [], "steps": [{"step": 1, "sha256": "aa"}], "program": program});
        let event = |kind: &str, step: u64, name: &str| {
            let change = json!({"name": name, "before": "1", "after": "2"});
            serde_json::from_value(
                json!({"schema": 1, "time": "t", "event": kind, "step": step, "change": change}),
            )
            .unwrap()
        };
        RecordedRun {
            folder: PathBuf::from("gone"),
            manifest: serde_json::from_value(manifest).unwrap(),
            history: [1, 2].map(|step| metrics(step, &json!({}))).to_vec(),
            lines: [1, 2].map(line).into(),
            events: vec![event("setting", 1, changed), event("accepted", 9, "record.responses")],
            checkpoints: BTreeMap::new(),
        }
    }

    /// A setting that was changed after step 1 held for step 2 already, and steps before were recorded with another.
    #[test]
    fn a_setting_changed_after_a_step_is_another_for_it() {
        let run_of_two = recorded(PROGRAM, "evaluation.samples");
        let changed = |step, table| run_of_two.was_changed_after(step, table);
        assert!(changed(0, "evaluation.") && changed(1, "evaluation.") && !changed(2, "evaluation."));
        assert!(!changed(0, "canaries.") && !changed(0, "record."), "an accepted change is no setting");
        assert_eq!([1, 2, 3].map(|step| run_of_two.history_before(step).len()), [0, 1, 2]);
    }

    #[test]
    fn an_evaluation_is_due_or_was_recorded() {
        let plan =
            |every: &str| run("s/a", &["steps=5", &format!("evaluation.every_steps={every}")], vec![]).plan;
        let mut run_of_two = recorded(PROGRAM, "evaluation.every_steps");
        // The change makes no difference to what is due after it.
        assert_eq!(
            [0, 1, 2, 3, 4, 5].map(|step| run_of_two.evaluates(&plan("2"), step)),
            [false, false, true, false, true, true]
        );
        assert!(!run_of_two.evaluates(&plan("1"), 1), "what is due by a later setting was not then");
        for key in ["eval_accuracy", "benchmarks"] {
            run_of_two.lines.get_mut(&1).unwrap().insert(key.into(), json!(0.5));
            assert!(run_of_two.evaluates(&plan("0"), 1), "{key}");
            run_of_two.lines.get_mut(&1).unwrap().remove(key);
        }
    }

    #[test]
    fn a_state_is_compared_with_every_place_that_has_its_hash() {
        let mut run_of_two = recorded(PROGRAM, "x");
        assert_eq!(
            (
                run_of_two.compare_state(1, "aa"),
                run_of_two.compare_state(1, "bb"),
                run_of_two.compare_state(2, "bb")
            ),
            (0, 1, 0)
        );
        run_of_two.lines.get_mut(&1).unwrap().insert("state_sha256".into(), json!("bb"));
        run_of_two.checkpoints.insert(1, "cc".into());
        assert_eq!(["aa", "bb", "cc", "dd"].map(|found| run_of_two.compare_state(1, found)), [2, 2, 2, 3]);
    }

    #[test]
    fn metrics_that_a_replay_repeats_are_compared() {
        let again = |keys: &Value| metrics(1, keys);
        let n_different =
            |run_of_two: &RecordedRun, keys: &Value| run_of_two.compare_metrics(1, &again(keys));
        let run_of_two = recorded(PROGRAM, "x");
        assert_eq!(n_different(&run_of_two, &json!({})), 0);
        assert_eq!(n_different(&run_of_two, &json!({"loss": 0.5, "accuracy": 0.25})), 2);
        // Times and rates are not repeated, and another hash is what `compare_state` counts.
        let other_rates = json!({"tokens_per_second": {"rollout": 2.0, "update": 2.0}, "state_sha256": "ff", "wall_seconds": 3.0});
        assert_eq!(n_different(&run_of_two, &other_rates), 0);
        let evaluated = json!({"eval_accuracy": 0.5, "warnings": ["w"]});
        assert_eq!(n_different(&run_of_two, &evaluated), 2, "this program knows both numbers");
        assert_eq!(n_different(&recorded("another", "x"), &evaluated), 0);
        assert_eq!(n_different(&recorded("another", "x"), &json!({"loss": 0.5})), 1);
        assert_eq!(n_different(&recorded(PROGRAM, "evaluation.samples"), &evaluated), 1);
        assert_eq!(n_different(&recorded(PROGRAM, "canaries.enabled"), &evaluated), 1);
        assert_eq!(run_of_two.compare_metrics(3, &metrics(3, &json!({}))), 1, "no line");
    }

    /// The processor time of a program is another each time, and one that ran out of time came another way each time.
    #[test]
    fn what_differs_from_one_run_of_a_program_to_the_next_is_left_out() {
        let line = |end: &str, seconds: f64, printed: &str| {
            format!(
                "{{\"a\": 1, \"program\": {{\"end\": \"{end}\", \"cpu_seconds\": {seconds}, \"printed\": \"{printed}\"}}}}\n"
            )
        };
        assert_eq!(repeated(&line("passed", 1.0, "x")), repeated(&line("passed", 2.0, "x")));
        assert_ne!(repeated(&line("passed", 1.0, "x")), repeated(&line("passed", 1.0, "y")));
        assert_ne!(repeated(&line("passed", 1.0, "x")), repeated(&line("failed_test", 1.0, "x")));
        assert_eq!(repeated(&line("time_out", 1.0, "x")), [json!({"a": 1})]);
        assert_eq!(repeated("no record\n[1]\n"), [json!("no record"), json!([1])]);
    }
}
