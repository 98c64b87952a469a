//! `metrics.jsonl`: one object per step.

use super::Extra;
use crate::diagnostics::QuadrantCensus;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The metrics of one training step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Metrics {
    /// Version of the format.
    pub schema: u32,
    /// Training steps made, from 1.
    pub step: u64,
    /// Of the weighted sum, where a run has several rewards.
    pub reward_mean: f64,
    /// Sample standard deviation of the rewards over all responses; absent for a single response, and in files written
    /// without this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_std: Option<f64>,
    /// Share of the groups whose rewards are all equal, from which the update learns nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub equal_rewards_share: Option<f64>,
    /// The mean of each reward by its name; empty for a run without `[[rewards]]`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub rewards: BTreeMap<String, f64>,
    /// Share of the responses judged right.
    pub accuracy: f64,
    /// Held-out accuracy, in steps that evaluate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_accuracy: Option<f64>,
    /// Held-out accuracy before the first step; present in the first step's record only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_accuracy_before: Option<f64>,
    /// Results on the benchmarks of `evaluation.benchmarks` by name, in steps that evaluate.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub benchmarks: BTreeMap<String, BenchmarkScore>,
    /// The same before the first step; present in the first step's record only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub benchmarks_before: BTreeMap<String, BenchmarkScore>,
    /// Tokens.
    pub response_tokens_mean: f64,
    /// Lengths of the responses, tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub response_tokens: Option<LengthQuantiles>,
    /// Share of the responses that reached the length limit.
    pub truncated_share: f64,
    /// What happened between turns; absent for a run without an environment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episodes: Option<EpisodeMetrics>,
    /// How a judge and a rule judged the same responses; absent for a run without a judge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judge: Option<JudgeMetrics>,
    /// The mean score of a reward model, as it gave it; absent for a run without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub score_mean: Option<f64>,
    /// Nats, over all response tokens.
    pub entropy_mean: f64,
    pub entropy_quantiles: EntropyQuantiles,
    pub n_tokens: usize,
    pub n_kept: usize,
    pub n_candidates: usize,
    pub n_silenced: usize,
    /// `n_silenced / n_tokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub silenced_share: Option<f64>,
    /// Entropy threshold of the first mini-batch, nats; absent if no mask had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau_h: Option<f64>,
    pub clip_fraction: f64,
    pub ratio_min: f64,
    pub ratio_max: f64,
    /// k3 estimate of KL(behavior || policy), nats: the mean of `r - 1 - ln r` over the kept tokens of all updates, with r
    /// the policy's probability over the behavior policy's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_behavior: Option<f64>,
    /// k3 estimate of KL(policy || reference), nats: the same mean with r the reference's probability over the policy's.
    /// Absent if the objective has no reference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl_reference: Option<f64>,
    pub loss: f64,
    pub learning_rate: f64,
    /// Global, before clipping.
    pub gradient_norm: f64,
    /// The silenced tokens' share of the summed squared gradient norm at the logits.
    pub silenced_gradient_share: f64,
    /// Tokens and gradient norms by quadrant of probability and entropy.
    pub quadrants: Vec<QuadrantCensus>,
    /// Absent in steps with a single optimizer step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy_change: Option<EntropyChange>,
    /// max |logp - behavior_logp| over the first mini-batch: 0 where rollout and training agree to the bit.
    pub exactness_max_abs: f64,
    /// Coefficient of an entropy bonus with a target, for the next optimizer step; absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy_coefficient: Option<f64>,
    /// Responses and response tokens of the rollout phase, with those of replaced groups. Absent in files written
    /// without these keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_responses: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_sampled: Option<usize>,
    /// How the rollout was decoded; absent if the policy did not sample. Responses do not depend on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoding: Option<DecodingRecord>,
    /// Absent if `update.reuse` is not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reuse: Option<ReuseRecord>,
    pub tokens_per_second: TokensPerSecond,
    /// Optimizer steps, and response tokens sampled, since the start of the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n_updates: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_total: Option<u64>,
    /// Seconds by phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seconds: Option<PhaseSeconds>,
    /// Seconds that processes have worked on the run when the line is written; the time between a stop and a resume does
    /// not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wall_seconds: Option<f64>,
    /// On the CPU the most memory that the process has held, bytes; on a GPU the memory in use on the device when the
    /// line is written, that of other processes included. Absent if the system does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Warnings of the step; `events.jsonl` has them too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Hash of weights, optimizer state and counters after the step, in steps that record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_sha256: Option<String>,
    #[serde(flatten)]
    pub extra: Extra,
}

impl Metrics {
    /// Seconds of sampling, grading and updating. In files written without `seconds` they follow from the counts and
    /// rates of the two phases; absent if `n_sampled` is absent too.
    pub fn working_seconds(&self) -> Option<f64> {
        if let Some(seconds) = self.seconds {
            return Some(
                seconds.rollout + seconds.environment + seconds.grade + seconds.calibrate + seconds.update,
            );
        }
        let phase = |n_tokens: usize, rate: f64| if n_tokens == 0 { 0.0 } else { n_tokens as f64 / rate };
        let rates = self.tokens_per_second;
        Some(phase(self.n_sampled?, rates.rollout) + phase(self.n_tokens, rates.update))
    }
}

/// Wall-clock seconds by phase, of the work since the line before: a checkpoint that is written after a line counts in
/// the next one, and what comes before the first step counts in the first line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PhaseSeconds {
    /// Sampling.
    pub rollout: f64,
    /// Waiting for environments while no sequence could be sampled; a part of the sampling that no other phase counts.
    #[serde(skip_serializing_if = "is_zero")]
    pub environment: f64,
    pub grade: f64,
    /// Scoring by reference, teacher and policy, advantages, and the thresholds of masks.
    pub calibrate: f64,
    pub update: f64,
    /// Hashes of the state, and writing of responses and tokens.
    pub record: f64,
    /// Held-out problems and benchmarks.
    pub evaluate: f64,
    pub checkpoint: f64,
    /// Waiting for a checkpoint that was written during the steps.
    #[serde(default)]
    pub checkpoint_wait: f64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

impl PhaseSeconds {
    pub fn total(&self) -> f64 {
        let Self {
            rollout,
            environment,
            grade,
            calibrate,
            update,
            record,
            evaluate,
            checkpoint,
            checkpoint_wait,
        } = self;
        rollout + environment + grade + calibrate + update + record + evaluate + checkpoint + checkpoint_wait
    }
}

/// The result of one benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BenchmarkScore {
    /// avg@k: the mean share of right samples.
    pub accuracy: f64,
    /// Clustered by question; absent if the samples have no spread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standard_error: Option<f64>,
    pub n_questions: usize,
    /// Samples per question.
    pub n_samples: usize,
    /// Of the file of the questions; absent for generated questions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

/// What happened between the turns of a step's episodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EpisodeMetrics {
    /// Turns of the policy, mean over the episodes.
    pub turns_mean: f64,
    /// Calls of tools, those that failed, and those that a limit of time stopped.
    pub n_calls: usize,
    pub n_failed_calls: usize,
    pub n_timed_out_calls: usize,
    /// Observations that were cut because they were too long.
    pub n_cut_observations: usize,
    /// Tokens that the policy was given between turns.
    pub n_given: usize,
    /// Share of the episodes that reached the limit of turns.
    pub turn_limit_share: f64,
}

/// How a judge and a rule judged the responses of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct JudgeMetrics {
    /// Share of the responses that the judge was asked about.
    pub asked_share: f64,
    /// Of these, the share on which judge and rule agree whether it is right; absent if the judge was asked about none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agreement: Option<f64>,
    /// Share of all responses that the rule calls right.
    pub rule_accuracy: f64,
}

/// Tokens. Quantiles are interpolated linearly.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LengthQuantiles {
    pub min: usize,
    pub q10: f64,
    pub q50: f64,
    pub q90: f64,
    pub max: usize,
}

/// How the rollout of a step was decoded, on rank 0 where there are several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DecodingRecord {
    /// Forward passes.
    pub steps: u64,
    /// Tokens that were drafted, and those of them that were the tokens drawn in their place.
    pub drafted: u64,
    pub accepted: u64,
}

/// How a rollout batch was used several times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReuseRecord {
    /// Uses of the rollout batch, the one that the gate ended included.
    pub n_uses: usize,
    /// True if the gate discarded the last update.
    pub gated: bool,
    /// In the order of the updates, the discarded one included.
    pub updates: Vec<ReusedUpdate>,
}

/// What the gate saw of one update.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReusedUpdate {
    /// Which use of the rollout batch, from 0.
    pub use_idx: usize,
    /// Squared norm of the gradient of the output head, after 1/N and before clipping.
    pub energy: f64,
    /// z-score of the energy's increment; absent before the window is full, and where its increments have no spread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub z: Option<f64>,
    /// True if the gate discarded the update.
    pub gated: bool,
}

/// The entropy change by all optimizer steps of a training step but the last. Nats per token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EntropyChange {
    /// The first-order prediction, summed over the optimizer steps: the mean over kept tokens of `-lr p (ln p + H) (1 -
    /// p) w`, which takes the learning rate as a step size at the logits. Adam rescales the step, so the sign and the
    /// proportion can be compared with `measured`, but not the size.
    pub predicted: f64,
    /// Mean over the tokens of the last mini-batch of the entropy at the update minus the entropy at sampling.
    pub measured: f64,
}

/// Nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EntropyQuantiles {
    pub q05: f64,
    /// Absent, as `q90`, in files written without these keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q10: Option<f64>,
    pub q25: f64,
    pub q50: f64,
    pub q75: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q90: Option<f64>,
    pub q95: f64,
}

/// Response tokens per second by phase of the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TokensPerSecond {
    pub rollout: f64,
    pub update: f64,
}

/// The metrics of one pretraining step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PretrainMetrics {
    /// Version of the format.
    pub schema: u32,
    pub step: u64,
    /// Mean negative log-prob of the learned tokens, nats.
    pub loss: f64,
    /// Nats.
    pub entropy_mean: f64,
    pub n_tokens: usize,
    /// Tokens with a loss.
    pub n_scored: usize,
    pub learning_rate: f64,
    /// Global, before clipping.
    pub gradient_norm: f64,
    /// Held-out accuracy, in steps that evaluate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_accuracy: Option<f64>,
    /// Mean negative log-prob of the learned tokens of held-out rows, nats, in steps that evaluate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_loss: Option<f64>,
    pub tokens_per_second: f64,
    /// What was compared; absent if texts are learned. `loss` and `eval_loss` are then those of the preference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preference: Option<PreferenceMetrics>,
    /// Of a reward model in training; absent for other runs. `loss` and `eval_loss` are then those of its pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward_model: Option<RankingMetrics>,
    /// Hash of weights, optimizer state and counters after the step, in steps that record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_sha256: Option<String>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// Means over the pairs of a step, before its update.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RankingMetrics {
    pub n_pairs: usize,
    /// The share of pairs whose chosen response has the higher score.
    pub accuracy: f64,
    pub score_chosen: f64,
    pub score_rejected: f64,
    /// Of held-out pairs, in steps that evaluate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval: Option<HeldOutPairs>,
}

/// How often a reward model prefers the chosen response of held-out pairs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HeldOutPairs {
    pub n_pairs: usize,
    pub accuracy: f64,
    /// The 95 % interval of `accuracy` (Wilson).
    pub low: f64,
    pub high: f64,
}

/// Means over the comparisons of a step, before its update.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PreferenceMetrics {
    /// Terms of the loss: comparisons, or responses that are judged alone.
    pub n_terms: usize,
    /// The share of pairs whose chosen response has the higher implicit reward; absent if there are no pairs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// The implicit reward of chosen responses; 0 if there are none.
    pub reward_chosen: f64,
    pub reward_rejected: f64,
    /// Log-prob of chosen responses per token, nats; 0 if there are none.
    pub logp_chosen: f64,
    pub logp_rejected: f64,
    /// Tokens of chosen responses, and those of them that masks find improbable and silence.
    pub n_chosen_tokens: usize,
    pub n_candidates: usize,
    pub n_silenced: usize,
    /// KTO's baseline; absent for other losses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub baseline: Option<f64>,
    /// `accuracy` of held-out rows, in steps that evaluate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_accuracy: Option<f64>,
}
