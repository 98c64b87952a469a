//! `stapo rm`: training a reward model, and what may be done with it.

use crate::common::{SMALL_RUN, complaint, copy_folder, json as json_file, ok, stapo};
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
        assert!(ok(&stapo(at, &["verify", name, "--replay"])).contains("replay: none, a supervised run"));
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

/// A reward model in the folder `rm`, and a config that rewards by its scores.
fn write_reward_model(at: &Path, more: &str) {
    write_pairs(at, 60);
    ok(&stapo(at, &words("rm --data pairs.jsonl --out trained --set steps=2 --set update.batch_rows=16")));
    copy_folder(&at.join("trained/model"), &at.join("rm"));
    let verifier = format!("{{ kind = \"reward-model\", model = \"rm\"{more} }}");
    fs::write(at.join("rm.toml"), format!("[task]\nkind = \"arithmetic\"\nverifier = {verifier}\n")).unwrap();
}

fn train<'a>(out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let every = ["--set", "record.responses_every_steps=1", "--set", "steps=3"];
    [&["train", "rm.toml", "--out", out][..], &SMALL_RUN, &every, more].concat()
}

#[test]
fn a_run_rewarded_by_a_reward_model_resumes_to_the_same_bits_and_refuses_a_changed_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_reward_model(at, ", normalise = \"running\", clip = 2.0");
    ok(&stapo(at, &train("whole", &[])));
    let metrics = lines(&at.join("whole/metrics.jsonl"));
    assert!(metrics.iter().all(|step| step["score_mean"].is_f64() && step.get("judge").is_none()));
    // The rewards of a step are measured against the scores of all steps so far.
    let recorded =
        |run: &str, step: usize| lines(&at.join(run).join(format!("rollouts/step-{step:06}.jsonl")));
    let first = recorded("whole", 1);
    let mut scores: Vec<f64> = Vec::new();
    for step in 1..=3 {
        let responses = recorded("whole", step);
        let score = |record: &Value| record["judge"]["score"].as_f64().unwrap();
        scores.extend(responses.iter().map(score));
        let n = scores.len() as f64;
        assert_eq!(scores.len(), 8 * step);
        let mean = scores.iter().sum::<f64>() / n;
        let deviation = (scores.iter().map(|score| (score - mean).powi(2)).sum::<f64>() / n).sqrt();
        for record in &responses {
            let expected = ((score(record) - mean) / deviation).clamp(-2.0, 2.0);
            assert!(
                (record["reward"].as_f64().unwrap() - expected).abs() < 1e-9,
                "step {step}: {}",
                record["reward"]
            );
        }
    }
    assert!(first.iter().all(|record| record["judge"]["rule"] == record["verdict"]));
    let manifest = json_file(&at.join("whole/manifest.json"));
    let names: Vec<&str> =
        manifest["inputs"].as_array().unwrap().iter().map(|input| input["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"reward model weights"), "{names:?}");
    let shown = ok(&stapo(at, &["inspect", "whole", "--terminal"]));
    assert!(shown.contains("reward model: score "), "{shown}");
    let replayed = ok(&stapo(at, &["verify", "whole", "--replay"]));
    assert!(replayed.contains("step 3: the same"), "{replayed}");
    // The moments of the scores are part of the checkpoint, on any number of ranks.
    let cut = ["--set", "record.checkpoint_every_steps=1"];
    ok(&stapo(at, &train("cut", &[&cut[..], &["--set", "steps=1"]].concat())));
    ok(&stapo(at, &words("train --resume cut --set steps=3")));
    let last = |run: &str| {
        json_file(&at.join(run).join("manifest.json"))["steps"].as_array().unwrap().last().cloned()
    };
    assert_eq!(last("cut"), last("whole"));
    let rewards = |run: &str| recorded(run, 3).iter().map(|it| it["reward"].clone()).collect::<Vec<_>>();
    assert_eq!(rewards("cut"), rewards("whole"));

    let weights = at.join("rm/model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(weights, bytes).unwrap();
    let said = complaint(at, &words("train --resume cut --set steps=4"));
    assert!(said.contains("reward model weights") && said.contains("changed"), "{said}");
}

#[test]
fn a_reward_model_beside_the_rule_is_one_of_several_rewards() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_reward_model(at, "");
    let config = "[[rewards]]\nname = \"rule\"\n[[rewards]]\nname = \"rm\"\nweight = 0.5\n\
                  verifier = { kind = \"reward-model\", model = \"rm\" }\n";
    fs::write(at.join("rm.toml"), config).unwrap();
    ok(&stapo(at, &train("run", &["--set", "steps=1"])));
    let recorded = lines(&at.join("run/rollouts/step-000001.jsonl"));
    for record in &recorded {
        let rule = if record["verdict"] == "right" { 1.0 } else { -1.0 };
        let sum = rule + 0.5 * record["rewards"]["rm"].as_f64().unwrap();
        assert_eq!(record["reward"], sum);
    }
    // Rewards are measured within their group.
    for group in 0..2 {
        let of_group = recorded.iter().filter(|record| record["group_idx"] == group);
        let sum: f64 = of_group.map(|record| record["rewards"]["rm"].as_f64().unwrap()).sum();
        assert!(sum.abs() < 1e-9, "{sum}");
    }
    let planned = ok(&stapo(at, &words("plan rm.toml --no-measure")));
    assert!(planned.contains("reward model"), "{planned}");
    fs::write(at.join("rm.toml"), config.replace("\"rm\" }", "\"builtin\" }")).unwrap();
    let said = complaint(at, &train("refused", &[]));
    assert!(said.contains("it has no score.weight") && !at.join("refused").exists(), "{said}");
}

/// Pairs of a generated task have a task, which a reward model cannot answer.
#[test]
fn a_reward_model_of_generated_pairs_is_measured_by_pairs_alone() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let config = "model = { kind = \"builtin\" }\nsteps = 1\n[data]\nkind = \"solution_pairs\"\nrows = 40\n\
                  held_out_share = 0.3\ntask = { kind = \"arithmetic\" }\nchosen = { wrong_result_share = 0.0 }\n\
                  rejected = { wrong_result_share = 0.9 }\n[update]\nbatch_rows = 4\n";
    fs::write(at.join("rm.toml"), config).unwrap();
    ok(&stapo(at, &words("rm rm.toml --out run")));
    let metrics = lines(&at.join("run/metrics.jsonl"));
    assert!(metrics[0]["reward_model"]["eval"]["n_pairs"].as_u64() > Some(0), "{}", metrics[0]);
    assert!(metrics[0].get("eval_accuracy").is_none(), "{}", metrics[0]);
}

#[test]
fn several_ranks_have_the_rewards_and_the_bits_of_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    write_reward_model(at, ", normalise = \"running\"");
    let sum = ["--set", "update.sum=microbatches"];
    ok(&stapo(at, &train("one", &sum)));
    ok(&stapo(at, &[&["launch", "--ranks", "2"][..], &train("two", &sum)].concat()));
    let hashes = |run: &str| json_file(&at.join(run).join("manifest.json"))["steps"].clone();
    assert_eq!(hashes("two"), hashes("one"));
    let scores = |run: &str| -> Vec<Value> {
        lines(&at.join(run).join("metrics.jsonl")).iter().map(|step| step["score_mean"].clone()).collect()
    };
    assert_eq!(scores("two"), scores("one"));
}
