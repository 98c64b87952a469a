//! `stapo train` as its users see it: killed, resumed, checked, exported, misused.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

const SMALL: [&str; 12] = [
    "--set",
    "steps=6",
    "--set",
    "rollout.problems_per_step=4",
    "--set",
    "update.problems_per_minibatch=4",
    "--set",
    "evaluation.problems=8",
    "--set",
    "evaluation.every_steps=0",
    "--set",
    "record.checkpoint_every_steps=2",
];

fn stapo(folder: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stapo")).current_dir(folder).args(args).output().unwrap()
}

fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The complaint of a refused call.
fn complaint(folder: &Path, args: &[&str]) -> String {
    let output = stapo(folder, args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn last_hash(run: &Path) -> Value {
    let manifest: Value =
        serde_json::from_str(&std::fs::read_to_string(run.join("manifest.json")).unwrap()).unwrap();
    manifest["steps"].as_array().unwrap().last().unwrap().clone()
}

#[test]
fn killed_three_times_and_resumed_is_the_uninterrupted_run() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    ok(&stapo(at, &new_run("whole")));
    for millis in [700, 300, 900] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
            .current_dir(at)
            .args(start_or_resume(at))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(millis));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    ok(&stapo(at, &start_or_resume(at)));
    assert_eq!(last_hash(&at.join("cut")), last_hash(&at.join("whole")));
    let replay = ok(&stapo(at, &["verify-run", "cut", "--steps", "2"]));
    assert_eq!(replay.matches("the same").count(), 2, "{replay}");
    assert!(ok(&stapo(at, &["runs", "."])).contains("done"));
    ok(&stapo(at, &["export", "cut", "--to", "model"]));
    assert!(at.join("model/model.safetensors").is_file() && at.join("model/tokenizer.json").is_file());
}

/// What a user would do next: go on where there is a checkpoint, else start over.
fn start_or_resume(at: &Path) -> Vec<&'static str> {
    let has_checkpoint = std::fs::read_dir(at.join("cut/checkpoints")).is_ok_and(|entries| {
        entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("step-"))
    });
    if has_checkpoint {
        return vec!["train", "--resume", "cut"];
    }
    let _ = std::fs::remove_dir_all(at.join("cut"));
    new_run("cut")
}

fn new_run(out: &'static str) -> Vec<&'static str> {
    [&["train", "--out", out], &SMALL[..]].concat()
}

#[test]
fn bad_input_is_one_paragraph_with_the_remedy_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("there")).unwrap();
    std::fs::write(at.join("empty.jsonl"), "").unwrap();
    let cases: [(&[&str], &str); 7] = [
        (&["train", "--set", "stepz=3"], "did you mean `steps`?"),
        (&["train", "--set", "steps=many"], "config.steps"),
        (&["train", "nowhere.toml"], "config nowhere.toml"),
        (&["train", "--out", "there"], "exists already"),
        (&["train", "--set", "task={kind=\"jsonl\",path=\"empty.jsonl\"}"], "empty.jsonl"),
        (&["train", "--set", "model={kind=\"path\",path=\"nowhere\"}"], "nowhere"),
        (&["train", "--resume", "nowhere"], "no run folder"),
    ];
    for (args, expected) in cases {
        let said = complaint(at, args);
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    assert!(!at.join("runs").exists(), "a refused run makes no folder");
    let long = complaint(at, &["train", "--out", "long", "--set", "rollout.max_prompt_tokens=2"]);
    assert!(long.contains("the limit is 2\nhint: raise rollout.max_prompt_tokens"), "{long}");
}
