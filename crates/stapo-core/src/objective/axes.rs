//! The small axes of an objective: whose signals, which ratio, which mean, which penalties and corrections.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Whose log-probs and entropies decide a token's fate, in masks and in the choice of tokens of `kl_cov`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MaskSignals {
    /// The policy being updated. Calibration then needs this policy's log-probs for the whole mini-batch before the
    /// first backward pass.
    #[default]
    Current,
    /// The policy that sampled. The rollout holds these values already, so no scoring pass is needed.
    Behavior,
}

/// The importance ratio of a token. `l_t = logp_t - behavior_logp_t`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Ratio {
    /// `exp(l_t)`, each token's own.
    Token {
        /// Holds `l_t` between this and its negative, where the ratio is a constant without a derivative: verl's 20.
        /// By default nothing is held.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        max_log_ratio: Option<f64>,
    },
    /// One ratio for a response: `exp(mean_t l_t)` (GSPO).
    Sequence {
        /// Whether the log-ratio of a silenced token stays in the mean.
        #[serde(default)]
        silenced: SilencedTokens,
    },
    /// One ratio for a response, the geometric mean of clipped token ratios: `exp(mean_t l_t)` with `l_t` at most `high`
    /// where A > 0, and at least `-low` where A < 0 (GMPO). A clipped token gets no derivative.
    Geometric {
        /// The largest log-ratio below 0 where A < 0, as a positive number.
        low: f64,
        /// The largest log-ratio where A > 0.
        high: f64,
        /// Whether the log-ratio of a silenced token stays in the mean.
        #[serde(default)]
        silenced: SilencedTokens,
    },
    /// One ratio for a response, the ratio of its whole probabilities: `exp(sum_t l_t)` over its kept tokens, held
    /// within [1e-8, e^20] (VESPO).
    Product,
}

impl Default for Ratio {
    fn default() -> Self {
        Ratio::Token { max_log_ratio: None }
    }
}

/// Whether a silenced token's log-ratio stays in the mean of its response. The S2T paper adds the mask to objectives
/// with a ratio per response and does not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SilencedTokens {
    /// The mean is over the kept tokens, so a silenced token has no derivative at all.
    #[default]
    Leave,
    /// The mean is over all tokens, as TRL computes it. A silenced token has no separate value, but its log-prob is
    /// part of the ratio of the kept tokens, and has a derivative through that ratio.
    Stay,
}

/// How the values of all tokens become one number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Denominator {
    /// Tokens that no mask silenced.
    KeptTokens {
        /// Whether a response without a kept token counts in a mean over responses.
        #[serde(default)]
        silenced_responses: SilencedResponses,
    },
    /// All response tokens, and all responses.
    AllTokens,
    /// A length fixed in advance, for `sequence_mean_of_token_sum`.
    Constant {
        /// The length, in tokens.
        length: f64,
    },
}

impl Default for Denominator {
    fn default() -> Self {
        Denominator::KeptTokens { silenced_responses: SilencedResponses::Leave }
    }
}

/// Whether a wholly silenced response counts in a mean over responses. The S2T paper has a mean over tokens and does
/// not say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SilencedResponses {
    /// The mean is over the responses with a kept token: silencing a response does not weaken the others.
    #[default]
    Leave,
    /// The mean is over all responses, as if a silenced response had the value 0.
    Stay,
}

/// Penalty for leaving a frozen reference policy, per kept token, with `d = reference_logp - logp`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Kl {
    /// No penalty.
    #[default]
    None,
    /// `-d`: unbiased, noisy.
    K1 {
        /// The factor on the penalty.
        beta: f64,
    },
    /// `d^2 / 2`: its gradient is that of the reverse KL in expectation.
    K2 {
        /// The factor on the penalty.
        beta: f64,
    },
    /// `e^d - d - 1`: non-negative, low variance (GRPO).
    K3 {
        /// The factor on the penalty.
        beta: f64,
    },
    /// `r (e^d - d - 1)` with the token's own ratio `r`, which is differentiated as well: value and gradient are those
    /// of the reverse KL in expectation over the policy that sampled (DeepSeek-V3.2; the default of TRL).
    UnbiasedK3 {
        /// The factor on the penalty.
        beta: f64,
    },
}

impl Kl {
    /// The penalty and the penalty's derivative by `logp`.
    pub(crate) fn penalty(self, logp: f64, reference_logp: f64, behavior_logp: f64) -> (f64, f64) {
        let d = reference_logp - logp;
        match self {
            Kl::None => (0.0, 0.0),
            Kl::K1 { beta } => (-beta * d, beta),
            Kl::K2 { beta } => (beta * 0.5 * d * d, -beta * d),
            Kl::K3 { beta } => {
                let growth = libm::expm1(d);
                (beta * (growth - d), -beta * growth)
            }
            Kl::UnbiasedK3 { beta } => {
                let ratio = libm::exp(logp - behavior_logp);
                (beta * ratio * (libm::expm1(d) - d), -beta * ratio * d)
            }
        }
    }

    pub(super) fn beta(self) -> Option<f64> {
        match self {
            Kl::None => None,
            Kl::K1 { beta } | Kl::K2 { beta } | Kl::K3 { beta } | Kl::UnbiasedK3 { beta } => Some(beta),
        }
    }
}

/// Reward for entropy: the objective gains `coefficient * entropy` per kept token.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum EntropyBonus {
    /// No bonus.
    #[default]
    None,
    /// The same coefficient in every step.
    Constant {
        /// The factor on the entropy.
        coefficient: f64,
    },
    /// A coefficient that follows the entropy (Skywork-OR1, He et al. 2025; the same rule and defaults as TRL's): after
    /// an optimizer step whose mean entropy was at most `target` the coefficient grows by `step` up to `max`, else it
    /// shrinks by `step` down to `min`; and the bonus is paid only where the step before was at most at the target.
    Target {
        /// The mean entropy up to which the bonus is paid, in nats.
        #[serde(default = "default_target")]
        target: f64,
        /// The coefficient at the start.
        #[serde(default)]
        initial: f64,
        /// What the coefficient changes by after an optimizer step.
        #[serde(default = "default_step")]
        step: f64,
        /// The smallest coefficient.
        #[serde(default)]
        min: f64,
        /// The largest coefficient.
        #[serde(default = "default_max")]
        max: f64,
    },
}

/// Constant weight on the surrogate from `w = exp(behavior_logp - sampler_logp)`: the ratio between our probability of
/// a token and the probability that the sampling engine reported for the same weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum OffPolicy {
    /// No correction.
    #[default]
    None,
    /// Truncated importance sampling: `min(w, cap)`.
    Tis {
        /// The largest weight.
        #[serde(default = "default_cap")]
        cap: f64,
        /// Whether weights are of tokens or of whole responses.
        #[serde(default)]
        level: WeightLevel,
    },
    /// `w` inside `[low, high]`, 0 outside, per token.
    Icepop {
        /// The smallest weight that is kept.
        #[serde(default = "default_icepop_low")]
        low: f64,
        /// The largest weight that is kept.
        #[serde(default = "default_icepop_high")]
        high: f64,
    },
    /// Masked importance sampling: `w` inside `[low, high]`, 0 outside. The defaults are those of TRL, which masks whole
    /// responses.
    Mis {
        /// The smallest weight that is kept.
        #[serde(default)]
        low: f64,
        /// The largest weight that is kept.
        #[serde(default = "default_mis_high")]
        high: f64,
        /// Whether weights are of tokens or of whole responses.
        #[serde(default = "whole_response")]
        level: WeightLevel,
    },
}

/// Whether an off-policy weight is a token's own or that of the whole response, the product over its tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WeightLevel {
    /// Each token has its weight.
    #[default]
    Token,
    /// All tokens of a response have the product of their weights.
    Sequence,
}

impl OffPolicy {
    /// The constant weight on the surrogate where the log of the importance weight is `log_weight`.
    pub(crate) fn weight(self, log_weight: f64) -> f64 {
        let within = |low: f64, high: f64| {
            let w = libm::exp(log_weight);
            if (low..=high).contains(&w) { w } else { 0.0 }
        };
        match self {
            OffPolicy::None => 1.0,
            OffPolicy::Tis { cap, .. } => libm::exp(log_weight).min(cap),
            OffPolicy::Icepop { low, high } | OffPolicy::Mis { low, high, .. } => within(low, high),
        }
    }

    pub(super) fn level(self) -> WeightLevel {
        match self {
            OffPolicy::None | OffPolicy::Icepop { .. } => WeightLevel::Token,
            OffPolicy::Tis { level, .. } | OffPolicy::Mis { level, .. } => level,
        }
    }
}

fn default_target() -> f64 {
    0.2
}
fn default_step() -> f64 {
    0.005
}
fn default_max() -> f64 {
    1.0
}
fn default_cap() -> f64 {
    2.0
}
fn default_icepop_low() -> f64 {
    0.5
}
fn default_icepop_high() -> f64 {
    5.0
}
fn default_mis_high() -> f64 {
    3.0
}
fn whole_response() -> WeightLevel {
    WeightLevel::Sequence
}
