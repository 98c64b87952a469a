//! Runs of the built-in hybrid: exact, and the same on two and four ranks and after a kill.

#![cfg(target_os = "linux")]

use crate::common::{SMALL_RUN, folder_below_tmp, ok, parsed_lines, stapo};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

fn train(at: &Path, ranks: &[&str], out: &str) {
    ok(&stapo(at, &[ranks, &arguments(out)].concat()));
}

fn arguments(out: &str) -> Vec<&str> {
    [
        &["train", "hybrid", "--out", out, "--set", "steps=3"][..],
        &["--set", "update.microbatch_tokens=192", "--set", "update.sum=microbatches"],
        &SMALL_RUN,
    ]
    .concat()
}

fn metrics(at: &Path, run: &str) -> Vec<Value> {
    parsed_lines(&fs::read_to_string(at.join(run).join("metrics.jsonl")).unwrap_or_default())
}

fn hashes(at: &Path, run: &str) -> Vec<Value> {
    metrics(at, run).iter().map(|step| step["state_sha256"].clone()).collect()
}

#[test]
fn the_hybrid_learns_exactly_and_the_same_on_ranks_and_after_a_kill() {
    let folder = folder_below_tmp();
    let at = folder.path();
    train(at, &[], "whole");
    let steps = metrics(at, "whole");
    assert_eq!(steps.len(), 3);
    assert!(steps.iter().all(|step| step["exactness_max_abs"] == 0.0));
    assert!(steps.iter().any(|step| step["gradient_norm"].as_f64().unwrap() > 0.0), "nothing was learned");
    let expected = hashes(at, "whole");
    for ranks in ["2", "4"] {
        train(at, &["launch", "--ranks", ranks], ranks);
        assert_eq!(hashes(at, ranks), expected, "{ranks} ranks changed a bit");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(at).args(arguments("killed")).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while metrics(at, "killed").is_empty() {
        assert!(child.try_wait().unwrap().is_none(), "the run ended early");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(hashes(at, "killed").len() < 3, "the run was killed too late to test anything");
    ok(&stapo(at, &["train", "--resume", "killed"]));
    assert_eq!(hashes(at, "killed"), expected, "a kill changed a bit");
}
