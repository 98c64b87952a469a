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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_fall_to_their_last_factor_after_the_warm_up() {
        let linear = Schedule {
            warmup_steps: Some(2),
            final_factor: Some(0.2),
            total_steps: Some(10),
            ..Schedule::without_warmup(Curve::Linear)
        };
        let factors = |schedule: Schedule| [0, 1, 2, 4, 6, 10, 30].map(|step| schedule.factor(step, 99));
        let near = |found: [f64; 7], expected: [f64; 7]| {
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?}");
        };
        near(factors(linear), [0.5, 1.0, 1.0, 0.8, 0.6, 0.2, 0.2]);
        // A quarter of the way is at (1 + cos(pi / 4)) / 2.
        let quarter = 0.2 + 0.8 * (1.0 + 0.5_f64.sqrt()) / 2.0;
        near(factors(Schedule { kind: Curve::Cosine, ..linear }), [0.5, 1.0, 1.0, quarter, 0.6, 0.2, 0.2]);
        let share = Schedule { warmup_steps: None, warmup_share: Some(0.4), final_factor: None, ..linear };
        near(factors(share), [0.25, 0.5, 0.75, 1.0, 2.0 / 3.0, 0.0, 0.0]);
        near(factors(Schedule::constant(4)), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]);
        assert!((Schedule { total_steps: None, ..linear }.factor(50, 98) - 0.6).abs() < 1e-12);
        for (schedule, follows) in [
            (linear, false),
            (Schedule { total_steps: None, ..linear }, true),
            (Schedule::constant(4), false),
            (Schedule { warmup_share: Some(0.1), ..Schedule::without_warmup(Curve::Constant) }, true),
        ] {
            assert_eq!(schedule.follows_the_plan(), follows, "{schedule:?}");
        }
        let is_taken = |schedule: Schedule| schedule.check().is_ok();
        assert!(is_taken(linear) && is_taken(Schedule { total_steps: Some(2), ..linear }));
        assert!(!is_taken(Schedule { total_steps: Some(1), ..linear }));
        assert!(!is_taken(Schedule { total_steps: Some(0), warmup_steps: None, ..linear }));
        assert!(!is_taken(Schedule { warmup_share: Some(0.1), ..linear }));
        assert!(is_taken(Schedule { final_factor: Some(0.0), ..linear }));
        assert!(!is_taken(Schedule { final_factor: Some(-0.1), ..linear }));
        assert!(!is_taken(Schedule { final_factor: Some(f64::INFINITY), ..linear }));
        assert!(!is_taken(Schedule { kind: Curve::Constant, total_steps: None, ..linear }));
        assert!(!is_taken(Schedule { total_steps: Some(9), ..Schedule::constant(2) }));
        assert!(is_taken(Schedule { warmup_share: Some(1.0), ..Schedule::without_warmup(Curve::Linear) }));
        assert!(!is_taken(Schedule { warmup_share: Some(1.1), ..Schedule::without_warmup(Curve::Linear) }));
    }
}
