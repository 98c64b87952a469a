//! What a checkpoint keeps, what is read of it, and what is left of it when the program is killed while it is written.

#![cfg(unix)]

#[cfg(debug_assertions)]
use crate::common::check_renames;
use crate::common::{SMALL_RUN, complaint, copy_folder, json, ok, root, stapo};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Trains the folder `run` below `at`.
fn train(at: &Path, set: &[&str]) -> PathBuf {
    let set: Vec<&str> = set.iter().flat_map(|set| ["--set", *set]).collect();
    ok(&stapo(at, &[&["train", "-q", "--out", "run"], &SMALL_RUN[..], &set].concat()));
    at.join("run")
}

fn checkpoint(run: &Path, step: u64) -> PathBuf {
    run.join(format!("checkpoints/step-{step:06}"))
}

fn files(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn weights_are_read_and_checked_without_the_moments() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let run = train(at, &["steps=2"]);
    let generate = ["generate", "--model", "run@2", "--prompt", "1+1="];
    let said = ok(&stapo(at, &generate));
    flip(&checkpoint(&run, 2).join("moments.safetensors"));
    assert_eq!(ok(&stapo(at, &generate)), said, "moments are not read");
    let refused = String::from_utf8(stapo(at, &["verify", "run"]).stdout).unwrap();
    assert!(refused.contains("step-000002/moments.safetensors: DIFFERENT"), "{refused}");
    // Going on needs them, and goes on from the step before.
    fs::remove_file(run.join("manifest.sha256")).unwrap();
    let resumed = stapo(at, &["train", "--resume", "run"]);
    ok(&resumed);
    let told = String::from_utf8_lossy(&resumed.stderr);
    assert!(told.contains("step-000002: moments.safetensors is damaged"), "{told}");
    assert!(told.contains("; going back to the checkpoint before"), "{told}");
    for (name, problem) in [
        ("weights.safetensors", "weights.safetensors is damaged"),
        ("moments.digests", "its weights and optimizer state have the hash"),
    ] {
        let copy = at.join(name);
        copy_folder(&run, &copy);
        flip(&checkpoint(&copy, 2).join(name));
        let said = complaint(at, &["generate", "--model", &format!("{name}@2"), "--prompt", "1+1="]);
        assert!(said.contains(problem), "{problem} in {said}");
        // The run itself is its newest good checkpoint.
        let said = stapo(at, &["generate", "--model", name, "--prompt", "1+1="]);
        let told = String::from_utf8_lossy(&said.stderr).into_owned();
        ok(&said);
        assert!(told.starts_with("warning: ") && told.contains("; taking the checkpoint before"), "{told}");
    }
}

#[test]
fn before_the_first_step_a_run_has_the_hashes_of_its_model_and_no_copy() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    copy_folder(&root().join("models/base"), &at.join("base"));
    let run = train(at, &["steps=1", "model.path=base"]);
    assert_eq!(files(&checkpoint(&run, 0)), ["checkpoint.json", "plan.toml"]);
    let said = |model: &str| ok(&stapo(at, &["generate", "--model", model, "--prompt", "1+1=", "--json"]));
    let continued = |text: String| text.split("\"text\"").nth(1).map(str::to_owned);
    assert_eq!(continued(said("run@0")), continued(said("base")));
    ok(&stapo(at, &["export", "run@0", "--to", "exported"]));
    // A run that begins there, and one whose model is gone.
    let further = ["train", "-q", "--out", "further", "--set", "model=run@0", "--set", "steps=1"];
    ok(&stapo(at, &[&further[..], &SMALL_RUN].concat()));
    ok(&stapo(at, &["generate", "--model", "further", "--prompt", "1+1="]));
    fs::rename(at.join("base"), at.join("moved")).unwrap();
    let gone = complaint(at, &["generate", "--model", "run@0", "--prompt", "1+1="]);
    assert!(gone.contains("step-000000") && gone.contains("base") && gone.contains("hint: "), "{gone}");
    copy_folder(&at.join("moved"), &at.join("base"));
    flip(&at.join("base/model.safetensors"));
    let changed = complaint(at, &["generate", "--model", "run@0", "--prompt", "1+1="]);
    assert!(changed.contains("step-000000") && changed.contains("weights: was"), "{changed}");
    let changed = complaint(at, &["train", "--resume", "run", "--set", "steps=2"]);
    assert!(changed.contains("weights: was"), "{changed}");
}

#[test]
fn the_optimizer_of_the_last_checkpoint_alone_is_kept_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let run = train(at, &["steps=3", "record.optimizer=last"]);
    let has_moments = |step: u64| checkpoint(&run, step).join("moments.safetensors").exists();
    assert_eq!([1, 2, 3].map(has_moments), [false, false, true]);
    ok(&stapo(at, &["verify", "run"]));
    ok(&stapo(at, &["export", "run@1", "--to", "exported"]));
    ok(&stapo(at, &["train", "-q", "--resume", "run", "--set", "steps=4"]));
    assert_eq!([3, 4].map(has_moments), [false, true]);
    ok(&stapo(at, &["verify", "run", "--replay", "--steps", "4"]));
    // Without the newest one, the others are named as what they are.
    fs::remove_dir_all(checkpoint(&run, 4)).unwrap();
    fs::remove_file(run.join("manifest.sha256")).unwrap();
    let resumed = stapo(at, &["train", "-q", "--resume", "run"]);
    ok(&resumed);
    let events = fs::read_to_string(run.join("events.jsonl")).unwrap();
    assert!(events.contains("step-000003: has weights but no optimizer state"), "{events}");
}

/// The state hash of the last step of a run.
fn last_hash(run: &Path) -> String {
    let steps = json(&run.join("manifest.json"))["steps"].as_array().unwrap().clone();
    steps.last().unwrap()["sha256"].as_str().unwrap().to_string()
}

#[test]
fn without_room_for_a_copy_a_state_is_written_beside_the_next_rollout_with_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    // A trace has the files of parts by their whole paths.
    let at = &folder.path().canonicalize().unwrap();
    let set = [&["--set", "steps=3", "--set", "record.checkpoint_every_steps=1"], &SMALL_RUN[..]].concat();
    let train = |out: &str, has_room: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(at).args(["train", "-q", "--out"]).arg(at.join(out)).args(&set);
        if !has_room {
            command.env("STAPO_NO_ROOM", "1");
        }
        let trace = at.join("trace");
        command.env("STAPO_DISK_TRACE", &trace);
        ok(&command.output().unwrap());
        #[cfg(debug_assertions)]
        check_renames(&fs::read_to_string(&trace).unwrap());
        let _ = fs::remove_file(&trace);
        at.join(out)
    };
    let (copied, in_place) = (train("copied", true), train("in-place", false));
    for step in 1..=3 {
        let [copied, in_place] = [&copied, &in_place].map(|run| checkpoint(run, step));
        assert_eq!(files(&copied), files(&in_place));
        for name in ["weights.safetensors", "moments.safetensors", "moments.digests"] {
            assert!(fs::read(copied.join(name)).unwrap() == fs::read(in_place.join(name)).unwrap(), "{name}");
        }
    }
    let seconds = |run: &Path| -> Vec<f64> {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let steps = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        steps.map(|step| step["seconds"]["checkpoint_wait"].as_f64().unwrap_or(0.0)).collect()
    };
    // The second step's rollout ran beside the first step's checkpoint, and the update waited for the rest.
    assert!(seconds(&in_place)[1] > 0.0, "{:?}", seconds(&in_place));
    ok(&stapo(at, &["verify", "in-place"]));
}

/// Kills a run `n_kills` times while it writes checkpoints, from a copy and from the state in turns, goes on each time, and expects the states of a run that nothing
/// happened to.
fn kill_while_writing(n_kills: u64) {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let steps = format!("steps={}", n_kills + 2);
    let run = train(at, &[&steps]);
    let expected = last_hash(&run);
    fs::remove_dir_all(&run).unwrap();
    let set = [&["--set", &steps][..], &SMALL_RUN].concat();
    let mut is_begun = false;
    for n in 0..n_kills {
        let first = [&["train", "-q", "--out", "run"][..], &set].concat();
        let args = if is_begun { vec!["train", "-q", "--resume", "run"] } else { first };
        let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
            .current_dir(at)
            .args(args)
            .envs((n % 2 == 1).then_some(("STAPO_NO_ROOM", "1")))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // From the moment that a checkpoint is begun, a little later each time.
        let is_writing = || {
            let entries = fs::read_dir(run.join("checkpoints")).into_iter().flatten().flatten();
            entries.into_iter().any(|entry| entry.file_name().to_string_lossy().ends_with(".tmp"))
        };
        let mut is_ended = false;
        while !is_writing() && !is_ended {
            is_ended = child.try_wait().unwrap().is_some();
            std::thread::sleep(Duration::from_micros(100));
        }
        std::thread::sleep(Duration::from_micros(997 * n % 12_000));
        let _ = child.kill();
        child.wait().unwrap();
        is_begun = run.exists();
        if is_ended {
            break;
        }
    }
    ok(&stapo(at, &["train", "-q", "--resume", "run"]));
    assert_eq!(last_hash(&run), expected);
    ok(&stapo(at, &["verify", "run"]));
}

#[test]
fn a_run_that_is_killed_while_it_writes_goes_on_to_the_same_states() {
    kill_while_writing(6);
}

#[test]
#[ignore = "50 kills take minutes"]
fn a_run_that_is_killed_fifty_times_while_it_writes_goes_on_to_the_same_states() {
    kill_while_writing(50);
}
