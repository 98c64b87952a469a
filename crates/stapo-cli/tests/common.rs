//! Calls of the program in tests.

use serde_json::Value;
#[cfg(debug_assertions)]
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A folder below `/tmp`, wherever other tests have theirs: an external verifier has a `/tmp` of its own, where only such
/// folders must be made visible again.
pub fn folder_below_tmp() -> TempDir {
    if cfg!(unix) { TempDir::new_in("/tmp").unwrap() } else { TempDir::new().unwrap() }
}

/// The call leaves no trace in the state folder of the user who runs the tests.
pub fn stapo(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(folder).args(args).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command.output().unwrap()
}

/// A small run that keeps every checkpoint.
pub const SMALL_RUN: [&str; 12] = [
    "--set",
    "rollout.problems_per_step=2",
    "--set",
    "rollout.group_size=4",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation={problems=4,every_steps=2}",
    "--set",
    "record.checkpoint_every_steps=1",
    "--set",
    "record.keep_checkpoints=99",
];

/// Resumes the folder `run` without an end, and returns the process once the run has three steps.
pub fn resumed_without_end(at: &Path, stderr: Stdio) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(at).args(["train", "--resume", "run", "--set", "steps=100000"]);
    let mut child = command.stdout(Stdio::null()).stderr(stderr).spawn().unwrap();
    let metrics = at.join("run/metrics.jsonl");
    while std::fs::read_to_string(&metrics).unwrap_or_default().lines().count() < 3 {
        assert!(child.try_wait().unwrap().is_none(), "the run goes on");
        std::thread::sleep(Duration::from_millis(20));
    }
    child
}

/// The standard output of a call that must succeed.
pub fn ok(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The standard error of a call that must be refused with exit status 2.
pub fn complaint(folder: &Path, args: &[&str]) -> String {
    let output = stapo(folder, args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs the program with `input` on its standard input.
pub fn stapo_with_input(args: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // A failed write is ignored: the program may refuse its arguments without reading its input.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// The root of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

/// Copies a folder with everything in it.
pub fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for path in std::fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let target = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_folder(&path, &target);
        } else {
            std::fs::copy(&path, &target).unwrap();
        }
    }
}

/// Leaves a run as a process does that is killed: without a receipt.
pub fn without_receipt(run: &Path) {
    let path = run.join("manifest.json");
    let mut manifest = json(&path);
    manifest.as_object_mut().unwrap().remove("files");
    std::fs::write(path, format!("{manifest}\n")).unwrap();
    std::fs::remove_file(run.join("manifest.sha256")).unwrap();
}

/// The JSON of a file.
pub fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// The JSON of each line.
pub fn parsed_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Every file below a folder with its length and time.
pub fn listing(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap()) {
        let metadata = entry.path().symlink_metadata().unwrap();
        if metadata.is_dir() {
            found.extend(listing(&entry.path()));
        }
        found.push(format!(
            "{} {} {:?}",
            entry.path().display(),
            metadata.len(),
            metadata.modified().unwrap()
        ));
    }
    found.sort();
    found
}

/// The files that a rename gives a name to are on disk before it, and the rename itself directly after it: a machine that
/// loses its power keeps the old file or the new one.
#[cfg(debug_assertions)]
pub fn check_renames(trace: &str) {
    let operation = |line: &'_ str| -> (String, PathBuf) {
        let mut parts = line.splitn(3, ' ').skip(1).map(str::to_string);
        (parts.next().unwrap(), PathBuf::from(parts.next().unwrap()))
    };
    let operations: Vec<(String, PathBuf)> = trace.lines().map(operation).collect();
    let mut unsynced: BTreeSet<&Path> = BTreeSet::new();
    for (idx, (operation, path)) in operations.iter().enumerate() {
        match operation.as_str() {
            "Create" | "Write" => drop(unsynced.insert(path)),
            "Sync" | "Remove" => drop(unsynced.remove(path.as_path())),
            "Rename" => {
                let name = path.file_name().unwrap().to_str().unwrap();
                let sources = ["tmp", "starting"].map(|end| path.with_file_name(format!(".{name}.{end}")));
                // Nobody reads the lock of a process that has ended.
                let is_renamed = |file: &Path| {
                    !file.ends_with("lock") && sources.iter().any(|source| file.starts_with(source))
                };
                let left: Vec<_> = unsynced.iter().filter(|file| is_renamed(file)).collect();
                assert!(left.is_empty(), "{left:?} are renamed before they are on disk");
                let folder = path.parent().filter(|f| *f != Path::new("")).unwrap_or(Path::new("."));
                // Other threads may write parts of a checkpoint in between.
                let mut after = operations[idx + 1..].iter().filter(|(next, _)| next != "Write").take(8);
                let is_synced = after.any(|(next, path)| next == "Sync" && path == folder);
                assert!(is_synced, "{}: the folder is not synced after the rename", path.display());
            }
            _ => {}
        }
    }
    assert!(operations.iter().filter(|(operation, _)| operation == "Rename").count() > 2);
}
