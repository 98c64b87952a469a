//! `stapo prefer`, and `stapo sft --from-run`.

use crate::common::{complaint, ok, stapo};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn prefer_learns_pairs_and_goes_on_to_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let row = |i: usize| {
        let wrong = 2 * i + 10;
        format!(
            "{}\n",
            json!({"prompt": format!("{i}+{i}="), "chosen": format!("{}", 2 * i), "rejected": format!("{wrong}")})
        )
    };
    fs::write(at.join("pairs.jsonl"), (0..24).map(row).collect::<String>()).unwrap();
    let small = "--set update.batch_rows=8 --set update.learning_rate=1e-4 --set update.schedule.warmup_steps=1 \
                 --set data.held_out_share=0.2 --set evaluation.every_steps=4";
    for loss in ["dpo", "kto"] {
        let set = format!(
            "{small} --set preference.loss.kind={loss} --set preference.masks=[{{kind=\"spurious\",tau_p=0.1}}]"
        );
        let line = format!("prefer --data pairs.jsonl --out {loss} --set steps=8 {set}");
        ok(&stapo(at, &words(&line)));
        let metrics = lines(&at.join(loss).join("metrics.jsonl"));
        let loss_at = |step: usize| metrics[step - 1]["loss"].as_f64().unwrap();
        assert!(loss_at(8) < 0.9 * loss_at(1), "{loss}: {} then {}", loss_at(1), loss_at(8));
        let last = &metrics[7]["preference"];
        assert!(last["reward_chosen"].as_f64() > last["reward_rejected"].as_f64(), "{last}");
        assert!(metrics[7]["eval_loss"].is_f64() && last["eval_accuracy"].is_f64(), "{last}");
        assert!(metrics.iter().any(|step| step["preference"]["n_silenced"].as_u64() > Some(0)));
        assert_eq!(last["baseline"].is_f64(), loss == "kto");
        // Other threads and a stop in between give the same bits.
        let cut = format!("cut-{loss}");
        ok(&stapo(
            at,
            &words(&format!("prefer --data pairs.jsonl --out {cut} --set steps=3 {set} --threads 1")),
        ));
        ok(&stapo(at, &words(&format!("prefer --resume {cut} --set steps=8"))));
        for file in ["model/model.safetensors", "reference.safetensors"] {
            let bytes = |run: &str| fs::read(at.join(run).join(file)).unwrap();
            assert!(bytes(loss) == bytes(&cut), "{loss}: {file}");
        }
        ok(&stapo(at, &["verify", loss]));
    }
    let listed = ok(&stapo(at, &["runs", "."]));
    assert!(listed.contains("prefer, done"), "{listed}");
}

#[test]
fn prefer_refuses_what_it_cannot_learn_from_and_leaves_no_folder() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    fs::write(at.join("pairs.jsonl"), "{\"prompt\": \"1+1=\", \"chosen\": \"2\", \"rejected\": \"3\"}\n")
        .unwrap();
    fs::write(at.join("texts.jsonl"), "{\"prompt\": \"1+1=\", \"response\": \"2\"}\n").unwrap();
    fs::write(at.join("pairs.toml"), "[preference]\n[data]\npath = \"pairs.jsonl\"\n").unwrap();
    for (line, expected) in [
        ("prefer", "hint: stapo prefer --model MODEL --data FILE"),
        ("prefer --data texts.jsonl --out x", "looked for chosen with rejected"),
        (
            "prefer --data pairs.jsonl --out x --set preference.loss.beta=0",
            "preference.loss.beta: 0, expected a positive",
        ),
        (
            "prefer --data pairs.jsonl --out x --set preference.masks=[{kind=\"taco\"}]",
            "preference.masks.0.kind",
        ),
        ("sft pairs.toml --out x", "hint: stapo prefer pairs.toml"),
        ("sft --from-run nothere --out x", "nothere"),
    ] {
        let said = complaint(at, &words(line));
        assert!(said.contains(expected), "{line}: {said}");
        assert!(!at.join("x").exists(), "{line}");
    }
}

#[test]
fn sft_learns_the_recorded_responses_of_a_run_as_they_were_sampled() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let small = "--set rollout.problems_per_step=8 --set update.problems_per_minibatch=8 --set rollout.group_size=4 \
                 --set evaluation.problems=2 --set rollout.max_response_tokens=64 --set record.responses=64 --set record.responses_every_steps=1";
    ok(&stapo(at, &words(&format!("train --json --set steps=2 --out run {small}"))));
    let recorded: Vec<Value> =
        (1..=2).flat_map(|step| lines(&at.join(format!("run/rollouts/step-{step:06}.jsonl")))).collect();
    assert_eq!(recorded.len(), 64);
    // The different responses, and their tokens.
    let distinct = |chosen: &[&Value]| -> (usize, u64) {
        let key = |it: &&Value| (it["prompt"].to_string(), it["tokens"]["id"].to_string());
        let all: BTreeSet<(String, String)> = chosen.iter().map(key).collect();
        (all.len(), all.iter().map(|(_, ids)| ids.matches(',').count() as u64 + 1).sum())
    };
    let right: Vec<&Value> = recorded.iter().filter(|it| it["verdict"] == "right").collect();
    assert!(!right.is_empty() && right.len() < 64);
    let mut best: Vec<&Value> = Vec::new();
    for step in 1..=2 {
        for group in 0..8 {
            let group: Vec<&Value> =
                recorded.iter().filter(|it| it["step"] == step && it["group_idx"] == group).collect();
            assert_eq!(group.len(), 4);
            let highest = group.iter().map(|it| it["reward"].as_f64().unwrap()).fold(f64::MIN, f64::max);
            let first = group.iter().find(|it| it["reward"].as_f64() == Some(highest)).unwrap();
            if first["verdict"] == "right" || group.iter().any(|it| it["reward"].as_f64() < Some(highest)) {
                best.push(first);
            }
        }
    }
    for (which, chosen) in [("right", right), ("best", best)] {
        let (n_rows, n_tokens) = distinct(&chosen);
        let line = format!(
            "sft --from-run run --where {which} --out {which} --json --set epochs=1 --set update.batch_rows={n_rows}"
        );
        let said = ok(&stapo(at, &words(&line)));
        assert_eq!(said.lines().count(), 1, "one step has every response once: {said}");
        let metrics: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(metrics["n_scored"].as_u64(), Some(n_tokens), "{which}");
        let plan = fs::read_to_string(at.join(which).join("plan.toml")).unwrap();
        assert!(
            plan.contains(&format!("where = \"{which}\"")) && plan.contains("kind = \"builtin\""),
            "{plan}"
        );
    }
    // Killed in the middle of its file operations, a run goes on to the same bits.
    let line = |out: &str| {
        format!(
            "sft --from-run run --out {out} --json --set steps=4 --set update.batch_tokens=64 --set record.checkpoint_every_steps=1"
        )
    };
    let faulty = |out: &str, name: &str, value: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stapo"));
        command.current_dir(at).args(words(&line(out))).env("XDG_STATE_HOME", env!("CARGO_TARGET_TMPDIR"));
        command.env(name, value).output().unwrap()
    };
    ok(&faulty("whole", "STAPO_DISK_TRACE", "trace"));
    let n_operations = fs::read_to_string(at.join("trace")).unwrap().lines().count();
    let killed = faulty("killed", "STAPO_DISK_FAULT", &format!("kill:{}", n_operations / 2));
    assert!(!killed.status.success() && lines(&at.join("killed/metrics.jsonl")).len() < 4);
    ok(&stapo(at, &words("sft --resume killed")));
    let weights = |run: &str| fs::read(at.join(run).join("model/model.safetensors")).unwrap();
    assert!(weights("whole") == weights("killed"), "a kill changed a bit");
    // A response that changed since is refused.
    ok(&stapo(at, &words("sft --from-run run --out cut --json --set steps=1 --set update.batch_tokens=64")));
    let file = at.join("run/rollouts/step-000001.jsonl");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen("\"wrong\"", "\"right\"", 1)).unwrap();
    let said = complaint(at, &words("sft --resume cut --set steps=2"));
    assert!(said.contains("data step-000001.jsonl"), "{said}");
    check_rows_without_tokens(at, &file);
}

/// Rows 37 to 47 of the embedding have no token. One that was sampled is learned like any other, with no text.
fn check_rows_without_tokens(at: &Path, file: &Path) {
    let with_first = |id: u32, text: &str| {
        let mut lines = lines(file);
        let right = lines.iter_mut().find(|it| it["verdict"] == "right").unwrap();
        (right["tokens"]["id"][0], right["tokens"]["text"][0]) = (id.into(), text.into());
        let lines: Vec<String> = lines.iter().map(Value::to_string).collect();
        fs::write(file, lines.join("\n") + "\n").unwrap();
    };
    for (id, text, expected) in [
        (40, "x", r#"token 40 is "", the run recorded "x""#),
        (48, "", "token 48 is nothing, the run recorded"),
    ] {
        with_first(id, text);
        let said = complaint(at, &words("sft --from-run run --out other --set steps=1"));
        assert!(said.contains(expected), "{said}");
    }
    with_first(40, "");
    ok(&stapo(at, &words("sft --from-run run --out padded --json --set steps=1")));
}
