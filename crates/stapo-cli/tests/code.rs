//! Programs as answers: `stapo grade --code`, and training on rewards from tests. The sandbox's attacks are tests of
//! `stapo-sandbox`. The tests need `python3` and say so where there is none.

use crate::common::{SMALL_RUN, complaint, json, ok, parsed_lines, stapo, stapo_with_input};
use serde_json::{Value, json};
use stapo_core::Verdict;
use stapo_rl::reward::{CodeReward, CodeSpec, CodeStyle, Judged, Programs, VerifierSpec};
use stapo_rl::run::restart;
use stapo_rl::tasks::{RowsSpec, Split, Task, TaskSpec};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Whether programs of a model can be run here; prints why not.
pub fn has_sandbox() -> bool {
    let found: Value = serde_json::from_str(&ok(&stapo(Path::new("/"), &["doctor", "--json"]))).unwrap();
    let missing = &found["sandbox"]["error"];
    if !missing.is_null() {
        println!("skipped: {missing}");
    }
    missing.is_null()
}

/// The lines that `stapo grade --code` prints for rows.
fn graded(args: &[&str], rows: &[Value]) -> Vec<Value> {
    let input: Vec<String> = rows.iter().map(|row| format!("{row}\n")).collect();
    let args = [&["grade", "--code", "-"], args].concat();
    parsed_lines(&ok(&stapo_with_input(&args, input.concat().as_bytes())))
}

#[test]
fn every_kind_of_test_judges_programs() {
    if !has_sandbox() {
        return;
    }
    let block = |program: &str| format!("Here it is:\n```python\n{program}\n```\n");
    let double = block("def f(x):\n    return [x, x]");
    let echo = block("a = input()\nprint(a, input())");
    let cases = [
        (
            json!({"response": double, "test_list": ["assert f(1) == [1, 1]"], "reference": "r"}),
            "right",
            "passed the test",
        ),
        (
            json!({"response": double, "test_list": ["assert f(1) == [1, 1]", "assert f(2) == [2]"]}),
            "wrong",
            "f returned [2, 2]",
        ),
        (
            json!({"response": double, "test": "def check(c):\n    assert c(3)[1] == 3", "entry_point": "f"}),
            "right",
            "passed",
        ),
        (
            json!({"response": double, "test": "def check(c):\n    assert c(3)[1] == 4", "entry_point": "f"}),
            "wrong",
            "assert c(3)[1] == 4",
        ),
        (
            json!({"response": double, "entry_point": "f", "tests": [{"args": [0.1], "expected": [0.1, 0.1000000000001]}]}),
            "right",
            "passed",
        ),
        (
            json!({"response": double, "entry_point": "f", "tests": [{"input": [1], "expected": "(1, 1)"}]}),
            "wrong",
            "f returned [1, 1]",
        ),
        (
            json!({"response": block("def f(): return {3, 1}"), "entry_point": "f", "unordered": true, "tests": [{"args": [], "expected": [1, 3]}]}),
            "right",
            "passed",
        ),
        (json!({"response": echo, "tests": [{"input": "1\n2\n", "output": "1  2 \n\n"}]}), "right", "passed"),
        (json!({"response": echo, "tests": [{"input": "1\n2\n", "output": "12"}]}), "wrong", "printed \"1 2"),
        (
            json!({"response": echo, "checker": "def check(given, output, expected): return len(output) == 4", "tests": [{"input": "1\n2\n", "output": ""}]}),
            "right",
            "passed",
        ),
        (json!({"response": "no program", "test_list": ["assert f(1)"]}), "wrong", "holds no program"),
        (json!({"response": block("while True: pass"), "test_list": ["assert f(1)"]}), "wrong", "limit of"),
    ];
    let rows: Vec<Value> = cases.iter().map(|(row, _, _)| row.clone()).collect();
    let lines = graded(&["--cpu-seconds", "0.5"], &rows);
    assert_eq!(lines.len(), cases.len());
    for (line, (row, verdict, part)) in lines.iter().zip(&cases) {
        assert_eq!(line["verdict"], *verdict, "{row}: {line}");
        assert!(line["reason"].as_str().unwrap().contains(part), "{row}: {line}");
    }
    assert_eq!(lines[0]["extracted"], "def f(x):\n    return [x, x]\n");
    assert_eq!((&lines[0]["reference"], &lines[1]["reference"]), (&json!("r"), &json!("")));
    let completed = json!({"prompt": "def g(x):\n", "response": "    return x\n", "test": "def check(c): assert c(1) == 1", "entry_point": "g"});
    assert_eq!(graded(&["--style", "complete"], &[completed])[0]["verdict"], "right");
}

#[test]
fn a_line_without_tests_and_a_machine_without_python_are_said() {
    let output = stapo_with_input(&["grade", "--code", "-", "--python", "/no/python"], b"");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("/no/python") && said.contains("hint: install Python"), "{said}");
    if !has_sandbox() {
        return;
    }
    let output =
        stapo_with_input(&["grade", "--code", "-"], b"{\"response\": \"x\"}\n{\"test_list\": [\"a\"]}\n");
    assert_eq!(output.status.code(), Some(1));
    let lines = parsed_lines(&String::from_utf8_lossy(&output.stdout));
    assert!(lines[0]["error"].as_str().unwrap().contains("looked for test_list"), "{}", lines[0]);
    assert!(lines[1]["error"].as_str().unwrap().contains("\"response\" is missing"), "{}", lines[1]);
}

/// A task for the built-in model, whose alphabet has no word of Python: a response is a program of a language that prints
/// what stands in its box, and the tests compare the output.
pub fn write_task(at: &Path) {
    let rows: Vec<String> = (0..40)
        .map(|n| {
            let (a, b) = (n % 8 + 1, n / 8 + 1);
            let test = json!({"input": "", "output": (a + b).to_string()});
            format!(
                "{}\n",
                json!({"id": format!("sum-{n}"), "problem": format!("{a}+{b}="), "tests": [test]})
            )
        })
        .collect();
    fs::write(at.join("rows.jsonl"), rows.concat()).unwrap();
    let sed = ["/usr/bin/sed", "/bin/sed"].into_iter().find(|path| Path::new(path).is_file()).unwrap();
    let config = format!(
        r#"
[task]
path = "rows.jsonl"
[task.verifier]
kind = "code"
style = "whole"
cpu_seconds = 2.0
[task.verifier.language]
source = "response.txt"
run = ["{sed}", "-n", 's/.*boxed{{\([0-9]*\)}}.*/\1/p', "{{source}}"]
reads = ["{sed}", "/bin/true", "/usr/bin/true"]
"#
    );
    fs::write(at.join("code.toml"), config).unwrap();
}

fn train<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["train", "code.toml", "--out", out][..], &SMALL_RUN, more].concat()
}

#[test]
fn a_policy_learns_from_the_tests_of_its_programs_and_resumes_to_the_same_bits() {
    if !has_sandbox() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_task(at);
    ok(&stapo(at, &train("whole", &["--set", "steps=3", "--set", "record.responses_every_steps=1"])));
    let metrics = parsed_lines(&fs::read_to_string(at.join("whole/metrics.jsonl")).unwrap());
    assert_eq!(metrics.len(), 3);
    let responses = fs::read_to_string(at.join("whole/rollouts/step-000001.jsonl")).unwrap();
    let verdicts: Vec<Value> =
        parsed_lines(&responses).into_iter().map(|record| record["verdict"].clone()).collect();
    assert!(verdicts.contains(&json!("right")), "{verdicts:?}");
    // A run that is killed at any moment, grading included, goes on to the same bits.
    let mut cut = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .current_dir(at)
        .args(train("cut", &["--set", "steps=3", "--set", "record.responses_every_steps=1"]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while fs::read_to_string(at.join("cut/metrics.jsonl")).unwrap_or_default().lines().count() < 1 {
        assert!(cut.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    cut.kill().unwrap();
    cut.wait().unwrap();
    ok(&stapo(at, &["train", "--resume", "cut"]));
    let last =
        |run: &str| json(&at.join(run).join("manifest.json"))["steps"].as_array().unwrap().last().cloned();
    assert_eq!(last("cut"), last("whole"));
}

/// The verdict of a time-out depends on the machine: a replay takes it from the record and does not run the program again.
#[test]
fn a_replay_takes_time_outs_from_the_record() {
    if !has_sandbox() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_task(at);
    // What runs a program is a script that is no part of the run's identity, so that it can change behind its back.
    let script = at.join("run.sh");
    fs::write(&script, "while :; do :; done\n").unwrap();
    let path = script.to_str().unwrap();
    let language = format!(
        "task.verifier.language={{source=\"x\",run=[\"/bin/sh\",\"{path}\"],reads=[\"/bin/sh\",\"/bin/true\",\"{path}\"]}}"
    );
    let settings = ["task.verifier.cpu_seconds=0.1", "task.verifier.wall_seconds=60", &language, "steps=1"];
    let settings: Vec<&str> = settings.iter().flat_map(|setting| ["--set", *setting]).collect();
    ok(&stapo(at, &train("run", &settings)));
    let recorded = fs::read_to_string(at.join("run/rollouts/step-000001.jsonl")).unwrap();
    assert!(
        parsed_lines(&recorded).iter().all(|record| record["verdict"] == "over_budget"),
        "{recorded:.500}"
    );
    fs::write(&script, "echo x\n").unwrap();
    let said = ok(&stapo(at, &["verify", "run", "--replay", "--allow-command"]));
    assert!(said.contains("step 1: the same"), "{said}");
}

#[test]
fn a_row_without_tests_is_refused_by_its_line() {
    if !has_sandbox() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::write(
        at.join("rows.jsonl"),
        "{\"prompt\": \"1+1=\", \"test_list\": [\"assert 1\"]}\n{\"prompt\": \"2=\"}\n",
    )
    .unwrap();
    fs::write(at.join("code.toml"), "[task]\npath = \"rows.jsonl\"\n[task.verifier]\nkind = \"code\"\n")
        .unwrap();
    let said = complaint(at, &train("run", &[]));
    assert!(said.contains("line 2") && said.contains("looked for test_list"), "{said}");
}

/// A task of one row with three tests, and the judgements of responses.
fn judged(change: impl Fn(&mut CodeSpec), responses: &[&str]) -> Vec<Judged> {
    restart::set(env!("CARGO_BIN_EXE_stapo").into(), Vec::new());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.jsonl");
    let row = json!({"prompt": "double x", "test_list": ["assert f(1) == 2", "assert f(2) == 4", "assert f(3) == 6"]});
    fs::write(&path, row.to_string()).unwrap();
    let mut spec = CodeSpec { style: CodeStyle::Whole, ..CodeSpec::default() };
    spec.limits.cpu_seconds = 0.5;
    change(&mut spec);
    let rows = RowsSpec { held_out_share: 0.0, verifier: VerifierSpec::Code(spec), ..RowsSpec::new(path) };
    let task = Task::open_with(&TaskSpec::Jsonl(rows), Programs::Allowed).unwrap();
    let problem = task.problem(0, Split::Train, 0).unwrap();
    assert_eq!((problem.prompt.as_str(), problem.reference.as_str()), ("double x", ""));
    task.judge(&responses.iter().map(|response| (&problem, *response)).collect::<Vec<_>>()).unwrap()
}

#[test]
fn the_share_of_passed_tests_leaves_out_visible_ones_and_time_outs() {
    if !has_sandbox() {
        return;
    }
    let responses = [
        "def f(x): return 2 * x",
        "def f(x): return {1: 2}.get(x)",
        "def f(x): return 2 * x if x < 3 else 0",
        "def f(x):\n    while x > 2: pass\n    return 2 * x",
        " ",
    ];
    let found = judged(|_| {}, &responses);
    let verdicts: Vec<Verdict> = found.iter().map(|judged| judged.verdict).collect();
    let (right, wrong) = (Verdict::Right, Verdict::Wrong);
    assert_eq!(verdicts, [right, wrong, wrong, Verdict::OverBudget, Verdict::NoAnswer]);
    assert!(found.iter().all(|judged| judged.reward.is_none()));
    let shares = |n_visible: usize| -> Vec<f64> {
        let share = |spec: &mut CodeSpec| {
            (spec.reward, spec.visible_tests) = (CodeReward::Share, n_visible);
        };
        judged(share, &responses).iter().map(|judged| judged.reward.unwrap()).collect()
    };
    assert_eq!(shares(0), [1.0, 1.0 / 3.0, 2.0 / 3.0, 0.0, 0.0]);
    assert_eq!(shares(1), [1.0, 0.0, 0.5, 0.0, 0.0], "hard-coded visible tests earn nothing");
}
