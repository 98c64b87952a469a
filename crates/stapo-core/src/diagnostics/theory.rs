//! Per-token theory of STAPO: gradient norm at the logits, its bounds, first-order entropy change, quadrant and risk.
//!
//! One position with logits a, softmax p over V tokens, sampled token with probability p and weight w = ratio * A
//! (0 where the clip is active).

use crate::objective::{is_improbable, logp_below};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `||dJ/da||^2 = w^2 (1 - 2p + sum_v p_v^2)`, exact. `collision` is the sum of squared probabilities.
pub fn gradient_norm_squared(p: f64, collision: f64, weight: f64) -> f64 {
    // At p = 1 the bracket is 0, and rounding could make the bracket negative.
    weight * weight * (1.0 - 2.0 * p + collision).max(0.0)
}

/// The lower and upper bound of [`gradient_norm_squared`] that need the entropy alone: `w^2 (1 - 2p + e^-H)` and
/// `w^2 (2 - 2p - C H^2)` with `C = (V - 1) / (V ln^2 V)`. Both are tight for uniform distributions.
pub fn gradient_norm_squared_bounds(p: f64, entropy: f64, weight: f64, vocabulary: usize) -> (f64, f64) {
    let v = vocabulary as f64;
    let c = if vocabulary > 1 { (v - 1.0) / (v * libm::pow(libm::log(v), 2.0)) } else { 0.0 };
    let w2 = weight * weight;
    (
        w2 * (1.0 - 2.0 * p + libm::exp(-entropy)).max(0.0),
        w2 * (2.0 - 2.0 * p - c * entropy * entropy).max(0.0),
    )
}

/// First-order change of the entropy at one position by an update of step size `eta`:
/// `-eta p (ln p - E ln p)(A - E A)`, with expectations over the vocabulary (`E ln p = -H`).
pub fn entropy_change(eta: f64, logp: f64, entropy: f64, advantage: f64, mean_advantage: f64) -> f64 {
    -eta * libm::exp(logp) * (logp + entropy) * (advantage - mean_advantage)
}

/// [`entropy_change`] where only the sampled token carries an advantage, so `E A = p A`.
pub fn entropy_change_of_sample(eta: f64, logp: f64, entropy: f64, advantage: f64) -> f64 {
    entropy_change(eta, logp, entropy, advantage, libm::exp(logp) * advantage)
}

/// The borders between probable and improbable, and between low and high entropy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Thresholds {
    pub tau_p: f64,
    /// Nats.
    pub tau_h: f64,
}

/// The four kinds of token by probability and entropy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Quadrant {
    ProbableHighEntropy,
    ProbableLowEntropy,
    ImprobableHighEntropy,
    /// In a rewarded response, the tokens that S2T calls spurious.
    ImprobableLowEntropy,
}

/// How likely a rewarded token of a quadrant is to be spurious.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Risk {
    Low,
    Medium,
    High,
}

/// The direction in which a rewarded token moves the entropy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntropyMove {
    Down,
    Up,
}

impl Quadrant {
    /// The quadrant in plain words.
    pub fn words(self) -> &'static str {
        match self {
            Quadrant::ProbableHighEntropy => "probable, high entropy",
            Quadrant::ProbableLowEntropy => "probable, low entropy",
            Quadrant::ImprobableHighEntropy => "improbable, high entropy",
            Quadrant::ImprobableLowEntropy => "improbable, low entropy",
        }
    }

    pub const ALL: [Quadrant; 4] = [
        Quadrant::ProbableHighEntropy,
        Quadrant::ProbableLowEntropy,
        Quadrant::ImprobableHighEntropy,
        Quadrant::ImprobableLowEntropy,
    ];

    /// Both comparisons are strict, as in the S2T mask.
    pub fn at(logp: f64, entropy: f64, thresholds: Thresholds) -> Self {
        match (is_improbable(logp, logp_below(thresholds.tau_p)), entropy < thresholds.tau_h) {
            (false, false) => Quadrant::ProbableHighEntropy,
            (false, true) => Quadrant::ProbableLowEntropy,
            (true, false) => Quadrant::ImprobableHighEntropy,
            (true, true) => Quadrant::ImprobableLowEntropy,
        }
    }

    pub fn spurious_risk(self) -> Risk {
        match self {
            Quadrant::ProbableHighEntropy | Quadrant::ProbableLowEntropy => Risk::Low,
            Quadrant::ImprobableHighEntropy => Risk::Medium,
            Quadrant::ImprobableLowEntropy => Risk::High,
        }
    }

    /// The direction for a rewarded token, from the paper's table.
    pub fn entropy_move(self) -> EntropyMove {
        match self {
            Quadrant::ProbableHighEntropy | Quadrant::ProbableLowEntropy => EntropyMove::Down,
            Quadrant::ImprobableHighEntropy | Quadrant::ImprobableLowEntropy => EntropyMove::Up,
        }
    }

    /// Mean gradient norm measured in the paper (arXiv 2602.15620).
    pub fn published_gradient_norm(self) -> f64 {
        match self {
            Quadrant::ProbableHighEntropy => 1.230,
            Quadrant::ProbableLowEntropy => 1.296,
            Quadrant::ImprobableHighEntropy => 1.289,
            Quadrant::ImprobableLowEntropy => 1.436,
        }
    }
}
