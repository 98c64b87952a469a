//! What of a mini-batch has to wait for the mini-batch's thresholds. Where only S2T's candidates do, all other tokens can
//! be learned from before the thresholds are known.

use super::calibrate::{CalibratedMask, CandidateRule};
use super::{
    Aggregate, Calibration, Denominator, Mask, MaskSignals, ObjectiveError, ObjectiveSpec, Ratio, Surrogate,
    Threshold, TokenEffect, UpdateKey,
};

/// The tokens whose effects depend on the thresholds of the whole mini-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Deferral {
    /// The candidates: every other token has the same effect whether candidates are kept or silenced.
    Candidates,
    /// All tokens of the responses that have a candidate: the ratio or the mean of a response depends on which of its
    /// tokens are kept.
    Responses,
}

impl Deferral {
    /// Tells of each token of a response whether it waits. Which tokens are candidates does not depend on the
    /// thresholds, so provisional and final effects give the same answer.
    pub fn waits(self, effects: &[TokenEffect]) -> impl Fn(&TokenEffect) -> bool {
        let has_candidate = effects.iter().any(|effect| effect.is_candidate);
        move |effect| match self {
            Deferral::Candidates => effect.is_candidate,
            Deferral::Responses => has_candidate,
        }
    }

    /// True if a response has a token that waited and moves the policy.
    pub fn has_waited(self, effects: &[TokenEffect]) -> bool {
        let waits = self.waits(effects);
        let moves = |effect: &TokenEffect| effect.d_logp != 0.0 || effect.d_entropy != 0.0;
        effects.iter().any(|effect| waits(effect) && moves(effect))
    }
}

impl ObjectiveSpec {
    /// What waits for the thresholds of a mini-batch; `None` if any token may depend on the thresholds, or none does.
    pub fn deferral(&self) -> Option<Deferral> {
        let is_settled = |mask: &Mask| match mask {
            Mask::Spurious { threshold, .. } => {
                matches!(threshold, Threshold::TauP | Threshold::Surprise { .. })
            }
            other => !other.needs_calibration(),
        };
        let waits = self.mask_signals == MaskSignals::Current
            && self.calibrates_on_current_policy()
            && self.masks.iter().all(is_settled)
            && !matches!(self.surrogate, Surrogate::KlCov { .. });
        let is_token_by_token = matches!(self.ratio, Ratio::Token { .. })
            && (self.aggregate != Aggregate::SequenceMeanOfTokenMean
                || self.denominator == Denominator::AllTokens);
        waits.then_some(if is_token_by_token { Deferral::Candidates } else { Deferral::Responses })
    }

    /// The calibration before a mini-batch was seen, for an objective with a [`Deferral`]: every candidate is silenced.
    /// Effects of tokens that do not wait are final.
    pub fn provisional(&self, update: UpdateKey) -> Result<Calibration, ObjectiveError> {
        let mut calibration = self.calibrate(&[], update)?;
        for mask in &mut calibration.masks {
            if let CalibratedMask::Spurious { rule, .. } = mask {
                *rule = CandidateRule::All;
            }
        }
        Ok(calibration)
    }
}
