//! Refuses impossible preference objectives before a run starts, with the reason.

use super::{PreferenceLoss, PreferenceSpec};
use crate::objective::{MaskKind, SpecError};

impl PreferenceSpec {
    /// Checks every value. Keys in messages are below `preference`.
    pub fn check(&self) -> Result<(), SpecError> {
        let refuse = |key: &str, problem: String, remedy: &str| {
            let (key, remedy) = (key.to_string(), remedy.to_string());
            Err(SpecError::RefusedPreference { key, problem, remedy })
        };
        let above_0 = |key: &'static str, value: f64| (key, value, value > 0.0, "a positive number");
        let at_least_0 = |key: &'static str, value: f64| (key, value, value >= 0.0, "at least 0");
        let values = match self.loss {
            PreferenceLoss::Dpo { beta, label_smoothing } => {
                let is_share = (0.0..0.5).contains(&label_smoothing);
                let smoothing = ("label_smoothing", label_smoothing, is_share, "a share from 0 to below 0.5");
                vec![above_0("beta", beta), smoothing]
            }
            PreferenceLoss::Ipo { beta } | PreferenceLoss::Orpo { beta } => vec![above_0("beta", beta)],
            PreferenceLoss::Simpo { beta, gamma } => vec![above_0("beta", beta), at_least_0("gamma", gamma)],
            PreferenceLoss::Kto { beta, desirable_weight, undesirable_weight } => vec![
                above_0("beta", beta),
                at_least_0("desirable_weight", desirable_weight),
                at_least_0("undesirable_weight", undesirable_weight),
            ],
        };
        for (key, value, is_good, expected) in values {
            if !(value.is_finite() && is_good) {
                return refuse(&format!("loss.{key}"), format!("{value}, expected {expected}"), "");
            }
        }
        let is_possible = |kind| {
            matches!(kind, MaskKind::Spurious | MaskKind::RandomTokens | MaskKind::TopEntropy | MaskKind::Rsi)
        };
        if let Some(idx) = self.masks.iter().position(|mask| !is_possible(mask.kind())) {
            let problem = "weighs advantages or reads sampled log-probs, and given responses have neither";
            let remedy = "spurious, random_tokens, top_entropy or rsi";
            return refuse(&format!("masks.{idx}.kind"), problem.to_string(), remedy);
        }
        self.mask_objective().check().map_err(|error| match error {
            SpecError::Refused { key, problem, remedy } => {
                SpecError::RefusedPreference { key, problem, remedy }
            }
            other => other,
        })
    }
}
