//! The learning rate over the optimizer steps.

use super::refusal::{PlanError, require};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The factor on the learning rate over the optimizer steps: a linear warm-up from 0, then a curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// The curve after the warm-up.
    pub kind: Curve,
    /// The warm-up in optimizer steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// The warm-up as a share of the total, instead of `warmup_steps`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warmup_share: Option<f64>,
    /// The optimizer steps at which the curve ends; by default those of the whole plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// The factor at the total, for a curve that falls; 0 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub final_factor: Option<f64>,
}

/// The factor after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Curve {
    /// The full learning rate.
    Constant,
    /// A straight line from 1 down to `final_factor` at the total.
    Linear,
    /// A half cosine from 1 down to `final_factor` at the total.
    Cosine,
}

impl Schedule {
    /// The curve without a warm-up.
    pub fn without_warmup(kind: Curve) -> Self {
        Self { kind, warmup_steps: None, warmup_share: None, total_steps: None, final_factor: None }
    }

    /// A constant schedule after `warmup_steps`.
    pub fn constant(warmup_steps: u64) -> Self {
        Self { warmup_steps: Some(warmup_steps), ..Self::without_warmup(Curve::Constant) }
    }

    /// The factor on the learning rate in optimizer step `step`, counted from 0, of a plan with `n_planned` optimizer
    /// steps.
    pub fn factor(self, step: u64, n_planned: u64) -> f64 {
        let total = self.total_steps.unwrap_or(n_planned);
        let warmup_of_share = self.warmup_share.map(|share| (share * total as f64).round() as u64);
        let warmup = self.warmup_steps.or(warmup_of_share).unwrap_or(0);
        if step < warmup {
            return (step + 1) as f64 / warmup as f64;
        }
        let span = total.saturating_sub(warmup).max(1) as f64;
        let done = ((step - warmup) as f64 / span).min(1.0);
        let height = match self.kind {
            Curve::Constant => return 1.0,
            Curve::Linear => 1.0 - done,
            Curve::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * done)),
        };
        let last = self.final_factor.unwrap_or(0.0);
        last + (1.0 - last) * height
    }

    /// Whether factors depend on the number of planned optimizer steps, so that a longer run has other learning rates.
    pub fn follows_the_plan(self) -> bool {
        self.total_steps.is_none() && (self.warmup_share.is_some() || self.kind != Curve::Constant)
    }

    /// Refuses values that make no schedule.
    pub(crate) fn check(self) -> Result<(), PlanError> {
        let Self { kind, warmup_steps, warmup_share, total_steps, final_factor } = self;
        let (share, total) = (warmup_share.unwrap_or(0.0), total_steps.unwrap_or(u64::MAX));
        require(
            warmup_steps.is_none() || warmup_share.is_none(),
            "update.schedule.warmup_share",
            share,
            "is given together with warmup_steps",
            "give one of the two",
        )?;
        let is_share = (0.0..=1.0).contains(&share);
        require(is_share, "update.schedule.warmup_share", share, "expected a number from 0 to 1", "")?;
        let last = final_factor.unwrap_or(0.0);
        let key = "update.schedule.final_factor";
        let falls = kind != Curve::Constant || final_factor.is_none();
        require(
            falls,
            key,
            last,
            "is given together with kind = \"constant\"",
            "take linear or cosine, or leave it out",
        )?;
        require(last.is_finite() && last >= 0.0, key, last, "expected at least 0", "")?;
        let is_read = kind != Curve::Constant || warmup_share.is_some() || total_steps.is_none();
        require(
            is_read,
            "update.schedule.total_steps",
            total,
            "has no effect with kind = \"constant\" without warmup_share",
            "take linear or cosine, or leave it out",
        )?;
        let is_long = total >= 1 && total >= warmup_steps.unwrap_or(0);
        let expected = "expected at least 1, and at least warmup_steps";
        require(is_long, "update.schedule.total_steps", total, expected, "")
    }
}
