//! What settings of OpenRLHF become.

use super::Peer;
use super::Translation::{self, Keys, Nothing, Refused};
use super::values::{as_number, of_kind, one, overlong, overlong_factor};
use toml::{Table, Value};

/// Names of earlier versions and those that they have now.
const EARLIER: &[(&str, &str)] = &[
    ("pretrain", "actor.model_name_or_path"),
    ("prompt_data", "data.prompt_dataset"),
    ("input_key", "data.input_key"),
    ("label_key", "data.label_key"),
    ("input_template", "data.input_template"),
    ("apply_chat_template", "data.apply_chat_template"),
    ("eval_dataset", "eval.dataset"),
    ("eval_steps", "eval.steps"),
    ("rollout_batch_size", "rollout.batch_size"),
    ("n_samples_per_prompt", "rollout.n_samples_per_prompt"),
    ("generate_max_len", "rollout.max_new_tokens"),
    ("temperature", "rollout.temperature"),
    ("top_p", "rollout.top_p"),
    ("train_batch_size", "train.batch_size"),
    ("max_epochs", "train.max_epochs"),
    ("num_episodes", "train.num_episodes"),
    ("seed", "train.seed"),
    ("advantage_estimator", "algo.advantage.estimator"),
    ("dynamic_filtering", "algo.dynamic_filtering_enable"),
    ("init_kl_coef", "algo.kl.init_coef"),
    ("use_kl_loss", "algo.kl.use_loss"),
    ("kl_estimator", "algo.kl.estimator"),
    ("policy_loss_type", "actor.policy_loss_type"),
    ("eps_clip", "actor.eps_clip"),
    ("eps_clip_low_high", "actor.eps_clip_low_high"),
    ("dual_clip", "actor.dual_clip"),
    ("entropy_loss_coef", "actor.entropy_coef"),
    ("actor_learning_rate", "actor.adam.lr"),
    ("l2", "actor.adam.weight_decay"),
    ("lr_scheduler", "actor.lr_scheduler"),
    ("lr_warmup_ratio", "actor.lr_warmup_ratio"),
    ("max_norm", "actor.max_norm"),
    ("remote_rm_url", "reward.remote_url"),
    ("overlong_buffer_len", "reward.overlong_buffer_len"),
    ("overlong_penalty_factor", "reward.overlong_penalty_factor"),
    ("lora_rank", "ds.lora.rank"),
    ("lora_alpha", "ds.lora.alpha"),
    ("target_modules", "ds.lora.target_modules"),
    ("gradient_checkpointing", "actor.gradient_checkpointing_enable"),
    ("save_steps", "ckpt.save_steps"),
    ("max_ckpt_num", "ckpt.max_num"),
];

/// The settings under the names of today, with the estimator that OpenRLHF has by default; `None` for another program's.
pub fn settings(leaves: &[(String, Value)]) -> Option<Vec<(String, Value)>> {
    let now = |name: &str| {
        let earlier = EARLIER.iter().find(|(earlier, _)| *earlier == name);
        earlier.map_or(name, |(_, now)| *now).to_string()
    };
    let mut settings: Vec<_> = leaves.iter().map(|(name, value)| (now(name), value.clone())).collect();
    let has = |name: &str| settings.iter().any(|(known, _)| known == name);
    if !has("data.prompt_dataset") && !has("rollout.n_samples_per_prompt") {
        return None;
    }
    if !has("algo.advantage.estimator") {
        settings.push(("algo.advantage.estimator".to_string(), "gae".into()));
    }
    Some(settings)
}

impl Peer {
    pub(super) fn openrlhf(&self, name: &str, value: &Value) -> Option<Translation> {
        if self.program != "OpenRLHF" {
            return None;
        }
        self.openrlhf_objective(name, value)
            .or_else(|| self.openrlhf_penalty(name, value))
            .or_else(|| self.openrlhf_rollout(name, value))
    }

    fn openrlhf_objective(&self, name: &str, value: &Value) -> Option<Translation> {
        let text = value.as_str().unwrap_or_default();
        let clip = |low: Value, high: Value| {
            let side = |side: &str| format!("objective.surrogate.{side}");
            Keys(vec![(side("low"), low), (side("high"), high)])
        };
        Some(match name {
            "algo.advantage.estimator" => match text {
                "group_norm" => one("objective.advantage", of_kind("group_z_score")),
                "rloo" => one("objective.advantage", of_kind("leave_one_out")),
                "dr_grpo" => one("objective.advantage", of_kind("group_mean")),
                "reinforce_baseline" => Keys(vec![
                    ("objective.advantage".to_string(), of_kind("group_mean")),
                    ("objective.whiten".to_string(), of_kind("tokens")),
                ]),
                "reinforce" => Nothing,
                other => Refused(format!(
                    "`advantage.estimator` = {other}: only estimators relative to a group and REINFORCE++ are here"
                )),
            },
            "actor.policy_loss_type" => {
                let is_return = self.text("algo.advantage.estimator") == Some("reinforce");
                let preset = match text {
                    "ppo" if is_return => "reinforce++",
                    "ppo" => "justrl",
                    other => other,
                };
                one("objective.preset", preset.into())
            }
            "actor.eps_clip" if self.get("actor.eps_clip_low_high").is_some() => Nothing,
            "actor.eps_clip" => clip(value.clone(), value.clone()),
            "actor.eps_clip_low_high" => match value.as_array().map(Vec::as_slice) {
                Some([low, high]) => clip(low.clone(), high.clone()),
                _ => Refused(format!("`{name}` = {value}: expected two numbers")),
            },
            "actor.loss_agg_mode" => match text {
                "token-mean" => one("objective.aggregate", of_kind("token_mean")),
                "seq-mean-token-mean" => one("objective.aggregate", of_kind("sequence_mean_of_token_mean")),
                _ => return None,
            },
            _ => return None,
        })
    }

    fn openrlhf_penalty(&self, name: &str, value: &Value) -> Option<Translation> {
        Some(match name {
            "algo.kl.init_coef" if as_number(value) == Some(0.0) => one("objective.kl", of_kind("none")),
            "algo.kl.init_coef" => {
                let kind = self.text("algo.kl.estimator").unwrap_or("k1");
                let key = if self.is_true("algo.kl.use_loss") { "kl" } else { "kl_in_reward" };
                let pairs = [("kind".to_string(), Value::from(kind)), ("beta".to_string(), value.clone())];
                one(&format!("objective.{key}"), Value::Table(Table::from_iter(pairs)))
            }
            "reward.overlong_buffer_len" => {
                overlong(self.number("rollout.max_new_tokens")?, as_number(value)?)
            }
            "reward.overlong_penalty_factor" => overlong_factor(name, value),
            "actor.lr_scheduler" => {
                let (kind, has_floor) = match value.as_str()? {
                    "cosine_with_min_lr" => ("cosine", true),
                    kind => (kind, false),
                };
                let warmup = self.number("actor.lr_warmup_ratio").unwrap_or(0.03);
                let mut keys = match self.schedule(kind) {
                    Keys(keys) => keys,
                    other => return Some(other),
                };
                for (_, schedule) in &mut keys {
                    let Value::Table(schedule) = schedule else { continue };
                    schedule.remove("warmup_steps");
                    schedule.insert("warmup_share".to_string(), Value::Float(warmup));
                    if has_floor {
                        let floor = self.number("actor.min_lr_ratio").unwrap_or(0.1);
                        schedule.insert("final_factor".to_string(), Value::Float(floor));
                    }
                }
                Keys(keys)
            }
            _ => return None,
        })
    }

    fn openrlhf_rollout(&self, name: &str, value: &Value) -> Option<Translation> {
        let number = as_number(value);
        Some(match name {
            "data.prompt_dataset" => {
                let mut keys = match self.prompts("data.train_files", value)? {
                    Keys(keys) => keys,
                    other => return Some(other),
                };
                if let Some(template) = self.text("data.input_template") {
                    keys.retain(|(key, _)| key != "task.template");
                    keys.push(("task.template".to_string(), template.replace("{}", "{{ problem }}").into()));
                }
                Keys(keys)
            }
            "data.max_len" => match self.number("rollout.max_new_tokens").zip(number) {
                Some((new, all)) if all > new => {
                    one("rollout.max_prompt_tokens", Value::Integer((all - new) as i64))
                }
                _ => Refused(format!("`{name}` = {value} limits a prompt and its response together")),
            },
            "train.batch_size" => {
                let group = self.number("rollout.n_samples_per_prompt").unwrap_or(1.0);
                let problems = (number? / group).ceil().max(1.0);
                one("update.problems_per_minibatch", Value::Integer(problems as i64))
            }
            "eval.dataset" => one("evaluation.benchmarks", Value::Array(vec![value.clone()])),
            "reward.remote_url" => Refused(format!(
                "`{name}` = {value}: OpenRLHF gives a function the queries, prompts and labels of a batch; task.verifier = {{ kind = \"python\", file = \"FILE.py\", function = \"NAME\" }} calls one for a response"
            )),
            "train.max_epochs" => return self.training("num_iterations", value),
            "algo.dynamic_filtering_enable" => return self.training("algorithm.filter_groups.enable", value),
            "rollout.top_p" => return self.training("top_p", value),
            "eval.steps" => return self.training("trainer.test_freq", value),
            "ckpt.save_steps" => {
                return self
                    .training("trainer.save_freq", value)
                    .or_else(|| Some(one("record.checkpoint_every_steps", value.clone())));
            }
            "algo.kl.use_loss"
            | "algo.kl.estimator"
            | "actor.lr_warmup_ratio"
            | "actor.min_lr_ratio"
            | "data.input_template"
            | "actor.gradient_checkpointing_enable"
            | "ds.lora.alpha"
            | "ds.lora.target_modules" => Nothing,
            _ => return None,
        })
    }
}
