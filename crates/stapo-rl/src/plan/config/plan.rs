//! A config with all presets resolved and all values checked.

use super::episode::{self, AnswerSource, EpisodeConfig};
use super::refusal::{PlanError, at_least_one, count, in_unit, positive, require, share};
use super::rewards::{self, Reward};
use super::style::{self, PromptStyle};
use super::truncation;
use super::{
    Behavior, Config, GradientSum, HELD_OUT, KvMemory, ModelSource, RolloutSourceSpec, Speculate, States,
    TeacherSource,
};
use crate::reward::{JudgeSpec, KeepWeights, RewardModelSpec, VerifierSpec};
use crate::tasks::TaskSpec;
use stapo_core::ObjectiveSpec;
use stapo_core::batch::Packing;
use stapo_core::objective::{OffPolicy, preset};
use stapo_model::generate::SamplingRule;
use stapo_model::optimizer::AdamWSettings;
use stapo_model::{DeviceName, ModelConfig};

/// The largest counts. Their products fit the numbers that memory and time are computed in.
const MAX_PROBLEMS: usize = 1 << 20;
const MAX_SAMPLES: usize = 1 << 16;
const MAX_TOKENS: usize = 1 << 22;
/// The most rows of keys for each row of a micro-batch: all layers share the memory of one. With 8 responses of 256 tokens to a
/// prompt of 8,192 there are 6.6.
const MAX_KEYS_PER_TOKEN: usize = 8;
const MAX_MICROBATCH_TOKENS: usize = 1 << 26;
const MAX_KV_MIB: usize = 1 << 24;

/// A run that can start: every value is checked and every preset resolved. A plan does not change after the start.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    pub config: Config,
    pub task: TaskSpec,
    pub objective: ObjectiveSpec,
    /// At least one.
    pub rewards: Vec<Reward>,
    /// How the model is asked.
    pub style: PromptStyle,
}

impl Plan {
    /// Resolves the presets and checks every value.
    pub fn resolve(config: Config) -> Result<Self, PlanError> {
        let (mut task, objective) = (config.task.clone(), config.objective.clone());
        objective.check()?;
        let rewards = rewards::resolve(&config, &mut task)?;
        let style = PromptStyle::from_rollout(&config.rollout);
        let plan = Plan { config, task: task.with_template(), objective, rewards, style };
        plan.check()?;
        Ok(plan)
    }

    /// The plan as TOML with presets written out. As a config, this TOML resolves to the same plan.
    pub fn to_toml(&self) -> String {
        Config { task: self.task.clone(), preset: None, ..self.config.clone() }.to_toml()
    }

    pub fn optimizer(&self) -> AdamWSettings {
        let update = &self.config.update;
        AdamWSettings {
            beta1: update.beta1,
            beta2: update.beta2,
            eps: update.epsilon,
            weight_decay: update.weight_decay,
        }
    }

    pub fn device(&self) -> DeviceName {
        self.config.device.parse().expect("`resolve` checked the device name")
    }

    /// How gradients are summed.
    pub fn sum(&self) -> GradientSum {
        let default = match self.device() {
            DeviceName::Cpu => GradientSum::Tokens,
            DeviceName::Cuda { .. } => GradientSum::Microbatches,
        };
        self.config.update.sum.unwrap_or(default)
    }

    /// How responses are packed into the micro-batches of a model. Layers with states instead of keys share no prompts.
    pub fn packing(&self, model: &ModelConfig) -> Packing {
        let budget_tokens = self.config.update.microbatch_tokens;
        let is_gpu = self.device() != DeviceName::Cpu;
        let shares = self.config.update.share_prompts.unwrap_or(is_gpu) && model.state_bytes(4) == 0;
        Packing { budget_tokens, budget_keys: shares.then_some(self.keys_per_token() * budget_tokens) }
    }

    /// Rows of keys for each row of a micro-batch of groups that share their prompts. Counted for the longest prompt and responses of
    /// a quarter of the limit; groups with more rows of keys are cut.
    fn keys_per_token(&self) -> usize {
        let rollout = &self.config.rollout;
        let (prompt, response) = (rollout.max_prompt_tokens, rollout.max_response_tokens.div_ceil(4));
        let n_keys = rollout.group_size * (prompt + response);
        n_keys.div_ceil((prompt + rollout.group_size * response).max(1)).clamp(1, MAX_KEYS_PER_TOKEN)
    }

    /// True if ratios divide by the log-probs of another engine from the first update on.
    pub fn has_behavior_of_sampler(&self) -> bool {
        matches!(
            self.config.rollout.source,
            Some(RolloutSourceSpec::Jsonl { behavior: Behavior::Sampler, .. })
        )
    }

    /// The limits of episodes, where the run has an environment.
    pub fn episode(&self) -> EpisodeConfig {
        self.config.episode.clone().unwrap_or_default()
    }

    /// Whether a resumed run takes what environments answered from records and journal.
    pub(crate) fn replays_answers(&self) -> bool {
        self.config.environment.is_some() && self.episode().resume == AnswerSource::Records
    }

    /// The model that judges responses; `None` if no reward has one.
    pub fn judge(&self) -> Option<&JudgeSpec> {
        self.rewards.iter().find_map(|reward| reward.verifier.judge())
    }

    /// The model of a judge or a reward model on the device of the run: what it is, and the model; `None` if no reward has one.
    pub fn verifying_model(&self) -> Option<(&'static str, ModelSource)> {
        let (role, name) = self.rewards.iter().find_map(|reward| {
            let device = reward.verifier.device().and_then(|name| name.parse().ok());
            reward
                .verifier
                .model()
                .filter(|_| device.is_none_or(|device: DeviceName| device == self.device()))
        })?;
        Some((role, ModelSource::named(name)))
    }

    /// Whether the host keeps the weights of a judge or a reward model while the policy samples and learns.
    pub(crate) fn keeps_verifier_on_host(&self) -> bool {
        self.rewards.iter().any(|reward| reward.verifier.keep() == KeepWeights::Host)
    }

    /// The reward that is a reward model's score, by its index.
    pub fn scored_reward(&self) -> Option<(usize, &RewardModelSpec)> {
        let mut rewards = self.rewards.iter().enumerate();
        rewards.find_map(|(idx, reward)| Some((idx, reward.verifier.reward_model()?)))
    }

    /// Every copy of the settings of verifiers.
    pub(crate) fn verifiers_mut(&mut self) -> impl Iterator<Item = &mut VerifierSpec> {
        let written = self.config.rewards.iter_mut().filter_map(|reward| reward.verifier.as_mut());
        let tasks = [self.config.task.verifier_mut(), self.task.verifier_mut()];
        let resolved = self.rewards.iter_mut().map(|reward| &mut reward.verifier);
        written.chain(tasks).chain(resolved)
    }

    /// Tokens of the longest prompt and the longest response together; of an episode, the given tokens count too.
    pub fn longest_sequence(&self) -> usize {
        self.config.rollout.max_prompt_tokens + self.config.rollout.max_response_tokens
    }

    /// Whether the reference of a KL penalty is the model in training without its adapters.
    pub fn has_free_reference(&self) -> bool {
        self.config.reference.is_none() && self.config.lora.is_some()
    }

    /// Uses of a rollout batch, at most.
    pub fn max_uses(&self) -> usize {
        self.config.update.reuse.map_or(1, |reuse| reuse.max)
    }

    /// Optimizer steps of one rollout batch, at most.
    pub fn updates_per_step(&self) -> usize {
        let rollout = self.config.rollout.problems_per_step;
        let per_use = rollout.div_ceil(self.config.update.problems_per_minibatch) * self.objective.n_passes();
        per_use * self.max_uses()
    }

    /// Optimizer steps of the whole run, at most.
    pub fn n_updates(&self) -> u64 {
        self.config.steps.saturating_mul(self.updates_per_step() as u64)
    }

    /// The learning rate of an optimizer step, counted from 0.
    pub fn learning_rate(&self, update: u64) -> f64 {
        let config = &self.config.update;
        config.learning_rate * config.schedule.factor(update, self.n_updates())
    }

    /// What is unusual about the objective, and settings of the training loop that the preset's paper uses and the config
    /// does not set.
    pub fn notes(&self) -> Vec<String> {
        let name = self.config.preset.as_deref().unwrap_or_default();
        let mut notes = self.objective.warnings();
        if !self.config.followed.is_empty() {
            let keys = self.config.followed.join(", ");
            notes.push(format!("defaults for the size of this model: {keys}; set them to choose others"));
        }
        let rollout = &self.config.rollout;
        if let Some(RolloutSourceSpec::Jsonl { behavior: Behavior::Policy, .. }) = rollout.source
            && self.objective.off_policy == OffPolicy::None
        {
            let remedy = "set objective.off_policy, or rollout.source.behavior=sampler";
            notes.push(format!("the log-probs of rollout.source are not used; {remedy}"));
        }
        if let Some(rows) = self.task.rows().filter(|rows| rows.has_instruction())
            && self.config.task.rows().is_some_and(|rows| rows.template.is_none())
        {
            let problem = "task.template is not set: the instruction of its default follows each problem";
            notes.push(format!("{problem} ({:?}); stapo problems shows the prompts", rows.template()));
        }
        let Some(preset) = preset(name) else { return notes };
        if preset.rollout.dynamic_sampling && rollout.max_redraws == 0 {
            notes.push(format!("{name} redraws groups of equal rewards; rollout.max_redraws is 0"));
        }
        if preset.rollout.overlong.is_some() && rollout.overlong.is_none() {
            notes.push(format!("{name} shapes the reward of long responses; rollout.overlong is not set"));
        }
        notes
    }

    fn check(&self) -> Result<(), PlanError> {
        let config = &self.config;
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        let named =
            !config.name.is_empty() && config.name.chars().all(plain) && !config.name.starts_with('.');
        require(named, "name", &config.name, "expected letters, digits, - _ . (it names a folder)", "")?;
        at_least_one("steps", config.steps)?;
        let device = config.device.parse::<DeviceName>();
        require(device.is_ok(), "device", &config.device, "expected cpu, cuda, or cuda:N", "")?;
        require(
            config.update.states == States::F32 || device != Ok(DeviceName::Cpu),
            "update.states",
            "8bit",
            "is for a GPU; the CPU keeps f32 states",
            "leave it out, or set device=cuda",
        )?;
        require(
            config.update.sum != Some(GradientSum::Tokens) || device == Ok(DeviceName::Cpu),
            "update.sum",
            "tokens",
            "is for the CPU; a GPU sums micro-batch by micro-batch",
            "leave it out, or set device=cpu",
        )?;
        require(
            config.update.share_prompts != Some(true) || self.sum() == GradientSum::Microbatches,
            "update.share_prompts",
            true,
            "conflicts with update.sum = \"tokens\", under which no bit depends on the cuts between micro-batches",
            "leave it out, or set update.sum=microbatches",
        )?;
        self.check_objective()?;
        self.check_rollout()?;
        episode::check(config, &self.task)?;
        self.check_update()?;
        rewards::check(config, &self.rewards)?;
        self.check_evaluation()?;
        let canaries = &config.canaries;
        share("canaries.max_unjudged_share", canaries.max_unjudged_share)?;
        share("canaries.entropy_collapse_factor", canaries.entropy_collapse_factor)?;
        let explosion = canaries.entropy_explosion_factor;
        require(explosion >= 1.0, "canaries.entropy_explosion_factor", explosion, "expected at least 1", "")?;
        at_least_one("record.checkpoint_every_steps", config.record.checkpoint_every_steps)?;
        at_least_one("record.keep_checkpoints", config.record.keep_checkpoints as u64)?;
        at_least_one("record.responses_every_steps", config.record.responses_every_steps)
    }

    fn check_evaluation(&self) -> Result<(), PlanError> {
        let evaluation = &self.config.evaluation;
        count("evaluation.problems", evaluation.problems, MAX_PROBLEMS)?;
        count("evaluation.samples", evaluation.samples, MAX_SAMPLES)?;
        count("evaluation.benchmark_limit", evaluation.benchmark_limit.unwrap_or(1), MAX_PROBLEMS)?;
        count("evaluation.benchmark_samples", evaluation.benchmark_samples.unwrap_or(1), MAX_SAMPLES)?;
        share("evaluation.target_accuracy", evaluation.target_accuracy.unwrap_or(1.0))?;
        for (key, is_given) in [
            ("evaluation.benchmark_limit", evaluation.benchmark_limit.is_some()),
            ("evaluation.benchmark_samples", evaluation.benchmark_samples.is_some()),
            ("evaluation.benchmark_template", evaluation.benchmark_template.is_some()),
        ] {
            let has_effect = !is_given || !evaluation.benchmarks.is_empty();
            let problem = "has no effect, because evaluation.benchmarks names none";
            require(has_effect, key, "given:", problem, "name benchmarks, or leave it out")?;
        }
        let metric = evaluation.best.as_str();
        // `all` stands for several names, which are compared with the key where the benchmarks are opened.
        let is_benchmark = evaluation.benchmark_names().any(|name| name == metric || name == "all");
        let is_known = matches!(metric, HELD_OUT | "none") || is_benchmark;
        require(
            is_known,
            "evaluation.best",
            metric,
            "is neither held_out nor none nor one of evaluation.benchmarks",
            "add the benchmark to evaluation.benchmarks, or leave the key out",
        )?;
        if let Some(steps) = evaluation.idle_patience {
            at_least_one("evaluation.idle_patience", steps)?;
        }
        let Some(patience) = evaluation.patience else { return Ok(()) };
        at_least_one("evaluation.patience", patience)?;
        require(
            evaluation.every_steps > 0,
            "evaluation.patience",
            patience,
            "counts evaluations, and evaluation.every_steps is 0",
            "set evaluation.every_steps to at least 1",
        )?;
        require(
            metric != "none",
            "evaluation.patience",
            patience,
            "waits for a better evaluation, but evaluation.best is \"none\"",
            "set evaluation.best=held_out, or leave evaluation.patience out",
        )
    }

    /// Refuses an objective that the training loop has no inputs for, and inputs that the objective does not read.
    fn check_objective(&self) -> Result<(), PlanError> {
        if self.config.reference.is_some() && !self.objective.needs_reference() {
            let problem = "given, but the objective has no KL penalty".to_string();
            let remedy = "leave it out, or add one: objective.kl = { kind = \"k3\", beta = 0.04 }";
            return Err(PlanError::Refused { key: "reference", problem, remedy });
        }
        let kind = match self.objective.off_policy {
            OffPolicy::None => return self.check_teacher(),
            OffPolicy::Tis { .. } => "tis",
            OffPolicy::Icepop { .. } => "icepop",
            OffPolicy::Mis { .. } => "mis",
        };
        let key = "objective.off_policy.kind";
        let remedy = "leave it out, or give rollouts with log-probs: rollout.source = { kind = \"jsonl\", path = \"..\" }";
        match self.config.rollout.source {
            None => {
                let problem =
                    "reads the log-probs of another sampling engine, and the rollouts of a run have none";
                require(false, key, kind, problem, remedy)?;
            }
            Some(RolloutSourceSpec::Jsonl { behavior, .. }) => {
                let problem = "weighs the policy against the sampler, and rollout.source.behavior is sampler";
                require(
                    behavior == Behavior::Policy,
                    key,
                    kind,
                    problem,
                    "set rollout.source.behavior=policy",
                )?;
            }
        }
        self.check_teacher()
    }

    fn check_teacher(&self) -> Result<(), PlanError> {
        let refuse = |problem: &str, remedy| {
            Err(PlanError::Refused { key: "teacher", problem: problem.to_string(), remedy })
        };
        match (&self.config.teacher, self.objective.needs_teacher()) {
            (None, false) => Ok(()),
            (None, true) => refuse(
                "absent, and objective.distillation learns from one",
                "teacher = { kind = \"solution\" } is the policy with the reference solution, { kind = \"path\", path = \"..\" } a model",
            ),
            (Some(_), false) => refuse(
                "given, but the objective has no distillation",
                "leave it out, or add one: objective.distillation = { kind = \"dasd\" }",
            ),
            (Some(TeacherSource::Solution { .. }), true) if !self.task.has_solutions() => refuse(
                "is the policy with the reference solution, and the task has no solutions",
                "name the field of the solution with task.solution_field",
            ),
            (Some(_), true) => Ok(()),
        }
    }

    fn check_rollout(&self) -> Result<(), PlanError> {
        let rollout = &self.config.rollout;
        count("rollout.problems_per_step", rollout.problems_per_step, MAX_PROBLEMS)?;
        require(
            rollout.group_size >= 2,
            "rollout.group_size",
            rollout.group_size,
            "expected at least 2",
            "an advantage compares responses to one problem",
        )?;
        count("rollout.group_size", rollout.group_size, MAX_SAMPLES)?;
        let range = SamplingRule::TEMPERATURES;
        require(
            range.contains(&rollout.temperature),
            "rollout.temperature",
            rollout.temperature,
            &format!("expected a number from {:e} to {:e}", range.start(), range.end()),
            "1 samples from the model as it is",
        )?;
        count("rollout.max_prompt_tokens", rollout.max_prompt_tokens, MAX_TOKENS)?;
        count("rollout.max_response_tokens", rollout.max_response_tokens, MAX_TOKENS)?;
        if let Some(lengths) = rollout.lengths {
            positive("rollout.lengths.mean", lengths.mean)?;
            let is_spread = lengths.sigma.is_finite() && lengths.sigma >= 0.0;
            require(is_spread, "rollout.lengths.sigma", lengths.sigma, "expected at least 0", "")?;
        }
        if let KvMemory::Mib(mib) = rollout.kv_mib {
            count("rollout.kv_mib", mib, MAX_KV_MIB)?;
        }
        style::check(rollout, &self.task)?;
        truncation::check(&self.config, self.device())?;
        let held_out = self.task.held_out_share();
        require(
            held_out < 1.0,
            "task.held_out_share",
            held_out,
            "leaves no problem to train on",
            "lower it below 1; stapo eval evaluates on a whole file",
        )?;
        if let Some(draft) = &rollout.draft {
            require(
                rollout.speculate == Speculate::Auto && rollout.source.is_none(),
                "rollout.draft",
                draft,
                "has nothing to draft: rollout.speculate is \"off\", or responses come from rollout.source",
                "leave it out",
            )?;
        }
        require(
            rollout.source.is_none() || rollout.max_redraws == 0,
            "rollout.max_redraws",
            rollout.max_redraws,
            "cannot redraw rollouts that come from rollout.source",
            "set it to 0",
        )
    }

    fn check_update(&self) -> Result<(), PlanError> {
        let rollout = &self.config.rollout;
        let update = &self.config.update;
        at_least_one("update.problems_per_minibatch", update.problems_per_minibatch as u64)?;
        require(
            update.problems_per_minibatch <= rollout.problems_per_step,
            "update.problems_per_minibatch",
            update.problems_per_minibatch,
            "is above rollout.problems_per_step",
            "a mini-batch is a part of a rollout batch",
        )?;
        let longest = rollout.max_prompt_tokens + rollout.max_response_tokens;
        require(
            update.microbatch_tokens >= longest,
            "update.microbatch_tokens",
            update.microbatch_tokens,
            &format!("is below the longest sequence, {longest} tokens"),
            "sequences are never split: raise it, or lower rollout.max_response_tokens",
        )?;
        count("update.microbatch_tokens", update.microbatch_tokens, MAX_MICROBATCH_TOKENS)?;
        positive("update.learning_rate", update.learning_rate)?;
        positive("update.epsilon", update.epsilon)?;
        positive("update.max_gradient_norm", update.max_gradient_norm)?;
        in_unit("update.beta1", update.beta1)?;
        in_unit("update.beta2", update.beta2)?;
        let decays = update.weight_decay.is_finite() && update.weight_decay >= 0.0;
        require(decays, "update.weight_decay", update.weight_decay, "expected at least 0", "")?;
        update.schedule.check()?;
        if let Some(lora) = &self.config.lora {
            lora.check(self.device())?;
            let refuse = |key, problem: &str, remedy| {
                Err(PlanError::Refused { key, problem: problem.to_string(), remedy })
            };
            // Beyond 128 a GPU's own kernels for adapters have no room, and others are exact at multiples of 8 only.
            let rank = lora.spec().rank;
            let is_exact = self.device() == DeviceName::Cpu || rank <= 128 || rank.is_multiple_of(8);
            let expected =
                "expected at most 128, or a multiple of 8, on a GPU, where other ranks are not exact";
            require(is_exact, "model.lora.rank", rank, expected, "take 128, or train on the CPU")?;
            if update.reuse.is_some() {
                let problem = "reads the gradient of the head, which is frozen with model.lora";
                return refuse("update.reuse", problem, "leave out update.reuse, or model.lora");
            }
            if update.states == States::EightBit {
                let problem = "8bit would round the few weights of model.lora for hardly any memory";
                return refuse("update.states", problem, "set it to f32: the states of adapters are small");
            }
        }
        let Some(reuse) = &update.reuse else { return Ok(()) };
        at_least_one("update.reuse.max", reuse.max as u64)?;
        require(reuse.tau.is_finite(), "update.reuse.tau", reuse.tau, "expected a finite number", "")?;
        let remedy = "a deviation needs two increments; 32 is the default";
        require(reuse.window >= 2, "update.reuse.window", reuse.window, "expected at least 2", remedy)
    }
}
