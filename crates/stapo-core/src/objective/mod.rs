//! One algorithm = one value. An [`ObjectiveSpec`] says how a mini-batch of responses turns into a number per token.
//!
//! Every objective of the family reaches the network only through the log-prob (and, for an entropy bonus, the entropy) of
//! the sampled token, so an objective is a pure function: [`ObjectiveSpec::calibrate`] reads a whole mini-batch once,
//! [`ObjectiveSpec::evaluate`] then gives each token its [`TokenEffect`], response by response, un-normalised;
//! [`Tally`] holds the one scale that turns sums into the mean. Evaluating a response depends on the calibration and that
//! response alone, so cutting a mini-batch into micro-batches in another way changes no bit.

mod advantage;
mod calibrate;
mod candidate;
mod check;
mod evaluate;
mod load;
mod mask;
mod preset;
mod surrogate;

pub use advantage::Advantage;
pub use calibrate::{Calibration, UpdateKey};
pub use candidate::{is_improbable, logp_below};
pub use evaluate::{SequenceTally, Tally, TokenEffect};
pub use load::SpecError;
pub use mask::{Mask, MaskKind, QuantileOver, Select};
pub use preset::{Preset, RolloutSettings, preset, presets};
pub use surrogate::Surrogate;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// An algorithm of the family as a value. Every axis is a closed set, tagged by `kind`; [`preset`] gives the published
/// values.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ObjectiveSpec {
    /// How the rewards of a group become one advantage per response.
    #[serde(default)]
    pub advantage: Advantage,
    /// Which tokens are silenced or weighed down. A token is kept if every mask keeps the token.
    #[serde(default)]
    pub masks: Vec<Mask>,
    /// Whose log-probs and entropies decide a token's fate.
    #[serde(default)]
    pub mask_signals: MaskSignals,
    /// Whether current and behavior policy are compared per token or per response.
    #[serde(default)]
    pub ratio: Ratio,
    /// How ratio and advantage become the value that is maximised.
    pub surrogate: Surrogate,
    /// How the values of all tokens become one number.
    #[serde(default)]
    pub aggregate: Aggregate,
    /// What the means divide by.
    #[serde(default)]
    pub denominator: Denominator,
    /// Penalty for leaving a frozen reference policy.
    #[serde(default)]
    pub kl: Kl,
    /// Reward for entropy.
    #[serde(default)]
    pub entropy_bonus: EntropyBonus,
    /// Correction for rollouts sampled by another engine, which reports its own log-probs.
    #[serde(default)]
    pub off_policy: OffPolicy,
}

/// Whose log-probs and entropies decide a token's fate, in masks and in the choice of tokens of `kl_cov`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MaskSignals {
    /// The policy being updated. Calibration then needs this policy's log-probs for the whole mini-batch before the first
    /// backward pass.
    #[default]
    Current,
    /// The policy that sampled. The rollout holds these values already, so no scoring pass is needed.
    Behavior,
}

/// Level of the importance ratio.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Ratio {
    /// `r_t = exp(logp_t - behavior_logp_t)`.
    #[default]
    Token,
    /// One ratio for a response: `exp(mean_t (logp_t - behavior_logp_t))` over its kept tokens (GSPO).
    Sequence,
}

/// How the values of all tokens become one number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Aggregate {
    /// Sum over all tokens of the mini-batch, divided once by the number of tokens.
    #[default]
    TokenMean,
    /// Mean over the tokens of a response, then over responses.
    SequenceMeanOfTokenMean,
    /// Sum over the tokens of a response divided by a constant length, then the mean over responses.
    SequenceMeanOfTokenSum,
}

/// What a mean over tokens divides by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Denominator {
    /// Tokens that no mask silenced; a mean over responses counts the responses with at least one such token.
    #[default]
    KeptTokens,
    /// All response tokens.
    AllTokens,
    /// A length fixed in advance, for `sequence_mean_of_token_sum`.
    Constant { length: f64 },
}

/// Penalty for leaving a frozen reference policy, per kept token, with `d = reference_logp - logp`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Kl {
    #[default]
    None,
    /// `-d`: unbiased, noisy.
    K1 { beta: f64 },
    /// `d^2 / 2`: its gradient is that of the reverse KL in expectation.
    K2 { beta: f64 },
    /// `e^d - d - 1`: non-negative, low variance (GRPO).
    K3 { beta: f64 },
}

/// Reward for entropy: the objective gains `coefficient * entropy` per kept token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum EntropyBonus {
    #[default]
    None,
    Constant {
        coefficient: f64,
    },
}

/// Constant weight on the surrogate from `w = exp(behavior_logp - sampler_logp)`: the ratio between our probability of a
/// token and the probability that the sampling engine reported for the same weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum OffPolicy {
    #[default]
    None,
    /// Truncated importance sampling: `min(w, cap)`.
    Tis {
        #[serde(default = "two")]
        cap: f64,
    },
    /// `w` inside `[low, high]`, 0 outside.
    Icepop {
        #[serde(default = "half")]
        low: f64,
        #[serde(default = "five")]
        high: f64,
    },
}

fn half() -> f64 {
    0.5
}
fn two() -> f64 {
    2.0
}
fn five() -> f64 {
    5.0
}

impl OffPolicy {
    /// The constant weight of a token's surrogate.
    pub(crate) fn weight(self, behavior_logp: f64, sampler_logp: f64) -> f64 {
        let w = || libm::exp(behavior_logp - sampler_logp);
        match self {
            OffPolicy::None => 1.0,
            OffPolicy::Tis { cap } => w().min(cap),
            OffPolicy::Icepop { low, high } => {
                let w = w();
                if (low..=high).contains(&w) { w } else { 0.0 }
            }
        }
    }
}

impl Kl {
    /// The penalty and the penalty's derivative by `logp`.
    pub(crate) fn penalty(self, logp: f64, reference_logp: f64) -> (f64, f64) {
        let d = reference_logp - logp;
        match self {
            Kl::None => (0.0, 0.0),
            Kl::K1 { beta } => (-beta * d, beta),
            Kl::K2 { beta } => (beta * 0.5 * d * d, -beta * d),
            Kl::K3 { beta } => {
                let growth = libm::expm1(d);
                (beta * (growth - d), -beta * growth)
            }
        }
    }
}

/// What the objective reads of one response. All slices have one entry per response token; prompt tokens have none.
#[derive(Debug, Clone, Copy)]
pub struct ResponseSignals<'a> {
    pub advantage: f64,
    /// Under the current policy.
    pub logp: &'a [f64],
    /// Under the policy that sampled.
    pub behavior_logp: &'a [f64],
    /// Under the current policy, nats.
    pub entropy: &'a [f64],
    /// Under the policy that sampled, nats; read by masks under [`MaskSignals::Behavior`].
    pub behavior_entropy: Option<&'a [f64]>,
    /// Under the frozen reference policy; read by [`Kl`].
    pub reference_logp: Option<&'a [f64]>,
    /// As another sampling engine reported them; read by [`OffPolicy`].
    pub sampler_logp: Option<&'a [f64]>,
}

/// Why a mini-batch cannot be evaluated. `response_idx` counts from 0 within the mini-batch.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum ObjectiveError {
    #[error("response {response_idx}: {field} has {got} entries, logp has {expected}")]
    Length { response_idx: usize, field: &'static str, got: usize, expected: usize },
    #[error("response {response_idx}: {field}[{token_idx}] is {value}, expected {expected}")]
    Value { response_idx: usize, field: &'static str, token_idx: usize, value: f64, expected: &'static str },
    #[error("response {response_idx}: advantage is {value}, expected a finite number")]
    Advantage { response_idx: usize, value: f64 },
    #[error("response {response_idx}: {field} is missing; {needed_by} needs it\nhint: {remedy}")]
    Missing { response_idx: usize, field: &'static str, needed_by: &'static str, remedy: &'static str },
    #[error(
        "response {response_idx}: {what} of token {token_idx} is not finite (logp {logp}, behavior_logp {behavior_logp})\nhint: such log-probs come from different tokens or different models"
    )]
    NotFinite { response_idx: usize, token_idx: usize, what: &'static str, logp: f64, behavior_logp: f64 },
    #[error(
        "group of 1 response: leave_one_out has no other response to compare with\nhint: sample at least 2 responses per problem"
    )]
    LoneResponse,
    #[error("reward {reward_idx} of the group is {value}, expected a finite number")]
    Reward { reward_idx: usize, value: f64 },
}

impl ObjectiveError {
    /// The response at fault; absent for faults of a whole group.
    pub fn response_idx(&self) -> Option<usize> {
        match *self {
            Self::Length { response_idx, .. }
            | Self::Value { response_idx, .. }
            | Self::Advantage { response_idx, .. }
            | Self::Missing { response_idx, .. }
            | Self::NotFinite { response_idx, .. } => Some(response_idx),
            Self::LoneResponse | Self::Reward { .. } => None,
        }
    }
}

impl ObjectiveSpec {
    /// Optimizer steps per mini-batch: 2 for objectives that update in two passes (Lopti), else 1.
    pub fn n_passes(&self) -> usize {
        if self.masks.iter().any(|mask| matches!(mask, Mask::LowProbabilityFirst { .. })) { 2 } else { 1 }
    }

    /// True where [`Self::calibrate`] reads log-probs or entropies of the current policy. Mini-batches after the first of a
    /// rollout batch then need a scoring pass.
    pub fn calibrates_on_current_policy(&self) -> bool {
        let over_the_minibatch = self.masks.iter().any(Mask::needs_calibration)
            || matches!(self.surrogate, Surrogate::KlCov { .. });
        self.mask_signals == MaskSignals::Current && over_the_minibatch
    }

    /// True where the objective reads a frozen reference policy.
    pub fn needs_reference(&self) -> bool {
        self.kl != Kl::None
    }
}

#[cfg(test)]
mod tests;
