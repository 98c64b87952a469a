//! Which tokens of a response the masks silence, and which tokens they weigh.

use super::calibrate::{CalibratedMask, Calibration, CandidateRule};
use super::candidate::{Improbable, is_improbable};
use super::{AdvantagesRef, MaskKind, ObjectiveSpec, ResponseSignals, StareSigns, TokenEffect};

impl ObjectiveSpec {
    /// Every token kept, with candidates marked and the soft weight 1.
    pub(super) fn start(
        &self,
        calibration: &Calibration,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
    ) {
        let fresh = TokenEffect { kept: true, weight: 1.0, ..TokenEffect::default() };
        let columns = self.columns(response);
        match (calibration.improbable.as_slice(), response.advantage) {
            ([Improbable::Below { logp: below }], AdvantagesRef::Response(advantage)) => {
                let is_rewarded = advantage > 0.0;
                for (effect, &logp) in effects.iter_mut().zip(columns.logp) {
                    *effect =
                        TokenEffect { is_candidate: is_rewarded && is_improbable(logp, *below), ..fresh };
                }
            }
            (tests, advantage) => {
                for (t, effect) in effects.iter_mut().enumerate() {
                    let is_candidate =
                        advantage.at(t) > 0.0 && tests.iter().any(|test| test.holds(&columns, t));
                    *effect = TokenEffect { is_candidate, ..fresh };
                }
            }
        }
    }

    /// Silences tokens, or multiplies the soft weight of tokens. Until the surrogate is applied, `weight` holds the
    /// product of the soft weights.
    pub(super) fn apply(
        &self,
        mask: &CalibratedMask,
        response_idx: usize,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
    ) {
        let columns = self.columns(response);
        let (logp, entropy) = (columns.logp, columns.entropy);
        let behavior_logp = response.behavior_logp;
        let advantage = response.advantage;
        match *mask {
            CalibratedMask::Spurious { .. } | CalibratedMask::Taco { .. } if advantage.rewards_nothing() => {}
            CalibratedMask::Spurious { improbable, rule } => silence(effects, MaskKind::Spurious, |t| {
                improbable.holds(&columns, t)
                    && advantage.at(t) > 0.0
                    && match rule {
                        CandidateRule::Below(tau_h) => entropy[t] < tau_h,
                        CandidateRule::Above(tau_h) => entropy[t] > tau_h,
                        CandidateRule::Lottery(lottery) => lottery.wins(response_idx, t),
                        CandidateRule::All => true,
                        CandidateRule::Nothing => false,
                    }
            }),
            CalibratedMask::RandomTokens { lottery, .. } => {
                silence(effects, MaskKind::RandomTokens, |t| lottery.wins(response_idx, t));
            }
            CalibratedMask::TopEntropy { at_least } => {
                silence(effects, MaskKind::TopEntropy, |t| entropy[t] < at_least);
            }
            CalibratedMask::ClipCov { cov, low, high, lottery } => silence(effects, MaskKind::ClipCov, |t| {
                self.is_cov_candidate(cov, low..high, response, t) && lottery.wins(response_idx, t)
            }),
            CalibratedMask::LowProbabilityFirst { logp_below, pass } => {
                let own_pass = |t: usize| usize::from(behavior_logp[t] >= logp_below);
                silence(effects, MaskKind::LowProbabilityFirst, |t| own_pass(t) != pass);
            }
            CalibratedMask::ProbabilityWeight { alpha } => {
                weigh(effects, |t| alpha * libm::exp(behavior_logp[t]) + 1.0 - alpha);
            }
            CalibratedMask::Taco { ln_a, l } => weigh(effects, |t| {
                let x = -logp[t] - entropy[t] + ln_a;
                if x > 0.0 && advantage.at(t) > 0.0 { 1.0 + l * libm::expm1(-x) } else { 1.0 }
            }),
            CalibratedMask::Stare { surprisal_at_least, weight, signs } => weigh(effects, |t| {
                let a = advantage.at(t);
                match signs {
                    _ if -logp[t] < surprisal_at_least => 1.0,
                    _ if a > 0.0 => weight,
                    StareSigns::Both if a < 0.0 => 2.0 - weight,
                    _ => 1.0,
                }
            }),
            CalibratedMask::Rsi { low, high } => silence(effects, MaskKind::Rsi, |t| {
                !(low * entropy[t]..=high * entropy[t]).contains(&-logp[t])
            }),
            CalibratedMask::OffPolicySequence { delta } => {
                if mean_drift(response) > delta {
                    silence(effects, MaskKind::OffPolicySequence, |t| advantage.at(t) < 0.0);
                }
            }
        }
    }
}

/// `mean_t (sampler_logp - logp)`: how far the policy has moved from the one that sampled the response.
fn mean_drift(response: &ResponseSignals) -> f64 {
    let sampler_logp = response.sampler_logp.unwrap_or(response.behavior_logp);
    let drift = sampler_logp.iter().zip(response.logp).map(|(sampler, logp)| sampler - logp);
    drift.sum::<f64>() / response.logp.len().max(1) as f64
}

fn silence(effects: &mut [TokenEffect], by: MaskKind, is_silenced: impl Fn(usize) -> bool) {
    for (token_idx, effect) in effects.iter_mut().enumerate() {
        if is_silenced(token_idx) && effect.kept {
            effect.kept = false;
            effect.silenced_by = Some(by);
        }
    }
}

fn weigh(effects: &mut [TokenEffect], weight: impl Fn(usize) -> f64) {
    for (token_idx, effect) in effects.iter_mut().enumerate() {
        effect.weight *= weight(token_idx);
    }
}
