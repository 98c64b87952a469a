//! The fate and the effect of each token of a response.

use super::calibrate::{CalibratedMask, Calibration, Rule, is_candidate};
use super::surrogate::{Point, Valued};
use super::{
    Aggregate, Denominator, EntropyBonus, MaskKind, ObjectiveError, ObjectiveSpec, Ratio, Response, Surrogate,
};
use serde::{Deserialize, Serialize};

/// What the objective does to one token. Derivatives are of the un-normalised loss: [`Tally::scale`] makes them the mean's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TokenEffect {
    /// In the loss: no mask silenced it.
    pub kept: bool,
    /// The first mask that silenced it.
    pub silenced_by: Option<MaskKind>,
    /// The surrogate's trust region is active.
    pub clipped: bool,
    /// Current over behavior probability, at the spec's level.
    pub ratio: f64,
    /// Slope of the surrogate by this token's log-prob before masks: `ratio * A` where nothing clips. For a silenced
    /// token, what it would have pushed with.
    pub weight: f64,
    /// Derivative of the un-normalised loss (which is minimised) by this token's log-prob.
    pub d_logp: f64,
    /// The same by its entropy.
    pub d_entropy: f64,
}

/// What one response adds to the mini-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceTally {
    pub n_tokens: usize,
    pub n_kept: usize,
    /// Tokens with A > 0 and p < `tau_p` of the S2T masks.
    pub n_candidates: usize,
    pub n_silenced: usize,
    /// Among the kept tokens.
    pub n_clipped: usize,
    /// Un-normalised loss.
    pub loss: f64,
    pub ratio_min: f64,
    pub ratio_max: f64,
}

/// A mini-batch summed up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// The loss that is minimised, normalised.
    pub loss: f64,
    /// Multiplies every un-normalised derivative: 1/N, or 0 for a mini-batch without kept tokens.
    pub scale: f64,
    pub n_sequences: usize,
    pub n_tokens: usize,
    pub n_kept: usize,
    pub n_candidates: usize,
    pub n_silenced: usize,
    pub n_clipped: usize,
    /// Share of the kept tokens.
    pub clip_fraction: f64,
    /// Over the kept tokens; 1 where there are none.
    pub ratio_min: f64,
    pub ratio_max: f64,
}

impl ObjectiveSpec {
    /// Effects of one response of a calibrated mini-batch, one per token into `effects`. `response_idx` is its place in the
    /// mini-batch.
    pub fn evaluate(
        &self,
        calibration: &Calibration,
        response_idx: usize,
        response: &Response,
        effects: &mut [TokenEffect],
    ) -> Result<SequenceTally, ObjectiveError> {
        let n_tokens = response.logp.len();
        assert_eq!(effects.len(), n_tokens, "evaluate: one effect per token");
        let mut tally = SequenceTally { n_tokens, ratio_min: f64::INFINITY, ..SequenceTally::default() };
        self.decide_fates(calibration, response_idx, response, effects, &mut tally);

        let share = self.token_share(&tally);
        let sequence_ratio = self.sequence_log_ratio(response, effects, tally.n_kept).map(libm::exp);
        let mut sequence_slope = 0.0;
        for token_idx in 0..n_tokens {
            let effect = &mut effects[token_idx];
            let soft_weight = effect.weight;
            let valued = self.value(calibration, response_idx, response, token_idx, sequence_ratio, effect);
            let not_finite = |what| ObjectiveError::NotFinite {
                response_idx,
                token_idx,
                what,
                logp: response.logp[token_idx],
                behavior_logp: response.behavior_logp[token_idx],
            };
            if !effect.ratio.is_finite() {
                return Err(not_finite("ratio"));
            }
            let off_policy = match response.sampler_logp {
                Some(sampler_logp) => {
                    self.off_policy.weight(response.behavior_logp[token_idx], sampler_logp[token_idx])
                }
                None => 1.0,
            };
            let weight = soft_weight * off_policy;
            effect.weight = valued.slope * off_policy;
            if !effect.kept {
                continue;
            }
            tally.n_clipped += usize::from(effect.clipped);
            tally.ratio_min = tally.ratio_min.min(effect.ratio);
            tally.ratio_max = tally.ratio_max.max(effect.ratio);
            let logp = response.logp[token_idx];
            let (penalty, penalty_slope) = match response.reference_logp {
                Some(reference_logp) => self.kl.penalty(logp, reference_logp[token_idx]),
                None => (0.0, 0.0),
            };
            let mut loss = penalty - weight * valued.value;
            let own_slope = if sequence_ratio.is_some() { 0.0 } else { weight * valued.slope };
            sequence_slope += weight * valued.slope;
            effect.d_logp = share * (penalty_slope - own_slope);
            if let EntropyBonus::Constant { coefficient } = self.entropy_bonus {
                loss -= coefficient * response.entropy[token_idx];
                effect.d_entropy = -coefficient * share;
            }
            tally.loss += loss;
            if !loss.is_finite() || !effect.d_logp.is_finite() {
                return Err(not_finite("loss"));
            }
        }
        tally.loss *= share;
        if sequence_ratio.is_some() {
            self.spread_sequence_slope(
                response,
                effects,
                share * sequence_slope / tally.n_kept.max(1) as f64,
            );
        }
        Ok(tally)
    }

    /// Marks each token kept or silenced and leaves its soft weight in `weight`.
    fn decide_fates(
        &self,
        calibration: &Calibration,
        response_idx: usize,
        response: &Response,
        effects: &mut [TokenEffect],
        tally: &mut SequenceTally,
    ) {
        let (logp, entropy) = self.signals(response);
        let advantage = response.advantage;
        for (token_idx, effect) in effects.iter_mut().enumerate() {
            let (logp, entropy) = (logp[token_idx], entropy[token_idx]);
            let behavior_logp = response.behavior_logp[token_idx];
            let mut is_any_candidate = false;
            let mut silenced_by = None;
            let mut weight = 1.0;
            for mask in &calibration.masks {
                let mut silence = |kind, silenced: bool| {
                    if silenced && silenced_by.is_none() {
                        silenced_by = Some(kind);
                    }
                };
                match *mask {
                    CalibratedMask::Spurious { logp_below, rule } => {
                        if !is_candidate(advantage, logp, logp_below) {
                            continue;
                        }
                        is_any_candidate = true;
                        let silenced = match rule {
                            Rule::Below(tau_h) => entropy < tau_h,
                            Rule::Above(tau_h) => entropy > tau_h,
                            Rule::Lottery(lottery) => lottery.wins(response_idx, token_idx),
                            Rule::All => true,
                            Rule::Nothing => false,
                        };
                        silence(MaskKind::Spurious, silenced);
                    }
                    CalibratedMask::RandomTokens { logp_below, lottery } => {
                        is_any_candidate |= is_candidate(advantage, logp, logp_below);
                        silence(MaskKind::RandomTokens, lottery.wins(response_idx, token_idx));
                    }
                    CalibratedMask::TopEntropy { at_least } => {
                        silence(MaskKind::TopEntropy, entropy < at_least)
                    }
                    CalibratedMask::ClipCov { cov, low, high, lottery } => {
                        let drawn = lottery.wins(response_idx, token_idx)
                            && self.is_cov_candidate(cov, low, high, advantage, logp, behavior_logp);
                        silence(MaskKind::ClipCov, drawn);
                    }
                    CalibratedMask::LowProbabilityFirst { logp_below, pass } => {
                        let own_pass = usize::from(behavior_logp >= logp_below);
                        silence(MaskKind::LowProbabilityFirst, own_pass != pass);
                    }
                    CalibratedMask::ProbabilityWeight { alpha } => {
                        weight *= alpha * libm::exp(behavior_logp) + 1.0 - alpha;
                    }
                    CalibratedMask::Taco { ln_a, l } => {
                        let x = -logp - entropy + ln_a;
                        if advantage > 0.0 && x > 0.0 {
                            weight *= 1.0 + l * libm::expm1(-x);
                        }
                    }
                }
            }
            let kept = silenced_by.is_none();
            *effect = TokenEffect { kept, silenced_by, weight, ..TokenEffect::default() };
            tally.n_candidates += usize::from(is_any_candidate);
            tally.n_kept += usize::from(kept);
            tally.n_silenced += usize::from(!kept);
        }
    }

    /// Value and slope of one token; fills `ratio` and `clipped`.
    fn value(
        &self,
        calibration: &Calibration,
        response_idx: usize,
        response: &Response,
        token_idx: usize,
        sequence_ratio: Option<f64>,
        effect: &mut TokenEffect,
    ) -> Valued {
        let (logp, behavior_logp) = (response.logp[token_idx], response.behavior_logp[token_idx]);
        let advantage = response.advantage;
        let log_ratio = logp - behavior_logp;
        effect.ratio =
            sequence_ratio.unwrap_or_else(|| if log_ratio == 0.0 { 1.0 } else { libm::exp(log_ratio) });
        let penalised = calibration.penalised.is_some_and(|cut| {
            cut.contains(advantage, self.signals(response).0[token_idx], response_idx, token_idx)
        });
        let point = Point { ratio: effect.ratio, advantage, logp, behavior_logp, penalised };
        let mut valued = self.surrogate.at(point);
        if let Surrogate::Geometric { clip } = self.surrogate {
            valued.clipped = geometric_clips(log_ratio, advantage, clip);
        }
        effect.clipped = valued.clipped;
        valued
    }

    /// Mean log-ratio over the kept tokens, where the ratio belongs to the whole response.
    fn sequence_log_ratio(&self, response: &Response, effects: &[TokenEffect], n_kept: usize) -> Option<f64> {
        let clip = match (self.ratio, self.surrogate) {
            (_, Surrogate::Geometric { clip }) => Some(clip),
            (Ratio::Sequence, _) => None,
            (Ratio::Token, _) => return None,
        };
        let logs = response.logp.iter().zip(response.behavior_logp).map(|(logp, behavior)| logp - behavior);
        let kept = logs.zip(effects).filter(|(_, effect)| effect.kept).map(|(log_ratio, _)| match clip {
            Some(clip) if geometric_clips(log_ratio, response.advantage, clip) => clip.copysign(log_ratio),
            _ => log_ratio,
        });
        Some(kept.sum::<f64>() / n_kept.max(1) as f64)
    }

    /// A sequence ratio moves with the log-prob of every kept token alike (clipped ones aside, in a geometric mean).
    fn spread_sequence_slope(&self, response: &Response, effects: &mut [TokenEffect], slope: f64) {
        let logs = response.logp.iter().zip(response.behavior_logp).map(|(logp, behavior)| logp - behavior);
        for (effect, log_ratio) in effects.iter_mut().zip(logs) {
            let held = match self.surrogate {
                Surrogate::Geometric { clip } => geometric_clips(log_ratio, response.advantage, clip),
                _ => false,
            };
            if held {
                effect.weight = 0.0;
            } else if effect.kept {
                effect.d_logp -= slope;
            }
        }
    }

    /// Factor of every token of a response before the division by N.
    fn token_share(&self, tally: &SequenceTally) -> f64 {
        match (self.aggregate, self.denominator) {
            (Aggregate::SequenceMeanOfTokenMean, Denominator::AllTokens) => {
                1.0 / tally.n_tokens.max(1) as f64
            }
            (Aggregate::SequenceMeanOfTokenMean, _) => 1.0 / tally.n_kept.max(1) as f64,
            (Aggregate::SequenceMeanOfTokenSum | Aggregate::TokenMean, _) => 1.0,
        }
    }

    /// Sums the tallies of a whole mini-batch, given in the order of its responses.
    pub fn total(&self, sequences: &[SequenceTally]) -> Tally {
        let count = |of: fn(&SequenceTally) -> usize| sequences.iter().map(of).sum::<usize>();
        let (n_tokens, n_kept, n_clipped) =
            (count(|s| s.n_tokens), count(|s| s.n_kept), count(|s| s.n_clipped));
        let n_sequences = sequences.len();
        let n_sequences_kept = count(|s| usize::from(s.n_kept > 0));
        let n = match (self.aggregate, self.denominator) {
            (Aggregate::TokenMean, Denominator::AllTokens) => n_tokens as f64,
            (Aggregate::TokenMean, _) => n_kept as f64,
            (_, Denominator::KeptTokens) => n_sequences_kept as f64,
            (_, Denominator::AllTokens) => n_sequences as f64,
            (_, Denominator::Constant { length }) => n_sequences as f64 * length,
        };
        let scale = if n_kept > 0 { 1.0 / n } else { 0.0 };
        let kept = sequences.iter().filter(|s| s.n_kept > 0);
        let ratio_min = kept.clone().map(|s| s.ratio_min).fold(f64::INFINITY, f64::min);
        let ratio_max = kept.map(|s| s.ratio_max).fold(0.0, f64::max);
        Tally {
            loss: scale * sequences.iter().map(|s| s.loss).sum::<f64>(),
            scale,
            n_sequences,
            n_tokens,
            n_kept,
            n_candidates: count(|s| s.n_candidates),
            n_silenced: count(|s| s.n_silenced),
            n_clipped,
            clip_fraction: if n_kept > 0 { n_clipped as f64 / n_kept as f64 } else { 0.0 },
            ratio_min: if n_kept > 0 { ratio_min } else { 1.0 },
            ratio_max: if n_kept > 0 { ratio_max } else { 1.0 },
        }
    }
}

/// True where GMPO holds a token: its log-ratio has left the clip in the direction the advantage rewards.
fn geometric_clips(log_ratio: f64, advantage: f64, clip: f64) -> bool {
    (advantage > 0.0 && log_ratio > clip) || (advantage < 0.0 && log_ratio < -clip)
}
