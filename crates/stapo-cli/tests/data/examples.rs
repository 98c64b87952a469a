//! Every folder of `examples/` runs, shortened.

use crate::common::{copy_folder, ok, root, stapo};
use std::fs;
use std::path::Path;

/// A folder with a copy of `examples/`, from which the commands of the examples run.
fn examples() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&root().join("examples"), &folder.path().join("examples"));
    folder
}

const SHORT: &str = "--json --set steps=1 --set rollout.problems_per_step=2 --set update.problems_per_minibatch=2 --set rollout.group_size=2 --set evaluation.problems=2 --set rollout.max_response_tokens=32";

/// Runs a command line of a README, with further options.
fn run(at: &Path, line: &str, more: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().chain(more.split_whitespace()).collect();
    ok(&stapo(at, &words[1..]))
}

/// The command lines of an example's README that begin so.
fn lines(example: &str, beginning: &str) -> Vec<String> {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(example).join("README.md");
    let text = fs::read_to_string(readme).unwrap();
    let found: Vec<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|line| line.starts_with(beginning))
        .map(str::to_string)
        .collect();
    assert!(!found.is_empty(), "{example}: no line begins with {beginning:?}");
    found
}

#[test]
fn own_data_and_the_comparison_of_two_models() {
    let folder = examples();
    let at = folder.path();
    for line in lines("own_data", "stapo problems").iter().chain(&lines("own_data", "stapo train")) {
        run(at, line, if line.contains("train") { SHORT } else { "" });
    }
    run(at, "stapo init --model builtin --data examples/own_data/problems.jsonl --out mine.toml", "");
    for line in lines("two_models", "stapo eval") {
        let line =
            line.replace("--limit 100 --samples 4 --max-tokens 96", "--limit 3 --samples 2 --max-tokens 32");
        assert!(line.contains("--limit 3"), "{line}");
        run(at, &line, "");
    }
    let said = run(at, &lines("two_models", "stapo compare")[0], "");
    assert!(said.contains("arithmetic"), "{said}");
}

#[test]
fn own_reward_is_judged_by_the_python_program() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: no python3");
        return;
    }
    let folder = examples();
    let at = folder.path();
    let line = &lines("own_reward", "stapo train")[0];
    run(
        at,
        line,
        &format!(
            "{SHORT} --set seed=3 --set rollout.problems_per_step=8 --set rollout.max_response_tokens=96"
        ),
    );
    let records: Vec<serde_json::Value> =
        fs::read_to_string(at.join("runs/own-reward/rollouts/step-000001.jsonl"))
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
    let rewards: Vec<f64> = records.iter().map(|record| record["reward"].as_f64().unwrap()).collect();
    assert!(rewards.iter().all(|&reward| reward == 0.0 || (0.5..1.0).contains(&reward)), "{rewards:?}");
    assert!(rewards.iter().any(|&reward| reward > 0.5), "{rewards:?}");
}

#[test]
fn python_reward_is_judged_by_the_function() {
    if std::process::Command::new("python3").arg("--version").output().is_err() {
        println!("skipped: no python3");
        return;
    }
    let folder = examples();
    let at = folder.path();
    let mut seen = Vec::new();
    for line in &lines("python_reward", "stapo train") {
        run(
            at,
            line,
            &format!(
                "{SHORT} --set seed=3 --set rollout.problems_per_step=8 --set rollout.max_response_tokens=96"
            ),
        );
        let out = line.split_whitespace().skip_while(|word| *word != "--out").nth(1).unwrap();
        let rewards: Vec<f64> = fs::read_to_string(at.join(out).join("rollouts/step-000001.jsonl"))
            .unwrap()
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["reward"].as_f64().unwrap())
            .collect();
        assert!(rewards.iter().all(|reward| [0.0, 0.7, 1.0].contains(reward)), "{rewards:?}");
        assert!(rewards.iter().any(|&reward| reward > 0.0), "{rewards:?}");
        seen.push(rewards);
    }
    // The function that takes all samples at once gives the same rewards.
    assert_eq!(seen[0], seen[1]);
}

#[test]
fn fine_tuning_then_reinforcement() {
    let folder = examples();
    let at = folder.path();
    run(at, &lines("sft_then_rl", "stapo sft")[0], "--json --set epochs=1");
    run(at, &lines("sft_then_rl", "stapo train")[0], SHORT);
}
