//! Python functions as verifiers: what a function is given and may return, and what happens to one that fails. The tests
//! need `python3` and say so where there is none.

use crate::common::folder_below_tmp;
use stapo_core::{Problem, Verdict};
use stapo_rl::reward::{Judged, ProcessLimits, Programs, PythonSpec, VerifierSpec, fingerprint, show_prints};
use stapo_rl::run::restart;
use stapo_rl::tasks::{RowsSpec, Split, Task, TaskError, TaskSpec};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use tempfile::TempDir;

static SHOWN: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn has_python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: there is no python3");
    }
    found
}

/// Three rows, `sum-1` to `sum-3`, whose answers are 1 to 3 and whose field `level` is 10 to 30.
fn rows(folder: &Path) -> RowsSpec {
    let lines: Vec<String> = (1..=3)
        .map(|n| format!(r#"{{"id": "sum-{n}", "problem": "0+{n}", "answer": "{n}", "level": {n}0}}"#))
        .collect();
    let path = folder.join("rows.jsonl");
    fs::write(&path, lines.join("\n")).unwrap();
    RowsSpec { held_out_share: 0.0, ..RowsSpec::new(path) }
}

/// A task on these rows, judged by a function of the given text.
fn task(folder: &Path, text: &str, change: impl Fn(&mut PythonSpec)) -> Result<Task, TaskError> {
    restart::set(env!("CARGO_BIN_EXE_stapo").into(), Vec::new());
    show_prints(|text| SHOWN.lock().unwrap().push(text.to_string()));
    let file = folder.join("reward.py");
    fs::write(&file, text).unwrap();
    let mut python = PythonSpec::new(file);
    change(&mut python);
    let verifier = VerifierSpec::Python(python);
    Task::open_with(&TaskSpec::Jsonl(RowsSpec { verifier, ..rows(folder) }), Programs::Allowed)
}

/// The problems in the order of their ids.
fn problems(task: &Task) -> Vec<Problem> {
    let mut problems: Vec<Problem> =
        (0..3).map(|position| task.problem(0, Split::Train, position).unwrap()).collect();
    problems.sort_by(|a, b| a.id.cmp(&b.id));
    problems
}

fn judge(task: &Task) -> Result<Vec<Judged>, TaskError> {
    let problems = problems(task);
    task.judge(&problems.iter().map(|problem| (problem, "it is \\boxed{2}\n\"é\"")).collect::<Vec<_>>())
}

fn judged(text: &str, change: impl Fn(&mut PythonSpec)) -> Result<Vec<Judged>, TaskError> {
    let folder = folder_below_tmp();
    judge(&task(folder.path(), text, change).unwrap())
}

fn failure(text: &str, change: impl Fn(&mut PythonSpec)) -> String {
    let message = judged(text, change).expect_err(text).to_string();
    assert!(message.contains("reward.py:reward") && message.contains("\nhint: "), "{message}");
    message
}

#[test]
fn numbers_truths_and_dicts_are_rewards() {
    if !has_python() {
        return;
    }
    let text = r#"
def reward(prompt, response, reference, row):
    assert prompt == "0+" + reference and response == 'it is \\boxed{2}\n"é"', (prompt, response)
    assert row == {"id": "sum-" + reference, "problem": prompt, "answer": reference, "level": int(reference) * 10}
    if reference == "1":
        return row["level"] / 4
    if reference == "2":
        return "boxed{2}" in response
    return {"reward": -1, "verdict": "no_answer", "answer": "2", "reason": "off by one"}
"#;
    let found = judged(text, |_| {}).unwrap();
    assert_eq!((found[0].verdict, found[0].reward), (Verdict::Right, Some(2.5)));
    assert_eq!((found[1].verdict, found[1].reward), (Verdict::Right, None));
    assert_eq!((found[2].verdict, found[2].reward), (Verdict::NoAnswer, Some(-1.0)));
    assert_eq!((found[2].answer.as_deref(), found[2].reason.as_str()), (Some("2"), "off by one"));
}

#[test]
fn a_batch_is_one_call_with_lists() {
    if !has_python() {
        return;
    }
    let text = r"
n_calls = 0
def score(prompts, responses, references, rows):
    global n_calls
    n_calls += 1
    return [n_calls * 100 + row['level'] + len(prompts) for row in rows]
";
    let folder = TempDir::new().unwrap();
    let task = task(folder.path(), text, |python| {
        python.batch = true;
        python.function = "score".into();
    });
    let task = task.unwrap();
    for call in 1..=2 {
        let rewards: Vec<_> = judge(&task).unwrap().iter().map(|judged| judged.reward.unwrap()).collect();
        let first = f64::from(call) * 100.0 + 13.0;
        assert_eq!(rewards, [first, first + 10.0, first + 20.0]);
    }
    let message = failure("def reward(*lists): return [1]", |python| python.batch = true);
    assert!(message.contains("sample 1 of 3") && message.contains("1 results for 3 samples"), "{message}");
}

#[test]
fn functions_of_trl_and_verl_work_as_they_are() {
    if !has_python() {
        return;
    }
    let rewards = |text: &str, is_batch: bool, function: &str| -> Vec<(Verdict, Option<f64>)> {
        let change = |python: &mut PythonSpec| {
            python.batch = is_batch;
            python.function = function.into();
        };
        judged(text, change).unwrap().iter().map(|judged| (judged.verdict, judged.reward)).collect()
    };
    let levels = [10.0, 20.0, 30.0].map(|level| (Verdict::Right, Some(level)));
    let trl = r#"
def reward(prompts, completions, answer, **kwargs):
    assert all("boxed{2}" in text for text in completions) and prompts[0] == "0+" + answer[0]
    return [float(level) for level in kwargs["level"]]

def strict(completions, level):
    return [None if n == 20 else n for n in level]
"#;
    assert_eq!(rewards(trl, false, "reward"), levels);
    assert_eq!(rewards(trl, true, "reward"), levels);
    let strict = rewards(trl, true, "strict");
    assert_eq!(strict[1], (Verdict::Wrong, Some(0.0)), "None adds nothing");
    let verl = r#"
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source is None and "boxed{2}" in solution_str
    if ground_truth == "2":
        return {"score": 20, "acc": True, "pred": "2", "more": 1}
    return 10.0 * int(ground_truth)

def together(data_sources, solution_strs, ground_truths, extra_infos):
    return [10 * int(truth) for truth in ground_truths]
"#;
    assert_eq!(rewards(verl, false, "compute_score"), levels);
    assert_eq!(rewards(verl, true, "compute_score"), levels);
    assert_eq!(rewards(verl, true, "together"), levels);
    let folder = TempDir::new().unwrap();
    let message = task(folder.path(), "def reward(text): return 1", |_| {}).err().unwrap().to_string();
    assert!(
        message.contains("reward(text): expected (prompt, response, reference, row), TRL's"),
        "{message}"
    );
}

#[test]
fn prints_are_shown_with_the_sample_and_never_taken_for_verdicts() {
    if !has_python() {
        return;
    }
    let text = r#"
import os, subprocess, sys
print("loading")
def reward(prompt, response, reference, row):
    print("looking at", row["id"])
    print("aside", file=sys.stderr)
    os.write(1, b'{"verdict": "right"}\n')
    subprocess.run(["echo", "from a child"])
    assert sys.stdin.read() == ""
    return False
"#;
    let found = judged(text, |_| {}).unwrap();
    assert!(found.iter().all(|judged| judged.verdict == Verdict::Wrong));
    let shown = SHOWN.lock().unwrap().join("\n");
    for (nth, id) in ["sum-1", "sum-2", "sum-3"].iter().enumerate() {
        let line = format!("reward.py:reward, sample {} of 3 (problem {id:?}): looking at {id}", nth + 1);
        assert!(shown.contains(&line), "{shown}");
    }
    assert!(shown.contains("): aside"), "{shown}");
}

#[test]
fn what_a_function_raises_names_the_sample_the_line_and_the_remedy() {
    if !has_python() {
        return;
    }
    let text = "def reward(prompt, response, reference, row):\n    return 1 / (int(reference) - 2)\n";
    let message = failure(text, |_| {});
    assert!(message.contains("sample 2 of 3 (problem \"sum-2\")"), "{message}");
    assert!(message.contains("reward.py\", line 2") && message.contains("ZeroDivisionError"), "{message}");
    for (returned, expected) in [
        ("'1'", "returned '1', expected a number"),
        ("None", "returned None"),
        ("[1]", "returned [1]"),
        ("float('nan')", "returned the reward nan"),
        ("{'score': 1}", "returned a dict with ['score']"),
        ("{}", "neither verdict nor reward"),
        ("{'verdict': 'good'}", "good"),
        ("exit(3)", "SystemExit"),
    ] {
        let message = failure(&format!("def reward(*given): return {returned}"), |_| {});
        assert!(message.contains("sample 1 of 3") && message.contains(expected), "{returned}: {message}");
    }
}

#[test]
fn a_file_that_does_not_load_is_found_at_the_start() {
    if !has_python() {
        return;
    }
    let folder = TempDir::new().unwrap();
    for (text, expected) in [
        ("import no_such_module_of_ours", "ModuleNotFoundError"),
        ("def reward(:", "SyntaxError"),
        ("def other(): pass", "no function 'reward'; it has other"),
    ] {
        let message = task(folder.path(), text, |_| {}).err().unwrap().to_string();
        assert!(message.contains("at the start") && message.contains(expected), "{message}");
    }
    let missing = |python: &mut PythonSpec| python.file = "/no/such/reward.py".into();
    let message = task(folder.path(), "", missing).err().unwrap().to_string();
    assert!(message.contains("at the start") && message.contains("No such file"), "{message}");
    let missing = |python: &mut PythonSpec| python.python = "/no/such/python".into();
    let message = task(folder.path(), "", missing).err().unwrap().to_string();
    assert!(message.contains("verifier /no/such/python"), "{message}");
}

#[test]
fn a_crash_starts_the_interpreter_again_once_and_a_hang_ends() {
    if !has_python() {
        return;
    }
    // The mark is beside the file, in a folder that stays visible though `/tmp` is private.
    let once = r#"
import os, pathlib
mark = pathlib.Path(__file__).with_name("mark")
def reward(prompt, response, reference, row):
    if reference == "2" and not mark.exists():
        mark.touch()
        os.abort()
    return int(reference)
"#;
    let rewards: Vec<_> = judged(once, |_| {}).unwrap().iter().map(|judged| judged.reward).collect();
    assert_eq!(rewards, [Some(1.0), Some(2.0), Some(3.0)]);
    assert!(SHOWN.lock().unwrap().iter().any(|line| line.contains("started again after: ")));
    let message = failure("import os\ndef reward(*given): os._exit(7)", |_| {});
    assert!(message.contains("sample 1 of 3 (problem \"sum-1\"): its output ended"), "{message}");
    assert!(message.contains("exit status: 7"), "{message}");
    let hang = "import time\ndef reward(*given): time.sleep(1000)";
    let message = failure(hang, |python| python.limits.sample_seconds = 0.3);
    assert!(message.contains("no answer for sample_seconds 0.3"), "{message}");
    let message = failure(hang, |python| (python.batch, python.limits.batch_seconds) = (true, 3.0));
    assert!(message.contains("batch_seconds 3 are over"), "{message}");
}

#[test]
fn the_file_the_function_and_the_way_of_calling_are_identity() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("reward.py");
    fs::write(&file, "def reward(*given): return 1").unwrap();
    // Any file that exists can stand for the interpreter here.
    let python = PythonSpec { python: file.clone(), ..PythonSpec::new(&file) };
    let hash = |python: &PythonSpec| fingerprint(&python.command()).unwrap();
    let before = hash(&python);
    assert_eq!(before, hash(&python));
    assert_ne!(before, hash(&PythonSpec { function: "other".into(), ..python.clone() }));
    assert_ne!(before, hash(&PythonSpec { batch: true, ..python.clone() }));
    assert_ne!(
        before,
        hash(&PythonSpec {
            limits: ProcessLimits { network: true, ..python.limits.clone() },
            ..python.clone()
        })
    );
    fs::write(&file, "def reward(*given): return 2").unwrap();
    assert_ne!(before, hash(&python));
}

#[test]
fn another_users_function_is_not_started() {
    let folder = TempDir::new().unwrap();
    let verifier = VerifierSpec::Python(PythonSpec::new(folder.path().join("reward.py")));
    let spec = TaskSpec::Jsonl(RowsSpec { verifier, ..rows(folder.path()) });
    let message = Task::open_with(&spec, Programs::Recorded).err().unwrap().to_string();
    assert!(message.contains("reward.py") && message.contains("--allow-command"), "{message}");
    let task = Task::open_with(&spec, Programs::Never).unwrap();
    assert!(judge(&task).unwrap_err().to_string().contains("was not started"));
}
