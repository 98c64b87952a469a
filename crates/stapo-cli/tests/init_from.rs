//! `stapo init --from`: configs and scripts of TRL, verl and OpenRLHF become ours.

use crate::common::{complaint, ok, stapo};
use std::fs;
use std::path::Path;
use tempfile::TempDir;

pub const TRL: &str = "
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: rows.jsonl
reward_funcs: [accuracy_reward]
learning_rate: 2e-6
num_generations: 16
per_device_train_batch_size: 8
gradient_accumulation_steps: 16
max_completion_length: 1024
loss_type: dr_grpo
scale_rewards: none
epsilon_high: 0.28
beta: 0.01
top_p: 0.9
max_steps: 200
lr_scheduler_type: cosine
warmup_ratio: 0.03
use_peft: true
lora_r: 16
use_vllm: true
chat_template_kwargs: {enable_thinking: false}
";

pub const VERL: &str = "
defaults: [_self_]
data: {train_files: rows.parquet, train_batch_size: 64, max_prompt_length: 1024, max_response_length: 8192}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B}
  actor:
    ppo_mini_batch_size: 32
    clip_ratio_high: 0.28
    use_kl_loss: true
    kl_loss_coef: 0.002
    loss_agg_mode: seq-mean-token-sum-norm
    optim: {lr: 1.0e-06}
  rollout: {n: 8, temperature: 0.7}
algorithm: {adv_estimator: rloo}
custom_reward_function: {path: reward.py, name: compute_score}
trainer: {total_epochs: 15, test_freq: 5, save_freq: -1, n_gpus_per_node: 8}
";

/// What the command says, and the config that it writes.
fn translated(at: &Path, yaml: &str) -> (String, toml::Table) {
    fs::write(at.join("peer.yaml"), yaml).unwrap();
    let said = ok(&stapo(at, &["init", "--from", "peer.yaml", "--force"]));
    (said, fs::read_to_string(at.join("stapo.toml")).unwrap().parse().unwrap())
}

fn at(config: &toml::Table, path: &str) -> String {
    let mut keys = path.split('.');
    let first = config.get(keys.next().unwrap());
    let found = keys.fold(first, |value, key| value.and_then(|value| value.get(key)));
    found.map_or(String::new(), |value| value.to_string().replace('"', ""))
}

#[test]
fn a_config_of_trl_becomes_ours() {
    let folder = TempDir::new().unwrap();
    let (said, config) = translated(folder.path(), TRL);
    for (path, expected) in [
        ("model.path", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("model.lora.rank", "16"),
        ("task.path", "rows.jsonl"),
        ("task.verifier.mode", "math"),
        ("steps", "200"),
        ("rollout.group_size", "16"),
        ("rollout.problems_per_step", "8"),
        ("rollout.max_response_tokens", "1024"),
        ("rollout.chat_arguments.enable_thinking", "false"),
        ("update.problems_per_minibatch", "8"),
        ("update.learning_rate", "0.000002"),
        ("update.schedule.warmup_share", "0.03"),
        ("update.weight_decay", "0"),
        ("objective.preset", "dr-grpo"),
        ("objective.surrogate.low", "0.2"),
        ("objective.surrogate.high", "0.28"),
        ("objective.kl.kind", "unbiased_k3"),
        ("objective.denominator.length", "1024.0"),
        ("objective.advantage.kind", "group_mean"),
    ] {
        assert_eq!(at(&config, path), expected, "{path}");
    }
    assert!(said.contains("`top_p` has no counterpart here") && said.contains("use_vllm"), "{said}");
}

#[test]
fn a_config_of_verl_becomes_ours() {
    let folder = TempDir::new().unwrap();
    let (said, config) = translated(folder.path(), VERL);
    for (path, expected) in [
        ("model.path", "Qwen/Qwen3-0.6B"),
        ("task.path", "rows.parquet"),
        ("task.verifier.file", "reward.py"),
        ("rollout.problems_per_step", "64"),
        ("rollout.max_prompt_tokens", "1024"),
        ("rollout.temperature", "0.7"),
        ("rollout.chat", "true"),
        ("update.problems_per_minibatch", "32"),
        ("update.learning_rate", "0.000001"),
        ("update.microbatch_tokens", "9216"),
        ("evaluation.every_steps", "5"),
        ("objective.preset", "justrl"),
        ("objective.surrogate.high", "0.28"),
        ("objective.surrogate.dual", "3.0"),
        ("objective.kl.beta", "0.002"),
        ("objective.advantage.kind", "leave_one_out"),
    ] {
        assert_eq!(at(&config, path), expected, "{path}");
    }
    for expected in ["`trainer.total_epochs` = 15", "`actor.loss_agg_mode`", "trainer.n_gpus_per_node"] {
        assert!(said.contains(expected), "{said}");
    }
    // The GPU is not here, but everything else of the config is checked by the plan.
    ok(&stapo(folder.path(), &["plan", "stapo.toml", "--no-measure", "--machine", "h200"]));
}

/// Most runs of verl start from a script with hydra's overrides, those of TRL from flags or a Python file.
#[test]
fn what_starts_a_training_becomes_a_config() {
    let folder = TempDir::new().unwrap();
    let verl = "#!/bin/bash\nlongest=$((1024 * 4))\nMODEL=${MODEL_OF_THIS_TEST:-\"o/m\"}\n\
        python3 -m verl.trainer.main_ppo \\\n    algorithm.adv_estimator=rloo \\\n    data.train_files=$ROWS_OF_THIS_TEST \\\n    \
        data.max_response_length=$longest \\\n    actor_rollout_ref.model.path=\"$MODEL\" $@\n";
    let trl = "accelerate launch src/grpo.py --config peer.yaml --num_generations 32\n";
    let python =
        "args = GRPOConfig(num_generations=32, loss_type='dr_grpo')\nGRPOTrainer(model='o/m', args=args)\n";
    fs::write(folder.path().join("peer.yaml"), TRL).unwrap();
    for (name, text, expected) in [
        (
            "verl.sh",
            verl,
            [
                ("model.path", "o/m"),
                ("rollout.max_response_tokens", "4096"),
                ("objective.advantage.kind", "leave_one_out"),
            ],
        ),
        (
            "trl.sh",
            trl,
            [
                ("rollout.group_size", "32"),
                ("rollout.max_response_tokens", "1024"),
                ("objective.preset", "dr-grpo"),
            ],
        ),
        (
            "openrlhf.sh",
            "python3 -m openrlhf.cli.train_ppo_ray \\\n  --pretrain o/m --n_samples_per_prompt 4 --advantage_estimator rloo\n",
            [
                ("model.path", "o/m"),
                ("rollout.group_size", "4"),
                ("objective.advantage.kind", "leave_one_out"),
            ],
        ),
        (
            "trl.py",
            python,
            [("rollout.group_size", "32"), ("model.path", "o/m"), ("objective.preset", "dr-grpo")],
        ),
    ] {
        fs::write(folder.path().join(name), text).unwrap();
        let said = ok(&stapo(folder.path(), &["init", "--from", name, "--force"]));
        let config: toml::Table =
            fs::read_to_string(folder.path().join("stapo.toml")).unwrap().parse().unwrap();
        for (path, expected) in expected {
            assert_eq!(at(&config, path), expected, "{name}: {path}");
        }
        assert_eq!(
            said.contains("`data.train_files` is \"${ROWS_OF_THIS_TEST}\""),
            name == "verl.sh",
            "{said}"
        );
    }
}

#[test]
fn a_file_without_settings_is_refused() {
    let folder = TempDir::new().unwrap();
    let two = "run algorithm.gamma=1\nrun algorithm.gamma=2\n";
    for (name, text, expected) in [
        ("peer.yaml", "- a\n", "holds no settings"),
        ("peer.yaml", "a: [1\n", "file peer.yaml: while parsing"),
        ("run.sh", "echo \"a\n", "file run.sh: holds no settings"),
        ("run.sh", two, "file run.sh: starts 2 trainings"),
        ("run.sh", "trl grpo --config gone.yaml", "file gone.yaml, which run.sh names"),
    ] {
        fs::write(folder.path().join(name), text).unwrap();
        let said = complaint(folder.path(), &["init", "--from", name]);
        assert!(said.contains(expected), "{said}");
    }
    assert!(complaint(folder.path(), &["init"]).contains("--model"));
}
