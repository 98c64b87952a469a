//! The effect of the objective on each token of a response.

use super::calibrate::{CalibratedMask, Calibration, CandidateRule};
use super::candidate::is_candidate;
use super::surrogate::{Point, Valued};
use super::{
    Aggregate, Denominator, EntropyBonus, MaskKind, ObjectiveError, ObjectiveSpec, Ratio, ResponseSignals,
    Surrogate,
};
use serde::{Deserialize, Serialize};

/// What the objective does to one token. Derivatives are those of the un-normalised loss until [`Tally::scale_effects`]
/// makes them those of the mean.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TokenEffect {
    /// True where no mask silenced the token, so that the token is part of the loss.
    pub kept: bool,
    /// The first mask that silenced the token.
    pub silenced_by: Option<MaskKind>,
    /// True for a rewarded and improbable token: `advantage > 0` and `logp < ln tau_p`, with the log-prob that the masks
    /// read and the threshold of [`ObjectiveSpec::tau_p`].
    pub is_candidate: bool,
    /// True where the trust region of the surrogate is active.
    pub clipped: bool,
    /// Current over behavior probability, of the token or of the whole response as [`Ratio`] says.
    pub ratio: f64,
    /// Derivative of the surrogate by this token's log-prob before masks: `ratio * A` where nothing clips. For a silenced
    /// token, the derivative that the token would have had.
    pub weight: f64,
    /// Derivative of the loss, which is minimised, by this token's log-prob.
    pub d_logp: f64,
    /// Derivative of the loss by the entropy at this token's position.
    pub d_entropy: f64,
}

/// What one response adds to the mini-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceTally {
    pub n_tokens: usize,
    pub n_kept: usize,
    /// Tokens with `is_candidate`; 0 for an objective without an S2T mask.
    pub n_candidates: usize,
    pub n_silenced: usize,
    /// Kept tokens whose surrogate is clipped.
    pub n_clipped: usize,
    /// Un-normalised loss.
    pub loss: f64,
    pub ratio_min: f64,
    pub ratio_max: f64,
}

/// The totals of a mini-batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    /// The loss that is minimised, normalised.
    pub loss: f64,
    /// 1/N, by which every un-normalised derivative is multiplied; 0 for a mini-batch without kept tokens.
    pub scale: f64,
    pub n_sequences: usize,
    pub n_tokens: usize,
    pub n_kept: usize,
    pub n_candidates: usize,
    pub n_silenced: usize,
    pub n_clipped: usize,
    /// Clipped tokens as a share of the kept tokens.
    pub clip_fraction: f64,
    /// Over the kept tokens; 1 where there are none.
    pub ratio_min: f64,
    pub ratio_max: f64,
}

impl Tally {
    /// Turns derivatives of the un-normalised loss into derivatives of the loss. This is the only division by N.
    pub fn scale_effects(&self, effects: &mut [TokenEffect]) {
        for effect in effects {
            effect.d_logp *= self.scale;
            effect.d_entropy *= self.scale;
        }
    }
}

impl ObjectiveSpec {
    /// Writes the effect of each token of one response of a calibrated mini-batch to `effects`. `response_idx` is the index
    /// of the response in the mini-batch.
    pub fn evaluate(
        &self,
        calibration: &Calibration,
        response_idx: usize,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
    ) -> Result<SequenceTally, ObjectiveError> {
        let n_tokens = response.logp.len();
        assert_eq!(effects.len(), n_tokens, "evaluate: one effect per token");
        let candidates = self.candidates(response.advantage, response.logp, response.behavior_logp);
        for (effect, is_candidate) in effects.iter_mut().zip(candidates) {
            *effect = TokenEffect { kept: true, is_candidate, weight: 1.0, ..TokenEffect::default() };
        }
        for mask in &calibration.masks {
            self.apply(mask, response_idx, response, effects);
        }
        let n_kept = count(effects, |effect| effect.kept);
        let mut tally = SequenceTally {
            n_tokens,
            n_kept,
            n_candidates: if self.has_candidate_mask() {
                count(effects, |effect| effect.is_candidate)
            } else {
                0
            },
            n_silenced: n_tokens - n_kept,
            ratio_min: f64::INFINITY,
            ..SequenceTally::default()
        };
        let share = self.token_share(&tally);
        match self.sequence_log_ratio(response, effects, n_kept).map(libm::exp) {
            None => self.push_tokens(calibration, response_idx, response, effects, &mut tally),
            Some(ratio) => self.push_sequence(ratio, response, effects, &mut tally),
        }
        self.add_penalties(response, effects, &mut tally);
        tally.loss *= share;
        let mut finite = tally.loss.is_finite();
        for effect in effects.iter_mut() {
            effect.d_logp *= share;
            effect.d_entropy *= share;
            finite &= effect.ratio.is_finite() & effect.d_logp.is_finite();
        }
        if finite { Ok(tally) } else { Err(not_finite(response_idx, response, effects)) }
    }

    /// Silences tokens, or multiplies the soft weight of tokens. Until [`Self::record`] runs, `weight` holds the product of
    /// the soft weights.
    fn apply(
        &self,
        mask: &CalibratedMask,
        response_idx: usize,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
    ) {
        let (logp, entropy) = self.signals(response);
        let behavior_logp = response.behavior_logp;
        let advantage = response.advantage;
        match *mask {
            CalibratedMask::Spurious { .. } if advantage <= 0.0 => {}
            CalibratedMask::Spurious { logp_below, rule } => silence(effects, MaskKind::Spurious, |t| {
                is_candidate(advantage, logp[t], logp_below)
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
                self.is_cov_candidate(cov, low, high, advantage, logp[t], behavior_logp[t])
                    && lottery.wins(response_idx, t)
            }),
            CalibratedMask::LowProbabilityFirst { logp_below, pass } => {
                let own_pass = |t: usize| usize::from(behavior_logp[t] >= logp_below);
                silence(effects, MaskKind::LowProbabilityFirst, |t| own_pass(t) != pass);
            }
            CalibratedMask::ProbabilityWeight { alpha } => {
                weigh(effects, |t| alpha * libm::exp(behavior_logp[t]) + 1.0 - alpha);
            }
            CalibratedMask::Taco { .. } if advantage <= 0.0 => {}
            CalibratedMask::Taco { ln_a, l } => weigh(effects, |t| {
                let x = -logp[t] - entropy[t] + ln_a;
                if x > 0.0 { 1.0 + l * libm::expm1(-x) } else { 1.0 }
            }),
        }
    }

    /// Applies a surrogate in which every token has an own ratio.
    fn push_tokens(
        &self,
        calibration: &Calibration,
        response_idx: usize,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
        tally: &mut SequenceTally,
    ) {
        let advantage = response.advantage;
        let signal_logp = self.signals(response).0;
        for (token_idx, effect) in effects.iter_mut().enumerate() {
            let (logp, behavior_logp) = (response.logp[token_idx], response.behavior_logp[token_idx]);
            let log_ratio = logp - behavior_logp;
            let ratio = if log_ratio == 0.0 { 1.0 } else { libm::exp(log_ratio) };
            let penalised = calibration
                .penalised
                .is_some_and(|cut| cut.contains(advantage, signal_logp[token_idx], response_idx, token_idx));
            let valued = self.surrogate.at(Point { ratio, advantage, logp, behavior_logp, penalised });
            let push = self.record(effect, ratio, valued, response, token_idx, tally);
            effect.d_logp = -push;
        }
    }

    /// Applies a surrogate in which the response has one ratio. The ratio depends on the log-prob of every kept token alike,
    /// so every kept token gets the same derivative, except tokens that the geometric mean clips, which get none.
    fn push_sequence(
        &self,
        ratio: f64,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
        tally: &mut SequenceTally,
    ) {
        let advantage = response.advantage;
        let mut push = 0.0;
        for (token_idx, effect) in effects.iter_mut().enumerate() {
            let (logp, behavior_logp) = (response.logp[token_idx], response.behavior_logp[token_idx]);
            let mut valued =
                self.surrogate.at(Point { ratio, advantage, logp, behavior_logp, penalised: false });
            if let Surrogate::Geometric { clip } = self.surrogate {
                valued.clipped = geometric_clips(logp - behavior_logp, advantage, clip);
            }
            push += self.record(effect, ratio, valued, response, token_idx, tally);
        }
        let each = push / tally.n_kept.max(1) as f64;
        let holds = matches!(self.surrogate, Surrogate::Geometric { .. });
        for effect in effects.iter_mut() {
            if holds && effect.clipped {
                effect.weight = 0.0;
            } else if effect.kept {
                effect.d_logp = -each;
            }
        }
    }

    /// Writes what the surrogate gave for a token, and returns the token's weighted derivative; 0 for a silenced token.
    #[inline]
    fn record(
        &self,
        effect: &mut TokenEffect,
        ratio: f64,
        valued: Valued,
        response: &ResponseSignals,
        token_idx: usize,
        tally: &mut SequenceTally,
    ) -> f64 {
        let off_policy = match response.sampler_logp {
            Some(sampler_logp) => {
                self.off_policy.weight(response.behavior_logp[token_idx], sampler_logp[token_idx])
            }
            None => 1.0,
        };
        let weight = effect.weight * off_policy;
        effect.ratio = ratio;
        effect.clipped = valued.clipped;
        effect.weight = valued.slope * off_policy;
        if !effect.kept {
            return 0.0;
        }
        tally.n_clipped += usize::from(valued.clipped);
        tally.ratio_min = tally.ratio_min.min(ratio);
        tally.ratio_max = tally.ratio_max.max(ratio);
        tally.loss -= weight * valued.value;
        weight * valued.slope
    }

    /// Adds the terms that do not depend on the advantage, for kept tokens.
    fn add_penalties(
        &self,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
        tally: &mut SequenceTally,
    ) {
        if let (true, Some(reference_logp)) = (self.needs_reference(), response.reference_logp) {
            for (t, effect) in effects.iter_mut().enumerate().filter(|(_, effect)| effect.kept) {
                let (penalty, slope) = self.kl.penalty(response.logp[t], reference_logp[t]);
                tally.loss += penalty;
                effect.d_logp += slope;
            }
        }
        if let EntropyBonus::Constant { coefficient } = self.entropy_bonus {
            for (t, effect) in effects.iter_mut().enumerate().filter(|(_, effect)| effect.kept) {
                tally.loss -= coefficient * response.entropy[t];
                effect.d_entropy = -coefficient;
            }
        }
    }

    /// Mean log-ratio over the kept tokens; absent where every token has an own ratio.
    fn sequence_log_ratio(
        &self,
        response: &ResponseSignals,
        effects: &[TokenEffect],
        n_kept: usize,
    ) -> Option<f64> {
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

    /// The factor on every token of a response before the division by N.
    fn token_share(&self, tally: &SequenceTally) -> f64 {
        match (self.aggregate, self.denominator) {
            (Aggregate::SequenceMeanOfTokenMean, Denominator::AllTokens) => {
                1.0 / tally.n_tokens.max(1) as f64
            }
            (Aggregate::SequenceMeanOfTokenMean, _) => 1.0 / tally.n_kept.max(1) as f64,
            (Aggregate::SequenceMeanOfTokenSum | Aggregate::TokenMean, _) => 1.0,
        }
    }

    /// Sums the tallies of a whole mini-batch. `sequences` is in the order of the mini-batch's responses.
    pub fn total(&self, sequences: &[SequenceTally]) -> Tally {
        let count = |of: fn(&SequenceTally) -> usize| sequences.iter().map(of).sum::<usize>();
        let n_tokens = count(|s| s.n_tokens);
        let n_kept = count(|s| s.n_kept);
        let n_clipped = count(|s| s.n_clipped);
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

/// True where GMPO clips a token: the log-ratio is beyond the clip in the direction that the advantage rewards.
fn geometric_clips(log_ratio: f64, advantage: f64, clip: f64) -> bool {
    (advantage > 0.0 && log_ratio > clip) || (advantage < 0.0 && log_ratio < -clip)
}

fn count(effects: &[TokenEffect], is_counted: impl Fn(&TokenEffect) -> bool) -> usize {
    effects.iter().filter(|effect| is_counted(effect)).count()
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

/// The error that names the first token with a ratio or derivative that is not finite.
#[cold]
fn not_finite(response_idx: usize, response: &ResponseSignals, effects: &[TokenEffect]) -> ObjectiveError {
    let ratio = effects.iter().position(|effect| !effect.ratio.is_finite());
    let loss = effects.iter().position(|effect| !effect.d_logp.is_finite());
    let (token_idx, what) = match (ratio, loss) {
        (Some(token_idx), _) => (token_idx, "ratio"),
        (None, token_idx) => (token_idx.unwrap_or(0), "loss"),
    };
    let (logp, behavior_logp) = (response.logp[token_idx], response.behavior_logp[token_idx]);
    ObjectiveError::NotFinite { response_idx, token_idx, what, logp, behavior_logp }
}
