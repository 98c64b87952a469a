//! Rules that take tokens out of the update or reduce their weight.

use super::Threshold;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A rule over tokens. A hard mask silences tokens: a silenced token is not part of the loss. A soft mask multiplies a
/// token's advantage by a weight. Masks are constants: no gradient flows through a mask.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Mask {
    /// S2T and its ablations. Candidates are tokens with A > 0 that `threshold` finds improbable; `select` says which of
    /// them are silenced.
    Spurious {
        /// The probability below which a rewarded token is a candidate. Only the threshold `tau_p` reads it.
        #[serde(default = "default_tau_p")]
        tau_p: f64,
        /// Which rewarded tokens count as improbable.
        #[serde(default)]
        threshold: Threshold,
        /// Candidates with an entropy below this quantile are silenced; for the ablations, the share that is silenced.
        #[serde(default = "default_q")]
        q: f64,
        /// Which candidates are silenced.
        #[serde(default)]
        select: Select,
        /// What the entropy quantile is taken over.
        #[serde(default)]
        quantile_over: QuantileOver,
        /// The seed of `select = "random"`.
        #[serde(default)]
        seed: u64,
    },
    /// As many tokens as `spurious` would silence with these settings, drawn from all response tokens.
    RandomTokens {
        /// The probability below which `spurious` would find a candidate.
        #[serde(default = "default_tau_p")]
        tau_p: f64,
        /// The entropy quantile below which `spurious` would silence a candidate.
        #[serde(default = "default_q")]
        q: f64,
        /// The seed of the draw.
        #[serde(default)]
        seed: u64,
    },
    /// Keeps the `share` of tokens with the highest entropy: tokens at or above the (1 - share)-quantile of the
    /// mini-batch (Wang et al. 2025, "80/20").
    TopEntropy {
        /// The share of tokens that is kept.
        #[serde(default = "default_top_share")]
        share: f64,
    },
    /// Of the unclipped tokens with `low` < cov < `high`, where cov = (A - mean A)(logp - mean logp) over the
    /// mini-batch, silences a random `share` of all tokens, at least one (Cui et al. 2025).
    ClipCov {
        /// The share of all tokens that is silenced.
        #[serde(default = "default_cov_share")]
        share: f64,
        /// The smallest covariance of a silenced token.
        #[serde(default = "default_cov_low")]
        low: f64,
        /// The largest covariance of a silenced token.
        #[serde(default = "default_cov_high")]
        high: f64,
        /// The seed of the draw.
        #[serde(default)]
        seed: u64,
    },
    /// Two updates per mini-batch: first with the tokens of behavior probability below `eta`, then with the other
    /// tokens (Lopti, Yang et al. 2025).
    LowProbabilityFirst {
        /// The probability below which tokens are in the first update.
        #[serde(default = "default_eta")]
        eta: f64,
    },
    /// Soft: A <- (alpha * p_behavior + 1 - alpha) * A (advantage reweighting, Yang et al. 2025).
    ProbabilityWeight {
        /// How much the weight follows the probability; 0 leaves all advantages as they are.
        #[serde(default = "default_alpha")]
        alpha: f64,
    },
    /// Soft S2T: for A > 0, x = -logp - entropy + ln a; A <- A if x <= 0, else (1 - l (1 - e^-x)) A.
    Taco {
        /// The weight falls where the surprisal is above the entropy by more than -ln a.
        #[serde(default = "default_taco_a")]
        a: f64,
        /// The most that is taken off the weight.
        #[serde(default = "default_taco_l")]
        l: f64,
    },
    /// Soft, the opposite of S2T: tokens with A > 0 whose surprisal -logp is at or above the (1 - `share`)-quantile of
    /// the mini-batch weigh `weight` while the mini-batch's mean entropy is below `entropy_below` (STARE). With `step` 0
    /// the weight is constant. With a `step` above 0 the weight starts at `weight`, grows by `step` after an optimizer
    /// step whose mean entropy was at most `entropy_below`, shrinks by `step` after any other, and stays between `min` and
    /// `max`; it is then in force at every entropy.
    Stare {
        /// The share of rewarded tokens with the highest surprisal that is weighed.
        #[serde(default = "default_stare_share")]
        share: f64,
        /// The weight, or its start where `step` is above 0.
        #[serde(default = "default_stare_weight")]
        weight: f64,
        /// The mean entropy below which the weight is in force, or up to which it grows, in nats.
        #[serde(default = "default_stare_entropy")]
        entropy_below: f64,
        /// Which tokens are weighed.
        #[serde(default)]
        signs: StareSigns,
        /// What the weight changes by after an optimizer step; 0 keeps it constant.
        #[serde(default)]
        step: f64,
        /// The smallest weight.
        #[serde(default = "default_stare_min")]
        min: f64,
        /// The largest weight.
        #[serde(default = "default_stare_max")]
        max: f64,
    },
    /// Keeps tokens whose surprisal is about what their entropy says: `low` H <= -logp <= `high` H (RSI-S).
    Rsi {
        /// The smallest surprisal that is kept, in multiples of the entropy.
        #[serde(default = "default_rsi_low")]
        low: f64,
        /// The largest surprisal that is kept, in multiples of the entropy.
        #[serde(default = "default_rsi_high")]
        high: f64,
    },
    /// Silences the tokens with A < 0 of a response that the policy has left: `mean_t (sampler_logp - logp)` above
    /// `delta`, with `behavior_logp` where the rollout has no `sampler_logp` (the off-policy sequence mask of
    /// DeepSeek-V3.2, eq. 9).
    OffPolicySequence {
        /// The mean difference of log-probs above which a response is left.
        #[serde(default = "default_delta")]
        delta: f64,
    },
}

/// Which tokens STARE weighs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StareSigns {
    /// Tokens with A > 0.
    #[default]
    Positive,
    /// Also tokens with A < 0, which weigh `2 - weight` (variant C2).
    Both,
}

/// Which S2T candidates are silenced.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Select {
    /// Entropy strictly below its q-quantile: STAPO.
    #[default]
    LowEntropy,
    /// Entropy strictly above its (1 - q)-quantile.
    HighEntropy,
    /// A random subset, as many as `low_entropy` would silence.
    Random,
    /// All candidates; `q` is not used.
    Full,
}

/// What the entropy quantile of S2T is taken over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum QuantileOver {
    /// The candidates of the mini-batch.
    #[default]
    Candidates,
    /// All response tokens of the mini-batch, as in versions 1 to 3 of the paper.
    AllTokens,
    /// All tokens with A > 0 of the mini-batch, as in the code that TACO's authors publish.
    RewardedTokens,
}

/// The name of a mask, as `silenced_by` gives it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MaskKind {
    Spurious,
    RandomTokens,
    TopEntropy,
    ClipCov,
    LowProbabilityFirst,
    ProbabilityWeight,
    Taco,
    Stare,
    Rsi,
    OffPolicySequence,
}

impl MaskKind {
    pub const ALL: [Self; 10] = [
        Self::Spurious,
        Self::RandomTokens,
        Self::TopEntropy,
        Self::ClipCov,
        Self::LowProbabilityFirst,
        Self::ProbabilityWeight,
        Self::Taco,
        Self::Stare,
        Self::Rsi,
        Self::OffPolicySequence,
    ];
}

impl Mask {
    /// S2T as published: `tau_p` 0.002, `q` 0.75, low entropy, quantile over the candidates.
    pub fn spurious() -> Self {
        Mask::Spurious {
            tau_p: default_tau_p(),
            threshold: Threshold::TauP,
            q: default_q(),
            select: Select::LowEntropy,
            quantile_over: QuantileOver::Candidates,
            seed: 0,
        }
    }

    pub fn kind(&self) -> MaskKind {
        match self {
            Mask::Spurious { .. } => MaskKind::Spurious,
            Mask::RandomTokens { .. } => MaskKind::RandomTokens,
            Mask::TopEntropy { .. } => MaskKind::TopEntropy,
            Mask::ClipCov { .. } => MaskKind::ClipCov,
            Mask::LowProbabilityFirst { .. } => MaskKind::LowProbabilityFirst,
            Mask::ProbabilityWeight { .. } => MaskKind::ProbabilityWeight,
            Mask::Taco { .. } => MaskKind::Taco,
            Mask::Stare { .. } => MaskKind::Stare,
            Mask::Rsi { .. } => MaskKind::Rsi,
            Mask::OffPolicySequence { .. } => MaskKind::OffPolicySequence,
        }
    }

    /// True for a mask whose decision on a token depends on other tokens of the mini-batch.
    pub fn needs_calibration(&self) -> bool {
        match self {
            Mask::Spurious { select, threshold, .. } => {
                *select != Select::Full || matches!(threshold, Threshold::TargetShare { .. })
            }
            Mask::RandomTokens { .. }
            | Mask::TopEntropy { .. }
            | Mask::ClipCov { .. }
            | Mask::Stare { .. } => true,
            Mask::LowProbabilityFirst { .. }
            | Mask::ProbabilityWeight { .. }
            | Mask::Taco { .. }
            | Mask::Rsi { .. }
            | Mask::OffPolicySequence { .. } => false,
        }
    }

    /// True for a mask that reads entropies.
    pub fn reads_entropy(&self) -> bool {
        match self {
            Mask::Spurious { select, threshold, .. } => {
                *select != Select::Full
                    || matches!(threshold, Threshold::Surprise { .. } | Threshold::Influence { .. })
            }
            Mask::RandomTokens { .. }
            | Mask::TopEntropy { .. }
            | Mask::Taco { .. }
            | Mask::Stare { .. }
            | Mask::Rsi { .. } => true,
            Mask::ClipCov { .. }
            | Mask::LowProbabilityFirst { .. }
            | Mask::ProbabilityWeight { .. }
            | Mask::OffPolicySequence { .. } => false,
        }
    }
}

/// The `tau_p` of STAPO.
pub(crate) const PUBLISHED_TAU_P: f64 = 0.002;

fn default_tau_p() -> f64 {
    PUBLISHED_TAU_P
}
fn default_q() -> f64 {
    0.75
}
fn default_top_share() -> f64 {
    0.2
}
fn default_cov_share() -> f64 {
    2e-4
}
fn default_cov_low() -> f64 {
    1.0
}
fn default_cov_high() -> f64 {
    5.0
}
fn default_eta() -> f64 {
    0.4
}
fn default_alpha() -> f64 {
    0.2
}
fn default_taco_a() -> f64 {
    0.01
}
fn default_taco_l() -> f64 {
    0.9
}
fn default_stare_share() -> f64 {
    0.1
}
fn default_stare_weight() -> f64 {
    1.1
}
fn default_stare_entropy() -> f64 {
    0.3
}
fn default_stare_min() -> f64 {
    0.5
}
fn default_stare_max() -> f64 {
    1.5
}
fn default_rsi_low() -> f64 {
    0.5
}
fn default_rsi_high() -> f64 {
    2.0
}
fn default_delta() -> f64 {
    0.5
}
