//! Tools that start programs: Python in the sandbox, and functions and programs of the user's. The tests need `python3` and
//! say so where there is none.

use crate::common::{folder_below_tmp, ok, parsed_lines, stapo};
use serde_json::{Map, Value, json};
use stapo_rl::reward::{ProcessLimits, Programs};
use stapo_rl::run::restart;
use stapo_rl::tasks::TaskError;
use stapo_rl::tasks::tools::{
    Arguments, Call, FunctionSpec, Observation, OwnCommandSpec, PythonToolSpec, Session, ToolSet, ToolSpec,
};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

fn has_python() -> bool {
    restart::set(env!("CARGO_BIN_EXE_stapo").into(), Vec::new());
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: there is no python3");
    }
    found
}

/// Python in the sandbox; `None` where this machine cannot keep programs apart.
fn python(session: Session) -> Option<ToolSet> {
    let mut spec = PythonToolSpec { session, ..PythonToolSpec::default() };
    spec.limits.cpu_seconds = 0.5;
    match ToolSet::from_spec(&[ToolSpec::Python(spec)], Programs::Never) {
        Ok(tools) => Some(tools),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn code(text: &str) -> Call {
    Call { tool: "python".into(), arguments: Arguments::Text(text.into()) }
}

#[test]
fn python_answers_what_a_program_prints_or_raises() {
    if !has_python() {
        return;
    }
    let Some(tools) = python(Session::None) else { return };
    let run = |text: &str| tools.call(&code(text)).unwrap();
    assert_eq!(run("print(6 * 7)").text, "42");
    assert_eq!(run("x = 6\nx * 7").text, "42");
    assert_eq!(run("import sys\nprint('a')\nprint('b', file=sys.stderr)").text, "a\nb");
    assert_eq!(run("pass").text, "");
    let raised = run("x = 1\nprint('before')\n1 / 0");
    assert_eq!(raised.text, "before\nZeroDivisionError in line 3: division by zero");
    assert!(raised.failed && !raised.timed_out);
    assert_eq!(run("x = (1").text, "SyntaxError in line 1: '(' was never closed");
    assert!(run("input()").text.contains("EOFError"), "a program reads no program");
    let endless = run("while True: pass");
    assert!(endless.failed && endless.timed_out && endless.text.contains("processor time"), "{endless:?}");
    assert!(run("open('/etc/passwd').read()").failed);
}

#[test]
fn a_session_keeps_what_earlier_programs_defined_and_hides_what_they_printed() {
    if !has_python() {
        return;
    }
    let Some(tools) = python(Session::Episode) else { return };
    let earlier = [code("x = 20\nprint('noise')"), code("def f(y): return x + y\n1 / 0"), code("x += 1")];
    assert_eq!(tools.call_after(&earlier, &code("print(f(21))")).unwrap().text, "42");
    assert!(tools.call(&code("print(x)")).unwrap().text.contains("NameError"));
    let apart = python(Session::None).unwrap();
    assert!(apart.call_after(&earlier, &code("print(x)")).unwrap().text.contains("NameError"));
}

fn function(folder: &Path, name: &str, text: &str, seconds: f64) -> Result<ToolSet, TaskError> {
    let file = folder.join("tools.py");
    fs::write(&file, text).unwrap();
    let limits = ProcessLimits { sample_seconds: seconds, ..ProcessLimits::default() };
    let spec = FunctionSpec { file, function: name.into(), python: "python3".into(), workers: 3, limits };
    ToolSet::from_spec(&[ToolSpec::Function(spec)], Programs::Allowed)
}

fn named(tool: &str, arguments: &Value) -> Call {
    let arguments: Map<String, Value> = arguments.as_object().unwrap().clone();
    Call { tool: tool.into(), arguments: Arguments::Named(arguments) }
}

const WEATHER: &str = r#"
import time
from typing import Literal, Optional

def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: Optional[list[str]] = None):
    """The weather of a city.

    Args:
        city: The name of the city,
            in English.
        days: How many days.
    """
    if city == "slow":
        time.sleep(60)
    if city == "nap":
        time.sleep(0.3)
    if city == "crash":
        import os
        os._exit(3)
    if city == "":
        raise ValueError("no city")
    print("a print is no answer")
    return {"city": city, "days": days} if days > 1 else f"sunny in {city}"
"#;

#[test]
fn a_functions_hints_and_docstring_are_its_schema() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let tools = function(folder.path(), "weather", WEATHER, 30.0).unwrap();
    let schema = &tools.schemas()[0]["function"];
    assert_eq!(schema["name"], "weather");
    assert_eq!(schema["description"], "The weather of a city.");
    let expected = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "The name of the city, in English."},
            "days": {"type": "integer", "description": "How many days."},
            "unit": {"enum": ["C", "F"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["city"],
    });
    assert_eq!(schema["parameters"], expected);
    for (text, word) in [
        ("def weather(x):\n    'Says.'\n", "no type hint"),
        ("def weather(x: str): pass\n", "no docstring"),
        ("def weather(x: object):\n    'Says.'\n", "expected str, int"),
        ("def other(): pass\n", "has no function 'weather'"),
    ] {
        let Err(error) = function(folder.path(), "weather", text, 30.0) else { panic!("{text}") };
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_function_answers_fails_and_times_out_without_an_end_of_the_run() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let tools = function(folder.path(), "weather", WEATHER, 1.0).unwrap();
    let call = |arguments: &Value| -> Observation { tools.call(&named("weather", arguments)).unwrap() };
    assert_eq!(call(&json!({"city": "Ulm"})).text, "sunny in Ulm");
    assert_eq!(call(&json!({"city": "Ulm", "days": 2})).text, r#"{"city": "Ulm", "days": 2}"#);
    let raised = call(&json!({"city": ""}));
    assert_eq!((raised.text.as_str(), raised.failed), ("error: ValueError: no city", true));
    assert!(call(&json!({"city": "Ulm", "wind": 1})).text.contains("unexpected keyword argument 'wind'"));
    let late = call(&json!({"city": "slow"}));
    assert!(late.timed_out && late.failed && late.text.contains("no answer within 1 s"), "{late:?}");
    assert!(call(&json!({"city": "crash"})).text.contains("its process ended"));
    assert_eq!(call(&json!({"city": "Ulm"})).text, "sunny in Ulm", "another process answers");
}

/// Three processes answer three calls in the time of one.
#[test]
fn calls_do_not_wait_for_each_other() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let tools = function(folder.path(), "weather", WEATHER, 30.0).unwrap();
    let all = |city: &str| {
        let call = named("weather", &json!({"city": city}));
        let start = Instant::now();
        std::thread::scope(|scope| {
            let calls: Vec<_> = (0..3).map(|_| scope.spawn(|| tools.call(&call).unwrap().text)).collect();
            for answer in calls {
                assert_eq!(answer.join().unwrap(), format!("sunny in {city}"));
            }
        });
        start.elapsed()
    };
    // The first round starts the processes.
    all("nap");
    let seconds = all("nap");
    assert!(seconds < Duration::from_millis(850), "{seconds:?} for three naps of 0.3 s");
}

#[test]
fn a_program_answers_lines_and_needs_a_permission() {
    if !has_python() {
        return;
    }
    let folder = folder_below_tmp();
    let file = folder.path().join("tool.py");
    let text = "import json, sys\nfor line in sys.stdin:\n    call = json.loads(line)\n    n = call['arguments']['n']\n    reply = {'text': str(2 * n)} if n else {'error': 'nothing to double'}\n    print(json.dumps(reply), flush=True)\n";
    fs::write(&file, text).unwrap();
    let spec = ToolSpec::Command(OwnCommandSpec {
        name: "double".into(),
        description: "Doubles a number.".into(),
        parameters: json!({"n": {"type": "integer"}}).as_object().unwrap().clone(),
        program: "python3".into(),
        args: vec![file.display().to_string()],
        workers: 1,
        limits: ProcessLimits::default(),
    });
    let Err(refused) = ToolSet::from_spec(std::slice::from_ref(&spec), Programs::Recorded) else {
        panic!("a program that nobody recorded was started")
    };
    assert!(refused.to_string().contains("--allow-command"), "{refused}");
    let tools = ToolSet::from_spec(&[spec], Programs::Allowed).unwrap();
    assert_eq!(tools.schemas()[0]["function"]["parameters"]["required"], json!(["n"]));
    let call = |n: u64| tools.call(&named("double", &json!({"n": n}))).unwrap();
    assert_eq!(call(21).text, "42");
    assert_eq!((call(0).text.as_str(), call(0).failed), ("error: nothing to double", true));
}

/// The shipped run: the built-in model is right with a calculator only.
#[test]
fn the_shipped_tools_run_is_right_with_the_tool_alone() {
    let folder = folder_below_tmp();
    let train = |out: &str, turns: &str| -> Value {
        let small = ["steps=1", "rollout.problems_per_step=16", "update.problems_per_minibatch=16"];
        let more = ["evaluation.problems=16", turns];
        let mut words = vec!["train", "tools", "--out", out];
        words.extend(small.iter().chain(&more).flat_map(|set| ["--set", set]));
        ok(&stapo(folder.path(), &words));
        let metrics = fs::read_to_string(folder.path().join(out).join("metrics.jsonl")).unwrap();
        parsed_lines(&metrics).pop().unwrap()
    };
    let with = train("with", "episode.max_turns=3");
    assert!(with["accuracy"].as_f64().unwrap() > 0.1, "{with}");
    assert!(with["episodes"]["n_calls"].as_u64().unwrap() > 0 && with["exactness_max_abs"] == 0.0, "{with}");
    assert_eq!(train("without", "episode.max_turns=1")["accuracy"], 0.0);
}
