//! What users see of programs: benchmarks, configs that `init` writes, records, pages and counterfactuals. The tests need
//! `python3` and say so where there is none.

use crate::code::{has_sandbox, write_task};
use crate::common::{SMALL_RUN, json, ok, parsed_lines, stapo};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn write_lines(path: &Path, rows: &[Value]) {
    let lines: Vec<String> = rows.iter().map(|row| format!("{row}\n")).collect();
    fs::write(path, lines.concat()).unwrap();
}

/// The built-in model writes one line, which continues a comment of the prompt.
fn row(id: &str, prompt: &str) -> Value {
    json!({"id": id, "prompt": prompt, "entry_point": "f", "test": "def check(f):\n    assert f() == 3"})
}

#[test]
fn a_benchmark_of_programs_says_how_they_ended() {
    if !has_sandbox() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::create_dir(at.join("data")).unwrap();
    let rows = [
        row("right", "print('hello')\ndef f():\n    return 3\n#"),
        row("wrong", "def f():\n    return 4\n#"),
        row("broken", "1+2="),
    ];
    write_lines(&at.join("data/humaneval.jsonl"), &rows);
    let call = ["eval", "--benchmarks", "humaneval", "--samples", "2", "--max-tokens", "40", "--out", "e"];
    let said = ok(&stapo(at, &call));
    assert!(said.contains("humaneval: of its programs 2 passed, 2 failed a test, 2 crashed"), "{said}");
    let table = json(&at.join("e/table.json"));
    let ends = json!({"passed": 2, "failed_test": 2, "crashed": 2});
    assert_eq!((&table[0]["programs"], table[0].get("maj")), (&ends, None), "{table}");
    assert_eq!((&table[0]["pass"][1][0], &table[0]["n_questions"]), (&json!(2), &json!(3)), "{table}");
    let samples = parsed_lines(&fs::read_to_string(at.join("e/samples.jsonl")).unwrap());
    let of = |id: &str| samples.iter().find(|sample| sample["problem_id"] == id).unwrap();
    let right = &of("right")["program"];
    assert!(right["source"].as_str().unwrap().starts_with("print('hello')\ndef f()"), "{right}");
    assert_eq!((&right["printed"], &right["end"]), (&json!("hello\n"), &json!("passed")));
    assert!(right["cpu_seconds"].as_f64().unwrap() > 0.0 && of("right")["answer"].is_null());
    let failing = of("wrong")["program"]["failing_test"].as_str().unwrap();
    assert!(failing.contains("assert f() == 3") && failing.contains('4'), "{failing}");
    assert_eq!(of("broken")["verdict"], "wrong");
    let said = ok(&stapo(at, &["verify", "e", "--replay", "--steps", "3"]));
    assert!(said.contains("replay: 6 samples the same, 0 different"), "{said}");
    // A response without a block holds no program where a template of the user's asks for a block.
    let said = ok(&stapo(at, &[&call[..7], &["--template", "{{ prompt }}", "--out", "t"]].concat()));
    assert!(said.contains("humaneval: of its programs 6 no program"), "{said}");
}

#[test]
fn init_writes_a_config_that_trains_on_rows_with_tests() {
    if !has_sandbox() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let row = |n: usize| {
        let split = if n < 40 { "train" } else { "test" };
        json!({"id": n, "problem": format!("{n}+1="), "test_list": [format!("assert {n}")], "split": split})
    };
    write_lines(&at.join("rows.jsonl"), &(0..50).map(row).collect::<Vec<_>>());
    let said = ok(&stapo(at, &["init", "--model", "builtin", "--data", "rows.jsonl"]));
    assert!(said.contains("mode \"code\": the rows hold tests"), "{said}");
    assert!(said.contains("40 rows: problem in \"problem\", ids from field \"id\""), "{said}");
    let config = fs::read_to_string(at.join("stapo.toml")).unwrap();
    assert!(config.contains("only = { split = [\"train\", \"validation\"] }"), "{config}");
    assert!(config.contains("verifier = { kind = \"code\", style = \"whole\" }"), "{config}");
    let train = [&["train", "stapo.toml", "--out", "run", "--set", "steps=1"][..], &SMALL_RUN].concat();
    ok(&stapo(at, &train));
    let records = parsed_lines(&fs::read_to_string(at.join("run/rollouts/step-000001.jsonl")).unwrap());
    let ends: Vec<&Value> = records.iter().map(|record| &record["program"]["end"]).collect();
    assert!(!ends.is_empty() && ends.iter().all(|end| end.is_string()), "{ends:?}");
}

#[test]
fn a_run_on_programs_is_inspected_replayed_and_continued_both_ways() {
    if !has_sandbox() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_task(at);
    let mask = "objective={preset=\"stapo\", masks=[{kind=\"spurious\", tau_p=0.2}]}";
    let train = [
        &["train", "code.toml", "--out", "run", "--set", "steps=2", "--set", mask][..],
        &["--set", "update.learning_rate=0.001", "--set", "record.responses_every_steps=1"],
        &SMALL_RUN,
    ];
    ok(&stapo(at, &train.concat()));
    let tokens: Vec<Value> = (1..=2)
        .filter_map(|step| fs::read_to_string(at.join(format!("run/tokens/step-{step:06}.jsonl"))).ok())
        .flat_map(|text| parsed_lines(&text))
        .collect();
    assert!(!tokens.is_empty() && tokens.iter().all(|token| token["category"].is_string()), "{tokens:?}");
    let said = ok(&stapo(at, &["inspect", "run", "--terminal"]));
    assert!(said.contains("  program: passed, ") || said.contains("  program: failed a test, "), "{said}");
    ok(&stapo(at, &["inspect", "run", "--out", "page.html"]));
    assert!(fs::read_to_string(at.join("page.html")).unwrap().contains("\"cpu_seconds\":"));
    ok(&stapo(at, &["report", "run", "--out", "report.html", "--csv", "tables"]));
    let table = fs::read_to_string(at.join("tables/silenced-categories.csv")).unwrap();
    assert!(table.contains("spurious, % of") && table.contains("\nidentifier,"), "{table}");
    let said = ok(&stapo(at, &["verify", "run", "--replay", "--steps", "2"]));
    assert!(said.contains("step 2: the same"), "{said}");
    let call = ["counterfactual", "run", "--from", "1", "--samples", "2", "--tokens", "1", "--json"];
    let summaries = parsed_lines(&ok(&stapo(at, &call)));
    assert_eq!(summaries[0]["kind"], "silenced", "{summaries:?}");
}
