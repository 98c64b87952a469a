//! One writer per folder; signals; the life and death of processes.

#![cfg(unix)]

use crate::common::{complaint, ok, stapo};
use serde_json::Value;
use std::fs;
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const LONG: [&str; 14] = [
    "--set",
    "steps=5000",
    "--set",
    "rollout.problems_per_step=2",
    "--set",
    "rollout.group_size=4",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation.problems=4",
    "--set",
    "evaluation.every_steps=0",
    "--set",
    "record.checkpoint_every_steps=2",
];

/// A process that ends with the test, also where the test fails.
struct Process(Child);

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn spawn(at: &Path, args: &[&str]) -> Process {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    command.current_dir(at).args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Process(command.spawn().unwrap())
}

fn kill(signal: &str, child: &Child) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// Waits until something holds; a test whose condition never comes fails.
fn wait_until(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..6000 {
        if condition() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} never came");
}

fn n_steps(run: &Path) -> usize {
    fs::read_to_string(run.join("metrics.jsonl")).unwrap_or_default().lines().count()
}

fn last_event(run: &Path) -> Value {
    let text = fs::read_to_string(run.join("events.jsonl")).unwrap();
    serde_json::from_str(text.lines().last().unwrap()).unwrap()
}

fn is_locked(folder: &Path) -> bool {
    fs::File::open(folder.join("lock")).is_ok_and(|file| file.try_lock_shared().is_err())
}

#[test]
fn a_second_writer_is_refused_and_told_by_whom_and_readers_work_beside() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut child = spawn(at, &[&["train", "--out", "run"], &LONG[..]].concat());
    let run = at.join("run");
    wait_until("step 3", || n_steps(&run) >= 3);
    let by = format!("process {} on ", child.id());
    let said = complaint(at, &["train", "--resume", "run"]);
    assert!(said.contains(&by) && said.contains("is writing it"), "{said}");
    assert!(complaint(at, &["train", "--out", "run"]).contains("exists already"));
    assert!(ok(&stapo(at, &["runs", "."])).contains(&format!("running, {by}")));
    ok(&stapo(at, &["export", "run", "--to", "model"]));
    ok(&stapo(at, &["report", "run", "--output", "page.html"]));
    let page = fs::read_to_string(at.join("page.html")).unwrap();
    assert!(page.contains("What happened") && page.contains(&format!("running, {by}")));
    // Killed without a word: the lock is free, readers say so, and the run goes on.
    kill("-KILL", &child);
    child.wait().unwrap();
    assert!(ok(&stapo(at, &["runs", "."])).contains("died: killed"));
    let n_before = n_steps(&run);
    let mut child = spawn(at, &["train", "--resume", "run"]);
    wait_until("a new step", || n_steps(&run) > n_before);
    // SIGTERM finishes the step, saves, and is named.
    kill("-TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    let stop = last_event(&run);
    assert_eq!(
        (&stop["event"], &stop["reason"], &stop["text"]),
        (&"stop".into(), &"signal".into(), &"SIGTERM".into())
    );
    assert!(run.join(format!("checkpoints/step-{:06}", n_steps(&run))).is_dir());
    assert!(ok(&stapo(at, &["runs", "."])).contains("resumable, stopped by SIGTERM"));
}

/// Two resumes started in the same moment: one trains, one is refused, and no step is lost.
#[test]
fn of_two_resumes_at_once_one_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let start = [&["train", "--out", "run"], &LONG[..], &["--set", "steps=2"]].concat();
    ok(&stapo(at, &start));
    let again = ["train", "--resume", "run", "--set", "steps=8"];
    let children: Vec<Process> = (0..4).map(|_| spawn(at, &again)).collect();
    let codes: Vec<_> = children.into_iter().map(|mut child| child.wait().unwrap().code()).collect();
    assert!(codes.contains(&Some(0)), "{codes:?}");
    assert!(codes.iter().all(|code| [Some(0), Some(2)].contains(code)), "{codes:?}");
    assert_eq!(n_steps(&at.join("run")), 8);
    ok(&stapo(at, &["verify", "run", "--replay"]));
    // An evaluation in the run's folder is a folder of its own, whose events are no samples.
    let eval = "eval --model run --out run/eval --limit 2 --samples 2 --max-tokens 20";
    ok(&stapo(at, &eval.split(' ').collect::<Vec<_>>()));
    ok(&stapo(at, &["report", "run"]));
}

/// A signal that was ignored when the program started stays ignored.
#[test]
fn a_run_under_nohup_survives_the_terminal() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut child = Command::new("sh")
        .args(["-c", "trap '' HUP INT; exec \"$0\" train --out run \"$@\"", env!("CARGO_BIN_EXE_stapo")])
        .args(LONG)
        .current_dir(at)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let run = at.join("run");
    wait_until("step 1", || n_steps(&run) >= 1);
    for signal in ["-HUP", "-INT"] {
        let n = n_steps(&run);
        kill(signal, &child);
        kill(signal, &child);
        wait_until("two more steps", || n_steps(&run) >= n + 2);
    }
    kill("-TERM", &child);
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

const ARMS: &str = "name = \"two\"\nseeds = [0]\n[[arms]]\nname = \"a\"\n[[arms]]\nname = \"b\"\nset = [\"update.learning_rate=2e-4\", \"model.lora.rank=1\"]\n";

fn experiment(at: &Path, jobs: &str) -> Vec<&'static str> {
    fs::write(at.join("two.toml"), ARMS).unwrap();
    let jobs: &'static str = if jobs == "2" { "2" } else { "1" };
    [&["experiment", "two.toml", "--out", "two", "--jobs", jobs], &LONG[..]].concat()
}

#[test]
fn the_runs_of_an_experiment_end_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = experiment(at, "2");
    let runs = ["two/a/seed-0", "two/b/seed-0"].map(|run| at.join(run));
    let mut parent = spawn(at, &args);
    wait_until("both runs", || runs.iter().all(|run| n_steps(run) >= 3));
    let said = complaint(at, &args);
    assert!(said.contains(&format!("process {} on ", parent.id())), "{said}");
    // Killed without a word, the experiment takes its runs with it.
    kill("-KILL", &parent);
    parent.wait().unwrap();
    wait_until("the end of the runs", || runs.iter().all(|run| !is_locked(run)));
    let n_before = runs.each_ref().map(|run| n_steps(run));
    // Started again it goes on, and SIGTERM lets the runs save and stop.
    let mut parent = spawn(at, &args);
    wait_until("more steps", || runs.iter().zip(n_before).all(|(run, n)| n_steps(run) > n));
    kill("-TERM", &parent);
    assert_eq!(parent.wait().unwrap().code(), Some(143));
    for run in &runs {
        assert!(!is_locked(run));
        let stop = last_event(run);
        assert_eq!((&stop["event"], &stop["text"]), (&"stop".into(), &"SIGTERM".into()), "{}", run.display());
        assert!(run.join(format!("checkpoints/step-{:06}", n_steps(run))).is_dir());
    }
}

/// A signal to one run is no signal to the experiment: the others go on, nothing is compared with half a run, and the same command
/// continues it.
#[test]
fn a_run_that_is_stopped_alone_is_named_and_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::write(at.join("two.toml"), ARMS).unwrap();
    let args = ["experiment", "two.toml", "--out", "two", "--jobs", "1", "--json"];
    let args = [&args[..], &LONG[..], &["--set", "steps=10"]].concat();
    let (a, b) = (at.join("two/a/seed-0"), at.join("two/b/seed-0"));
    let file = |name: &str| fs::File::create(at.join(name)).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    let command = command.current_dir(at).args(&args).stdin(Stdio::null());
    let mut parent = Process(command.stdout(file("said.json")).stderr(file("said.txt")).spawn().unwrap());
    wait_until("a step of the first run", || n_steps(&a) >= 1);
    let events = fs::read_to_string(a.join("events.jsonl")).unwrap();
    let start: Value = serde_json::from_str(events.lines().next().unwrap()).unwrap();
    let run = start["writer"]["pid"].to_string();
    assert!(Command::new("kill").args(["-TERM", &run]).status().unwrap().success());
    let status = parent.wait().unwrap();
    let said = fs::read_to_string(at.join("said.txt")).unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    let stopped_at = n_steps(&a);
    assert!(stopped_at < 10 && n_steps(&b) == 10, "the other run goes on");
    assert!(said.contains("warning: a/seed-0 was stopped by a signal"), "{said}");
    assert!(said.contains(&format!("not in the summary: a/seed-0, {stopped_at} of 10 steps")), "{said}");
    let names = |summary: &str| -> Vec<String> {
        let summary: Value = serde_json::from_str(summary).unwrap();
        summary.as_array().unwrap().iter().map(|arm| arm["name"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(names(&fs::read_to_string(at.join("said.json")).unwrap()), ["b"]);
    ok(&stapo(at, &["report", "two"]));
    let page = fs::read_to_string(at.join("two/report.html")).unwrap();
    assert!(page.contains(&format!("compared by what is there: a, seed 0 ({stopped_at} of 10 steps)")));
    let again = names(&ok(&stapo(at, &args)));
    assert_eq!((again, n_steps(&a)), (vec!["a".to_string(), "b".to_string()], 10));
    // A run that has ended stays, also without its checkpoints.
    fs::remove_dir_all(a.join("checkpoints")).unwrap();
    let before = fs::read(a.join("manifest.sha256")).unwrap();
    assert_eq!(names(&ok(&stapo(at, &args))), ["a", "b"]);
    assert!(
        fs::read(a.join("manifest.sha256")).unwrap() == before && !at.join("two/a/seed-0.aside-1").exists()
    );
    ok(&stapo(at, &["report", "two"]));
    assert!(!fs::read_to_string(at.join("two/report.html")).unwrap().contains("Unfinished"));
}

/// The folder of an arm is that arm's: another arm's run in its place is refused, one without a readable checkpoint is
/// moved aside, and what is there besides stays.
#[test]
fn an_arm_takes_no_other_run_for_its_own_and_removes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = [&experiment(at, "1")[..], &["--set", "steps=2"]].concat();
    ok(&stapo(at, &args));
    let (a, b) = (at.join("two/a/seed-0"), at.join("two/b/seed-0"));
    fs::rename(&a, at.join("kept")).unwrap();
    fs::rename(&b, &a).unwrap();
    let output = stapo(at, &args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("holds another run than arm \"a\"") && said.contains("update.learning_rate"),
        "{said}"
    );
    fs::rename(&a, at.join("other")).unwrap();
    fs::rename(at.join("kept"), &a).unwrap();
    for checkpoint in fs::read_dir(a.join("checkpoints")).unwrap() {
        fs::write(checkpoint.unwrap().path().join("checkpoint.json"), "x").unwrap();
    }
    fs::write(a.join("notes.txt"), "mine").unwrap();
    ok(&stapo(at, &args));
    assert_eq!(fs::read_to_string(at.join("two/a/seed-0.aside-1/notes.txt")).unwrap(), "mine");
    assert_eq!(n_steps(&a), 2);
}

/// A run's plan names the checkpoint that it starts from and every key of its adapters, and the experiment that left both
/// to their defaults still knows the run as its own.
#[test]
fn an_experiment_started_again_knows_runs_whose_plan_says_more_than_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = [&experiment(at, "1")[..], &["--set", "steps=2"]].concat();
    ok(&stapo(at, &args));
    let args = args.iter().map(|arg| if *arg == "two" { "further" } else { arg });
    let args: Vec<&str> = args.chain(["--set", "model=two/a/seed-0"]).collect();
    ok(&stapo(at, &args));
    let run = at.join("further/b/seed-0");
    let plan = fs::read_to_string(run.join("plan.toml")).unwrap();
    assert!(plan.contains("two/a/seed-0@2") && plan.contains("all-linear"), "{plan}");
    let before = fs::read(run.join("metrics.jsonl")).unwrap();
    ok(&stapo(at, &args));
    assert_eq!(fs::read(run.join("metrics.jsonl")).unwrap(), before);
}

#[test]
fn an_evaluation_has_one_writer_and_one_identity() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let rows = (1..6).map(|n| format!("{{\"problem\": \"{n}+{n}=\", \"answer\": \"{}\"}}\n", 2 * n));
    fs::write(at.join("sums.jsonl"), rows.collect::<String>()).unwrap();
    let args = [
        "eval",
        "--benchmarks",
        "sums.jsonl",
        "--template",
        "{{ problem }}",
        "--max-tokens",
        "40",
        "--samples",
        "2",
        "--out",
        "eval",
    ];
    ok(&stapo(at, &args));
    ok(&stapo(at, &["eval", "--resume", "eval"]));
    let held = fs::File::open(at.join("eval/lock")).unwrap();
    held.try_lock().unwrap();
    let said = complaint(at, &["eval", "--resume", "eval"]);
    assert!(said.contains("is writing it"), "{said}");
    drop(held);
    let plan = fs::read_to_string(at.join("eval/eval.json")).unwrap();
    fs::write(at.join("eval/eval.json"), plan.replace("\"seed\": 0", "\"seed\": 1")).unwrap();
    assert!(complaint(at, &["eval", "--resume", "eval"]).contains("eval.json was changed"));
    fs::write(at.join("eval/eval.json"), plan).unwrap();
    let rows = fs::read_to_string(at.join("sums.jsonl")).unwrap();
    fs::write(at.join("sums.jsonl"), rows.replace("\"4\"", "\"5\"")).unwrap();
    let said = complaint(at, &["eval", "--resume", "eval"]);
    assert!(said.contains("benchmark sums: was "), "{said}");
    ok(&stapo(at, &["eval", "--resume", "eval", "--accept-changes"]));
    ok(&stapo(at, &["eval", "--resume", "eval"]));
    let twice = complaint(at, &["eval", "--benchmarks", "arithmetic,arithmetic", "--out", "twice"]);
    assert!(twice.contains("benchmark arithmetic: named twice") && !at.join("twice").exists(), "{twice}");
}
