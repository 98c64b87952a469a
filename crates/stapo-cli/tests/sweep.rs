//! Training, pretraining, evaluation and experiments under faults at the file operations they make: killed there
//! (a write cut in half), failing once there, or on a disk that is full from there on. Whatever the fault left behind,
//! going on must give the same metrics, records, hashes and weights as a run that nothing happened to.

#![cfg(debug_assertions)]

use crate::common::{check_renames, copy_folder};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One command that writes a folder, and how it goes on.
struct Writer {
    name: &'static str,
    start: Vec<String>,
    /// The command that goes on; where it refuses because nothing was begun, `start` is called again.
    resume: Vec<String>,
    /// Every so many operations are tried, with the three faults in turns; `STAPO_SWEEP_ALL=1` tries every fault at each.
    stride: usize,
}

/// Files by name.
type Contents = BTreeMap<String, Vec<u8>>;

const INPUTS: [&str; 6] =
    ["data.jsonl", "texts.jsonl", "pairs.jsonl", "sft.toml", "config.toml", "experiment.toml"];

const FAULTS: [&str; 3] = ["kill", "error", "full"];

#[test]
fn a_training_run_goes_on_from_every_fault() {
    let work = Work::new();
    let writer = Writer {
        name: "train",
        start: words("train config.toml --out out --json"),
        resume: words("train --resume out --json"),
        stride: 5,
    };
    work.sweep(&writer);
}

#[test]
fn a_supervised_run_goes_on_from_every_fault() {
    let work = Work::new();
    let writer = Writer {
        name: "sft",
        start: words("sft sft.toml --out out --json --set steps=4 --set checkpoint_every_steps=2"),
        resume: words("sft --resume out --json"),
        stride: 7,
    };
    work.sweep(&writer);
}

#[test]
fn a_run_on_preferences_goes_on_from_every_fault() {
    let work = Work::new();
    let writer = Writer {
        name: "prefer",
        start: words(
            "prefer --model base/model --data pairs.jsonl --out out --json --set steps=4 --set update.batch_rows=4 --set record.checkpoint_every_steps=2",
        ),
        resume: words("prefer --resume out --json"),
        stride: 7,
    };
    work.sweep(&writer);
}

#[test]
fn a_reward_model_in_training_goes_on_from_every_fault() {
    let work = Work::new();
    let writer = Writer {
        name: "rm",
        start: words(
            "rm --model base/model --data pairs.jsonl --out out --json --set steps=4 --set update.batch_rows=4 --set record.checkpoint_every_steps=2",
        ),
        resume: words("rm --resume out --json"),
        stride: 11,
    };
    work.sweep(&writer);
}

#[test]
fn an_evaluation_goes_on_from_every_fault() {
    let work = Work::new();
    let writer = Writer {
        name: "eval",
        start: words(
            "eval --model base/model --benchmarks data.jsonl --template {{problem}} --samples 3 --max-tokens 12 --out out --json",
        ),
        resume: words("eval --resume out --json"),
        stride: 3,
    };
    work.sweep(&writer);
}

#[test]
fn an_experiment_goes_on_from_every_fault() {
    let work = Work::new();
    let words = words("experiment experiment.toml --out out --json");
    let writer = Writer { name: "experiment", start: words.clone(), resume: words, stride: 17 };
    work.sweep(&writer);
}

/// A folder with a model of 6 KB, problems, and configs.
struct Work {
    folder: tempfile::TempDir,
}

impl Work {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let problems = (0..12).map(|n| format!("{{\"problem\": \"{n}\", \"answer\": \"1\"}}\n"));
        std::fs::write(at.join("data.jsonl"), problems.collect::<String>()).unwrap();
        let texts =
            (0..24).map(|n| format!("{{\"prompt\": \"{}\", \"response\": \"{}\"}}\n", n % 12, 1 + n / 12));
        std::fs::write(at.join("texts.jsonl"), texts.collect::<String>()).unwrap();
        let pairs =
            (0..12).map(|n| format!("{{\"prompt\": \"{n}\", \"chosen\": \"1\", \"rejected\": \"2\"}}\n"));
        std::fs::write(at.join("pairs.jsonl"), pairs.collect::<String>()).unwrap();
        std::fs::write(at.join("sft.toml"), SUPERVISED).unwrap();
        std::fs::write(at.join("config.toml"), CONFIG).unwrap();
        let config = CONFIG.replace("steps = 4", "steps = 2").replace("\n[", "\n[config.");
        std::fs::write(at.join("experiment.toml"), format!("{EXPERIMENT}\n[config]{config}")).unwrap();
        let made = call(at, &words("sft sft.toml --out base"), &[]);
        assert!(made.status.success(), "{}", said(&made));
        Self { folder }
    }

    /// A copy of the folder for one trial.
    fn copy(&self) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        for name in INPUTS {
            std::fs::copy(self.folder.path().join(name), copy.path().join(name)).unwrap();
        }
        copy_folder(&self.folder.path().join("base/model"), &copy.path().join("base/model"));
        copy
    }

    fn sweep(&self, writer: &Writer) {
        let whole = self.copy();
        let trace = whole.path().join("trace");
        let output = call(whole.path(), &writer.start, &[("STAPO_DISK_TRACE", trace.to_str().unwrap())]);
        assert!(output.status.success(), "{}", said(&output));
        let expected = contents(&whole.path().join("out"));
        let trace = std::fs::read_to_string(&trace).unwrap();
        let n_operations = trace.lines().count();
        check_renames(&trace);
        assert!(n_operations > 10, "{n_operations} operations");

        let all = std::env::var_os("STAPO_SWEEP_ALL").is_some();
        let stride = if all { 1 } else { writer.stride };
        let places = (1..=n_operations).step_by(stride).enumerate();
        let is_tried = |idx: usize, fault: usize| all || idx % FAULTS.len() == fault;
        let points: Vec<(&str, usize)> = places
            .flat_map(|(idx, place)| {
                let faults = FAULTS.into_iter().enumerate().filter(move |(fault, _)| is_tried(idx, *fault));
                faults.map(move |(_, fault)| (fault, place))
            })
            .collect();
        let next = AtomicUsize::new(0);
        let failures = Mutex::new(Vec::new());
        let trials = || {
            while let Some(&(fault, place)) = points.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(problem) = self.trial(writer, fault, place, &expected) {
                    failures.lock().unwrap().push(format!("{fault}:{place}: {problem}"));
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(trials);
            }
        });
        let failures = failures.into_inner().unwrap();
        println!("{}: {} faults at {n_operations} file operations", writer.name, points.len());
        assert!(failures.is_empty(), "{}: {} failures\n{}", writer.name, failures.len(), failures.join("\n"));
    }

    /// One fault, a second one while going on, and then the rest in peace.
    fn trial(&self, writer: &Writer, fault: &str, place: usize, expected: &Contents) -> Result<(), String> {
        let copy = self.copy();
        let at = copy.path();
        let hit = call(at, &writer.start, &[("STAPO_DISK_FAULT", &format!("{fault}:{place}"))]);
        let is_ended = match fault {
            "kill" => hit.status.code().is_none() || writer.name == "experiment",
            _ => matches!(hit.status.code(), Some(0..=2)),
        };
        if !is_ended {
            return Err(format!("ended with {}: {}", hit.status, said(&hit)));
        }
        let again = format!("{fault}:{}", place % 17 + 1);
        go_on(at, writer, &[("STAPO_DISK_FAULT", &again)]);
        let last = go_on(at, writer, &[]);
        if !last.status.success() {
            return Err(format!("then {again}: does not go on: {}", said(&last)));
        }
        let found = contents(&at.join("out"));
        let names = expected.keys().chain(found.keys());
        let beside: Vec<String> = unexpected(at);
        if !beside.is_empty() {
            return Err(format!("then {again}: left behind {beside:?}"));
        }
        let differing: BTreeSet<&String> =
            names.filter(|name| found.get(*name) != expected.get(*name)).collect();
        if !differing.is_empty() {
            return Err(format!("then {again}: differing: {differing:?}"));
        }
        let verified = call(at, &words("verify out"), &[]);
        if verified.status.success() { Ok(()) } else { Err(format!("then {again}: {}", said(&verified))) }
    }
}

/// Resumes, or starts where nothing had been begun that could be resumed.
fn go_on(at: &Path, writer: &Writer, environment: &[(&str, &str)]) -> Output {
    let resumed = call(at, &writer.resume, environment);
    if resumed.status.code() == Some(2) && writer.resume != writer.start {
        let started = call(at, &writer.start, environment);
        if !(said(&started).contains("exists already")) {
            return started;
        }
    }
    resumed
}

fn call(at: &Path, args: &[String], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command
        .current_dir(at)
        .args(args)
        .env("STAPO_THREADS", "1")
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_string).collect()
}

/// Every file of a folder by name, without what depends on time, process or the number of starts.
fn contents(folder: &Path) -> Contents {
    let mut found = Contents::new();
    for path in files(folder) {
        let name = path.strip_prefix(folder).unwrap().to_string_lossy().into_owned();
        let is_free = ["lock", "events.jsonl", "manifest.sha256"]
            .iter()
            .any(|free| path.file_name().is_some_and(|name| name == *free));
        if !is_free {
            found.insert(name, without_times(&path, std::fs::read(&path).unwrap()));
        }
    }
    found
}

/// What lies in the work folder besides the inputs and the outcome.
fn unexpected(at: &Path) -> Vec<String> {
    let names = std::fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name != "out" && name != "base" && !INPUTS.contains(&name.as_str())).collect()
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            found.extend(files(&entry));
        } else {
            found.push(entry);
        }
    }
    found
}

/// JSON without the keys that measure time; other files as they are.
fn without_times(path: &Path, bytes: Vec<u8>) -> Vec<u8> {
    let is_json = path.extension().is_some_and(|e| e == "json" || e == "jsonl");
    let Some(text) = std::str::from_utf8(&bytes).ok().filter(|_| is_json) else { return bytes };
    let values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
    let values: Vec<Value> = values.map(|value| timeless(value.unwrap())).collect();
    serde_json::to_vec(&values).unwrap()
}

/// A value without rates, seconds and memory. The seal of a checkpoint covers its line and its hash of metrics, and so the
/// clock, as do the hashes of all files in a manifest.
fn timeless(value: Value) -> Value {
    let is_free = |key: &str| {
        let free = ["memory_bytes", "seal", "files", "records"];
        key.contains("seconds") || key.contains("per_second") || free.contains(&key)
    };
    match value {
        Value::Object(map) => {
            let kept = map.into_iter().filter(|(key, _)| !is_free(key));
            kept.map(|(key, value)| (key, timeless(value))).collect()
        }
        Value::Array(values) => values.into_iter().map(timeless).collect(),
        Value::String(text) if text.starts_with('{') => {
            serde_json::from_str(&text).map_or(text.into(), timeless)
        }
        other => other,
    }
}

const SUPERVISED: &str = r#"
steps = 60
batch_tokens = 96
microbatch_tokens = 96
learning_rate = 2e-2
evaluation_every_steps = 0
checkpoint_every_steps = 60

[start]
kind = "fresh"
width = 16
n_layers = 1
n_heads = 1
n_kv_heads = 1
head_dim = 16
ffn_width = 16
max_positions = 128
deviation = 0.1

[texts]
kind = "jsonl"
path = "texts.jsonl"
prompt_field = "prompt"
response_field = "response"
"#;

const CONFIG: &str = r#"
steps = 4

[model]
kind = "path"
path = "base/model"

[task]
kind = "jsonl"
path = "data.jsonl"
template = "{{problem}}"
held_out_share = 0.3
verifier = { kind = "rule", fallback = "last-number" }

[objective]
preset = "stapo"
masks = [{ kind = "spurious", tau_p = 0.9, q = 0.5, quantile_over = "candidates", select = "low_entropy", seed = 0 }]

[rollout]
problems_per_step = 4
group_size = 4
max_response_tokens = 8

[update]
problems_per_minibatch = 2

[evaluation]
problems = 1
every_steps = 2
benchmarks = ["data.jsonl"]
benchmark_limit = 1
benchmark_samples = 2
benchmark_template = "{{problem}}"

[record]
checkpoint_every_steps = 2
responses_every_steps = 1
state_hash_every_steps = 1
"#;

const EXPERIMENT: &str = r#"
name = "two"
seeds = [0]
method = "b"

[[arms]]
name = "a"
set = ["update.learning_rate=1e-3"]

[[arms]]
name = "b"
set = []
"#;
