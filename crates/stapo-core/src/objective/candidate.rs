//! S2T's candidates: the tokens that are rewarded and improbable. "Candidate" and "improbable" are defined here and
//! nowhere else.

use super::{Mask, MaskSignals, ObjectiveSpec, mask};

/// The log-prob below which a token is less likely than `tau_p`. Thresholds are compared as logarithms, and the logarithm
/// is `libm`'s, so a comparison has the same result on every machine.
pub fn logp_below(tau_p: f64) -> f64 {
    libm::log(tau_p)
}

/// True for a log-prob strictly below the threshold.
pub fn is_improbable(logp: f64, logp_below: f64) -> bool {
    logp < logp_below
}

/// True for a rewarded and improbable token.
pub(super) fn is_candidate(advantage: f64, logp: f64, logp_below: f64) -> bool {
    advantage > 0.0 && is_improbable(logp, logp_below)
}

impl ObjectiveSpec {
    /// The probability below which a token counts as improbable: the highest `tau_p` of the S2T masks, or the published
    /// value for an objective without such a mask.
    pub fn tau_p(&self) -> f64 {
        self.highest_tau_p().unwrap_or(mask::PUBLISHED_TAU_P)
    }

    /// True where a mask silences S2T candidates, or as many random tokens as S2T would.
    pub fn has_candidate_mask(&self) -> bool {
        self.highest_tau_p().is_some()
    }

    fn highest_tau_p(&self) -> Option<f64> {
        let thresholds = self.masks.iter().filter_map(|mask| match *mask {
            Mask::Spurious { tau_p, .. } | Mask::RandomTokens { tau_p, .. } => Some(tau_p),
            _ => None,
        });
        thresholds.reduce(f64::max)
    }

    /// Which tokens of a response are candidates, by the log-probs that the masks read. The columns have one length.
    pub fn candidates<'a>(
        &self,
        advantage: f64,
        logp: &'a [f64],
        behavior_logp: &'a [f64],
    ) -> impl Iterator<Item = bool> {
        let logp_below = logp_below(self.tau_p());
        let signal = self.signal_logp(logp, behavior_logp);
        signal.iter().map(move |&logp| is_candidate(advantage, logp, logp_below))
    }

    /// The log-probs that the masks read.
    pub(super) fn signal_logp<'a>(&self, logp: &'a [f64], behavior_logp: &'a [f64]) -> &'a [f64] {
        match self.mask_signals {
            MaskSignals::Current => logp,
            MaskSignals::Behavior => behavior_logp,
        }
    }
}
