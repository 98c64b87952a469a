//! The learning rate over the optimizer steps.

use super::refusal::{PlanError, require};
use serde::{Deserialize, Serialize};

/// The factor on the learning rate over the optimizer steps: a linear warm-up from 0, then one of three curves. The
/// warm-up is `warmup_steps` optimizer steps, or `warmup_share` of the total, or none. The total is `total_steps`, or
/// else all optimizer steps of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Schedule {
    /// 1 after the warm-up.
    Constant {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        warmup_steps: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        warmup_share: Option<f64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total_steps: Option<u64>,
    },
    /// A straight line from 1 down to `final_factor` at the total.
    Linear {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        warmup_steps: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        warmup_share: Option<f64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total_steps: Option<u64>,
        #[serde(default)]
        final_factor: f64,
    },
    /// A half cosine from 1 down to `final_factor` at the total.
    Cosine {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        warmup_steps: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        warmup_share: Option<f64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total_steps: Option<u64>,
        #[serde(default)]
        final_factor: f64,
    },
}

/// The keys that all kinds have.
struct Common {
    warmup_steps: Option<u64>,
    warmup_share: Option<f64>,
    total_steps: Option<u64>,
    /// 1 for a constant schedule.
    final_factor: f64,
}

impl Schedule {
    /// A constant schedule after `warmup_steps`.
    pub fn constant(warmup_steps: u64) -> Self {
        Schedule::Constant { warmup_steps: Some(warmup_steps), warmup_share: None, total_steps: None }
    }

    fn common(self) -> Common {
        match self {
            Schedule::Constant { warmup_steps, warmup_share, total_steps } => {
                Common { warmup_steps, warmup_share, total_steps, final_factor: 1.0 }
            }
            Schedule::Linear { warmup_steps, warmup_share, total_steps, final_factor }
            | Schedule::Cosine { warmup_steps, warmup_share, total_steps, final_factor } => {
                Common { warmup_steps, warmup_share, total_steps, final_factor }
            }
        }
    }

    /// The factor on the learning rate in optimizer step `step`, counted from 0, of a plan with `n_planned` optimizer
    /// steps.
    pub fn factor(self, step: u64, n_planned: u64) -> f64 {
        let Common { warmup_steps, warmup_share, total_steps, final_factor } = self.common();
        let total = total_steps.unwrap_or(n_planned);
        let of_share = warmup_share.map(|share| (share * total as f64).round() as u64);
        let warmup = warmup_steps.or(of_share).unwrap_or(0);
        if step < warmup {
            return (step + 1) as f64 / warmup as f64;
        }
        let span = total.saturating_sub(warmup).max(1) as f64;
        let done = ((step - warmup) as f64 / span).min(1.0);
        let height = match self {
            Schedule::Constant { .. } => return 1.0,
            Schedule::Linear { .. } => 1.0 - done,
            Schedule::Cosine { .. } => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * done)),
        };
        final_factor + (1.0 - final_factor) * height
    }

    /// Whether factors depend on the number of planned optimizer steps, so that a longer run has other learning rates.
    pub fn follows_the_plan(self) -> bool {
        let Common { warmup_share, total_steps, .. } = self.common();
        total_steps.is_none() && (warmup_share.is_some() || !matches!(self, Schedule::Constant { .. }))
    }

    /// Refuses values that make no schedule.
    pub(crate) fn check(self) -> Result<(), PlanError> {
        let Common { warmup_steps, warmup_share, total_steps, final_factor } = self.common();
        let (share, total) = (warmup_share.unwrap_or(0.0), total_steps.unwrap_or(u64::MAX));
        require(
            warmup_steps.is_none() || warmup_share.is_none(),
            "update.schedule.warmup_share",
            share,
            "stands beside warmup_steps",
            "give one of the two",
        )?;
        let is_share = (0.0..=1.0).contains(&share);
        require(is_share, "update.schedule.warmup_share", share, "expected a number from 0 to 1", "")?;
        let is_factor = final_factor.is_finite() && final_factor >= 0.0;
        require(is_factor, "update.schedule.final_factor", final_factor, "expected at least 0", "")?;
        let is_long = total >= 1 && total >= warmup_steps.unwrap_or(0);
        let expected = "expected at least 1, and at least warmup_steps";
        require(is_long, "update.schedule.total_steps", total, expected, "")
    }
}
