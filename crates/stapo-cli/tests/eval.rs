//! `stapo eval`, `compare` and `experiment` from the outside.

use crate::common::{complaint, json, ok, stapo, without_receipt};
use crate::pinned::{compare, numbered};
use crate::terminal::on_terminal;
use serde_json::Value;
use std::process::{Command, Stdio};
use std::time::Duration;

#[test]
fn an_evaluation_killed_and_resumed_gives_the_same_table() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = |out: &'static str| {
        vec![
            "eval",
            "--benchmarks",
            "arithmetic",
            "--limit",
            "60",
            "--decoding",
            "paper",
            "--samples",
            "8",
            "--max-tokens",
            "80",
            "--out",
            out,
        ]
    };
    let table = ok(&stapo(at, &args("whole")));
    assert!(
        table.contains("T=1.0 p=1.0") && table.contains("T=0.7 p=0.9") && table.contains("arithmetic"),
        "{table}"
    );
    let mut child = Command::new(env!("CARGO_BIN_EXE_stapo"))
        .current_dir(at)
        .args(args("cut"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let samples = at.join("cut/samples.jsonl");
    for _ in 0..500 {
        std::thread::sleep(Duration::from_millis(10));
        if std::fs::metadata(&samples).is_ok_and(|file| file.len() > 20_000) {
            break;
        }
    }
    child.kill().unwrap();
    child.wait().unwrap();
    ok(&stapo(at, &["eval", "--resume", "cut"]));
    assert_eq!(json(&at.join("cut/table.json")), json(&at.join("whole/table.json")));
    let said = ok(&stapo(at, &["compare", "whole", "cut"]));
    for line in table.lines().chain(said.lines()) {
        assert!(line.chars().count() <= 80, "{line}");
    }
    assert_eq!(said.matches("no detectable difference").count(), 2, "{said}");
    assert!(said.contains("\n\nT=0.7 p=0.9\n"), "a blank line above the first decoding: {said}");
}

#[test]
fn wrong_questions_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let cases: [(&[&str], &str); 8] = [
        (
            &["eval", "--chat", "--benchmarks", "arithmetic", "--limit", "1"],
            "but the model has no chat template",
        ),
        (&["eval", "--max-turns", "3"], "--max-turns: has no effect without tools"),
        (&["eval", "--benchmarks", "aime26"], "one of all, aime24"),
        (&["eval", "--benchmarks", "all"], "aime24.jsonl"),
        (&["eval", "--decoding", "hot"], "expected paper, greedy"),
        (&["eval", "--model", "nowhere"], "nowhere"),
        (&["eval", "--limit", "0"], "--limit <N>"),
        (&["compare", "a", "b"], "a: holds no evaluation"),
    ];
    for (args, expected) in cases {
        let said = complaint(at, args);
        assert!(said.contains(expected), "{args:?}: {said}");
    }
    assert_eq!(std::fs::read_dir(at).unwrap().count(), 0, "a refused evaluation makes no folder");
}

#[cfg(unix)]
#[test]
fn a_second_verifier_judges_beside_the_rule() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = ["eval", "--limit", "6", "--samples", "2", "--max-tokens", "80", "--out"];
    // Under another mode of the grader, the text of the box counts.
    let asked = [&args[..], &["modes", "--verifier", "boxed-exact"]].concat();
    let (status, table) = on_terminal(at, &asked, "");
    assert!(status.success(), "{table}");
    assert!(
        table.contains(" 0/12 samples  0s, ") && table.contains(" right, ") && table.contains(" tokens"),
        "{table}"
    );
    assert!(
        table.contains("\nbenchmark        k  avg@k               pass@k              maj@k\n"),
        "{table}"
    );
    assert!(table.contains("\nsamples and verdicts: modes\nreceipt "), "{table}");
    assert!(table.contains("rule and boxed-exact") && table.contains("0 samples are disputed"), "{table}");
    // A program that calls everything right disagrees on what the rule calls wrong.
    std::fs::write(at.join("yes.sh"), "while read -r line; do echo '{\"verdict\": \"right\"}'; done\n")
        .unwrap();
    let table = ok(&stapo(at, &[&args[..], &["yes", "--verifier", "sh yes.sh"]].concat()));
    let rows = json(&at.join("yes/table.json"));
    let found = &rows[0]["agreement"];
    let count = |key: &str| found[key].as_u64().unwrap();
    assert_eq!(count("n_both") + count("n_second_alone"), 12, "{found}");
    assert_eq!(count("n_rule_alone") + count("n_neither"), 0, "{found}");
    assert!(table.contains(&format!("{} samples are disputed", count("n_second_alone"))), "{table}");
    let samples = std::fs::read_to_string(at.join("yes/samples.jsonl")).unwrap();
    assert_eq!(samples.matches("\"second\":{").count(), 12);
    // The program is an input of the evaluation, and its folder is sealed with it.
    assert!(std::fs::read_to_string(at.join("yes/eval.json")).unwrap().contains("second verifier"));
    ok(&stapo(at, &["verify", "yes", "--replay", "--steps", "1"]));
    // Another program and another sample are named, and the others are the same.
    let program = std::fs::read_to_string(at.join("yes.sh")).unwrap();
    std::fs::write(at.join("yes.sh"), format!("{program}# changed\n")).unwrap();
    let changed = samples.replacen("\"tokens\":[", "\"tokens\":[1,", 1);
    std::fs::write(at.join("yes/samples.jsonl"), changed).unwrap();
    let output = stapo(at, &["verify", "yes", "--replay", "--steps", "1", "--allow-command"]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("second verifier") && said.contains(": DIFFERENT, recorded "), "{said}");
    assert!(said.contains(", sample 0: DIFFERENT\n"), "{said}");
    assert!(said.contains("replay: 1 samples the same, 1 different"), "{said}");
    assert!(complaint(at, &["eval", "--verifier", "{kind = \"oracle\"}"]).contains("verifier"));
}

/// A run is evaluated as it was trained: with its chat template, its variables, its system message, its stops and its length.
#[test]
fn a_run_is_asked_as_it_was_trained_unless_the_command_line_says_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    crate::data::set_up(at);
    let asked = [
        "model={kind=\"path\", path=\"model\"}",
        "rollout.chat=true",
        "rollout.chat_arguments={shout=true}",
        "rollout.stop=[\"=\"]",
        "rollout.max_response_tokens=24",
        "task.system=1+1",
        "steps=1",
    ];
    let set: Vec<&str> = asked.iter().flat_map(|setting| ["--set", setting]).collect();
    std::fs::create_dir(at.join("run")).unwrap();
    ok(&stapo(at, &[&["train", "--quiet", "--out", "run"], &TINY[..], &set].concat()));
    let eval = |out: &str, more: &[&str]| {
        let words = ["eval", "--model", "run", "--limit", "3", "--samples", "1", "--out", out];
        (ok(&stapo(at, &[&words, more].concat())), json(&at.join(out).join("eval.json")))
    };
    let (said, plan) = eval("as-trained", &[]);
    let shown = "asked as in the run run: chat template, with {\"shout\":true}, system message \"1+1\", responses end at [\"=\"], up to 24 tokens";
    let (above, _) = said.split_once("benchmark ").unwrap();
    assert!(above.replace('\n', " ").contains(shown), "{said}");
    assert_eq!((&plan["chat"], &plan["max_tokens"]), (&true.into(), &24.into()));
    assert_eq!((&plan["system"], &plan["chat_arguments"]["shout"]), (&"1+1".into(), &true.into()));
    assert_eq!((&plan["stop"], &plan["prompting_of"]), (&serde_json::json!(["="]), &"run".into()));
    ok(&stapo(at, &["verify", "as-trained", "--replay", "--steps", "2"]));
    let (said, plan) = eval("plain", &["--chat=false", "--max-tokens", "30", "--stop", "+"]);
    assert!(said.contains("plain text, responses end at [\"+\"], up to 30 tokens"), "{said}");
    assert!(plan["system"].is_null() && plan["chat"] == false && plan["chat_arguments"].is_null(), "{plan}");
    // The model itself is no run, and nothing is taken over.
    let words = ["eval", "--model", "model", "--limit", "1", "--samples", "1", "--max-tokens", "30"];
    assert!(ok(&stapo(at, &words)).contains("asked: plain text, up to 30 tokens"));
}

#[test]
fn two_runs_are_compared_by_their_responses() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    for (out, rate) in [("a", "update.learning_rate=1e-4"), ("b", "update.learning_rate=1e-2")] {
        let mask = "objective={preset=\"stapo\", masks=[{kind=\"spurious\", tau_p=0.2}]}";
        let records = "record.responses_every_steps=1";
        let set = ["--set", rate, "--set", records, "--set", "steps=3", "--set", mask];
        ok(&stapo(at, &[&["train", "--quiet", "--out", out], &TINY[..], &set[..]].concat()));
    }
    let said = ok(&stapo(at, &["compare", "a", "b"]));
    assert!(said.contains("3 steps in both, 3 of them with whole groups"), "{said}");
    assert!(
        said.contains("distinct answers of a group") && said.contains("improbable, low entropy"),
        "{said}"
    );
    for title in [
        "\nmean over steps                      A         B  B - A",
        "\nn-grams    divergence, nats",
        "\nshare of tokens, %       A: first",
    ] {
        assert!(said.contains(title), "{title}: {said}");
    }
    assert!(said.starts_with("A a, receipt ") && said.contains("\nB b, receipt "), "{said}");
    let same: Value = serde_json::from_str(&ok(&stapo(at, &["compare", "a", "a", "--json"]))).unwrap();
    assert_eq!(same["length"]["difference"], 0.0);
    assert!(same["n_grams"][1]["divergence"]["value"].as_f64().unwrap().abs() < 1e-9, "{same}");
    crate::common::copy_folder(&at.join("b"), &at.join("none"));
    std::fs::write(at.join("none/metrics.jsonl"), "").unwrap();
    assert!(complaint(at, &["compare", "a", "none"]).contains("a and none share no step"));
    // The first batch of both is of the same policy, the third is not.
    let apart: Value = serde_json::from_str(&ok(&stapo(at, &["compare", "a", "b", "--json"]))).unwrap();
    assert!(apart["n_grams"][1]["divergence"]["value"].as_f64().unwrap() > 0.01, "{apart}");
}

const TINY: [&str; 10] = [
    "--set",
    "steps=2",
    "--set",
    "rollout.problems_per_step=4",
    "--set",
    "update.problems_per_minibatch=4",
    "--set",
    "evaluation={problems=8,every_steps=1}",
    "--set",
    "rollout.group_size=4",
];

#[test]
fn the_main_experiment_runs_end_to_end_and_goes_on_where_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let args = [&["experiment", "main-quick", "--json", "--jobs", "2"], &TINY[..]].concat();
    let first: Value = serde_json::from_str(&ok(&stapo(at, &args))).unwrap();
    let names: Vec<&str> =
        first.as_array().unwrap().iter().map(|arm| arm["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["grpo", "entropy20", "justrl", "stapo"]);
    assert!(first[0]["against"]["n_questions"] == 2 && first[3]["against"].is_null());
    let run = at.join("experiments/main-quick/stapo/seed-1");
    assert!(run.join("metrics.jsonl").is_file());
    // The runs are listed from above the experiment, from the experiment and from the run itself.
    for (listed, name, n_runs) in [
        ("experiments", "main-quick/stapo/seed-1", 8),
        ("experiments/main-quick", "stapo/seed-1", 8),
        ("experiments/main-quick/stapo/seed-1", "seed-1", 1),
    ] {
        let runs: Value = serde_json::from_str(&ok(&stapo(at, &["runs", listed, "--json"]))).unwrap();
        let runs = runs.as_array().unwrap();
        let found = runs.iter().find(|run| run["run"] == name);
        assert!(found.is_some_and(|run| run["status"] == "done" && run["step"] == 2), "{listed}: {runs:?}");
        assert_eq!(runs.len(), n_runs, "{listed}");
    }
    let mut sections = Vec::new();
    let without_json = [&["experiment", "main-quick"], &TINY[..]].concat();
    for (name, args) in [
        ("the summary", without_json.clone()),
        ("what it detects", [&without_json[..], &["--power"]].concat()),
        ("what it would run", [&without_json[..], &["--dry-run", "--only", "stapo"]].concat()),
        ("its runs", vec!["runs", "experiments"]),
    ] {
        sections.push((name.to_string(), numbered(&ok(&stapo(at, &args)))));
    }
    compare("experiment.txt", &sections);
    // One run loses its last step and another its whole folder; running again restores both and gives the same summary.
    without_receipt(&run);
    std::fs::remove_dir_all(run.join("checkpoints/step-000002")).unwrap();
    std::fs::remove_dir_all(at.join("experiments/main-quick/grpo/seed-0")).unwrap();
    let again: Value = serde_json::from_str(&ok(&stapo(at, &args))).unwrap();
    assert_eq!(again, first);
    let other = [&args[..], &["--set", "steps=3"]].concat();
    let said = complaint(at, &other);
    assert!(
        said.contains("holds another experiment: its run grpo/seed-0 was made without steps=3"),
        "{said}"
    );
}

#[test]
fn a_dry_run_warns_once_of_data_that_no_run_could_open() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("rows.jsonl"), "{\"problem\": \"1+1=\", \"answer\": 2, \"split\": \"test\"}\n")
        .unwrap();
    let task = "task={kind=\"jsonl\",path=\"rows.jsonl\",held_out_share=0.0,only={split=[\"SPLIT\"]}}";
    for (split, warnings) in [("test", 0), ("train", 1)] {
        let set = task.replace("SPLIT", split);
        let output = stapo(at, &["experiment", "falsify", "--seeds", "0,1", "--dry-run", "--set", &set]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("warning: ").count(), warnings, "{said}");
        assert_eq!(
            said.contains("with-s2t/seed-0: task file rows.jsonl: holds no problem"),
            warnings > 0,
            "{said}"
        );
    }
    // All that is missing, each once for both arms and both seeds.
    let set =
        ["model=nothere.gguf", "evaluation.benchmarks=[\"humaneval\"]", "evaluation.benchmark_data=\"none\""];
    let set = set.iter().flat_map(|set| ["--set", set]);
    let words: Vec<&str> =
        ["experiment", "falsify", "--seeds", "0,1", "--dry-run"].into_iter().chain(set).collect();
    let output = stapo(at, &words);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.matches("warning: ").count() == 2, "{said}");
    assert!(said.contains("nothere.gguf") && said.contains("humaneval"), "{said}");
}

#[test]
fn an_experiment_starts_no_run_that_would_not_end_in_time_and_says_what_it_can_detect() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let text = "name = \"long\"\nseeds = [0, 1, 2]\n[[arms]]\nname = \"a\"\n[[arms]]\nname = \"b\"\n";
    std::fs::write(at.join("long.toml"), text).unwrap();
    let small = [&["experiment", "long.toml", "--seeds", "3"], &TINY[..]].concat();
    let long = [&small[..], &["--only", "a", "--minutes", "1", "--set", "steps=10000000"]].concat();
    let output = stapo(at, &long);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success() && said.contains("1 run left") && said.contains("a/seed-3 (about "),
        "{said}"
    );
    assert!(!at.join("experiments/long/a").exists());
    // The runs that are there set the pace: two steps take no minute.
    let short = [&small[..], &["--minutes", "1", "--out", "short"]].concat();
    let output = stapo(at, &short);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && !said.contains("left"), "{said}");
    assert!(said.contains("a/seed-3 done\n") && said.contains("b/seed-3 done\n"), "{said}");
    assert!(at.join("short/b/seed-3/manifest.sha256").is_file());
    // A seed is added to the folder, whose runs stay; other settings are another experiment.
    let receipt = || std::fs::read(at.join("short/a/seed-3/manifest.sha256")).unwrap();
    let before = receipt();
    let more = |seeds| [&["experiment", "long.toml", "--seeds", seeds, "--out", "short"], &TINY[..]].concat();
    let added = [&more("4")[..], &["--only", "a", "--json"]].concat();
    let summary: Value = serde_json::from_str(&ok(&stapo(at, &added))).unwrap();
    assert_eq!((&summary[0]["n_runs"], &summary[1]["n_runs"]), (&Value::from(2), &Value::from(1)));
    assert!(receipt() == before && !at.join("short/b/seed-4").exists());
    let said = complaint(at, &[&more("5")[..], &["--set", "steps=3"]].concat());
    assert!(said.contains("its run a/seed-3 was made without steps=3"), "{said}");
    let said = ok(&stapo(at, &["experiment", "long.toml", "--power", "--set", "evaluation.problems=256"]));
    // Three seeds detect 3.33 deviations, and 256 answers deviate by 3.125 points in each of two arms.
    assert!(said.contains("3 seeds, 256 problems") && said.contains("14.7"), "{said}");
    assert!(ok(&stapo(at, &["experiment", "long.toml", "--power", "--seeds", "0"])).contains("one seed"));
    // Data that is not here is taken to have as many problems as are asked for.
    let gone = "task={kind=\"jsonl\",path=\"gone.jsonl\"}";
    let output =
        stapo(at, &["experiment", "long.toml", "--power", "--set", gone, "--set", "evaluation.problems=77"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.starts_with("note: ") && said.contains("all of evaluation.problems are taken"), "{said}");
    assert!(ok(&output).contains("3 seeds, 77 problems"));
}

#[cfg(unix)]
#[test]
fn an_arm_that_fails_does_not_lose_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let text = "name = \"half\"\nseeds = [0]\n[[arms]]\nname = \"good\"\n[[arms]]\nname = \"bad\"\nset = [\"model={kind=\\\"path\\\",path=\\\"gone\\\"}\"]\n";
    std::fs::write(at.join("half.toml"), text).unwrap();
    let (status, table) = on_terminal(at, &[&["experiment", "half.toml"], &TINY[..]].concat(), "");
    assert_eq!(status.code(), Some(1));
    // A bar for all runs, and a line for the one in progress.
    assert!(
        table.contains(" 0/2 runs  0s so far  ")
            && table.contains(" 1/2 runs ")
            && table.contains(" 2/2 runs "),
        "{table}"
    );
    assert!(
        table.contains("good/seed-0 step 1  accuracy ") && table.contains("error: bad/seed-0 failed: "),
        "{table}"
    );
    assert!(!table.contains("good/seed-0 done"), "{table}");
    assert!(table.contains("good") && table.contains("failed: bad/seed-0 error: model gone"), "{table}");
    let listed = ok(&stapo(at, &["experiment"]));
    assert!(listed.contains("falsify") && listed.contains("ablation-mask"), "{listed}");
    // A quiet experiment draws no bars, and says what failed.
    let quiet = ["experiment", "half.toml", "--quiet", "--only", "bad", "--out", "none"];
    let (_, said) = on_terminal(at, &[&quiet[..], &TINY].concat(), "");
    assert!(!said.contains(" so far ") && said.contains(" bad/seed-0 failed: "), "{said}");
    let said = complaint(at, &["report", "none"]);
    assert!(said.contains("experiment none: no run has a result\ngood, seed 0: "), "{said}");
    let run = "experiments/half/good/seed-0";
    assert!(complaint(at, &["report", run, run]).contains("named twice\nhint: "));
}
