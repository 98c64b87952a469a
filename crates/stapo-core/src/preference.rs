//! Objectives over pairs of responses, of which one is preferred, or over responses that are judged good or bad.
//!
//! As the group objectives do, a preference objective reaches the network only through log-probs of given tokens:
//! [`PreferenceSpec::calibrate`] reads a whole mini-batch once, [`PreferenceSpec::evaluate`] then gives each token of one
//! comparison its derivative, un-normalised; the mean is over [`Comparison::n_terms`].

mod check;

use crate::objective::{
    AdvantagesRef, Calibration, Mask, ObjectiveError, ObjectiveSpec, ResponseSignals, Surrogate, TokenEffect,
    UpdateKey, plain,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A preference objective as a value.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PreferenceSpec {
    /// The loss of a comparison.
    pub loss: PreferenceLoss,
    /// Which tokens of chosen responses are silenced. A silenced token leaves the loss: its log-prob is not part of the
    /// response's, and its derivative is 0; a pair whose chosen response has no other token has no loss. Thresholds and
    /// draws are over the chosen responses of the mini-batch.
    pub masks: Vec<Mask>,
}

/// The loss of a comparison. `c` and `r` are the chosen and the rejected response; `s` is a response's sum of
/// `logp - reference_logp`, `a` its mean of `logp`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum PreferenceLoss {
    /// `-ln sigmoid(beta (s_c - s_r))` (Rafailov et al. 2023, eq. 7).
    Dpo {
        /// The factor on log-ratios: how strongly the reference holds the policy.
        #[serde(default = "default_beta")]
        beta: f64,
        /// The share of comparisons that is assumed to be the wrong way round (Mitchell 2023).
        #[serde(default)]
        label_smoothing: f64,
    },
    /// `(s_c / n_c - s_r / n_r - 1 / (2 beta))^2` with means over tokens, as TRL and the authors compute it (Azar et al.
    /// 2023, eq. 17).
    Ipo {
        /// Half the inverse of the margin that is aimed at.
        #[serde(default = "default_beta")]
        beta: f64,
    },
    /// `-ln sigmoid(beta (a_c - a_r) - gamma)`: no reference (Meng et al. 2024, eq. 6).
    Simpo {
        /// The factor on mean log-probs.
        #[serde(default = "default_simpo_beta")]
        beta: f64,
        /// The margin that is aimed at.
        #[serde(default = "default_gamma")]
        gamma: f64,
    },
    /// `-a_c - beta ln sigmoid(odds_c - odds_r)` with `odds = a - ln(1 - e^a)`: no reference (Hong et al. 2024, eq. 6).
    Orpo {
        /// The factor on the log odds ratio.
        #[serde(default = "default_beta")]
        beta: f64,
    },
    /// A good response has `1 - sigmoid(beta (s - z))`, a bad one `1 - sigmoid(beta (z - s))`, each with its weight. `z` is
    /// the mean log-ratio of responses to other prompts, at least 0 and a constant (Ethayarajh et al. 2024, eq. 8).
    Kto {
        /// The factor on log-ratios.
        #[serde(default = "default_beta")]
        beta: f64,
        /// The weight of good responses.
        #[serde(default = "one")]
        desirable_weight: f64,
        /// The weight of bad responses.
        #[serde(default = "one")]
        undesirable_weight: f64,
    },
}

/// The highest mean log-prob that ORPO's odds are computed from: the odds of a certain response are not finite. In f32 the
/// log-prob next to 0 is closer to 0 than this.
const SUREST: f64 = -1e-6;

fn default_beta() -> f64 {
    0.1
}
fn default_simpo_beta() -> f64 {
    2.0
}
fn default_gamma() -> f64 {
    1.0
}
fn one() -> f64 {
    1.0
}

impl Default for PreferenceLoss {
    fn default() -> Self {
        PreferenceLoss::Dpo { beta: default_beta(), label_smoothing: 0.0 }
    }
}

/// Whether a response is the better or the worse one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Chosen,
    Rejected,
}

/// What a preference objective reads of one response, one entry per response token.
#[derive(Debug, Clone, Copy)]
pub struct JudgedResponse<'a> {
    /// Under the current policy.
    pub logp: &'a [f64],
    /// Under the current policy, nats; read by masks.
    pub entropy: &'a [f64],
    /// Sums of squared probabilities under the current policy; read by the threshold `influence` of a mask.
    pub collision: Option<&'a [f64]>,
    /// Under the frozen reference; read by losses with [`PreferenceLoss::reads_reference`].
    pub reference_logp: Option<&'a [f64]>,
}

/// A chosen and a rejected response to one prompt; for [`PreferenceLoss::Kto`] one of them is enough.
#[derive(Debug, Clone, Copy, Default)]
pub struct Comparison<'a> {
    pub chosen: Option<JudgedResponse<'a>>,
    pub rejected: Option<JudgedResponse<'a>>,
}

/// What the objective reads of a whole mini-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct PreferenceCalibration {
    masks: Calibration,
    baseline: f64,
}

/// What the objective does to the tokens of one comparison. Derivatives are those of the un-normalised loss.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ComparisonEffect {
    /// Un-normalised.
    pub loss: f64,
    pub chosen: ResponseEffect,
    pub rejected: ResponseEffect,
}

/// What the objective does to one response.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ResponseEffect {
    /// Derivative of the loss by the log-prob of each token; empty for a response that is absent.
    pub d_logp: Vec<f64>,
    /// The implicit reward: what the loss compares, `beta s` or `beta a`.
    pub reward: f64,
    pub n_candidates: usize,
    pub n_silenced: usize,
}

/// The kept tokens of a response.
struct KeptTokens {
    is_in_loss: Vec<bool>,
    /// Sum of what the loss reads of each kept token.
    sum: f64,
    n: f64,
}

impl PreferenceLoss {
    /// True for a loss that reads log-probs of a frozen reference.
    pub fn reads_reference(&self) -> bool {
        matches!(self, Self::Dpo { .. } | Self::Ipo { .. } | Self::Kto { .. })
    }

    /// True for a loss that judges each response by itself.
    pub fn judges_alone(&self) -> bool {
        matches!(self, Self::Kto { .. })
    }

    /// KTO's `z` from the log-ratios of responses to other prompts.
    pub fn baseline(log_ratios: &[f64]) -> f64 {
        (log_ratios.iter().sum::<f64>() / log_ratios.len().max(1) as f64).max(0.0)
    }

    /// The loss of a pair and its derivatives by the sums of the two responses.
    fn pair(&self, chosen: &KeptTokens, rejected: &KeptTokens) -> (f64, f64, f64) {
        let (mean_c, mean_r) = (chosen.sum / chosen.n, rejected.sum / rejected.n);
        match *self {
            Self::Dpo { beta, label_smoothing } => {
                let margin = beta * (chosen.sum - rejected.sum);
                let keep = 1.0 - label_smoothing;
                let loss = -keep * log_sigmoid(margin) - label_smoothing * log_sigmoid(-margin);
                let slope = beta * (label_smoothing * sigmoid(margin) - keep * sigmoid(-margin));
                (loss, slope, -slope)
            }
            Self::Ipo { beta } => {
                let distance = mean_c - mean_r - 0.5 / beta;
                (distance * distance, 2.0 * distance / chosen.n, -2.0 * distance / rejected.n)
            }
            Self::Simpo { beta, gamma } => {
                let margin = beta * (mean_c - mean_r) - gamma;
                let slope = -beta * sigmoid(-margin);
                (-log_sigmoid(margin), slope / chosen.n, -slope / rejected.n)
            }
            Self::Orpo { beta } => {
                let (mean_c, mean_r) = (mean_c.min(SUREST), mean_r.min(SUREST));
                let log_odds = |mean: f64| mean - libm::log(-libm::expm1(mean));
                // The derivative of the log odds by the mean log-prob.
                let steepness = |mean: f64| -1.0 / libm::expm1(mean);
                let margin = log_odds(mean_c) - log_odds(mean_r);
                let slope = -beta * sigmoid(-margin);
                let loss = -mean_c - beta * log_sigmoid(margin);
                (loss, (slope * steepness(mean_c) - 1.0) / chosen.n, -slope * steepness(mean_r) / rejected.n)
            }
            Self::Kto { .. } => unreachable!("judges_alone"),
        }
    }

    /// The loss of one response under KTO, and its derivative by the response's sum.
    fn alone(&self, side: Side, response: &KeptTokens, baseline: f64) -> (f64, f64) {
        let Self::Kto { beta, desirable_weight, undesirable_weight } = *self else {
            unreachable!("judges_alone")
        };
        let (weight, slope) = match side {
            Side::Chosen => (desirable_weight, beta),
            Side::Rejected => (undesirable_weight, -beta),
        };
        let value = slope * (response.sum - baseline);
        (weight * sigmoid(-value), -weight * slope * sigmoid(value) * sigmoid(-value))
    }

    /// The implicit reward of a response.
    fn reward(&self, response: &KeptTokens) -> f64 {
        match *self {
            Self::Dpo { beta, .. } | Self::Kto { beta, .. } => beta * response.sum,
            Self::Ipo { beta } | Self::Simpo { beta, .. } | Self::Orpo { beta } => {
                beta * response.sum / response.n
            }
        }
    }
}

impl Comparison<'_> {
    /// Terms of the mean over a mini-batch: the responses for a loss that judges each alone, else 1.
    pub fn n_terms(&self, loss: &PreferenceLoss) -> usize {
        let n_responses = usize::from(self.chosen.is_some()) + usize::from(self.rejected.is_some());
        if loss.judges_alone() { n_responses } else { 1 }
    }
}

impl PreferenceSpec {
    /// An objective whose masks are those of the preference: masks are calibrated and applied in one place.
    fn mask_objective(&self) -> ObjectiveSpec {
        ObjectiveSpec { masks: self.masks.clone(), ..plain(Surrogate::Reinforce) }
    }

    /// Derives the thresholds of the masks from the chosen responses of a mini-batch. `baseline` is KTO's
    /// [`PreferenceLoss::baseline`]; other losses do not read it. `step` keys random masks.
    pub fn calibrate(
        &self,
        minibatch: &[Comparison],
        baseline: f64,
        step: u64,
    ) -> Result<PreferenceCalibration, ObjectiveError> {
        let chosen: Vec<ResponseSignals> = minibatch.iter().map(mask_signals).collect();
        let masks = self.mask_objective().calibrate(&chosen, UpdateKey { step, ..UpdateKey::default() })?;
        Ok(PreferenceCalibration { masks, baseline })
    }

    /// The loss of one comparison of a calibrated mini-batch, and its derivatives. `comparison_idx` is the index in the
    /// mini-batch.
    pub fn evaluate(
        &self,
        calibration: &PreferenceCalibration,
        comparison_idx: usize,
        comparison: &Comparison,
    ) -> Result<ComparisonEffect, ObjectiveError> {
        let signals = mask_signals(comparison);
        let mut fates = vec![TokenEffect::default(); signals.logp.len()];
        self.mask_objective().evaluate(&calibration.masks, comparison_idx, &signals, &mut fates)?;
        let n_silenced = fates.iter().filter(|fate| !fate.kept).count();
        let n_candidates =
            if self.masks.is_empty() { 0 } else { fates.iter().filter(|fate| fate.is_candidate).count() };
        let chosen = comparison
            .chosen
            .map(|response| {
                self.kept(comparison_idx, &response, fates.iter().map(|fate| fate.kept).collect())
            })
            .transpose()?;
        let rejected = comparison
            .rejected
            .map(|response| self.kept(comparison_idx, &response, vec![true; response.logp.len()]))
            .transpose()?;
        let (loss, slope_c, slope_r) = match (&chosen, &rejected) {
            // Nothing is left to compare with the rejected response.
            (Some(chosen), Some(_)) if !self.loss.judges_alone() && !chosen.is_in_loss.contains(&true) => {
                (0.0, 0.0, 0.0)
            }
            (Some(chosen), Some(rejected)) if !self.loss.judges_alone() => self.loss.pair(chosen, rejected),
            (chosen, rejected) if self.loss.judges_alone() => {
                let alone = |side, response: &Option<KeptTokens>| {
                    response.as_ref().map_or((0.0, 0.0), |it| self.loss.alone(side, it, calibration.baseline))
                };
                let ((loss_c, slope_c), (loss_r, slope_r)) =
                    (alone(Side::Chosen, chosen), alone(Side::Rejected, rejected));
                (loss_c + loss_r, slope_c, slope_r)
            }
            (chosen, _) => {
                let field = if chosen.is_none() { "chosen" } else { "rejected" };
                let remedy = "loss.kind = \"kto\" learns from single responses";
                let needed_by = "a loss over pairs";
                return Err(ObjectiveError::Missing {
                    response_idx: comparison_idx,
                    field,
                    needed_by,
                    remedy,
                });
            }
        };
        if !(loss.is_finite() && slope_c.is_finite() && slope_r.is_finite()) {
            let expected = "log-probs whose preference loss is finite";
            return Err(ObjectiveError::Value {
                response_idx: comparison_idx,
                field: "logp",
                token_idx: 0,
                value: loss,
                expected,
            });
        }
        let effect = |response: Option<KeptTokens>, slope: f64| {
            response.map_or(ResponseEffect::default(), |kept| ResponseEffect {
                d_logp: kept.is_in_loss.iter().map(|&is_kept| if is_kept { slope } else { 0.0 }).collect(),
                reward: self.loss.reward(&kept),
                ..ResponseEffect::default()
            })
        };
        let chosen = ResponseEffect { n_candidates, n_silenced, ..effect(chosen, slope_c) };
        Ok(ComparisonEffect { loss, chosen, rejected: effect(rejected, slope_r) })
    }

    fn kept(
        &self,
        comparison_idx: usize,
        response: &JudgedResponse,
        is_in_loss: Vec<bool>,
    ) -> Result<KeptTokens, ObjectiveError> {
        let reference = response.reference_logp.filter(|_| self.loss.reads_reference());
        let (response_idx, field) = (comparison_idx, "reference_logp");
        let n_tokens = response.logp.len();
        match reference {
            None if self.loss.reads_reference() => {
                let remedy = "give reference_logp, or take a loss without reference: simpo or orpo";
                return Err(ObjectiveError::Missing { response_idx, field, needed_by: "the loss", remedy });
            }
            Some(values) if values.len() != n_tokens => {
                return Err(ObjectiveError::Length {
                    response_idx,
                    field,
                    got: values.len(),
                    expected: n_tokens,
                });
            }
            _ => {}
        }
        let token = |t: usize| response.logp[t] - reference.map_or(0.0, |values| values[t]);
        let sum = (0..n_tokens).filter(|&t| is_in_loss[t]).map(token).sum();
        let n = is_in_loss.iter().filter(|is_in_loss| **is_in_loss).count().max(1) as f64;
        Ok(KeptTokens { is_in_loss, sum, n })
    }
}

/// The chosen response as the masks read it: rewarded, on-policy. A comparison without one has no token.
fn mask_signals<'a>(comparison: &Comparison<'a>) -> ResponseSignals<'a> {
    let none = JudgedResponse { logp: &[], entropy: &[], collision: Some(&[]), reference_logp: None };
    let JudgedResponse { logp, entropy, collision, .. } = comparison.chosen.unwrap_or(none);
    ResponseSignals {
        advantage: AdvantagesRef::Response(1.0),
        logp,
        behavior_logp: logp,
        entropy,
        behavior_entropy: None,
        reference_logp: None,
        sampler_logp: None,
        collision,
    }
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    if x >= 0.0 { 1.0 / (1.0 + libm::exp(-x)) } else { libm::exp(x) / (1.0 + libm::exp(x)) }
}

pub(crate) fn log_sigmoid(x: f64) -> f64 {
    x.min(0.0) - libm::log1p(libm::exp(-x.abs()))
}

#[cfg(test)]
mod tests;
