//! What settings of TRL and verl become.

mod sizes;

use super::super::{Changes, translated};
use super::*;

#[test]
fn a_setting_is_given_or_has_its_default() {
    let value = |n: f64| Value::Float(n);
    let leaves = [("learning_rate".to_string(), value(1e-5)), ("max_steps".to_string(), value(7.0))];
    let peer = Peer::new(&leaves);
    let mut names: Vec<&String> = peer.given.iter().map(|(name, ..)| name).collect();
    let n_given = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), n_given, "{names:?}");
    assert!(n_given > 2, "absent settings have the defaults of the program");
}

/// The config that a file of settings becomes, and what is refused.
fn config(settings: &str) -> (Table, Vec<String>) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("peer.yaml");
    std::fs::write(&file, settings).unwrap();
    let changes = Changes { model: None, data: None, device: "cpu".into() };
    let translated = translated(&file, &changes).unwrap();
    let is_file_missing = |reason: &String| reason.contains(" is not set, so that");
    let refused = translated.refused.into_iter().filter(|reason| !is_file_missing(reason)).collect();
    (translated.text.parse().unwrap(), refused)
}

/// The value at a path, as a text without quotes; empty where there is none.
fn at(config: &Table, path: &str) -> String {
    let mut keys = path.split('.');
    let first = config.get(keys.next().unwrap());
    let found = keys.fold(first, |value, key| value.and_then(|value| value.get(key)));
    found.map_or(String::new(), |value| value.to_string().replace('"', ""))
}

/// Settings in one line each, and the values at some paths of the config that they become.
type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)]);

fn check(base: &str, cases: &[Case]) {
    for (lines, expected) in cases {
        let (config, refused) = config(&format!("{base}\n{}\n", lines.join("\n")));
        for (path, value) in *expected {
            assert_eq!(at(&config, path), *value, "{lines:?}: {path}; refused: {refused:?}");
        }
    }
}

/// What a refusal of a single line says.
fn check_refused(base: &str, cases: &[(&str, &str)]) {
    for (line, expected) in cases {
        let (_, refused) = config(&format!("{base}\n{line}\n"));
        assert!(refused.iter().any(|reason| reason.contains(expected)), "{line}: {refused:?}");
    }
}

#[test]
fn objectives_of_trl_keep_their_clips_ratios_and_advantages() {
    let (low, high) = ("objective.surrogate.low", "objective.surrogate.high");
    let (advantage, kl) = ("objective.advantage.kind", "objective.kl.kind");
    check(
        "num_generations: 8",
        &[
            (&[], &[("objective.preset", "dapo"), (low, "0.2"), (high, "0.2"), (kl, "none")]),
            (
                &["loss_type: grpo", "epsilon_high: 0.3"],
                &[("objective.preset", "grpo"), (low, "0.2"), (high, "0.3")],
            ),
            (&["epsilon: 0.1"], &[(low, "0.1"), (high, "0.1")]),
            (&["epsilon: 0.1", "epsilon_high: 0.3"], &[(low, "0.1"), (high, "0.3")]),
            (&["delta: 2.0"], &[("objective.surrogate.dual", "2.0")]),
            (&["importance_sampling_level: sequence"], &[("objective.ratio.kind", "sequence")]),
            (&["importance_sampling_level: token"], &[("objective.ratio", "")]),
            (&["scale_rewards: group"], &[(advantage, "group_z_score")]),
            (&["scale_rewards: true"], &[(advantage, "group_z_score")]),
            (&["scale_rewards: none"], &[(advantage, "group_mean")]),
            (&["scale_rewards: false"], &[(advantage, "group_mean")]),
            (&["scale_rewards: batch"], &[(advantage, "group_mean_batch_std")]),
            (&["beta: 0.04"], &[(kl, "unbiased_k3"), ("objective.kl.beta", "0.04")]),
            (&["beta: 0.04", "use_bias_correction_kl: false"], &[(kl, "k3"), ("objective.kl.beta", "0.04")]),
            (
                &["entropy_coef: 0.01"],
                &[
                    ("objective.entropy_bonus.kind", "constant"),
                    ("objective.entropy_bonus.coefficient", "0.01"),
                ],
            ),
            (&["entropy_coef: 0.0"], &[("objective.entropy_bonus", "")]),
            (
                &["loss_type: dr_grpo"],
                &[("objective.denominator.kind", "constant"), ("objective.denominator.length", "512.0")],
            ),
        ],
    );
}

#[test]
fn schedules_adapters_and_rows_of_trl_keep_their_values() {
    let (kind, warmup, share) =
        ("update.schedule.kind", "update.schedule.warmup_steps", "update.schedule.warmup_share");
    let adapters =
        ["model_name_or_path: o/m", "lora_r: 8", "lora_alpha: 16", "lora_target_modules: [q_proj]"];
    let trained = [&adapters[..], &["use_peft: true"]].concat();
    check(
        "num_generations: 8",
        &[
            (&[], &[(kind, "linear"), (warmup, "0"), ("update.weight_decay", "0"), ("reward.wrong", "0.0")]),
            (
                &["lr_scheduler_type: constant_with_warmup", "warmup_steps: 10", "warmup_ratio: 0.5"],
                &[(kind, "constant"), (warmup, "10"), (share, "")],
            ),
            (
                &["lr_scheduler_type: cosine", "warmup_ratio: 0.1"],
                &[(kind, "cosine"), (warmup, ""), (share, "0.1")],
            ),
            (
                &trained,
                &[("model.lora.rank", "8"), ("model.lora.alpha", "16"), ("model.lora.targets", "[q_proj]")],
            ),
            (&adapters, &[("model.lora", ""), ("model.path", "o/m")]),
            (&["mask_truncated_completions: true"], &[("rollout.truncated", "drop")]),
            (&["mask_truncated_completions: false"], &[("rollout.truncated", "")]),
            (&["chat_template_kwargs: {}"], &[("rollout.chat", "")]),
            (
                &["chat_template_kwargs: {enable_thinking: false}"],
                &[("rollout.chat", "true"), ("rollout.chat_arguments.enable_thinking", "false")],
            ),
            (
                &["eval_steps: 7", "save_steps: 9", "save_total_limit: 2"],
                &[
                    ("evaluation.every_steps", "7"),
                    ("record.checkpoint_every_steps", "9"),
                    ("record.keep_checkpoints", "2"),
                ],
            ),
            (
                &["reward_funcs: accuracy_reward"],
                &[("task.verifier.kind", "rule"), ("task.verifier.mode", "math")],
            ),
            (
                &["dataset_name: [a.parquet, b.jsonl]"],
                &[("task.path", "[a.parquet, b.jsonl]"), ("task.template", "{{ problem }}")],
            ),
            (
                &["temperature: 0.9", "seed: 5", "max_grad_norm: 0.5"],
                &[("rollout.temperature", "0.9"), ("seed", "5"), ("update.max_gradient_norm", "0.5")],
            ),
            (
                &["max_completion_length: 9000"],
                &[("update.microbatch_tokens", "10024"), ("rollout.max_prompt_tokens", "1024")],
            ),
        ],
    );
    check_refused(
        "num_generations: 8",
        &[
            ("lr_scheduler_type: polynomial", "update.schedule has constant, linear and cosine"),
            ("num_train_epochs: 2", "`steps` counts rollout batches"),
            ("reward_funcs: [accuracy_reward, mine]", "calls such a function as it is"),
            ("dataset_name: trl-lib/tldr", "is no file"),
            ("top_entropy_quantile: 0.2", "entropy20"),
            ("top_k: 20", "has no counterpart here"),
        ],
    );
    let neutral =
        ["top_p: 1.0", "top_k: 0", "repetition_penalty: 1.0", "top_entropy_quantile: 1.0", "bf16: true"];
    assert_eq!(config(&neutral.join("\n")).1, [""; 0]);
}

#[test]
fn arguments_of_a_template_that_are_no_table_are_named() {
    check_refused("", &[("chat_template_kwargs: 3", "rollout.chat_arguments")]);
}

#[test]
fn objectives_of_verl_keep_their_estimators_clips_and_aggregates() {
    let (preset, advantage) = ("objective.preset", "objective.advantage.kind");
    let [low, high, dual] = ["low", "high", "dual"].map(|side| format!("objective.surrogate.{side}"));
    let (low, high, dual) = (low.as_str(), high.as_str(), dual.as_str());
    let aggregate = "objective.aggregate.kind";
    check(
        "trainer: {save_freq: -1}",
        &[
            (
                &[],
                &[(preset, "justrl"), (low, "0.2"), (high, "0.2"), (dual, "3.0"), (aggregate, "token_mean")],
            ),
            (&["algorithm: {adv_estimator: rloo}"], &[(advantage, "leave_one_out")]),
            (&["algorithm: {adv_estimator: opo}"], &[(advantage, "length_weighted_mean")]),
            (&["algorithm: {adv_estimator: gpg}"], &[(advantage, "group_mean_nonzero_share")]),
            (&["algorithm: {adv_estimator: grpo_passk}"], &[(advantage, "best_above_second")]),
            (&["algorithm: {adv_estimator: grpo}"], &[(advantage, "")]),
            (
                &["algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}"],
                &[(advantage, "group_mean")],
            ),
            (&["algorithm: {adv_estimator: reinforce_plus_plus}"], &[(preset, "reinforce++"), (dual, "3.0")]),
            (&["actor_rollout_ref: {actor: {policy_loss: {loss_mode: gspo}}}"], &[(preset, "gspo")]),
            (&["actor_rollout_ref: {actor: {policy_loss: {loss_mode: geo_mean}}}"], &[(preset, "gmpo")]),
            (&["actor_rollout_ref: {actor: {policy_loss: {loss_mode: clip_cov}}}"], &[(preset, "clip-cov")]),
            (
                &[
                    "actor_rollout_ref: {actor: {clip_ratio_low: 0.1, clip_ratio_high: 0.3, clip_ratio_c: 5.0}}",
                ],
                &[(low, "0.1"), (high, "0.3"), (dual, "5.0")],
            ),
            (
                &["actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-mean}}"],
                &[(aggregate, "sequence_mean_of_token_mean")],
            ),
            (
                &["actor_rollout_ref: {actor: {loss_agg_mode: seq-mean-token-sum}}"],
                &[(aggregate, "sequence_mean_of_token_sum"), ("objective.denominator.length", "1.0")],
            ),
        ],
    );
    check_refused(
        "trainer: {save_freq: -1}",
        &[
            ("algorithm: {adv_estimator: gae}", "only estimators relative to a group are here"),
            ("actor_rollout_ref: {actor: {use_kl_loss: true, kl_loss_type: abs}}", "`kl_loss_type` = abs"),
            ("data: {train_batch_size: '${n}'}", "which is filled in when the training starts"),
            ("data: {max_prompt_length: '???'}", "which is filled in when the training starts"),
        ],
    );
}

#[test]
fn penalties_adapters_and_rollouts_of_verl_keep_their_values() {
    let (kl, beta) = ("objective.kl.kind", "objective.kl.beta");
    let actor = |settings: &str| format!("actor_rollout_ref: {{actor: {{{settings}}}}}");
    for (settings, kind, weight) in [
        ("use_kl_loss: false", "none", ""),
        ("use_kl_loss: true", "k3", "0.001"),
        ("use_kl_loss: true, kl_loss_type: k3, kl_loss_coef: 0.01", "k3", "0.01"),
        ("use_kl_loss: true, kl_loss_type: kl", "k1", "0.001"),
        ("use_kl_loss: true, kl_loss_type: k1", "k1", "0.001"),
        ("use_kl_loss: true, kl_loss_type: mse", "k2", "0.001"),
        ("use_kl_loss: true, kl_loss_type: k2", "k2", "0.001"),
    ] {
        check("trainer: {save_freq: -1}", &[(&[&actor(settings)], &[(kl, kind), (beta, weight)])]);
    }
    let lora =
        "actor_rollout_ref: {model: {path: o/m, lora_rank: 16, lora_alpha: 32, target_modules: [v_proj]}}";
    check(
        "trainer: {save_freq: -1}",
        &[
            (&[&actor("entropy_coeff: 0.02")], &[("objective.entropy_bonus.coefficient", "0.02")]),
            (
                &[lora],
                &[("model.lora.rank", "16"), ("model.lora.alpha", "32"), ("model.lora.targets", "[v_proj]")],
            ),
            (
                &["actor_rollout_ref: {model: {path: o/m, lora_rank: 0, lora_alpha: 32}}"],
                &[("model.lora", "")],
            ),
            (&[&actor("ppo_epochs: 2")], &[("update.reuse.max", "2")]),
            (
                // By default a rollout batch of verl has four mini-batches.
                &[&actor("optim: {lr_scheduler_type: cosine, lr_warmup_steps: 5}")],
                &[("update.schedule.kind", "cosine"), ("update.schedule.warmup_steps", "20")],
            ),
            (
                &[
                    "data: {train_batch_size: 64}",
                    &actor("ppo_mini_batch_size: 16, ppo_epochs: 2, optim: {lr_warmup_steps: 5}"),
                ],
                &[("update.schedule.kind", "constant"), ("update.schedule.warmup_steps", "40")],
            ),
            (&[&actor("optim: {lr_warmup_steps: -1}")], &[("update.schedule", "")]),
            (
                &[&actor("optim: {lr: 2e-6}")],
                &[("update.learning_rate", "0.000002"), ("update.weight_decay", "0.01")],
            ),
            (&["algorithm: {filter_groups: {enable: true}}"], &[("rollout.max_redraws", "10")]),
            (&["algorithm: {filter_groups: {enable: false}}"], &[("rollout.max_redraws", "")]),
            (
                &["data: {filter_overlong_prompts: true, max_prompt_length: 100}"],
                &[("rollout.long_prompts", "drop"), ("rollout.max_prompt_tokens", "100")],
            ),
            (
                &["data: {filter_overlong_prompts: false}"],
                &[("rollout.long_prompts", ""), ("rollout.max_prompt_tokens", "512")],
            ),
            (
                &["data: {max_response_length: 4000}"],
                &[("rollout.max_response_tokens", "4000"), ("rollout.chat", "true")],
            ),
            (
                &["custom_reward_function: {path: r.py}"],
                &[
                    ("task.verifier.kind", "python"),
                    ("task.verifier.file", "r.py"),
                    ("task.verifier.function", "compute_score"),
                ],
            ),
            (&["custom_reward_function: {path: r.py, name: mine}"], &[("task.verifier.function", "mine")]),
        ],
    );
    check("trainer: {test_freq: -1}", &[(&[], &[("evaluation.every_steps", "0")])]);
    check("trainer: {save_freq: 20}", &[(&[], &[("record.checkpoint_every_steps", "20")])]);
}

#[test]
fn the_buffer_of_dapo_shapes_the_reward_under_both_of_its_names() {
    let (longest, buffer) = ("rollout.overlong.max_tokens", "rollout.overlong.buffer_tokens");
    for table in ["overlong_buffer", "reward_kwargs: {overlong_buffer_cfg"] {
        let close = if table.contains('{') { "}" } else { "" };
        let switched = |on: bool| {
            format!("reward_model: {{{table}: {{enable: {on}, len: 40, penalty_factor: 1.0}}{close}}}")
        };
        let base = "trainer: {save_freq: -1}\ndata: {max_response_length: 200}";
        check(base, &[(&[&switched(true)], &[(longest, "200"), (buffer, "40")])]);
        check(base, &[(&[&switched(false)], &[(longest, "")])]);
        let other = switched(true).replace("1.0", "0.5");
        check_refused(base, &[(&other, "`overlong_buffer.penalty_factor` = 0.5")]);
    }
}

#[test]
fn objectives_of_openrlhf_keep_their_estimators_clips_and_penalties() {
    let (kind, low, high) =
        ("objective.advantage.kind", "objective.surrogate.low", "objective.surrogate.high");
    let base = "rollout.n_samples_per_prompt: 8";
    check(
        base,
        &[
            (
                &["algo.advantage.estimator: group_norm"],
                &[
                    (kind, "group_z_score"),
                    ("rollout.group_size", "8"),
                    ("objective.preset", "justrl"),
                    (low, "0.2"),
                    (high, "0.2"),
                    ("objective.aggregate.kind", "token_mean"),
                    ("objective.kl_in_reward.kind", "k1"),
                    ("objective.kl_in_reward.beta", "0.01"),
                    ("update.learning_rate", "0.000001"),
                    ("update.weight_decay", "0"),
                    ("update.schedule.kind", "cosine"),
                    ("update.schedule.warmup_share", "0.03"),
                    ("update.schedule.final_factor", "0.1"),
                    ("rollout.max_prompt_tokens", ""),
                ],
            ),
            (&["advantage_estimator: rloo"], &[(kind, "leave_one_out")]),
            (&["eval_dataset: q.jsonl"], &[("evaluation.benchmarks", "[q.jsonl]")]),
            (&["advantage_estimator: dr_grpo"], &[(kind, "group_mean"), ("objective.whiten", "")]),
            (
                &["advantage_estimator: reinforce_baseline"],
                &[(kind, "group_mean"), ("objective.whiten.kind", "tokens")],
            ),
            (&["advantage_estimator: reinforce"], &[("objective.preset", "reinforce++")]),
            (&["actor.policy_loss_type: gspo"], &[("objective.preset", "gspo")]),
            (
                &["eps_clip: 0.1", "eps_clip_low_high: [0.2, 0.3]", "dual_clip: 4.0"],
                &[(low, "0.2"), (high, "0.3"), ("objective.surrogate.dual", "4.0")],
            ),
            (&["eps_clip: 0.1"], &[(low, "0.1"), (high, "0.1")]),
            (
                &["use_kl_loss: true", "kl_estimator: k3", "init_kl_coef: 1e-3"],
                &[
                    ("objective.kl.kind", "k3"),
                    ("objective.kl.beta", "0.001"),
                    ("objective.kl_in_reward", ""),
                ],
            ),
            (&["init_kl_coef: 0"], &[("objective.kl.kind", "none"), ("objective.kl_in_reward", "")]),
            (
                &["actor.loss_agg_mode: seq-mean-token-mean"],
                &[("objective.aggregate.kind", "sequence_mean_of_token_mean")],
            ),
            (&["entropy_loss_coef: 0.01"], &[("objective.entropy_bonus.coefficient", "0.01")]),
        ],
    );
}

#[test]
fn schedules_and_rollouts_of_openrlhf_keep_their_values_under_earlier_names() {
    let base = "rollout.n_samples_per_prompt: 8";
    check(
        base,
        &[
            (
                &["actor.lr_scheduler: constant", "lr_warmup_ratio: 0.1"],
                &[
                    ("update.schedule.kind", "constant"),
                    ("update.schedule.warmup_share", "0.1"),
                    ("update.schedule.final_factor", ""),
                ],
            ),
            (
                &["train_batch_size: 100", "rollout_batch_size: 64"],
                &[("update.problems_per_minibatch", "13"), ("rollout.problems_per_step", "64")],
            ),
            (
                &["prompt_data: rows.jsonl", "input_template: 'Q: {}'", "label_key: answer"],
                &[
                    ("task.path", "rows.jsonl"),
                    ("task.template", "Q: {{ problem }}"),
                    ("task.answer_field", "answer"),
                ],
            ),
            (
                &["data.max_len: 2048", "generate_max_len: 1500", "overlong_buffer_len: 100"],
                &[
                    ("rollout.max_prompt_tokens", "548"),
                    ("rollout.max_response_tokens", "1500"),
                    ("rollout.overlong.max_tokens", "1500"),
                    ("rollout.overlong.buffer_tokens", "100"),
                ],
            ),
            (
                &["prompt_max_len: 700", "apply_chat_template: true"],
                &[("rollout.max_prompt_tokens", "700"), ("rollout.chat", "true")],
            ),
            (
                &["dynamic_filtering: true", "max_epochs: 2", "save_steps: -1", "eval_steps: 5"],
                &[
                    ("rollout.max_redraws", "10"),
                    ("update.reuse.max", "2"),
                    ("record.checkpoint_every_steps", ""),
                    ("evaluation.every_steps", "5"),
                ],
            ),
            (
                &["pretrain: o/m", "lora_rank: 8", "lora_alpha: 16", "save_steps: 20", "max_ckpt_num: 3"],
                &[
                    ("model.path", "o/m"),
                    ("model.lora.rank", "8"),
                    ("model.lora.alpha", "16"),
                    ("record.checkpoint_every_steps", "20"),
                    ("record.keep_checkpoints", "3"),
                ],
            ),
        ],
    );
    check_refused(
        base,
        &[
            ("seed: 1", "`advantage.estimator` = gae"),
            ("advantage_estimator: flash_reinforce", "`advantage.estimator` = flash_reinforce"),
            ("data.max_len: 2048", "limits a prompt and its response together"),
            ("num_episodes: 3", "`train.num_episodes` = 3"),
            ("remote_rm_url: r.py", "`reward.remote_url` = \"r.py\": OpenRLHF gives a function"),
            ("eps_clip_low_high: 0.2", "expected two numbers"),
            ("overlong_penalty_factor: 0.5", "the penalty of the longest responses is 1 here"),
            ("top_p: 0.9", "OpenRLHF's `rollout.top_p` has no counterpart"),
        ],
    );
}
