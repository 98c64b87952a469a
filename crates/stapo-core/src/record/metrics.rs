//! `metrics.jsonl`: one object per step.

use super::Extra;
use crate::diagnostics::QuadrantCensus;
use serde::{Deserialize, Serialize};

/// The metrics of one training step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Metrics {
    pub schema: u32,
    pub step: u64,
    pub reward_mean: f64,
    /// Share of the responses judged right.
    pub accuracy: f64,
    /// Held-out accuracy, in steps that evaluate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_accuracy: Option<f64>,
    /// Held-out accuracy before the first step; present in the first step's record only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_accuracy_before: Option<f64>,
    /// Tokens.
    pub response_tokens_mean: f64,
    /// Share of the responses that reached the length limit.
    pub truncated_share: f64,
    /// Nats, over all response tokens.
    pub entropy_mean: f64,
    pub entropy_quantiles: EntropyQuantiles,
    pub n_tokens: usize,
    pub n_kept: usize,
    pub n_candidates: usize,
    pub n_silenced: usize,
    /// Entropy threshold of the first mini-batch, nats; absent where no mask had one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tau_h: Option<f64>,
    pub clip_fraction: f64,
    pub ratio_min: f64,
    pub ratio_max: f64,
    pub loss: f64,
    pub learning_rate: f64,
    /// Global, before clipping.
    pub gradient_norm: f64,
    /// The silenced tokens' share of the summed squared gradient norm at the logits.
    pub silenced_gradient_share: f64,
    pub quadrants: Vec<QuadrantCensus>,
    /// Absent in steps with a single optimizer step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy_change: Option<EntropyChange>,
    /// max |logp - behavior_logp| over the first mini-batch: 0 where rollout and training agree to the bit.
    pub exactness_max_abs: f64,
    pub tokens_per_second: TokensPerSecond,
    /// Hash of weights, optimizer state and counters after the step, in steps that record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_sha256: Option<String>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// The entropy change by all optimizer steps of a training step but the last. Nats per token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EntropyChange {
    /// The first-order prediction, summed over the optimizer steps: the mean over kept tokens of `-lr p (ln p + H) (1 -
    /// p) w`, which takes the learning rate as a step size at the logits. Adam rescales the step, so the sign and the
    /// proportion can be compared with `measured`, but not the size.
    pub predicted: f64,
    /// Mean over the tokens of the last mini-batch of the entropy at the update minus the entropy at sampling.
    pub measured: f64,
}

/// Nats.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EntropyQuantiles {
    pub q05: f64,
    pub q25: f64,
    pub q50: f64,
    pub q75: f64,
    pub q95: f64,
}

/// Response tokens per second by phase of the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TokensPerSecond {
    pub rollout: f64,
    pub update: f64,
}

/// The metrics of one pretraining step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PretrainMetrics {
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
    pub tokens_per_second: f64,
    /// Hash of weights, optimizer state and counters after the step, in steps that record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_sha256: Option<String>,
    #[serde(flatten)]
    pub extra: Extra,
}
