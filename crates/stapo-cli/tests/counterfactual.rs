//! Continuations from a token as sampled and from the preferred one.

use crate::common::{complaint, ok, parsed_lines, stapo};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// A run whose mask silences many tokens, with a checkpoint between its steps and some steps to replay.
const RUN: [&str; 21] = [
    "train",
    "--quiet",
    "--out",
    "run",
    "--set",
    "steps=4",
    "--set",
    "rollout.problems_per_step=4",
    "--set",
    "update.problems_per_minibatch=2",
    "--set",
    "evaluation.problems=2",
    "--set",
    "evaluation.every_steps=0",
    "--set",
    "record.checkpoint_every_steps=2",
    "--set",
    "update.learning_rate=0.001",
    "--set",
    "objective={preset=\"stapo\", masks=[{kind=\"spurious\", tau_p=0.2}]}",
    "--json",
];

/// Compares the table with one line for each kind of token.
fn assert_table(table: &str, summaries: &[Value]) {
    let rows: Vec<&str> = table.lines().skip(2).collect();
    assert_eq!(rows.len(), summaries.len(), "{table}");
    for (row, summary) in rows.iter().zip(summaries) {
        let numbers: Vec<&str> = row[25..].split_whitespace().collect();
        let percent = |key: &str| format!("{:.1}", 100.0 * summary[key].as_f64().unwrap());
        let counts = ["n_tokens", "n_problems"].map(|key| summary[key].to_string());
        assert_eq!(numbers[..2], counts, "{table}");
        assert_eq!(numbers[2..4], ["right_sampled", "right_preferred"].map(percent), "{table}");
        let points = |value: &Value| format!("{:+.1}", 100.0 * value.as_f64().unwrap());
        let paired = &summary["paired"];
        if paired.is_null() {
            assert!(row.ends_with("  needs two problems"), "{table}");
            continue;
        }
        let [low, high] = ["low", "high"].map(|end| points(&paired["interval"][end]));
        let p = paired["p_permutation"].as_f64().unwrap();
        let difference = format!("{} ({low} to {high}), p = {p:.3}", points(&paired["difference"]));
        assert!(row.ends_with(&format!("  {difference}")), "{difference}: {table}");
    }
}

/// Compares what is shown of the gradients with their summary.
fn assert_gradients(table: &str, summary: &Value) {
    let counts = ["n_silenced", "n_tokens", "n_steps"].map(|key| summary[key].to_string());
    let [n_silenced, n_tokens, n_steps] = counts;
    assert!(
        table.starts_with(&format!(
            "{n_silenced} silenced of {n_tokens} tokens in the first mini-batches of {n_steps} steps; "
        )),
        "{table}"
    );
    let share = summary["silenced_share"]["value"].as_f64().unwrap();
    let interval = &summary["silenced_share"]["interval"];
    let [low, high] = ["low", "high"].map(|end| interval[end].as_f64().unwrap());
    let row = format!(
        "{:<50} {share:+.3e} ({low:+.3e} to {high:+.3e})",
        "share of the squared gradient norm, silenced"
    );
    assert!(table.lines().any(|line| line == row), "{row}: {table}");
    assert!(table.ends_with("in nats per response by one plain step of the learning rate\n"), "{table}");
}

/// What is said of a step before its tokens are continued.
fn told_of(at: &Path, step: u64) -> String {
    let recorded = fs::read_to_string(at.join(format!("run/tokens/step-{step:06}.jsonl"))).unwrap();
    format!("step {step}: {} silenced tokens\n", recorded.lines().count())
}

/// What is said of steps after their gradients were looked at.
fn assert_told(told: &str, steps: &[Value]) {
    for step in steps {
        let (number, n) = (&step["step"], &step["n_silenced"]);
        let said = format!("step {number}: {n} silenced tokens in the first mini-batch\n");
        assert!(told.contains(&said), "{said}: {told}");
    }
}

#[test]
fn tokens_of_a_replayed_step_are_continued_both_ways() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    ok(&stapo(at, &RUN));
    let call = ["counterfactual", "run", "--from", "3", "--samples", "4", "--tokens", "3", "--json", "--out"];
    let summaries = parsed_lines(&ok(&stapo(at, &[&call[..], &["a.jsonl"]].concat())));
    let tokens = parsed_lines(&fs::read_to_string(at.join("a.jsonl")).unwrap());
    let of = |kind: &str| tokens.iter().filter(|token| token["kind"] == kind).collect::<Vec<_>>();
    // Step 3 begins at a checkpoint, step 4 is replayed; at most three tokens of each kind in each.
    for step in [3, 4] {
        let recorded = fs::read_to_string(at.join(format!("run/tokens/step-{step:06}.jsonl"))).unwrap();
        let recorded = parsed_lines(&recorded);
        let own: Vec<_> = of("silenced").into_iter().filter(|token| token["step"] == step).collect();
        assert_eq!(own.len(), recorded.len().min(3), "step {step}");
        for token in own {
            let same = ["problem_id", "sample_idx", "token_idx", "id", "text"];
            let is_same = |record: &&Value| same.iter().all(|key| record[*key] == token[*key]);
            let record = recorded.iter().find(is_same).expect("a silenced token of the run");
            assert_eq!(token["preferred_id"], record["alternatives"][0]["id"], "{token}");
        }
    }
    assert!(tokens.iter().all(|token| token["id"] != token["preferred_id"] && token["n_samples"] == 4));
    assert!(of("punished").iter().all(|token| token["advantage"].as_f64().unwrap() < 0.0));
    assert!(!of("random").is_empty() && !of("punished").is_empty());
    let silenced = &summaries[0];
    assert_eq!(
        (&silenced["kind"], &silenced["n_tokens"]),
        (&"silenced".into(), &of("silenced").len().into())
    );
    // The same seed gives the same continuations, and without --json their rates in a table.
    let words: Vec<&str> = call.into_iter().filter(|word| *word != "--json").chain(["b.jsonl"]).collect();
    let output = stapo(at, &words);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let (first, last) = told.split_once("1 of 2 steps, ").expect("the time that is left");
    assert_eq!(first, told_of(at, 3));
    assert!(last.ends_with(&format!(" left\n{}", told_of(at, 4))), "{told}");
    let table = ok(&output);
    assert_eq!(fs::read(at.join("a.jsonl")).unwrap(), fs::read(at.join("b.jsonl")).unwrap());
    assert_table(&table, &summaries);
    assert!(complaint(at, &["counterfactual", "run", "--from", "9"]).contains("no silenced token"));
    let told = complaint(at, &["counterfactual", "run", "--from", "4", "--to", "3"]);
    assert!(told.contains("--from 4 --to 3: no step lies between these"), "{told}");
    assert!(complaint(at, &[&call[..], &["a.jsonl"]].concat()).contains("a.jsonl"), "nothing is overwritten");
    // The gradient side of the same steps.
    let call = ["counterfactual", "run", "--from", "3", "--gradient", "--problems", "8", "--json", "--out"];
    let summary = &parsed_lines(&ok(&stapo(at, &[&call[..], &["c.jsonl"]].concat())))[0];
    let steps = parsed_lines(&fs::read_to_string(at.join("c.jsonl")).unwrap());
    assert_eq!(steps.iter().map(|own| own["step"].as_u64().unwrap()).collect::<Vec<_>>(), [3, 4]);
    let share = summary["silenced_share"]["value"].as_f64().unwrap();
    assert!(share > 0.0 && share < 1.0, "{summary}");
    let metrics = parsed_lines(&fs::read_to_string(at.join("run/metrics.jsonl")).unwrap());
    for own in &steps {
        // The first of two mini-batches has some of the step's silenced tokens.
        let of_step = &metrics[own["step"].as_u64().unwrap() as usize - 1]["n_silenced"];
        assert!(own["n_silenced"].as_u64() <= of_step.as_u64(), "{own}");
        assert!(own["n_answers"].as_u64().unwrap() <= 8, "{own}");
    }
    let words: Vec<&str> = call.into_iter().filter(|word| *word != "--json").chain(["d.jsonl"]).collect();
    let output = stapo(at, &words);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_told(&told, &steps);
    let table = ok(&output);
    // A step that does not follow a checkpoint is the same if it is looked at alone.
    let last = ["counterfactual", "run", "--from", "4", "--gradient", "--problems", "8", "--out", "e.jsonl"];
    ok(&stapo(at, &last));
    assert_eq!(parsed_lines(&fs::read_to_string(at.join("e.jsonl")).unwrap()), steps[1..]);
    assert_eq!(fs::read(at.join("c.jsonl")).unwrap(), fs::read(at.join("d.jsonl")).unwrap());
    assert_gradients(&table, summary);
    // A record that the replay does not reproduce.
    let file = at.join("run/tokens/step-000003.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    let mut first: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    first["id"] = 7.into();
    first["token_idx"] = 0.into();
    fs::write(&file, format!("{first}\n")).unwrap();
    assert!(
        complaint(at, &["counterfactual", "run", "--from", "3", "--to", "3"])
            .contains("step 3: the replayed batch has another token")
    );
}

/// A signal ends the command behind the step at work, with the summary of the steps that are done.
#[test]
#[cfg(unix)]
fn a_stopped_counterfactual_sums_up_what_is_done() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    ok(&stapo(at, &RUN));
    let words = ["counterfactual", "run", "--samples", "8", "--json", "--out", "a.jsonl"];
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_stapo"));
    command
        .current_dir(at)
        .args(words)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    while fs::read_to_string(at.join("a.jsonl")).map_or(0, |text| text.lines().count()) == 0 {
        assert!(child.try_wait().unwrap().is_none(), "ended before a step was done");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(143));
    let steps: std::collections::BTreeSet<u64> =
        parsed_lines(&fs::read_to_string(at.join("a.jsonl")).unwrap())
            .iter()
            .map(|token| token["step"].as_u64().unwrap())
            .collect();
    assert!((1..4).contains(&steps.len()), "{steps:?}");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.ends_with(&format!("stopped by SIGTERM after {} of 4 steps\n", steps.len())), "{told}");
    let summaries = parsed_lines(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(summaries[0]["kind"], "silenced");
}
