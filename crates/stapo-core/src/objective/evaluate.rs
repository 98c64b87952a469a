//! The effect of the objective on each token of a response.

use super::calibrate::Calibration;
use super::surrogate::{Surrogate, SurrogatePoint, Valued};
use super::{
    Aggregate, Denominator, MaskKind, ObjectiveError, ObjectiveSpec, OffPolicy, Ratio, ResponseSignals,
    SilencedResponses, SilencedTokens, WeightLevel,
};
use serde::{Deserialize, Serialize};

/// What the objective does to one token. Derivatives are those of the un-normalised loss until [`Tally::scale_effects`]
/// makes them those of the mean.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TokenEffect {
    /// True if no mask silenced the token, so that the token is part of the loss.
    pub kept: bool,
    /// The first mask that silenced the token.
    pub silenced_by: Option<MaskKind>,
    /// True for a rewarded and improbable token, by the signals that the masks read and the thresholds of the S2T masks,
    /// or the published `tau_p` for an objective without such a mask.
    pub is_candidate: bool,
    /// True if the trust region of the surrogate is active.
    pub clipped: bool,
    /// Current over behavior probability, of the token or of the whole response as [`Ratio`] says.
    pub ratio: f64,
    /// Derivative of the surrogate by this token's log-prob before masks: `ratio * A` where nothing clips. For a
    /// silenced token, the derivative that the token would have had.
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
    /// Sum over the kept tokens, nats; 0 for an objective without adaptive settings.
    pub entropy: f64,
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
    /// Over the kept tokens; 1 if there are none.
    pub ratio_min: f64,
    pub ratio_max: f64,
    /// Mean entropy of the kept tokens, nats, which adaptive settings follow; absent for an objective without such
    /// settings, and for a mini-batch without kept tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy_mean: Option<f64>,
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
    /// Writes the effect of each token of one response of a calibrated mini-batch to `effects`. `response_idx` is the
    /// index of the response in the mini-batch.
    pub fn evaluate(
        &self,
        calibration: &Calibration,
        response_idx: usize,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
    ) -> Result<SequenceTally, ObjectiveError> {
        let n_tokens = response.logp.len();
        assert_eq!(effects.len(), n_tokens, "evaluate: one effect per token");
        self.start(calibration, response, effects);
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
        let log_weight = self.sequence_log_weight(response);
        match self.sequence_ratio(response, effects) {
            None => self.push_tokens(calibration, response_idx, response, log_weight, effects, &mut tally),
            Some(ratio) => self.push_sequence(ratio, response, log_weight, effects, &mut tally),
        }
        self.add_penalties(calibration, response, effects, &mut tally);
        tally.loss *= share;
        let mut finite = tally.loss.is_finite();
        for effect in effects.iter_mut() {
            effect.d_logp *= share;
            effect.d_entropy *= share;
            finite &= effect.ratio.is_finite() & effect.d_logp.is_finite();
        }
        if finite { Ok(tally) } else { Err(not_finite(response_idx, response, effects)) }
    }

    /// Applies a surrogate in which every token has a separate ratio.
    fn push_tokens(
        &self,
        calibration: &Calibration,
        response_idx: usize,
        response: &ResponseSignals,
        log_weight: Option<f64>,
        effects: &mut [TokenEffect],
        tally: &mut SequenceTally,
    ) {
        let signal_logp = self.columns(response).logp;
        let max_log_ratio = match self.ratio {
            Ratio::Token { max_log_ratio } => max_log_ratio.unwrap_or(f64::INFINITY),
            _ => f64::INFINITY,
        };
        for (token_idx, effect) in effects.iter_mut().enumerate() {
            let (logp, behavior_logp) = (response.logp[token_idx], response.behavior_logp[token_idx]);
            let advantage = response.advantage.at(token_idx);
            let log_ratio = logp - behavior_logp;
            let is_held = log_ratio.abs() > max_log_ratio;
            let log_ratio = if is_held { max_log_ratio.copysign(log_ratio) } else { log_ratio };
            let ratio = if log_ratio == 0.0 { 1.0 } else { libm::exp(log_ratio) };
            let penalised = calibration
                .penalised
                .is_some_and(|cut| cut.contains(advantage, signal_logp[token_idx], response_idx, token_idx));
            let mut valued =
                self.surrogate.at(SurrogatePoint { ratio, advantage, logp, behavior_logp, penalised });
            // The weight of CISPO is a constant anyway, and the slope is that of the log-prob next to it.
            if is_held && !matches!(self.surrogate, Surrogate::Cispo { .. }) {
                valued.slope = 0.0;
            }
            let off_policy = self.off_policy_weight(response, token_idx, log_weight);
            let push = record(effect, ratio, valued, off_policy, tally);
            effect.d_logp = -push;
        }
    }

    /// Applies a surrogate in which the response has one ratio. The ratio depends on the log-prob of every token of its
    /// mean alike, so all these tokens get the same derivative, except tokens that the geometric mean clips, which get
    /// none. Where the ratio is a constant weight, every token has an own derivative.
    fn push_sequence(
        &self,
        ratio: SequenceRatio,
        response: &ResponseSignals,
        log_weight: Option<f64>,
        effects: &mut [TokenEffect],
        tally: &mut SequenceTally,
    ) {
        let holds_ratio = self.surrogate.holds_ratio();
        let mut push = 0.0;
        for (token_idx, effect) in effects.iter_mut().enumerate() {
            let (logp, behavior_logp) = (response.logp[token_idx], response.behavior_logp[token_idx]);
            let advantage = response.advantage.at(token_idx);
            let point =
                SurrogatePoint { ratio: ratio.value, advantage, logp, behavior_logp, penalised: false };
            let mut valued = self.surrogate.at(point);
            valued.clipped |= self.geometric_bound(logp - behavior_logp, advantage).is_some();
            let off_policy = self.off_policy_weight(response, token_idx, log_weight);
            let contribution = record(effect, ratio.value, valued, off_policy, tally);
            if holds_ratio {
                effect.d_logp = -contribution;
            }
            push += contribution;
        }
        if holds_ratio {
            return;
        }
        let each = push / ratio.n_tokens.max(1) as f64;
        let is_geometric = matches!(self.ratio, Ratio::Geometric { .. });
        for effect in effects.iter_mut() {
            if is_geometric && effect.clipped {
                effect.weight = 0.0;
            } else if effect.kept || ratio.silenced == SilencedTokens::Stay {
                effect.d_logp = -each;
            }
        }
    }

    /// Adds the terms that do not depend on the advantage, for kept tokens.
    fn add_penalties(
        &self,
        calibration: &Calibration,
        response: &ResponseSignals,
        effects: &mut [TokenEffect],
        tally: &mut SequenceTally,
    ) {
        if let (true, Some(reference_logp)) = (self.kl_needs_reference(), response.reference_logp) {
            for (t, effect) in effects.iter_mut().enumerate().filter(|(_, effect)| effect.kept) {
                let (penalty, slope) =
                    self.kl.penalty(response.logp[t], reference_logp[t], response.behavior_logp[t]);
                tally.loss += penalty;
                effect.d_logp += slope;
            }
        }
        let coefficient = calibration.entropy_coefficient;
        if coefficient != 0.0 {
            for (t, effect) in effects.iter_mut().enumerate().filter(|(_, effect)| effect.kept) {
                tally.loss -= coefficient * response.entropy[t];
                effect.d_entropy = -coefficient;
            }
        }
        if self.is_adaptive() {
            let kept = response.entropy.iter().zip(&*effects).filter(|(_, effect)| effect.kept);
            tally.entropy = kept.map(|(entropy, _)| entropy).sum();
        }
    }

    /// The log of the off-policy weight of a whole response; absent if every token has a separate weight.
    fn sequence_log_weight(&self, response: &ResponseSignals) -> Option<f64> {
        let sampler_logp =
            response.sampler_logp.filter(|_| self.off_policy.level() == WeightLevel::Sequence)?;
        Some(response.behavior_logp.iter().zip(sampler_logp).map(|(ours, theirs)| ours - theirs).sum())
    }

    #[inline]
    fn off_policy_weight(&self, response: &ResponseSignals, token_idx: usize, sequence: Option<f64>) -> f64 {
        match (self.off_policy, sequence, response.sampler_logp) {
            (OffPolicy::None, _, _) | (_, None, None) => 1.0,
            (off_policy, Some(log_weight), _) => off_policy.weight(log_weight),
            (off_policy, None, Some(sampler_logp)) => {
                off_policy.weight(response.behavior_logp[token_idx] - sampler_logp[token_idx])
            }
        }
    }

    /// The one ratio of a response; absent if every token has a separate ratio.
    fn sequence_ratio(&self, response: &ResponseSignals, effects: &[TokenEffect]) -> Option<SequenceRatio> {
        let silenced = match self.ratio {
            Ratio::Token { .. } => return None,
            Ratio::Sequence { silenced } | Ratio::Geometric { silenced, .. } => silenced,
            Ratio::Product => SilencedTokens::Leave,
        };
        let mut sum = 0.0;
        let mut n_tokens = 0;
        for (t, effect) in effects.iter().enumerate() {
            if effect.kept || silenced == SilencedTokens::Stay {
                let log_ratio = response.logp[t] - response.behavior_logp[t];
                sum += self.geometric_bound(log_ratio, response.advantage.at(t)).unwrap_or(log_ratio);
                n_tokens += 1;
            }
        }
        let log_ratio = match self.ratio {
            Ratio::Product => sum.clamp(libm::log(SMALLEST_PRODUCT), LARGEST_LOG_PRODUCT),
            _ => sum / n_tokens.max(1) as f64,
        };
        Some(SequenceRatio { value: libm::exp(log_ratio), n_tokens, silenced })
    }

    /// The bound that takes the place of a log-ratio which GMPO clips: the log-ratio is beyond the bound in the direction
    /// that the advantage rewards.
    fn geometric_bound(&self, log_ratio: f64, advantage: f64) -> Option<f64> {
        match self.ratio {
            Ratio::Geometric { high, .. } if advantage > 0.0 && log_ratio > high => Some(high),
            Ratio::Geometric { low, .. } if advantage < 0.0 && log_ratio < -low => Some(-low),
            _ => None,
        }
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
            (_, Denominator::KeptTokens { silenced_responses: SilencedResponses::Leave }) => {
                n_sequences_kept as f64
            }
            (_, Denominator::KeptTokens { .. } | Denominator::AllTokens) => n_sequences as f64,
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
            entropy_mean: (self.is_adaptive() && n_kept > 0)
                .then(|| sequences.iter().map(|s| s.entropy).sum::<f64>() / n_kept as f64),
        }
    }
}

/// The smallest ratio of a whole response, and the log of the largest, as in TRL's VESPO.
const SMALLEST_PRODUCT: f64 = 1e-8;
const LARGEST_LOG_PRODUCT: f64 = 20.0;

/// The one ratio of a response.
#[derive(Debug, Clone, Copy)]
struct SequenceRatio {
    value: f64,
    /// The tokens whose log-ratios are in the mean.
    n_tokens: usize,
    silenced: SilencedTokens,
}

/// Writes what the surrogate gave for a token, and returns the token's weighted derivative; 0 for a silenced token.
#[inline]
fn record(
    effect: &mut TokenEffect,
    ratio: f64,
    valued: Valued,
    off_policy: f64,
    tally: &mut SequenceTally,
) -> f64 {
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

fn count(effects: &[TokenEffect], is_counted: impl Fn(&TokenEffect) -> bool) -> usize {
    effects.iter().filter(|effect| is_counted(effect)).count()
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
