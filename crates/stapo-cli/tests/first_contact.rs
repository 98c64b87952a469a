//! What a newcomer types first: `stapo`, `stapo tutorial`, `stapo explain`.

use crate::common::{complaint, listing, ok, root, stapo};
use crate::terminal::on_terminal;
use serde_json::Value;
use std::process::Command;

#[test]
fn without_a_command_five_lines_say_what_to_run() {
    let folder = tempfile::tempdir().unwrap();
    let text = ok(&stapo(folder.path(), &[]));
    assert_eq!(text.lines().count(), 5, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    for command in ["stapo tutorial", "stapo init", "stapo --help", "stapo explain"] {
        assert!(text.contains(command), "{command}: {text}");
    }
}

#[test]
fn explain_prints_keys_metrics_presets_and_words() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let text = ok(&stapo(at, &["explain", "rollout.group_size"]));
    assert!(text.starts_with("rollout.group_size (config key)\n"), "{text}");
    assert!(text.contains("type") && text.contains("`8`") && text.contains("changes results"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let preset = ok(&stapo(at, &["explain", "dapo"]));
    assert!(preset.contains("min(r A,") && preset.contains("dynamic sampling"), "{preset}");
    let option = ok(&stapo(at, &["explain", "--tensorboard"]));
    assert!(option.contains("stapo train --tensorboard (option)"), "{option}");
    let found: Value = serde_json::from_str(&ok(&stapo(at, &["explain", "tau_h", "--json"]))).unwrap();
    let kinds: Vec<&str> =
        found.as_array().unwrap().iter().map(|entry| entry["kind"].as_str().unwrap()).collect();
    assert!(kinds.contains(&"metric") && kinds.contains(&"word"), "{kinds:?}");
    let metric = found.as_array().unwrap().iter().find(|entry| entry["kind"] == "metric").unwrap();
    assert_eq!((&metric["unit"], &metric["TensorBoard"]), (&"nats".into(), &"`silencing/tau_h`".into()));
    for kind in ["train", "sft", "experiment"] {
        let schema: Value =
            serde_json::from_str(&ok(&stapo(at, &["config", "--schema", "--kind", kind]))).unwrap();
        assert!(schema["properties"].is_object(), "{kind}: {schema}");
    }
}

#[test]
fn the_reference_is_the_programs() {
    let folder = tempfile::tempdir().unwrap();
    ok(&stapo(folder.path(), &["explain", "--write", "reference"]));
    let printed: Vec<_> =
        folder.path().join("reference").read_dir().unwrap().map(|page| page.unwrap()).collect();
    assert_eq!(printed.len(), 6);
    for page in printed {
        let name = page.file_name();
        let kept = std::fs::read_to_string(root().join("docs/reference").join(&name)).unwrap_or_default();
        let is_same = kept == std::fs::read_to_string(page.path()).unwrap();
        assert!(is_same, "docs/reference/{name:?} is outdated: run stapo explain --write docs/reference");
    }
}

#[test]
fn explain_names_what_is_nearest_to_an_unknown_word() {
    let folder = tempfile::tempdir().unwrap();
    let text = complaint(folder.path(), &["explain", "group_sise"]);
    assert!(text.starts_with("error: explain group_sise: nothing has this name\nhint: "), "{text}");
    assert!(text.contains("group_size"), "{text}");
}

#[cfg(unix)]
#[test]
fn the_tutorial_runs_every_step_in_a_new_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::create_dir(at.join("stapo-tutorial")).unwrap();
    // Six times Enter.
    let (status, text) = on_terminal(at, &["tutorial", "--steps", "2"], "\n\n\n\n\n\n");
    assert!(status.success(), "{text}");
    for file in ["run/manifest.sha256", "report.html", "tokens.html"] {
        assert!(at.join("stapo-tutorial-2").join(file).exists(), "{file}:\n{text}");
    }
    let files = std::fs::read_to_string(root().join("docs/reference/files.md")).unwrap();
    for entry in std::fs::read_dir(at.join("stapo-tutorial-2/run")).unwrap().map(|entry| entry.unwrap()) {
        let slash = if entry.path().is_dir() { "/" } else { "" };
        let name = format!("`{}{slash}`", entry.file_name().to_string_lossy());
        assert!(files.contains(&name), "docs/reference/files.md does not name {name}");
    }
    assert!(text.contains("Step 6 of 6") && text.contains("stapo init"), "{text}");
    assert_eq!(text.matches("Enter runs it, q ends: ").count(), 6, "{text}");
    // The bar of the run with the curves and the phase below it, and its lines, filled up to the width of the terminal.
    for part in [
        "0/2 steps  0 s ",
        "1/2 steps  ",
        " left ",
        "rollout ",
        "last     reward ",
        "accuracy ",
        "done: 2 steps in ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(
        text.contains("run stapo-tutorial-2/run ") && text.contains("before training: held-out "),
        "{text}"
    );
    assert!(text.contains("\nAll files go into the folder stapo-tutorial-2.\n"), "{text}");
    assert!(text.contains("steps accuracy held-out  status\n"), "{text}");
    // What `generate` says of its pace.
    assert!(text.contains("\n1 responses, ") && text.contains(" tokens/s\n"), "{text}");
    assert_eq!(listing(&at.join("stapo-tutorial")), [""; 0], "a folder that exists stays as it was");
    // `q` and the end of the input, Ctrl-D, run nothing.
    for typed in ["q\n", " Q \n", "\u{4}"] {
        let (status, text) = on_terminal(at, &["tutorial", "--out", "none"], typed);
        assert!(status.success() && text.contains("Ended. The folder none keeps what is there.\n"), "{text}");
        assert_eq!(listing(&at.join("none")), [""; 0]);
        std::fs::remove_dir(at.join("none")).unwrap();
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(at).args(["tutorial", "--yes", "--out", "failed"]).env("STAPO_THREADS", "none");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(2) && text.contains("error: tutorial: step 1 failed\nhint: "),
        "{text}"
    );
    let text = complaint(at, &["tutorial", "--yes", "--out", "stapo-tutorial"]);
    assert!(text.contains("--out stapo-tutorial: exists\nhint: "), "{text}");
}

#[test]
fn without_a_terminal_the_tutorial_prints_its_steps_and_runs_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    let output = command.arg("tutorial").current_dir(folder.path()).stdin(std::process::Stdio::null());
    let text = ok(&output.output().unwrap());
    assert!(text.contains("stapo train --out stapo-tutorial/run --set steps=30"), "{text}");
    assert!(text.contains("Nothing was run") && text.contains("stapo tutorial --yes"), "{text}");
    assert_eq!(listing(folder.path()), [""; 0]);
}

/// A signal while a command runs reaches the command, which saves; the tutorial then ends with the signal's status.
#[cfg(unix)]
#[test]
fn a_signal_lets_the_run_of_the_tutorial_save_and_ends_the_tutorial() {
    use rustix::process::{Pid, Signal, kill_process};
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("t/run");
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.args(["tutorial", "--yes", "--steps", "80", "--out", "t"]).current_dir(folder.path());
    command.env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR")).stderr(std::process::Stdio::null());
    let child = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    while std::fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count() < 1 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    kill_process(Pid::from_raw(child.id().try_into().unwrap()).unwrap(), Signal::TERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(143), "{text}");
    assert!(text.contains("Stopped by SIGTERM") && !text.contains("Step 2 of 6"), "{text}");
    assert!(std::fs::read_to_string(run.join("events.jsonl")).unwrap().contains("\"reason\":\"signal\""));
}
