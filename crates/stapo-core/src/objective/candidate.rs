//! S2T's candidates: the tokens that are rewarded and improbable. "Candidate" and "improbable" are defined here and
//! nowhere else.

use super::signals::MaskColumns;
use super::{Mask, MaskSignals, ObjectiveSpec, mask};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which rewarded tokens count as improbable. Only `tau_p` needs a probability that someone has to choose for the model
/// at hand.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Threshold {
    /// p < `tau_p` of the mask: STAPO.
    #[default]
    TauP,
    /// p < tau_p with the tau_p that makes `share` of the mini-batch's rewarded tokens candidates: the `share`-quantile
    /// of their log-probs. A quantile is the same rule for every model and every temperature: any increasing map of the
    /// log-probs leaves the candidates as they are. The STAPO paper's 1.6e-4 to 7e-4 of all tokens silenced, at q = 0.75
    /// and with half of the tokens rewarded, are shares of 4e-4 to 2e-3.
    TargetShare {
        /// The share of rewarded tokens that are candidates.
        #[serde(default = "default_share")]
        share: f64,
    },
    /// -logp > `c` H + `b`. The surprisal -logp of a sampled token has the mean H of its position, so c H is what the
    /// position itself explains, and b, in nats, is what it does not: a surprisal above x has a probability of at most
    /// V e^-x under the policy (Markov's inequality for 1 / p), so every nat of b makes such a token e times as rare,
    /// whatever the model's scale. The defaults join the public relatives: RSI-S keeps -logp <= 2 H (c = 2), TACO's gate
    /// opens at -logp > H - ln a (b = -ln 0.01 = 4.6).
    Surprise {
        /// The factor on the entropy.
        #[serde(default = "default_c")]
        c: f64,
        /// The surprisal that the entropy does not explain, in nats.
        #[serde(default = "default_b")]
        b: f64,
    },
    /// 1 - 2p + sum pi^2 > `kappa` (2 - C H^2). The left side is the squared norm of the token's gradient at the logits
    /// for A = 1; the right side is the largest such norm that a position of entropy H allows (the STAPO paper's upper
    /// bound at p = 0), with C = (V - 1) / (V ln^2 V). Near 1 the token moves the logits as much as any token could: it
    /// is improbable, and the policy was sure of another one. No probability threshold remains. Without `vocabulary`, C
    /// is 0, its limit for large V (0.007 at V = 150,000).
    Influence {
        /// The share of the largest norm above which a token is a candidate.
        #[serde(default = "default_kappa")]
        kappa: f64,
        /// The size of the vocabulary; unbounded by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        vocabulary: Option<usize>,
    },
}

fn default_share() -> f64 {
    1e-3
}
fn default_c() -> f64 {
    2.0
}
fn default_b() -> f64 {
    4.6
}
fn default_kappa() -> f64 {
    0.97
}

/// The log-prob below which a token is less likely than `tau_p`. Thresholds are compared as logarithms, and the
/// logarithm is `libm`'s, so a comparison has the same result on every machine.
pub fn logp_below(tau_p: f64) -> f64 {
    libm::log(tau_p)
}

/// True for a log-prob strictly below the threshold.
pub fn is_improbable(logp: f64, logp_below: f64) -> bool {
    logp < logp_below
}

/// A [`Threshold`] with the values of a mini-batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Improbable {
    Below {
        logp: f64,
    },
    Surprising {
        c: f64,
        b: f64,
    },
    /// `curvature` is the bound's constant C.
    Influential {
        kappa: f64,
        curvature: f64,
    },
}

impl Improbable {
    pub(super) fn below(tau_p: f64) -> Self {
        Improbable::Below { logp: logp_below(tau_p) }
    }

    /// True for a token that is a candidate if it is rewarded.
    #[inline]
    pub(super) fn holds(self, columns: &MaskColumns, token_idx: usize) -> bool {
        let logp = columns.logp[token_idx];
        match self {
            Improbable::Below { logp: below } => is_improbable(logp, below),
            Improbable::Surprising { c, b } => -logp > c * columns.entropy[token_idx] + b,
            Improbable::Influential { kappa, curvature } => {
                let entropy = columns.entropy[token_idx];
                let collision = columns.collision.map_or(0.0, |collision| collision[token_idx]);
                influence(logp, collision) > kappa * (2.0 - curvature * entropy * entropy)
            }
        }
    }
}

/// The squared norm of a token's gradient at the logits for A = 1, which `influence` compares with its bound; `collision`
/// is the sum of squared probabilities at the position.
pub fn influence(logp: f64, collision: f64) -> f64 {
    1.0 - 2.0 * libm::exp(logp) + collision
}

impl Threshold {
    /// Every kind with its default values.
    pub fn defaults() -> [Self; 4] {
        [
            Threshold::TauP,
            Threshold::TargetShare { share: default_share() },
            Threshold::Surprise { c: default_c(), b: default_b() },
            Threshold::Influence { kappa: default_kappa(), vocabulary: None },
        ]
    }

    /// The name of the kind in configs.
    pub fn kind(self) -> &'static str {
        match self {
            Threshold::TauP => "tau_p",
            Threshold::TargetShare { .. } => "target_share",
            Threshold::Surprise { .. } => "surprise",
            Threshold::Influence { .. } => "influence",
        }
    }

    /// The constant C = (V - 1) / (V ln^2 V) of the upper bound of the gradient norm; 0 for a vocabulary of unknown size,
    /// and for thresholds without this bound.
    pub fn curvature(self) -> f64 {
        let Threshold::Influence { vocabulary: Some(vocabulary), .. } = self else { return 0.0 };
        let v = vocabulary as f64;
        (v - 1.0) / (v * libm::pow(libm::log(v), 2.0))
    }
}

impl ObjectiveSpec {
    /// The fixed probability below which a token counts as improbable: the highest `tau_p` of the S2T masks, or the
    /// published value for an objective without such a mask. A threshold that sets itself is in
    /// [`super::Calibration::tau_p`].
    pub fn tau_p(&self) -> f64 {
        let thresholds = self.masks.iter().filter_map(|mask| match *mask {
            Mask::Spurious { tau_p, threshold: Threshold::TauP, .. } | Mask::RandomTokens { tau_p, .. } => {
                Some(tau_p)
            }
            _ => None,
        });
        thresholds.reduce(f64::max).unwrap_or(mask::PUBLISHED_TAU_P)
    }

    /// True if a mask silences S2T candidates, or as many random tokens as S2T would.
    pub fn has_candidate_mask(&self) -> bool {
        self.masks.iter().any(|mask| matches!(mask, Mask::Spurious { .. } | Mask::RandomTokens { .. }))
    }

    /// Which tokens of a response are candidates under the fixed threshold [`Self::tau_p`], by the log-probs that the
    /// masks read. The columns have one length.
    pub fn candidates<'a>(
        &self,
        advantage: f64,
        logp: &'a [f64],
        behavior_logp: &'a [f64],
    ) -> impl Iterator<Item = bool> {
        let logp_below = logp_below(self.tau_p());
        let signal = self.signal_logp(logp, behavior_logp);
        signal.iter().map(move |&logp| advantage > 0.0 && is_improbable(logp, logp_below))
    }

    /// True if a mask reads sums of squared probabilities.
    pub fn reads_collision(&self) -> bool {
        self.masks
            .iter()
            .any(|mask| matches!(mask, Mask::Spurious { threshold: Threshold::Influence { .. }, .. }))
    }

    /// The log-probs that the masks read.
    pub(super) fn signal_logp<'a>(&self, logp: &'a [f64], behavior_logp: &'a [f64]) -> &'a [f64] {
        match self.mask_signals {
            MaskSignals::Current => logp,
            MaskSignals::Behavior => behavior_logp,
        }
    }
}
