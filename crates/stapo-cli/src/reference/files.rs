//! The files of a run, an evaluation and an experiment, and the keys of their records.

use super::keys::record_rows;
use super::{Entry, Page, Section};
use serde_json::Value;
use stapo_core::record::{
    Best, BuildRecord, EpisodeRecord, EvalRecord, Event, Experiment, LockRecord, Manifest, PretrainMetrics,
    ResponseRecord, StepFiles, TokenRecord,
};
use stapo_rl::plan::config::schema;

const INTRO: &str = "\
Everything that a command shows comes from these files, so other programs can read them too. Files that end in `.jsonl` have one \
JSON object per line. Every record has a `schema`, the version of its format. New versions of the program add keys without \
changing it; a program refuses a record with a higher version than it knows. Keys that are absent have no value.";

/// The files of a run folder. A name that ends in `/` is a folder.
pub const RUN: [(&str, &str); 17] = [
    ("config.toml", "The config as it was named on the command line."),
    (
        "plan.toml",
        "All settings of the run: those of the config, of `--set`, and all defaults. It is itself a config.",
    ),
    ("metrics.jsonl", "One line per step; see [Metrics](metrics.md)."),
    ("events.jsonl", "Starts, stops, warnings and changed settings."),
    ("rollouts/", "Whole responses with the numbers of every token, of recorded steps (`record.responses`)."),
    ("tokens/", "Every silenced token with its context, its probability and what the model preferred."),
    ("explored/", "The same for candidates that were kept."),
    ("episodes/", "What an environment answered, in runs with one."),
    ("benchmarks/", "Every sample of the benchmarks in `evaluation.benchmarks`."),
    ("checkpoints/", "Weights, optimizer and loop state, one folder per saved step."),
    ("best.json", "The checkpoint with the best evaluation."),
    ("records.jsonl", "Hashes of the files that each step wrote. A resume checks them."),
    ("build.json", "The program and its machine."),
    ("lock", "The process that writes the run, or wrote it last."),
    ("manifest.json", "Every file with its hash, written when the run ends."),
    ("manifest.sha256", "The hash of `manifest.json`: the receipt of the run."),
    ("tensorboard/", "Event files for TensorBoard, with `--tensorboard`. The receipt does not cover them."),
];

/// Files whose records have keys, with their schema.
fn records() -> [(&'static str, Value); 12] {
    [
        ("`metrics.jsonl` of `stapo sft`, `prefer`, `rm` and `pretrain`", schema::<PretrainMetrics>()),
        ("`rollouts/*.jsonl`", schema::<ResponseRecord>()),
        ("`tokens/*.jsonl` and `explored/*.jsonl`", schema::<TokenRecord>()),
        ("`episodes/*.jsonl`", schema::<EpisodeRecord>()),
        ("`events.jsonl`", schema::<Event>()),
        ("`records.jsonl`", schema::<StepFiles>()),
        ("`best.json`", schema::<Best>()),
        ("`build.json`", schema::<BuildRecord>()),
        ("`lock`", schema::<LockRecord>()),
        ("`manifest.json`", schema::<Manifest>()),
        ("`benchmarks/*.jsonl`, and samples of `stapo eval`", schema::<EvalRecord>()),
        ("`experiment.json`", schema::<Experiment>()),
    ]
}

pub fn page() -> Page {
    let rows = RUN.iter().map(|(name, about)| Entry::new("file", *name, *about)).collect();
    let run = Section { title: "A run folder".to_string(), rows, ..Section::default() };
    let records = records().into_iter().map(|(title, schema)| {
        let about = schema["description"].as_str().unwrap_or_default().to_string();
        Section { title: title.to_string(), intro: about, rows: record_rows(&schema), ..Section::default() }
    });
    let sections = std::iter::once(run).chain(records).collect();
    Page { file: "files.md", title: "Files and records", intro: INTRO, sections }
}
