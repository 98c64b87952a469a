//! The numbers of `metrics.jsonl`: what each is called, in which unit it is, and how it is drawn. TensorBoard, reports,
//! pages, the terminal and `stapo explain` read this table.

use super::Metrics;
use std::ops::RangeInclusive;

/// A number of a training step.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// The path in `metrics.jsonl`, as in `entropy_quantiles.q05`.
    pub key: &'static str,
    /// The title of its chart.
    pub label: &'static str,
    /// The name where the context says the rest: a column, a curve among its siblings, a line of a terminal.
    pub short: &'static str,
    pub unit: Unit,
    pub axis: Axis,
    pub better: Better,
    /// The tag in TensorBoard; `None` for numbers that are not written there.
    pub tag: Option<&'static str>,
    /// What the number is, without its unit.
    pub about: &'static str,
    /// The number of a step; `None` if the step has none.
    pub value: fn(&Metrics) -> Option<f64>,
}

/// What a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Without a unit.
    Plain,
    /// From 0 to 1; shown in percent.
    Share,
    Reward,
    Nats,
    Tokens,
    TokensPerSecond,
    Responses,
    Updates,
    Seconds,
    /// Shown in GiB.
    Bytes,
}

/// How a number is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    /// Linear; the number is never negative.
    Linear,
    /// Linear; the number may be negative.
    Signed,
    /// Logarithmic, with a place for 0.
    Log,
}

/// Which values one hopes for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    Higher,
    Lower,
    /// Neither as such.
    Neither,
}

impl Unit {
    /// The name of the unit in records; empty for a number without one.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Plain => "",
            Unit::Share => "share",
            Unit::Reward => "reward",
            Unit::Nats => "nats",
            Unit::Tokens => "tokens",
            Unit::TokensPerSecond => "tokens/s",
            Unit::Responses => "responses",
            Unit::Updates => "updates",
            Unit::Seconds => "s",
            Unit::Bytes => "bytes",
        }
    }

    /// The unit in which the number is shown, and the factor from records to it.
    pub fn shown(self) -> (&'static str, f64) {
        match self {
            Unit::Share => ("%", 100.0),
            Unit::Bytes => ("GiB", 1.0 / (1u64 << 30) as f64),
            Unit::Reward | Unit::Updates => ("", 1.0),
            unit => (unit.name(), 1.0),
        }
    }
}

impl Better {
    pub fn name(self) -> &'static str {
        match self {
            Better::Higher => "higher",
            Better::Lower => "lower",
            Better::Neither => "",
        }
    }
}

impl Metric {
    pub fn by_key(key: &str) -> Option<&'static Metric> {
        ALL.iter().find(|metric| metric.key == key)
    }

    /// The values that the number can have, in the unit of records.
    pub fn bounds(&self) -> RangeInclusive<f64> {
        match (self.unit, self.axis) {
            (_, Axis::Signed) => f64::NEG_INFINITY..=f64::INFINITY,
            (Unit::Share, _) => 0.0..=1.0,
            _ => 0.0..=f64::INFINITY,
        }
    }
}

/// Keys that records do not have: readers compute these numbers.
pub const DERIVED: [&str; 2] = ["candidate_share", "head_energy"];

macro_rules! catalogue {
    ($($name:ident: $key:literal, $label:literal, $short:literal, $unit:ident, $axis:ident, $better:ident,
        $tag:expr, $about:literal, $value:expr;)*) => {
        $(pub const $name: Metric = Metric {
            key: $key,
            label: $label,
            short: $short,
            unit: Unit::$unit,
            axis: Axis::$axis,
            better: Better::$better,
            tag: $tag,
            about: $about,
            value: $value,
        };)*

        /// Every number, in the order in which a reader meets them.
        pub const ALL: &[Metric] = &[$($name),*];
    };
}

catalogue! {
    EVAL_ACCURACY: "eval_accuracy", "Held-out accuracy", "held-out", Share, Linear, Higher,
        Some("accuracy/held_out"), "held-out problems answered right, in steps that evaluate", |m| m.eval_accuracy;
    EVAL_ACCURACY_BEFORE: "eval_accuracy_before", "Held-out accuracy before training", "before", Share, Linear, Higher,
        None, "held-out accuracy before the first step, in the first step's line only", |m| m.eval_accuracy_before;
    ACCURACY: "accuracy", "Training accuracy", "accuracy", Share, Linear, Higher,
        Some("accuracy/training"), "sampled responses judged right", |m| Some(m.accuracy);
    REWARD_MEAN: "reward_mean", "Reward", "reward", Reward, Signed, Higher,
        Some("reward/mean"), "mean reward of the sampled responses", |m| Some(m.reward_mean);
    REWARD_STD: "reward_std", "Spread of rewards", "std", Reward, Linear, Neither,
        Some("reward/std"), "sample standard deviation of the rewards over all responses", |m| m.reward_std;
    EQUAL_REWARDS_SHARE: "equal_rewards_share", "Groups with equal rewards", "equal groups", Share, Linear, Lower,
        Some("reward/equal_share"), "groups whose rewards are all equal, from which nothing is learned",
        |m| m.equal_rewards_share;
    RESPONSE_TOKENS_MEAN: "response_tokens_mean", "Response length", "length", Tokens, Linear, Neither,
        Some("response/tokens_mean"), "mean length of the responses", |m| Some(m.response_tokens_mean);
    RESPONSE_TOKENS_MIN: "response_tokens.min", "Shortest response", "min", Tokens, Linear, Neither,
        Some("response/tokens_min"), "length of the shortest response", |m| Some(m.response_tokens?.min as f64);
    RESPONSE_TOKENS_Q10: "response_tokens.q10", "Response length, 10 % quantile", "q10", Tokens, Linear, Neither,
        Some("response/tokens_q10"), "10 % quantile of the lengths", |m| Some(m.response_tokens?.q10);
    RESPONSE_TOKENS_Q50: "response_tokens.q50", "Response length, median", "median", Tokens, Linear, Neither,
        Some("response/tokens_q50"), "median of the lengths", |m| Some(m.response_tokens?.q50);
    RESPONSE_TOKENS_Q90: "response_tokens.q90", "Response length, 90 % quantile", "q90", Tokens, Linear, Neither,
        Some("response/tokens_q90"), "90 % quantile of the lengths", |m| Some(m.response_tokens?.q90);
    RESPONSE_TOKENS_MAX: "response_tokens.max", "Longest response", "max", Tokens, Linear, Neither,
        Some("response/tokens_max"), "length of the longest response", |m| Some(m.response_tokens?.max as f64);
    TRUNCATED_SHARE: "truncated_share", "Truncated responses", "truncated", Share, Linear, Lower,
        Some("response/truncated_share"), "responses that the length limit cut", |m| Some(m.truncated_share);
    TURNS_MEAN: "episodes.turns_mean", "Turns", "turns", Plain, Linear, Neither,
        Some("episode/turns_mean"), "mean number of turns of an episode, in runs with an environment",
        |m| Some(m.episodes?.turns_mean);
    N_CALLS: "episodes.n_calls", "Tool calls", "calls", Plain, Linear, Neither,
        Some("episode/n_calls"), "calls of tools in all episodes of the step", |m| Some(m.episodes?.n_calls as f64);
    N_FAILED_CALLS: "episodes.n_failed_calls", "Failed tool calls", "failed", Plain, Linear, Lower,
        Some("episode/n_failed_calls"), "calls that were wrong or that a tool could not answer",
        |m| Some(m.episodes?.n_failed_calls as f64);
    N_TIMED_OUT_CALLS: "episodes.n_timed_out_calls", "Timed-out tool calls", "timed out", Plain, Linear, Lower,
        Some("episode/n_timed_out_calls"), "calls that a limit of time stopped",
        |m| Some(m.episodes?.n_timed_out_calls as f64);
    N_CUT_OBSERVATIONS: "episodes.n_cut_observations", "Cut observations", "cut", Plain, Linear, Lower,
        Some("episode/n_cut_observations"), "observations that were cut because they were too long",
        |m| Some(m.episodes?.n_cut_observations as f64);
    N_GIVEN: "episodes.n_given", "Given tokens", "given", Tokens, Linear, Neither,
        Some("episode/n_given"), "tokens that the policy was given between turns", |m| Some(m.episodes?.n_given as f64);
    TURN_LIMIT_SHARE: "episodes.turn_limit_share", "Episodes out of turns", "out of turns", Share, Linear, Lower,
        Some("episode/turn_limit_share"), "episodes that reached the limit of turns",
        |m| Some(m.episodes?.turn_limit_share);
    JUDGE_ASKED_SHARE: "judge.asked_share", "Judged by the judge", "asked", Share, Linear, Neither,
        Some("judge/asked_share"), "responses that the judge was asked about, in runs with a judge",
        |m| Some(m.judge?.asked_share);
    JUDGE_AGREEMENT: "judge.agreement", "Agreement of judge and rule", "agree", Share, Linear, Higher,
        Some("judge/agreement"), "of the responses that the judge was asked about, those on which judge and rule agree",
        |m| m.judge?.agreement;
    RULE_ACCURACY: "judge.rule_accuracy", "Accuracy by the rule", "rule", Share, Linear, Higher,
        Some("judge/rule_accuracy"), "responses that the rule calls right, in runs with a judge",
        |m| Some(m.judge?.rule_accuracy);
    SCORE_MEAN: "score_mean", "Score of the reward model", "score", Reward, Signed, Higher,
        Some("reward/score_mean"), "mean score as the reward model gave it, in runs with a reward model",
        |m| m.score_mean;
    ENTROPY_MEAN: "entropy_mean", "Entropy", "entropy", Nats, Linear, Neither,
        Some("entropy/mean"), "mean over all response tokens, when sampled", |m| Some(m.entropy_mean);
    ENTROPY_Q05: "entropy_quantiles.q05", "Entropy, 5 % quantile", "q05", Nats, Linear, Neither,
        Some("entropy/q05"), "5 % quantile over all response tokens", |m| Some(m.entropy_quantiles.q05);
    ENTROPY_Q10: "entropy_quantiles.q10", "Entropy, 10 % quantile", "q10", Nats, Linear, Neither,
        Some("entropy/q10"), "10 % quantile", |m| m.entropy_quantiles.q10;
    ENTROPY_Q25: "entropy_quantiles.q25", "Entropy, 25 % quantile", "q25", Nats, Linear, Neither,
        Some("entropy/q25"), "25 % quantile", |m| Some(m.entropy_quantiles.q25);
    ENTROPY_Q50: "entropy_quantiles.q50", "Entropy, median", "median", Nats, Linear, Neither,
        Some("entropy/q50"), "median", |m| Some(m.entropy_quantiles.q50);
    ENTROPY_Q75: "entropy_quantiles.q75", "Entropy, 75 % quantile", "q75", Nats, Linear, Neither,
        Some("entropy/q75"), "75 % quantile", |m| Some(m.entropy_quantiles.q75);
    ENTROPY_Q90: "entropy_quantiles.q90", "Entropy, 90 % quantile", "q90", Nats, Linear, Neither,
        Some("entropy/q90"), "90 % quantile", |m| m.entropy_quantiles.q90;
    ENTROPY_Q95: "entropy_quantiles.q95", "Entropy, 95 % quantile", "q95", Nats, Linear, Neither,
        Some("entropy/q95"), "95 % quantile", |m| Some(m.entropy_quantiles.q95);
    N_TOKENS: "n_tokens", "Tokens", "tokens", Tokens, Linear, Neither,
        None, "response tokens in all updates of the step", |m| Some(m.n_tokens as f64);
    N_KEPT: "n_kept", "Kept tokens", "kept", Tokens, Linear, Neither,
        None, "tokens that no mask silenced", |m| Some(m.n_kept as f64);
    N_CANDIDATES: "n_candidates", "Candidates", "candidates", Tokens, Linear, Neither,
        None, "tokens that S2T may silence: rewarded and improbable", |m| Some(m.n_candidates as f64);
    N_SILENCED: "n_silenced", "Silenced tokens", "silenced", Tokens, Linear, Neither,
        None, "tokens that a mask took out of the loss", |m| Some(m.n_silenced as f64);
    SILENCED_SHARE: "silenced_share", "Silenced share", "silenced", Share, Log, Neither,
        Some("silencing/share"), "silenced tokens among response tokens", |m| share(m, m.n_silenced);
    CANDIDATE_SHARE: "candidate_share", "Candidate share", "candidates", Share, Log, Neither,
        Some("silencing/candidate_share"), "candidates among response tokens", |m| share(m, m.n_candidates);
    SILENCED_GRADIENT_SHARE: "silenced_gradient_share", "Gradient taken out by silencing", "gradient", Share, Linear, Neither,
        Some("silencing/gradient_share"), "the silenced tokens' share of the summed squared gradient norm at the logits",
        |m| Some(m.silenced_gradient_share);
    TAU_H: "tau_h", "Entropy threshold", "τh", Nats, Linear, Neither,
        Some("silencing/tau_h"), "entropy threshold of the first mini-batch, where a mask has one", |m| m.tau_h;
    CLIP_FRACTION: "clip_fraction", "Clip fraction", "clipped", Share, Linear, Lower,
        Some("update/clip_fraction"), "kept tokens whose ratio left its range, mean over updates", |m| Some(m.clip_fraction);
    RATIO_MIN: "ratio_min", "Smallest ratio", "min", Plain, Linear, Neither,
        Some("update/ratio_min"), "smallest ratio of current to behavior probability, over all updates", |m| Some(m.ratio_min);
    RATIO_MAX: "ratio_max", "Largest ratio", "max", Plain, Linear, Neither,
        Some("update/ratio_max"), "largest ratio of current to behavior probability, over all updates", |m| Some(m.ratio_max);
    KL_BEHAVIOR: "kl_behavior", "KL from the behavior policy", "kl", Nats, Linear, Lower,
        Some("update/kl_behavior"), "k3 estimate of KL(behavior || policy), mean over the kept tokens of all updates",
        |m| m.kl_behavior;
    KL_REFERENCE: "kl_reference", "KL from the reference", "kl reference", Nats, Linear, Lower,
        Some("update/kl_reference"), "k3 estimate of KL(policy || reference), where the objective has a reference",
        |m| m.kl_reference;
    LOSS: "loss", "Loss", "loss", Plain, Signed, Neither,
        Some("update/loss"), "loss of the objective, mean over updates", |m| Some(m.loss);
    LEARNING_RATE: "learning_rate", "Learning rate", "learning rate", Plain, Linear, Neither,
        Some("update/learning_rate"), "at the last update", |m| Some(m.learning_rate);
    GRADIENT_NORM: "gradient_norm", "Gradient norm", "grad", Plain, Linear, Neither,
        Some("update/gradient_norm"), "of all weights, before clipping, mean over updates", |m| Some(m.gradient_norm);
    ENTROPY_CHANGE_PREDICTED: "entropy_change.predicted", "Predicted entropy change", "predicted", Nats, Signed, Neither,
        None, "first-order prediction of the entropy change per token, where a step has several updates",
        |m| Some(m.entropy_change?.predicted);
    ENTROPY_CHANGE_MEASURED: "entropy_change.measured", "Measured entropy change", "measured", Nats, Signed, Neither,
        None, "entropy at the last update minus entropy at sampling, mean over its tokens", |m| Some(m.entropy_change?.measured);
    ENTROPY_COEFFICIENT: "entropy_coefficient", "Entropy coefficient", "coefficient", Plain, Linear, Neither,
        Some("entropy/coefficient"), "coefficient of an entropy bonus with a target, for the next update",
        |m| m.entropy_coefficient;
    EXACTNESS: "exactness_max_abs", "Exactness", "exactness", Nats, Linear, Lower,
        None, "max abs(logp - behavior_logp) over the first mini-batch; 0: sampling and training agree to the bit",
        |m| Some(m.exactness_max_abs);
    N_USES: "reuse.n_uses", "Uses of a rollout batch", "uses", Plain, Linear, Neither,
        Some("update/uses"), "optimizer passes over one rollout batch, the one that the gate ended included",
        |m| Some(m.reuse.as_ref()?.n_uses as f64);
    HEAD_ENERGY: "head_energy", "Gradient energy of the output head", "energy", Plain, Linear, Neither,
        None, "squared norm of its gradient after 1/N, mean over the updates of a step", head_energy;
    N_RESPONSES: "n_responses", "Responses", "responses", Responses, Linear, Neither,
        None, "responses of the rollout, with those of replaced groups", |m| Some(m.n_responses? as f64);
    N_SAMPLED: "n_sampled", "Sampled tokens", "sampled", Tokens, Linear, Neither,
        None, "response tokens of the rollout, with those of replaced groups", |m| Some(m.n_sampled? as f64);
    DECODING_STEPS: "decoding.steps", "Decoding steps", "steps", Plain, Linear, Lower,
        Some("speed/decoding_steps"), "forward passes of the rollout", |m| Some(m.decoding?.steps as f64);
    DECODING_DRAFTED: "decoding.drafted", "Drafted tokens", "drafted", Tokens, Linear, Neither,
        Some("speed/drafted_tokens"), "tokens that were drafted and verified several at a time",
        |m| Some(m.decoding?.drafted as f64);
    DECODING_ACCEPTED: "decoding.accepted", "Accepted drafts", "accepted", Tokens, Linear, Higher,
        Some("speed/accepted_tokens"), "drafted tokens that were drawn in their place anyway; each saves a step of its sequence",
        |m| Some(m.decoding?.accepted as f64);
    N_UPDATES: "n_updates", "Updates", "updates", Updates, Linear, Neither,
        Some("update/n_updates"), "optimizer steps since the start of the run", |m| Some(m.n_updates? as f64);
    TOKENS_TOTAL: "tokens_total", "Tokens of the run", "total", Tokens, Linear, Neither,
        Some("response/tokens_total"), "response tokens sampled since the start of the run", |m| Some(m.tokens_total? as f64);
    ROLLOUT_SPEED: "tokens_per_second.rollout", "Rollout speed", "rollout", TokensPerSecond, Linear, Higher,
        Some("speed/rollout_tokens_per_second"), "`n_sampled / seconds.rollout`", |m| Some(m.tokens_per_second.rollout);
    UPDATE_SPEED: "tokens_per_second.update", "Update speed", "update", TokensPerSecond, Linear, Higher,
        Some("speed/update_tokens_per_second"), "`n_tokens / seconds.update`", |m| Some(m.tokens_per_second.update);
    SECONDS_ROLLOUT: "seconds.rollout", "Rollout time", "rollout", Seconds, Linear, Lower,
        Some("seconds/rollout"), "sampling, since the line before, like all phases", |m| Some(m.seconds?.rollout);
    SECONDS_ENVIRONMENT: "seconds.environment", "Environment wait", "environment", Seconds, Linear, Lower,
        Some("seconds/environment"), "waiting for environments while no sequence could be sampled",
        |m| Some(m.seconds?.environment).filter(|seconds| *seconds > 0.0);
    SECONDS_GRADE: "seconds.grade", "Grading time", "grade", Seconds, Linear, Lower,
        Some("seconds/grade"), "judging responses", |m| Some(m.seconds?.grade);
    SECONDS_CALIBRATE: "seconds.calibrate", "Calibration time", "calibrate", Seconds, Linear, Lower,
        Some("seconds/calibrate"), "scoring by reference, teacher and policy, advantages, thresholds",
        |m| Some(m.seconds?.calibrate);
    SECONDS_UPDATE: "seconds.update", "Update time", "update", Seconds, Linear, Lower,
        Some("seconds/update"), "forward, backward, optimizer", |m| Some(m.seconds?.update);
    SECONDS_RECORD: "seconds.record", "Recording time", "record", Seconds, Linear, Lower,
        Some("seconds/record"), "hashing the state, writing responses and tokens", |m| Some(m.seconds?.record);
    SECONDS_EVALUATE: "seconds.evaluate", "Evaluation time", "evaluate", Seconds, Linear, Lower,
        Some("seconds/evaluate"), "held-out problems and benchmarks", |m| Some(m.seconds?.evaluate);
    SECONDS_CHECKPOINT: "seconds.checkpoint", "Checkpoint time", "checkpoint", Seconds, Linear, Lower,
        Some("seconds/checkpoint"), "copying the state for checkpoints, or writing it", |m| Some(m.seconds?.checkpoint);
    SECONDS_CHECKPOINT_WAIT: "seconds.checkpoint_wait", "Checkpoint wait", "wait", Seconds, Linear, Lower,
        Some("seconds/checkpoint_wait"), "waiting for a checkpoint that was still being written", |m| Some(m.seconds?.checkpoint_wait);
    WALL_SECONDS: "wall_seconds", "Time of the run", "wall", Seconds, Linear, Lower,
        Some("seconds/wall"), "time that processes have spent on the run so far", |m| m.wall_seconds;
    MEMORY_BYTES: "memory_bytes", "Memory", "memory", Bytes, Linear, Lower,
        Some("memory/bytes"), "most memory of the process so far; on a GPU the memory in use on the device",
        |m| Some(m.memory_bytes? as f64);
}

fn share(metrics: &Metrics, part: usize) -> Option<f64> {
    (metrics.n_tokens > 0).then(|| part as f64 / metrics.n_tokens as f64)
}

fn head_energy(metrics: &Metrics) -> Option<f64> {
    let updates = &metrics.reuse.as_ref()?.updates;
    Some(updates.iter().map(|update| update.energy).sum::<f64>() / updates.len().max(1) as f64)
}

#[cfg(test)]
mod tests;
