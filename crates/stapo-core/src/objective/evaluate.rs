//! The fate and the effect of each token of a response.

use super::calibrate::{CalibratedMask, Calibration, CandidateRule, is_candidate};
use super::surrogate::{Point, Valued};
use super::{
    Aggregate, Denominator, EntropyBonus, MaskKind, ObjectiveError, ObjectiveSpec, Ratio, ResponseSignals,
    Surrogate,
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
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
    ) -> Result<SequenceTally, ObjectiveError> {
        let n_tokens = response.logp.len();
        assert_eq!(effects.len(), n_tokens, "evaluate: one effect per token");
        effects.fill(TokenEffect { kept: true, weight: 1.0, ..TokenEffect::default() });
        for mask in &calibration.masks {
            self.apply(mask, response_idx, response, effects);
        }
        let n_kept = effects.iter().filter(|effect| effect.kept).count();
        let mut tally = SequenceTally {
            n_tokens,
            n_kept,
            n_candidates: self.n_candidates(calibration, response),
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

    /// Silences tokens, or multiplies the soft weight that stands in `weight` for now.
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

    /// Tokens that are a candidate of any S2T mask: of the one with the highest threshold.
    fn n_candidates(&self, calibration: &Calibration, response: &ResponseSignals) -> usize {
        let thresholds = calibration.masks.iter().filter_map(|mask| match *mask {
            CalibratedMask::Spurious { logp_below, .. } | CalibratedMask::RandomTokens { logp_below, .. } => {
                Some(logp_below)
            }
            _ => None,
        });
        let logp_below = thresholds.fold(f64::NEG_INFINITY, f64::max);
        self.signals(response)
            .0
            .iter()
            .filter(|&&logp| is_candidate(response.advantage, logp, logp_below))
            .count()
    }

    /// The surrogate where every token has its own ratio.
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

    /// The surrogate where a response has one ratio, which moves with the log-prob of every kept token alike; those that a geometric
    /// mean clips are held.
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

    /// Writes what the surrogate found for a token and returns what a kept token pushes with.
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

    /// The terms that have nothing to do with the advantage, on kept tokens.
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

    /// Mean log-ratio over the kept tokens, where the ratio belongs to the whole response.
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

/// Names the first token whose numbers overflowed.
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
