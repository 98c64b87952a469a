//! What a setting of TRL, verl or OpenRLHF becomes here. Settings that keep their value follow the table of the docs; the rules of the
//! others are below.

mod openrlhf;
mod values;

use stapo_core::settings::{PeerSetting, peer_settings};
use toml::{Table, Value};
use values::{as_number, constant_length, of_kind, one, overlong, overlong_factor, parsed};

/// The settings of a file of one program, under the names of the docs' table.
pub struct Peer {
    pub program: &'static str,
    table: Vec<PeerSetting>,
    /// Name, value, and whether the value is the program's default because the file does not set it.
    given: Vec<(String, Value, bool)>,
    /// Paths of the file that the table does not name.
    pub unnamed: Vec<String>,
}

/// What a setting becomes.
pub enum Translation {
    /// Keys of a config with their values.
    Keys(Vec<(String, Value)>),
    /// Nothing: the setting is switched off, has no effect here, or belongs to another one.
    Nothing,
    /// Why it has no translation.
    Refused(String),
}

use Translation::{Keys, Nothing, Refused};

impl Peer {
    pub fn new(leaves: &[(String, Value)]) -> Self {
        let is_verl =
            |path: &str| ["actor_rollout_ref.", "algorithm.", "trainer."].iter().any(|t| path.starts_with(t));
        let openrlhf = openrlhf::settings(leaves);
        let program = match &openrlhf {
            _ if leaves.iter().any(|(path, _)| is_verl(path)) => "verl",
            Some(_) => "OpenRLHF",
            None => "TRL",
        };
        let leaves = openrlhf.as_deref().filter(|_| program == "OpenRLHF").unwrap_or(leaves);
        let table: Vec<PeerSetting> = peer_settings().into_iter().filter(|s| s.program == program).collect();
        let (mut given, mut unnamed): (Vec<(String, Value, bool)>, Vec<String>) = (Vec::new(), Vec::new());
        // Hydra's names of Python classes, and the critic, which no objective here has.
        let is_setting = |path: &str| !path.starts_with("critic.") && !path.ends_with("_target_");
        for (path, value) in leaves.iter().filter(|(path, _)| is_setting(path)) {
            match table.iter().find(|setting| setting.is_named(path)) {
                Some(setting) if !given.iter().any(|(name, ..)| *name == setting.name) => {
                    given.push((setting.name.clone(), value.clone(), false));
                }
                Some(_) => {}
                None => match part_of_table(path) {
                    Some(name) => given.push((name, value.clone(), false)),
                    None => unnamed.push(path.clone()),
                },
            }
        }
        for setting in &table {
            let is_absent = !given.iter().any(|(name, ..)| *name == setting.name);
            if let Some(default) = setting.default.filter(|_| is_absent) {
                let value = parsed(default);
                given.push((setting.name.clone(), value, true));
            }
        }
        Self { program, table, given, unnamed }
    }

    /// Every setting with its translation, and whether it is a default.
    pub fn translations(&self) -> impl Iterator<Item = (&str, Translation, bool)> {
        self.given
            .iter()
            .map(|(name, value, is_default)| (name.as_str(), self.translation(name, value), *is_default))
    }

    fn get(&self, name: &str) -> Option<&Value> {
        self.given.iter().find(|(known, ..)| known == name).map(|(_, value, _)| value)
    }

    fn number(&self, name: &str) -> Option<f64> {
        self.get(name).and_then(as_number)
    }

    fn text(&self, name: &str) -> Option<&str> {
        self.get(name)?.as_str()
    }

    fn is_true(&self, name: &str) -> bool {
        self.get(name).and_then(Value::as_bool).unwrap_or(false)
    }

    fn translation(&self, name: &str, value: &Value) -> Translation {
        if is_open(value) {
            return Refused(format!("`{name}` is {value}, which is filled in when the training starts"));
        }
        self.openrlhf(name, value)
            .or_else(|| self.batches(name))
            .or_else(|| self.objective(name, value))
            .or_else(|| self.penalty(name, value))
            .or_else(|| self.prompts(name, value))
            .or_else(|| self.rewards_and_adapters(name, value))
            .or_else(|| self.training(name, value))
            .unwrap_or_else(|| self.copied(name, value))
    }

    /// The same value under our key, where the table names one.
    fn copied(&self, name: &str, value: &Value) -> Translation {
        let Some(setting) = self.table.iter().find(|setting| setting.name == name) else { return Nothing };
        match setting.key() {
            Some(key) => one(key, value.clone()),
            None => Refused(setting.sentence()),
        }
    }

    /// Mini-batches and rollout batches. TRL counts responses, and for each process.
    fn batches(&self, name: &str) -> Option<Translation> {
        let group = self.number("num_generations").unwrap_or(8.0);
        let per_device = self.number("per_device_train_batch_size").unwrap_or(8.0);
        let minibatch = per_device * self.number("gradient_accumulation_steps").unwrap_or(1.0);
        let of_steps = self.number("steps_per_generation").map(|steps| per_device * steps);
        let rollout = self.number("generation_batch_size").or(of_steps).unwrap_or(minibatch);
        let problems = |key: &str, responses: f64| {
            let n = (responses / group).ceil().max(1.0);
            (key.to_string(), Value::Integer(n as i64))
        };
        match name {
            "per_device_train_batch_size"
            | "gradient_accumulation_steps"
            | "generation_batch_size"
            | "steps_per_generation" => {
                let rollout = problems("rollout.problems_per_step", rollout.max(minibatch));
                Some(Keys(vec![problems("update.problems_per_minibatch", minibatch), rollout]))
            }
            "max_steps" => {
                let n_updates = (rollout / minibatch).max(1.0) * self.number("num_iterations").unwrap_or(1.0);
                let steps = self.number(name).filter(|n| *n > 0.0)? / n_updates;
                Some(one("steps", Value::Integer(steps.ceil() as i64)))
            }
            _ => None,
        }
    }

    fn objective(&self, name: &str, value: &Value) -> Option<Translation> {
        let text = value.as_str().unwrap_or_default();
        Some(match name {
            "loss_type" | "actor.policy_loss.loss_mode" => self.preset(text),
            "epsilon" => {
                let mut keys = vec![("objective.surrogate.low".to_string(), value.clone())];
                if self.get("epsilon_high").is_none() {
                    keys.push(("objective.surrogate.high".to_string(), value.clone()));
                }
                Keys(keys)
            }
            "importance_sampling_level" => match text {
                "token" => Nothing,
                kind => one("objective.ratio", of_kind(kind)),
            },
            "scale_rewards" => match (text, value.as_bool()) {
                ("group", _) | (_, Some(true)) => one("objective.advantage", of_kind("group_z_score")),
                ("none", _) | (_, Some(false)) => one("objective.advantage", of_kind("group_mean")),
                ("batch", _) => one("objective.advantage", of_kind("group_mean_batch_std")),
                _ => return None,
            },
            "algorithm.adv_estimator" => match text {
                "grpo" if self.get("algorithm.norm_adv_by_std_in_grpo") == Some(&Value::Boolean(false)) => {
                    one("objective.advantage", of_kind("group_mean"))
                }
                "grpo" | "reinforce_plus_plus" => Nothing,
                "rloo" => one("objective.advantage", of_kind("leave_one_out")),
                "opo" => one("objective.advantage", of_kind("length_weighted_mean")),
                "gpg" => one("objective.advantage", of_kind("group_mean_nonzero_share")),
                "grpo_passk" => one("objective.advantage", of_kind("best_above_second")),
                other => Refused(format!(
                    "`adv_estimator` = {other}: only estimators relative to a group are here"
                )),
            },
            "algorithm.norm_adv_by_std_in_grpo" => Nothing,
            "actor.loss_agg_mode" => match text {
                "token-mean" => one("objective.aggregate", of_kind("token_mean")),
                "seq-mean-token-mean" => one("objective.aggregate", of_kind("sequence_mean_of_token_mean")),
                // verl divides a sum by the number of responses alone.
                "seq-mean-token-sum" => Keys(vec![
                    ("objective.aggregate".to_string(), of_kind("sequence_mean_of_token_sum")),
                    ("objective.denominator".to_string(), constant_length(1.0)),
                ]),
                _ => return None,
            },
            "top_entropy_quantile" if as_number(value) == Some(1.0) => Nothing,
            _ => return None,
        })
    }

    /// The preset, with what the other program's loss of that name has in another way.
    fn preset(&self, loss: &str) -> Translation {
        let preset = match loss.replace('_', "-").as_str() {
            "vanilla" if self.text("algorithm.adv_estimator") == Some("reinforce_plus_plus") => {
                "reinforce++".to_string()
            }
            "vanilla" => "justrl".to_string(),
            "geo-mean" => "gmpo".to_string(),
            other => other.to_string(),
        };
        let mut keys = vec![("objective.preset".to_string(), Value::String(preset.clone()))];
        let mut clip = |side: &str, value: f64| {
            keys.push((format!("objective.surrogate.{side}"), Value::Float(value)));
        };
        match (self.program, preset.as_str()) {
            ("TRL", "grpo" | "dapo" | "dr-grpo") if self.get("epsilon").is_none() => {
                clip("low", 0.2);
                clip("high", self.number("epsilon_high").unwrap_or(0.2));
            }
            ("verl", "justrl" | "reinforce++") => {
                for (side, name, default) in [
                    ("low", "clip_ratio_low", 0.2),
                    ("high", "clip_ratio_high", 0.2),
                    ("dual", "clip_ratio_c", 3.0),
                ] {
                    clip(side, self.number(&format!("actor.{name}")).unwrap_or(default));
                }
            }
            _ => {}
        }
        if (self.program, preset.as_str()) == ("TRL", "dr-grpo") {
            let length = self.number("max_completion_length").unwrap_or(512.0);
            keys.push(("objective.denominator".to_string(), constant_length(length)));
        }
        Keys(keys)
    }

    /// KL penalties and entropy bonuses.
    fn penalty(&self, name: &str, value: &Value) -> Option<Translation> {
        let weighted = |kind: &str, key: &str, weight: f64| {
            let pairs = [("kind".to_string(), Value::from(kind)), (key.to_string(), Value::Float(weight))];
            Value::Table(Table::from_iter(pairs))
        };
        let off = || one("objective.kl", of_kind("none"));
        Some(match name {
            "beta" => match as_number(value)? {
                0.0 => off(),
                beta if self.is_true("use_bias_correction_kl") => {
                    one("objective.kl", weighted("unbiased_k3", "beta", beta))
                }
                beta => one("objective.kl", weighted("k3", "beta", beta)),
            },
            "actor.use_kl_loss" if value.as_bool() == Some(false) => off(),
            "actor.use_kl_loss" => {
                let kind = match self.text("actor.kl_loss_type").unwrap_or("low_var_kl") {
                    "low_var_kl" | "k3" => "k3",
                    "kl" | "k1" => "k1",
                    "mse" | "k2" => "k2",
                    other => {
                        return Some(Refused(format!("`kl_loss_type` = {other} has no counterpart here")));
                    }
                };
                one(
                    "objective.kl",
                    weighted(kind, "beta", self.number("actor.kl_loss_coef").unwrap_or(0.001)),
                )
            }
            "actor.kl_loss_coef" | "actor.kl_loss_type" | "use_bias_correction_kl" => Nothing,
            "algorithm.use_kl_in_reward" if value.as_bool() == Some(false) => Nothing,
            "entropy_coef" | "actor.entropy_coeff" | "actor.entropy_coef" => match as_number(value)? {
                0.0 => Nothing,
                weight => one("objective.entropy_bonus", weighted("constant", "coefficient", weight)),
            },
            "use_adaptive_entropy" if value.as_bool() == Some(false) => Nothing,
            _ => return None,
        })
    }

    fn prompts(&self, name: &str, value: &Value) -> Option<Translation> {
        Some(match name {
            "train_dataset" | "dataset_name" | "data.train_files" => {
                let is_file = |value: &Value| {
                    value.as_str().is_some_and(|text| {
                        text.contains(".parquet") || text.contains(".json") || text.contains(".csv")
                    })
                };
                let is_here =
                    value.as_array().map_or_else(|| is_file(value), |list| list.iter().all(is_file));
                if is_here {
                    // Prompts stay as they are: the default template would add an instruction.
                    Keys(vec![
                        ("task.path".to_string(), value.clone()),
                        ("task.template".to_string(), "{{ problem }}".into()),
                    ])
                } else {
                    Refused(format!(
                        "{value} is no file: `stapo fetch dataset NAME` fetches it, and --data names a file of it"
                    ))
                }
            }
            "data.val_files" | "reward_weights" => return self.refused(name),
            "chat_template_kwargs" | "data.apply_chat_template_kwargs" => {
                if value.as_table().is_some_and(Table::is_empty) {
                    return Some(Nothing);
                }
                let chat = ("rollout.chat".to_string(), Value::Boolean(true));
                Keys(vec![chat, ("rollout.chat_arguments".to_string(), value.clone())])
            }
            "data.filter_overlong_prompts" | "mask_truncated_completions"
                if value.as_bool() == Some(false) =>
            {
                Nothing
            }
            "data.filter_overlong_prompts" => one("rollout.long_prompts", "drop".into()),
            "mask_truncated_completions" => one("rollout.truncated", "drop".into()),
            "overlong_buffer.enable" if value.as_bool() == Some(true) => {
                let longest = self.number("data.max_response_length").unwrap_or(512.0);
                overlong(longest, self.number("overlong_buffer.len")?)
            }
            "overlong_buffer.penalty_factor" => overlong_factor(name, value),
            "overlong_buffer.enable" | "overlong_buffer.len" => Nothing,
            _ => return None,
        })
    }

    fn rewards_and_adapters(&self, name: &str, value: &Value) -> Option<Translation> {
        Some(match name {
            "reward_funcs" => {
                let names = value.as_array().cloned().unwrap_or_else(|| vec![value.clone()]);
                match names.as_slice() {
                    [only] if only.as_str() == Some("accuracy_reward") => {
                        let rule = [("kind".to_string(), "rule".into()), ("mode".to_string(), "math".into())];
                        one("task.verifier", Value::Table(Table::from_iter(rule)))
                    }
                    _ => Refused(format!(
                        "`reward_funcs` = {value}: task.verifier = {{ kind = \"python\", file = \"FILE.py\", function = \"NAME\" }} calls such a function as it is"
                    )),
                }
            }
            "custom_reward_function.path" => {
                let function = self.text("custom_reward_function.name").unwrap_or("compute_score");
                let pairs =
                    [("kind", "python".into()), ("file", value.clone()), ("function", Value::from(function))];
                let pairs = pairs.into_iter().map(|(key, value)| (key.to_string(), value));
                one("task.verifier", Value::Table(pairs.collect()))
            }
            "use_peft" | "lora_alpha" | "lora_target_modules" => Nothing,
            "lora_r" if !self.is_true("use_peft") => Nothing,
            "lora_r" | "actor_rollout_ref.model.lora_rank" | "ds.lora.rank" => match as_number(value)? {
                0.0 => Nothing,
                rank => {
                    let mut lora = Table::from_iter([("rank".to_string(), Value::Integer(rank as i64))]);
                    let others = [
                        ("alpha", "lora_alpha"),
                        ("targets", "lora_target_modules"),
                        ("alpha", "actor_rollout_ref.model.lora_alpha"),
                        ("targets", "actor_rollout_ref.model.target_modules"),
                        ("alpha", "ds.lora.alpha"),
                        ("targets", "ds.lora.target_modules"),
                    ];
                    lora.extend(
                        others
                            .into_iter()
                            .filter_map(|(key, name)| Some((key.to_string(), self.get(name)?.clone()))),
                    );
                    one("model.lora", Value::Table(lora))
                }
            },
            "actor_rollout_ref.model.lora_alpha" | "actor_rollout_ref.model.target_modules" => Nothing,
            _ => return None,
        })
    }

    fn training(&self, name: &str, value: &Value) -> Option<Translation> {
        let number = as_number(value);
        Some(match name {
            "num_iterations" | "actor_rollout_ref.actor.ppo_epochs" => match number? {
                1.0 => Nothing,
                uses => {
                    let reuse = [
                        ("max".to_string(), Value::Integer(uses as i64)),
                        ("gate".to_string(), "none".into()),
                    ];
                    one("update.reuse", Value::Table(Table::from_iter(reuse)))
                }
            },
            "lr_scheduler_type" | "actor.optim.lr_scheduler_type" => self.schedule(value.as_str()?),
            // verl's rate is constant behind a warm-up unless it says otherwise.
            "actor.optim.lr_warmup_steps"
                if self.get("actor.optim.lr_scheduler_type").is_none() && number? > 0.0 =>
            {
                self.schedule("constant")
            }
            "warmup_steps" | "warmup_ratio" | "actor.optim.lr_warmup_steps" => Nothing,
            "num_train_epochs" | "trainer.total_epochs" | "train.num_episodes" => Refused(format!(
                "`{name}` = {value}: `steps` counts rollout batches; one pass over the data is rows / rollout.problems_per_step"
            )),
            "trainer.save_freq" | "save_total_limit" | "trainer.total_training_steps"
                if number.is_none_or(|n| n <= 0.0) =>
            {
                Nothing
            }
            "trainer.test_freq" => one("evaluation.every_steps", Value::Integer(number?.max(0.0) as i64)),
            "algorithm.filter_groups.enable" if value.as_bool() == Some(true) => {
                one("rollout.max_redraws", Value::Integer(10))
            }
            // Chosen by the program itself, or a flag of the command line.
            "algorithm.filter_groups.enable"
            | "bf16"
            | "gradient_checkpointing"
            | "model.enable_gradient_checkpointing"
            | "actor_rollout_ref.rollout.gpu_memory_utilization"
            | "eval_strategy"
            | "report_to"
            | "trainer.logger"
            | "log_completions"
            | "trainer.rollout_data_dir"
            | "trainer.resume_mode" => Nothing,
            "top_p" | "actor_rollout_ref.rollout.top_p" if number == Some(1.0) => Nothing,
            "top_k" | "actor_rollout_ref.rollout.top_k" if number.is_some_and(|k| k <= 0.0) => Nothing,
            "repetition_penalty" if number == Some(1.0) => Nothing,
            _ => return None,
        })
    }

    fn schedule(&self, kind: &str) -> Translation {
        let kind = match kind {
            "constant" | "constant_with_warmup" => "constant",
            "linear" | "cosine" => kind,
            other => {
                return Refused(format!(
                    "`lr_scheduler_type` = {other}: update.schedule has constant, linear and cosine"
                ));
            }
        };
        let mut schedule = Table::from_iter([("kind".to_string(), Value::from(kind))]);
        let steps = self.number("warmup_steps").or_else(|| self.number("actor.optim.lr_warmup_steps"));
        // verl moves its rate once for a rollout batch, which has several optimizer steps.
        let batch = self.number("data.train_batch_size");
        let minibatch = self.number("actor_rollout_ref.actor.ppo_mini_batch_size");
        let epochs = self.number("actor_rollout_ref.actor.ppo_epochs").unwrap_or(1.0);
        let n_updates = batch.zip(minibatch).map_or(1.0, |(batch, n)| (batch / n).max(1.0)) * epochs;
        let steps = steps.map(|steps| steps * n_updates);
        let share = self.number("warmup_ratio");
        match (steps.filter(|n| *n > 0.0), share.filter(|share| *share > 0.0)) {
            (Some(steps), _) => schedule.insert("warmup_steps".to_string(), Value::Integer(steps as i64)),
            (None, Some(share)) => schedule.insert("warmup_share".to_string(), Value::Float(share)),
            (None, None) => schedule.insert("warmup_steps".to_string(), Value::Integer(0)),
        };
        one("update.schedule", Value::Table(schedule))
    }

    fn refused(&self, name: &str) -> Option<Translation> {
        self.table.iter().find(|setting| setting.name == name).map(|setting| Refused(setting.sentence()))
    }
}

/// The name of a setting below a table that lies elsewhere in other versions of verl.
fn part_of_table(path: &str) -> Option<String> {
    let tables = [
        ("overlong_buffer.", "overlong_buffer"),
        ("overlong_buffer_cfg.", "overlong_buffer"),
        ("custom_reward_function.", "custom_reward_function"),
    ];
    tables.iter().find_map(|(table, name)| Some(format!("{name}.{}", path.split_once(table)?.1)))
}

/// Whether the page of TRL names a setting.
pub fn is_of_trl(name: &str) -> bool {
    peer_settings().iter().any(|setting| setting.program == "TRL" && setting.name == name)
}

/// Whether hydra, a shell or Python fills in a value or a part of it.
fn is_open(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains("${") || text.contains("$(") || text == "???",
        Value::Array(values) => values.iter().any(is_open),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
