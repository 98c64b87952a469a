//! A model as judge, from the outside. The built-in model judges: its verdicts mean nothing, and what is tested is
//! everything around them.

use crate::common::{SMALL_RUN, complaint, copy_folder, json, ok, parsed_lines, root, stapo};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A judge in the characters of the built-in model, in the folder `judge`.
const JUDGE: &str = r#"{kind="judge", model="judge", template="{{ problem }}:{{ response }}:{{ reference }}=", yes="1", no="2"}"#;

fn write_judge(at: &Path) {
    copy_folder(&root().join("models/base"), &at.join("judge"));
    fs::write(at.join("judge.toml"), format!("[task]\nkind = \"arithmetic\"\nverifier = {JUDGE}\n")).unwrap();
}

fn train<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let every = ["--set", "record.responses_every_steps=1", "--set", "steps=3"];
    [&["train", "judge.toml", "--out", out][..], &SMALL_RUN, &every, more].concat()
}

/// Runs until the first step is recorded, and kills the process.
fn cut_off(at: &Path, args: &[&str], run: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
    let mut child =
        command.current_dir(at).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while fs::read_to_string(at.join(run).join("metrics.jsonl")).unwrap_or_default().lines().count() < 1 {
        assert!(child.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Changes the last weight of a model.
fn change_weights(model: &Path) {
    let path = model.join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_run_rewarded_by_a_judge_resumes_to_the_same_bits_and_refuses_a_changed_judge() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_judge(at);
    ok(&stapo(at, &train("whole", &[])));
    for metrics in parsed_lines(&fs::read_to_string(at.join("whole/metrics.jsonl")).unwrap()) {
        let judge = &metrics["judge"];
        assert_eq!(judge["asked_share"], 1.0);
        let share = |key: &str| (0.0..=1.0).contains(&judge[key].as_f64().unwrap());
        assert!(share("agreement") && share("rule_accuracy"), "{judge}");
    }
    let recorded = parsed_lines(&fs::read_to_string(at.join("whole/rollouts/step-000001.jsonl")).unwrap());
    for record in &recorded {
        let opinion = &record["judge"];
        let is_right = opinion["margin"].as_f64().unwrap() > 0.0;
        assert_eq!(record["verdict"], if is_right { "right" } else { "wrong" });
        assert_eq!(record["verdict"], opinion["verdict"]);
        assert!(opinion["rule"].is_string());
    }
    let manifest = json(&at.join("whole/manifest.json"));
    let names: Vec<&str> =
        manifest["inputs"].as_array().unwrap().iter().map(|input| input["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"judge weights") && names.contains(&"judge tokenizer"), "{names:?}");
    assert!(fs::read_to_string(at.join("whole/plan.toml")).unwrap().contains("{{ response }}"));
    ok(&stapo(at, &["report", "whole", "--csv", "tables"]));
    let table = fs::read_to_string(at.join("tables/judge.csv")).unwrap();
    assert!(table.lines().count() == 2 && table.contains("100.0"), "{table}");
    let shown = ok(&stapo(at, &["inspect", "whole", "--terminal"]));
    assert!(shown.contains("judge: ") && shown.contains(" nats; rule: "), "{shown}");
    let replayed = ok(&stapo(at, &["verify", "whole", "--replay"]));
    assert!(replayed.contains("step 3: the same"), "{replayed}");

    cut_off(at, &train("cut", &[]), "cut");
    ok(&stapo(at, &["train", "--resume", "cut"]));
    let last =
        |run: &str| json(&at.join(run).join("manifest.json"))["steps"].as_array().unwrap().last().cloned();
    assert_eq!(last("cut"), last("whole"));

    cut_off(at, &train("changed", &[]), "changed");
    change_weights(&at.join("judge"));
    let said = complaint(at, &["train", "--resume", "changed"]);
    assert!(said.contains("judge weights") && said.contains("changed"), "{said}");
}

#[test]
fn a_judge_beside_the_rule_is_one_of_several_rewards() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_judge(at);
    let config = format!(
        "[[rewards]]\nname = \"rule\"\n[[rewards]]\nname = \"judge\"\nweight = 0.5\nverifier = {JUDGE}\n"
    );
    fs::write(at.join("judge.toml"), config).unwrap();
    ok(&stapo(at, &train("run", &["--set", "steps=1"])));
    let recorded = parsed_lines(&fs::read_to_string(at.join("run/rollouts/step-000001.jsonl")).unwrap());
    for record in &recorded {
        let value = |verdict: &Value| if verdict == "right" { 1.0 } else { -1.0 };
        assert_eq!(record["judge"]["rule"], record["verdict"], "the first reward decides accuracy");
        assert_eq!(record["rewards"]["judge"], value(&record["judge"]["verdict"]));
        let sum = value(&record["verdict"]) + 0.5 * value(&record["judge"]["verdict"]);
        assert_eq!(record["reward"], sum);
    }
    let twice = format!(
        "{}[[rewards]]\nname = \"more\"\nverifier = {JUDGE}\n",
        fs::read_to_string(at.join("judge.toml")).unwrap()
    );
    fs::write(at.join("judge.toml"), twice).unwrap();
    let said = complaint(at, &train("two", &[]));
    assert!(said.contains("several judges") && said.contains("hint: "), "{said}");
}

#[test]
fn an_evaluation_has_the_verdicts_of_a_judge_beside_the_rule() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_judge(at);
    let first = ["eval", "--benchmarks", "arithmetic", "--limit", "4", "--samples", "2", "--out"];
    let args = [&first[..], &["evaluated", "--verifier", JUDGE]].concat();
    let said = ok(&stapo(at, &args));
    assert!(said.contains("rule and the judge judge") && said.contains("second alone"), "{said}");
    let samples = parsed_lines(&fs::read_to_string(at.join("evaluated/samples.jsonl")).unwrap());
    assert_eq!(samples.len(), 8);
    assert!(samples.iter().all(|sample| sample["second"]["margin"].is_number()));
    assert!(ok(&stapo(at, &["verify", "evaluated", "--replay"])).contains("0 different"));
    // The built-in model does not know the words of the default prompt.
    let said = complaint(at, &[&first[..], &["refused", "--judge", "judge"]].concat());
    assert!(said.contains("verifier.yes") && said.contains("\"Yes\""), "{said}");
    assert!(!at.join("refused").exists());
}

#[test]
fn the_panel_shows_the_rates_of_judge_and_rule() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_judge(at);
    fs::write(at.join("prompt.jinja"), "{{ problem }}:{{ response }}:{{ reference }}=").unwrap();
    let args = [
        "judge-test",
        "--model",
        "judge",
        "--template",
        "prompt.jinja",
        "--yes",
        "1",
        "--no",
        "2",
        "--limit",
        "3",
    ];
    let said = ok(&stapo(at, &args));
    for word in
        ["empty", "injection", "special tokens", "right answer (control)", "s per 1,000 verdicts", "weights "]
    {
        assert!(said.contains(word), "{word}: {said}");
    }
    let lines = parsed_lines(&ok(&stapo(at, &[&args[..], &["--json"]].concat())));
    let (verdicts, rows): (Vec<_>, Vec<_>) =
        lines.into_iter().partition(|line| line.get("response").is_some());
    for row in &rows {
        let of_trick: Vec<_> = verdicts.iter().filter(|verdict| verdict["trick"] == row["trick"]).collect();
        assert_eq!(row["n_responses"], of_trick.len());
        let n_right = of_trick.iter().filter(|verdict| verdict["judge"] == "right").count();
        let rate = row["judge"]["value"].as_f64().unwrap();
        assert!((rate - n_right as f64 / of_trick.len() as f64).abs() < 1e-12, "{row}");
        assert_eq!(row["rule"]["value"], f64::from(u8::from(row["is_right"] == true)));
    }
    assert_eq!(rows.len(), 13);
    // The table has a row for each trick, below its titles.
    let table: Vec<&str> = said.lines().skip_while(|line| !line.starts_with("called right, %")).collect();
    let titles = "called right, %        responses  by the judge           by the rule";
    assert_eq!(table[0], titles);
    for (line, row) in table[1..].iter().zip(&rows) {
        let percent = |key: &str| format!("{:.1}", 100.0 * row[key]["value"].as_f64().unwrap());
        assert!(line.starts_with(row["trick"].as_str().unwrap()), "{line}");
        assert!(line.contains(&format!(" {}  {}", row["n_responses"], percent("judge"))), "{line}");
        assert!(line[57..].starts_with(&percent("rule")), "{line}");
    }
    let n_responses = verdicts.len();
    assert!(said.contains(&format!(": {n_responses} responses to 3 questions\n")), "{said}");
    fs::write(at.join("mine.jsonl"), "{\"problem\": \"1+1=\", \"answer\": \"2\"}\n").unwrap();
    let mine = parsed_lines(&ok(&stapo(at, &[&args[..9], &["--data", "mine.jsonl", "--json"]].concat())));
    let copied = mine.iter().find(|line| line["trick"] == "copied question").unwrap();
    assert_eq!(copied["response"], "1+1=");
    let said = complaint(at, &["judge-test", "--model", "judge", "--read", "word"]);
    assert!(said.contains("yes-no, letter or number"), "{said}");
}
