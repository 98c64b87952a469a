//! How ratio and advantage become the value that is maximised, and the derivative of that value.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The value of a token. `r` is the ratio, `A` the advantage; the slope is the derivative by `ln r`, which is that by
/// `logp`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Surrogate {
    /// `min(r A, clip(r, 1 - low, 1 + high) A)`; with `dual` c, for A < 0 not below `c A` (PPO, DAPO, JustRL).
    Clip {
        /// The ratio is clipped below at 1 - low.
        low: f64,
        /// The ratio is clipped above at 1 + high.
        high: f64,
        /// The largest multiple of a negative advantage; no second clip by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        dual: Option<f64>,
    },
    /// `stopgrad(clip(r, 1 - low, 1 + high)) A logp`; no lower clip where `low` is absent (CISPO).
    Cispo {
        /// The ratio is clipped below at 1 - low.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        low: Option<f64>,
        /// The ratio is clipped above at 1 + high.
        high: f64,
    },
    /// `A logp`: no ratio.
    Reinforce,
    /// `A logp - (beta / 2) (ln r)^2`: no clip, a squared log-ratio holds the policy near the one that sampled (verl's
    /// `dro`).
    SquaredLogRatio {
        /// The factor on the squared log-ratio.
        beta: f64,
    },
    /// `r A`, unclipped.
    Unclipped,
    /// `r A`, less `coefficient |ln r|` on the `share` of tokens with the highest covariance of A and logp (KL-Cov).
    KlCov {
        /// The share of tokens with a penalty.
        share: f64,
        /// The factor on the penalty.
        coefficient: f64,
    },
    /// `(4 / tau) sigmoid(tau (r - 1)) A`, tau by the sign of A (SAPO).
    Sapo {
        /// The temperature where A > 0.
        tau_positive: f64,
        /// The temperature where A < 0.
        tau_negative: f64,
    },
    /// `r A`; 0 if p - p_behavior > `high` (A > 0) or < -`low` (A < 0) (DPPO, total variation). With `cap` c the
    /// slope is at most `c A`: beyond r = c the value continues as `c A (1 + ln(r / c))`.
    TotalVariation {
        /// The largest fall of the probability where A < 0.
        low: f64,
        /// The largest rise of the probability where A > 0.
        high: f64,
        /// The largest slope, in multiples of the advantage; no cap by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cap: Option<f64>,
    },
    /// `r A`; 0 if p has moved in the direction that A rewards, and the KL divergence between the two choices "this
    /// token" and "another one", from behavior to current policy, is above `high` (A > 0) or `low` (A < 0) (DPPO, binary
    /// KL). `cap` as for total variation.
    BinaryKl {
        /// The largest divergence where A < 0.
        low: f64,
        /// The largest divergence where A > 0.
        high: f64,
        /// The largest slope, in multiples of the advantage; no cap by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cap: Option<f64>,
    },
    /// `stopgrad(phi(r)) A logp` with `phi(r) = r^k exp(lambda (1 - r))`, k and lambda by the sign of A, for the ratio of
    /// whole responses (VESPO).
    Vespo {
        /// k where A > 0.
        k_positive: f64,
        /// lambda where A > 0.
        lambda_positive: f64,
        /// k where A < 0.
        k_negative: f64,
        /// lambda where A < 0.
        lambda_negative: f64,
    },
}

/// The value of a surrogate at one token, with the derivative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Valued {
    pub value: f64,
    /// Derivative of `value` by `logp`, stop-gradients held.
    pub slope: f64,
    pub clipped: bool,
}

impl Valued {
    const DROPPED: Valued = Valued { value: 0.0, slope: 0.0, clipped: true };
}

/// What a surrogate reads of one token.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SurrogatePoint {
    pub ratio: f64,
    pub advantage: f64,
    pub logp: f64,
    pub behavior_logp: f64,
    /// True if KL-Cov penalises this token.
    pub penalised: bool,
}

impl Surrogate {
    /// Value and slope at a token. At a kink the slope is that of the inner side, as in `torch.clamp`: a ratio exactly
    /// at a clip edge is not clipped.
    #[expect(
        clippy::inline_always,
        reason = "this function runs once per token, and a call costs more than the body"
    )]
    #[inline(always)]
    pub(crate) fn at(&self, point: SurrogatePoint) -> Valued {
        let SurrogatePoint { ratio, advantage, logp, behavior_logp, penalised } = point;
        let linear = Valued { value: ratio * advantage, slope: ratio * advantage, clipped: false };
        match *self {
            Surrogate::Clip { low, high, dual } => clip(ratio, advantage, low, high, dual),
            Surrogate::Cispo { low, high } => {
                let floor = low.map_or(0.0, |low| 1.0 - low);
                let weight = ratio.clamp(floor, 1.0 + high) * advantage;
                Valued { value: weight * logp, slope: weight, clipped: ratio > 1.0 + high || ratio < floor }
            }
            Surrogate::Reinforce => Valued { value: advantage * logp, slope: advantage, clipped: false },
            Surrogate::SquaredLogRatio { beta } => {
                let log_ratio = logp - behavior_logp;
                Valued {
                    value: advantage * logp - 0.5 * beta * log_ratio * log_ratio,
                    slope: advantage - beta * log_ratio,
                    clipped: false,
                }
            }
            Surrogate::Unclipped => linear,
            Surrogate::KlCov { coefficient, .. } => {
                let log_ratio = logp - behavior_logp;
                let c = if penalised { coefficient } else { 0.0 };
                let sign = if log_ratio == 0.0 { 0.0 } else { log_ratio.signum() };
                Valued {
                    value: linear.value - c * log_ratio.abs(),
                    slope: linear.slope - c * sign,
                    clipped: false,
                }
            }
            Surrogate::Sapo { tau_positive, tau_negative } => {
                let tau = if advantage > 0.0 { tau_positive } else { tau_negative };
                let gate = 1.0 / (1.0 + libm::exp(-tau * (ratio - 1.0)));
                Valued {
                    value: 4.0 / tau * gate * advantage,
                    slope: 4.0 * gate * (1.0 - gate) * ratio * advantage,
                    clipped: false,
                }
            }
            Surrogate::TotalVariation { low, high, cap } => {
                let moved = libm::exp(logp) - libm::exp(behavior_logp);
                let is_outside = (advantage > 0.0 && moved > high) || (advantage < 0.0 && moved < -low);
                if is_outside { Valued::DROPPED } else { capped(linear, ratio, advantage, cap) }
            }
            Surrogate::BinaryKl { low, high, cap } => {
                let bound = if advantage > 0.0 { high } else { low };
                let moved_with_advantage = (logp - behavior_logp) * advantage > 0.0;
                let is_outside = moved_with_advantage && binary_kl(behavior_logp, logp) > bound;
                if is_outside { Valued::DROPPED } else { capped(linear, ratio, advantage, cap) }
            }
            Surrogate::Vespo { k_positive, lambda_positive, k_negative, lambda_negative } => {
                let (k, lambda) = if advantage >= 0.0 {
                    (k_positive, lambda_positive)
                } else {
                    (k_negative, lambda_negative)
                };
                let weight = libm::exp(lambda + k * libm::log(ratio) - lambda * ratio) * advantage;
                Valued { value: weight * logp, slope: weight, clipped: false }
            }
        }
    }

    /// True for a surrogate whose ratio is a constant weight on the token's own log-prob.
    pub(super) fn holds_ratio(&self) -> bool {
        matches!(self, Surrogate::Vespo { .. })
    }
}

/// `linear`, with the slope held at `cap * advantage` beyond the cap.
fn capped(linear: Valued, ratio: f64, advantage: f64, cap: Option<f64>) -> Valued {
    match cap {
        Some(cap) if ratio > cap => {
            let slope = cap * advantage;
            Valued { value: slope * (1.0 + libm::log(ratio / cap)), slope, clipped: true }
        }
        _ => linear,
    }
}

/// How far 1 - p is kept from 0, as in verl.
const BINARY_KL_FLOOR: f64 = 1e-8;

/// `q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))` with q the behavior and p the current probability of the token.
fn binary_kl(behavior_logp: f64, logp: f64) -> f64 {
    let q = libm::exp(behavior_logp);
    let others = |p: f64| 1.0 - p.min(1.0) + BINARY_KL_FLOOR;
    q * (behavior_logp - logp) + (1.0 - q) * libm::log(others(q) / others(libm::exp(logp)))
}

fn clip(ratio: f64, advantage: f64, low: f64, high: f64, dual: Option<f64>) -> Valued {
    let bound = if advantage > 0.0 && ratio > 1.0 + high {
        Some(1.0 + high)
    } else if advantage < 0.0 && ratio < 1.0 - low {
        Some(1.0 - low)
    } else if advantage < 0.0 {
        dual.filter(|&c| ratio > c)
    } else {
        None
    };
    match bound {
        Some(bound) => Valued { value: bound * advantage, slope: 0.0, clipped: true },
        None => Valued { value: ratio * advantage, slope: ratio * advantage, clipped: false },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(surrogate: Surrogate, ratio: f64, advantage: f64, (logp, behavior_logp): (f64, f64)) -> Valued {
        surrogate.at(SurrogatePoint { ratio, advantage, logp, behavior_logp, penalised: true })
    }

    /// Without an advantage nothing pushes a token, so nothing clips it, however far it has moved.
    #[test]
    fn a_token_without_advantage_is_never_clipped() {
        let surrogates = [
            Surrogate::Clip { low: 0.2, high: 0.2, dual: Some(3.0) },
            Surrogate::TotalVariation { low: 0.1, high: 0.1, cap: None },
            Surrogate::BinaryKl { low: 0.01, high: 0.01, cap: None },
        ];
        for surrogate in surrogates {
            for (ratio, logps) in [(9.0, (-0.1, -2.0)), (0.1, (-2.0, -0.1))] {
                let valued = at(surrogate, ratio, 0.0, logps);
                assert_eq!(valued, Valued { value: 0.0, slope: 0.0, clipped: false }, "{surrogate:?}");
            }
        }
    }

    /// Probabilities of 0 and 1 are 1 apart.
    #[test]
    fn a_move_of_exactly_the_bound_is_not_clipped() {
        let impossible = f64::NEG_INFINITY;
        for (bound, is_clipped) in [(1.0, false), (0.999, true)] {
            let total = Surrogate::TotalVariation { low: bound, high: bound, cap: None };
            assert_eq!(at(total, 2.0, 1.0, (0.0, impossible)).clipped, is_clipped);
            assert_eq!(at(total, 0.5, -1.0, (impossible, 0.0)).clipped, is_clipped);
        }
        let (logp, behavior_logp) = (-0.5, -1.5);
        let exact = binary_kl(behavior_logp, logp);
        for (high, is_clipped) in [(exact, false), (exact * 0.999, true)] {
            let binary = Surrogate::BinaryKl { low: 0.0, high, cap: None };
            assert_eq!(at(binary, 2.0, 1.0, (logp, behavior_logp)).clipped, is_clipped);
        }
    }

    #[test]
    fn surrogates_without_a_bound_clip_nothing() {
        let surrogates = [
            Surrogate::Reinforce,
            Surrogate::SquaredLogRatio { beta: 0.5 },
            Surrogate::Unclipped,
            Surrogate::KlCov { share: 0.1, coefficient: 0.5 },
            Surrogate::Sapo { tau_positive: 1.0, tau_negative: 1.05 },
            Surrogate::Vespo { k_positive: 1.0, lambda_positive: 1.0, k_negative: 1.0, lambda_negative: 1.0 },
        ];
        for surrogate in surrogates {
            assert!(!at(surrogate, 20.0, 1.0, (-1.0, -4.0)).clipped, "{surrogate:?}");
        }
    }
}
