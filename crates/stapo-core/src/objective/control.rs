//! Settings that adapt from optimizer step to optimizer step.

use super::{EntropyBonus, Mask, ObjectiveSpec, Tally};
use serde::{Deserialize, Serialize};

/// The values of the settings that adapt, for the next optimizer step. A run keeps this value in its checkpoints. The
/// default is the state before the first step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Controls {
    /// Mean entropy of the kept tokens in the step before, nats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f64>,
    /// Coefficient of an entropy bonus with a target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy_coefficient: Option<f64>,
    /// Weight of an adaptive STARE mask.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stare_weight: Option<f64>,
}

impl ObjectiveSpec {
    /// True if a setting adapts from step to step, so that the run must keep [`Controls`].
    pub fn is_adaptive(&self) -> bool {
        matches!(self.entropy_bonus, EntropyBonus::Target { .. })
            || self.masks.iter().any(|mask| matches!(mask, Mask::Stare { step, .. } if *step > 0.0))
    }

    /// The controls for the optimizer step after the one with these controls and this outcome. A step without kept
    /// tokens has no entropy and changes nothing.
    pub fn next_controls(&self, controls: Controls, tally: &Tally) -> Controls {
        let Some(entropy) = tally.entropy_mean else { return controls };
        let toward = |value: f64, target: f64, step: f64| {
            if entropy <= target { value + step } else { value - step }
        };
        let entropy_coefficient = match self.entropy_bonus {
            EntropyBonus::Target { target, initial, step, min, max } => {
                let value = controls.entropy_coefficient.unwrap_or(initial);
                Some(toward(value, target, step).clamp(min, max))
            }
            _ => None,
        };
        let adaptive_stare = self.masks.iter().find_map(|mask| match *mask {
            Mask::Stare { weight, entropy_below, step, min, max, .. } if step > 0.0 => {
                let value = controls.stare_weight.unwrap_or(weight);
                Some(toward(value, entropy_below, step).clamp(min, max))
            }
            _ => None,
        });
        Controls { entropy: Some(entropy), entropy_coefficient, stare_weight: adaptive_stare }
    }

    /// The coefficient of the entropy bonus under these controls.
    pub(super) fn entropy_coefficient(&self, controls: Controls) -> f64 {
        match self.entropy_bonus {
            EntropyBonus::None => 0.0,
            EntropyBonus::Constant { coefficient } => coefficient,
            EntropyBonus::Target { target, initial, .. } => match controls.entropy {
                Some(entropy) if entropy <= target => controls.entropy_coefficient.unwrap_or(initial),
                _ => 0.0,
            },
        }
    }
}
