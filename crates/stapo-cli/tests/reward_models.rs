//! `stapo rm`: training a reward model, and what may be done with it.

use crate::common::{complaint, ok, stapo};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Sums of one digit, right and wrong by one to nine.
fn write_pairs(at: &Path, n: usize) {
    let row = |i: usize| {
        let (a, b) = (i % 9, i / 9 % 9);
        let wrong = (a + b + 1 + i % 8) % 19;
        format!(
            "{}\n",
            json!({"prompt": format!("{a}+{b}="), "chosen": format!("{}", a + b), "rejected": format!("{wrong}"), "margin": 0.25})
        )
    };
    fs::write(at.join("pairs.jsonl"), (0..n).map(row).collect::<String>()).unwrap();
}

const SMALL: &str = "--set update.batch_rows=16 --set update.learning_rate=1e-3 --set update.schedule.warmup_steps=1 \
                     --set data.held_out_share=0.2 --set evaluation.every_steps=5";

#[test]
fn rm_learns_pairs_and_goes_on_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_pairs(at, 162);
    for (name, set) in
        [("whole", ""), ("lora", "--set model.lora.rank=4 --set reward_model.center_coefficient=0.01")]
    {
        let line = format!("rm --data pairs.jsonl --out {name} --set steps=10 {SMALL} {set}");
        ok(&stapo(at, &words(&line)));
        let metrics = lines(&at.join(name).join("metrics.jsonl"));
        let loss_at = |step: usize| metrics[step - 1]["loss"].as_f64().unwrap();
        assert!(loss_at(10) < 0.95 * loss_at(1), "{name}: {} then {}", loss_at(1), loss_at(10));
        let last = &metrics[9]["reward_model"];
        assert!(last["score_chosen"].as_f64() > last["score_rejected"].as_f64(), "{last}");
        let eval = &last["eval"];
        assert!(
            eval["low"].as_f64() < eval["accuracy"].as_f64() && eval["n_pairs"].as_u64() > Some(10),
            "{eval}"
        );
        // Other threads, smaller micro-batches and a stop in between give the same bits.
        let cut = format!("cut-{name}");
        let other = "--threads 1 --set update.microbatch_tokens=64";
        let line = format!("rm --data pairs.jsonl --out {cut} --set steps=3 {SMALL} {set} {other}");
        ok(&stapo(at, &words(&line)));
        ok(&stapo(at, &words(&format!("rm --resume {cut} --set steps=10"))));
        let weights = |run: &str| fs::read(at.join(run).join("model/model.safetensors")).unwrap();
        assert!(weights(name) == weights(&cut), "{name}");
        ok(&stapo(at, &["verify", name]));
    }
    let listed = ok(&stapo(at, &["runs", "."]));
    assert!(listed.contains("rm, done"), "{listed}");
    let config: Value =
        serde_json::from_str(&fs::read_to_string(at.join("whole/model/config.json")).unwrap()).unwrap();
    assert_eq!(config["architectures"], json!(["Qwen3ForSequenceClassification"]));
    scores_are_the_same_alone_and_together(at);
    // A reward model is trained further; a language model would start with a new head and the scores of noise.
    let line = format!("rm --model whole --data pairs.jsonl --out further --set steps=1 {SMALL}");
    ok(&stapo(at, &words(&line)));
    let (before, further) =
        (lines(&at.join("whole/metrics.jsonl")), lines(&at.join("further/metrics.jsonl")));
    assert!(further[0]["loss"].as_f64().unwrap() < before[0]["loss"].as_f64().unwrap());
}

fn scores_are_the_same_alone_and_together(at: &Path) {
    let record =
        |i: usize| format!("{}\n", json!({"id": i, "prompt": format!("{i}+{i}="), "response": "1 0"}));
    fs::write(at.join("all.jsonl"), (0..7).map(record).collect::<String>()).unwrap();
    let together = ok(&stapo(at, &words("score --model whole --input all.jsonl")));
    let together: Vec<Value> = together.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(together.len(), 7);
    for (i, expected) in together.iter().enumerate() {
        fs::write(at.join("one.jsonl"), record(i)).unwrap();
        let alone: Value =
            serde_json::from_str(&ok(&stapo(at, &words("score --model whole --input one.jsonl")))).unwrap();
        assert_eq!((&alone["id"], &alone["score"]), (&expected["id"], &expected["score"]));
    }
}

#[test]
fn rm_refuses_what_it_cannot_learn_from_and_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_pairs(at, 20);
    fs::write(at.join("labels.jsonl"), "{\"prompt\": \"1+1=\", \"completion\": \"2\", \"label\": true}\n")
        .unwrap();
    let margin = "{\"prompt\": \"1+1=\", \"chosen\": \"2\", \"rejected\": \"3\", \"margin\": \"much\"}\n";
    fs::write(at.join("words.jsonl"), margin).unwrap();
    fs::write(at.join("rm.toml"), "[reward_model]\n[data]\nkind = \"file\"\npath = \"pairs.jsonl\"\n")
        .unwrap();
    fs::create_dir(at.join("run")).unwrap();
    fs::write(at.join("run/kept"), "kept").unwrap();
    for (line, expected) in [
        ("rm", "hint: stapo rm --model MODEL --data FILE"),
        ("rm run", "trains a reward model and deletes nothing"),
        ("rm --data labels.jsonl --out x", "compares pairs, and 1 rows have a single response"),
        ("rm --data words.jsonl --out x", "\"margin\" is \"much\", expected a number"),
        ("rm --data pairs.jsonl --out x --set reward_model.center_coefficient=-1", "center_coefficient: -1"),
        ("rm --data pairs.jsonl --out x --set preference.loss.kind=dpo", "given together with reward_model"),
        ("rm --data pairs.jsonl --out x --set model={kind=\"fresh\"}", "a fresh model knows no text to rank"),
        ("sft rm.toml --out x", "hint: stapo rm rm.toml"),
        ("prefer --data pairs.jsonl --out x --set data.margin_field=margin", "stapo rm reads margins"),
    ] {
        let said = complaint(at, &words(line));
        assert!(said.contains(expected), "{line}: {said}");
        assert!(!at.join("x").exists(), "{line}");
    }
    assert_eq!(fs::read_to_string(at.join("run/kept")).unwrap(), "kept");
}

#[test]
fn a_reward_model_writes_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_pairs(at, 20);
    ok(&stapo(at, &words("rm --data pairs.jsonl --out rm --set steps=1 --set update.batch_rows=4")));
    for line in ["generate --model rm --prompt 1+1=", "train --set model={kind=\"path\",path=\"rm\"} --out x"]
    {
        let said = complaint(at, &words(line));
        assert!(said.contains("is a reward model"), "{line}: {said}");
    }
}
