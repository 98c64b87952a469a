//! `stapo eval`, `compare` and `experiment` from the outside.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod common;

use common::{complaint, ok, stapo};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn an_evaluation_killed_and_resumed_gives_the_same_table() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = |out: &'static str| {
        vec![
            "eval",
            "--benchmarks",
            "arithmetic",
            "--limit",
            "60",
            "--decoding",
            "paper",
            "--samples",
            "8",
            "--max-tokens",
            "80",
            "--out",
            out,
        ]
    };
    let table = ok(&stapo(at, &args("whole")));
    assert!(
        table.contains("T=1.0 p=1.0") && table.contains("T=0.7 p=0.9") && table.contains("arithmetic"),
        "{table}"
    );
    let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .current_dir(at)
        .args(args("cut"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let samples = at.join("cut/samples.jsonl");
    for _ in 0..500 {
        std::thread::sleep(Duration::from_millis(10));
        if std::fs::metadata(&samples).is_ok_and(|file| file.len() > 20_000) {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    ok(&stapo(at, &["eval", "--resume", "cut"]));
    assert_eq!(read(&at.join("cut/table.json")), read(&at.join("whole/table.json")));
    let said = ok(&stapo(at, &["compare", "whole", "cut"]));
    assert_eq!(said.matches("no detectable difference").count(), 2, "{said}");
}

#[test]
fn wrong_questions_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let cases: [(&[&str], &str); 6] = [
        (&["eval", "--benchmarks", "aime26"], "one of all, aime24"),
        (&["eval", "--benchmarks", "all"], "aime24.jsonl"),
        (&["eval", "--decoding", "hot"], "expected paper, greedy"),
        (&["eval", "--model", "nowhere"], "nowhere"),
        (&["eval", "--limit", "0"], "nothing to ask"),
        (&["compare", "a", "b"], "a: holds no evaluation"),
    ];
    for (args, expected) in cases {
        let said = complaint(at, args);
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    assert_eq!(std::fs::read_dir(at).unwrap().count(), 0, "a refused evaluation makes no folder");
}

const TINY: [&str; 10] = [
    "--set",
    "steps=2",
    "--set",
    "rollout.problems_per_step=4",
    "--set",
    "update.problems_per_minibatch=4",
    "--set",
    "evaluation={problems=8,every_steps=1}",
    "--set",
    "rollout.group_size=4",
];

#[test]
fn the_main_experiment_runs_end_to_end_and_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = [&["experiment", "main-quick", "--json", "--jobs", "2"], &TINY[..]].concat();
    let first: Value = serde_json::from_str(&ok(&stapo(at, &args))).unwrap();
    let names: Vec<&str> =
        first.as_array().unwrap().iter().map(|arm| arm["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["grpo", "entropy20", "justrl", "stapo"]);
    assert!(first[0]["against"]["n_questions"] == 2 && first[3]["against"].is_null());
    let run = at.join("experiments/main-quick/stapo/seed-1");
    assert!(run.join("metrics.jsonl").is_file());
    // One run loses its last step and another its whole folder; running again restores both and gives the same summary.
    std::fs::remove_dir_all(run.join("checkpoints/step-000002")).unwrap();
    std::fs::remove_dir_all(at.join("experiments/main-quick/grpo/seed-0")).unwrap();
    let again: Value = serde_json::from_str(&ok(&stapo(at, &args))).unwrap();
    assert_eq!(again, first);
    let other = [&args[..], &["--set", "steps=3"]].concat();
    assert!(complaint(at, &other).contains("holds another experiment"));
}

#[test]
fn an_arm_that_fails_does_not_lose_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let text = "name = \"half\"\nseeds = [0]\n[[arms]]\nname = \"good\"\n[[arms]]\nname = \"bad\"\nset = [\"model={kind=\\\"path\\\",path=\\\"gone\\\"}\"]\n";
    std::fs::write(at.join("half.toml"), text).unwrap();
    let output = stapo(at, &[&["experiment", "half.toml"], &TINY[..]].concat());
    assert_eq!(output.status.code(), Some(1));
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("good") && table.contains("failed: bad/seed-0 error: model gone"), "{table}");
    let listed = ok(&stapo(at, &["experiment"]));
    assert!(listed.contains("falsify") && listed.contains("ablation-mask"), "{listed}");
}
