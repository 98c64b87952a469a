//! What difference a paired evaluation can show, and how many questions a difference needs.

use serde::{Deserialize, Serialize};

use super::StatsError;
use super::cluster::{QuestionScores, VarianceComponents, variance_components};
use super::descriptive::variance_of;
use super::distribution::{normal_quantile, t_quantile};
use super::error::{at_least, open_unit, same_length};

/// Most questions [`PairedDesign::questions_needed`] answers with: above 2^53, f64 no longer holds every integer.
const MAX_QUESTIONS: u64 = 1 << 53;

/// Two arms answer the same questions. With n questions, `samples_a` and `samples_b` samples each, the mean difference
/// has variance `(effect_variance + within_a / samples_a + within_b / samples_b) / n` (Miller 2024, section 5).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairedDesign {
    /// Variance over questions of the true difference between the arms.
    pub effect_variance: f64,
    /// Variance over samples of arm A around its question's true mean.
    pub within_a: f64,
    pub within_b: f64,
    pub samples_a: f64,
    pub samples_b: f64,
    /// Chance of a false alarm, two-sided.
    pub alpha: f64,
    /// Chance of finding a difference of the size asked about.
    pub power: f64,
}

impl PairedDesign {
    pub const ALPHA: f64 = 0.05;
    pub const POWER: f64 = 0.8;

    /// A design before arm B exists: arm B is taken to spread like A, with question means correlated with A's by
    /// `correlation` (near 1 for two checkpoints of one model), so that
    /// `effect_variance = 2 between (1 - correlation)`.
    pub fn planned(
        components: &VarianceComponents,
        correlation: f64,
        samples: usize,
    ) -> Result<Self, StatsError> {
        if !(-1.0..=1.0).contains(&correlation) {
            return Err(StatsError::OutOfRange {
                what: "correlation",
                value: correlation,
                expected: "a number from -1 to 1",
            });
        }
        let design = Self {
            effect_variance: 2.0 * components.between * (1.0 - correlation),
            within_a: components.within,
            within_b: components.within,
            samples_a: samples as f64,
            samples_b: samples as f64,
            alpha: Self::ALPHA,
            power: Self::POWER,
        };
        design.check()?;
        Ok(design)
    }

    /// From both arms' samples of the same questions, in the same order. Needs repeated samples in both arms;
    /// `samples_a` and `samples_b` are the harmonic means. `effect_variance` is what the variance of the observed
    /// differences leaves after the samples' share, never below 0.
    pub fn measured(a: &[QuestionScores], b: &[QuestionScores]) -> Result<Self, StatsError> {
        same_length("arms", a.len(), b.len())?;
        let (spread_a, spread_b) = (variance_components(a)?, variance_components(b)?);
        let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| b.mean() - a.mean()).collect();
        let sampling =
            spread_a.within * spread_a.inverse_samples + spread_b.within * spread_b.inverse_samples;
        Ok(Self {
            effect_variance: (variance_of(&differences) - sampling).max(0.0),
            within_a: spread_a.within,
            within_b: spread_b.within,
            samples_a: 1.0 / spread_a.inverse_samples,
            samples_b: 1.0 / spread_b.inverse_samples,
            alpha: Self::ALPHA,
            power: Self::POWER,
        })
    }

    /// Variance of one question's observed difference.
    pub fn difference_variance(&self) -> f64 {
        self.effect_variance + self.within_a / self.samples_a + self.within_b / self.samples_b
    }

    /// The smallest true difference that a paired t test of `n_questions` (at least 2) finds with the wanted power.
    pub fn minimum_detectable_effect(&self, n_questions: u64) -> Result<f64, StatsError> {
        self.check()?;
        at_least("questions", 2, usize::try_from(n_questions).unwrap_or(usize::MAX))?;
        Ok(detectable(self.difference_variance(), n_questions, self.alpha, self.power))
    }

    /// The fewest questions whose [`minimum_detectable_effect`](Self::minimum_detectable_effect) is at most `effect`.
    pub fn questions_needed(&self, effect: f64) -> Result<u64, StatsError> {
        self.check()?;
        let reaches = |n: u64| detectable(self.difference_variance(), n, self.alpha, self.power) <= effect;
        if !(effect > 0.0 && reaches(MAX_QUESTIONS)) {
            return Err(StatsError::OutOfRange {
                what: "effect",
                value: effect,
                expected: "a number above 0 within reach of 2^53 questions",
            });
        }
        let mut enough = 2;
        while !reaches(enough) {
            enough *= 2;
        }
        let mut too_few = enough / 2;
        while enough - too_few > 1 {
            let middle = too_few + (enough - too_few) / 2;
            if reaches(middle) {
                enough = middle;
            } else {
                too_few = middle;
            }
        }
        Ok(enough)
    }

    fn check(&self) -> Result<(), StatsError> {
        let variances = [
            ("effect_variance", self.effect_variance),
            ("within_a", self.within_a),
            ("within_b", self.within_b),
        ];
        for (what, value) in variances {
            if !(value.is_finite() && value >= 0.0) {
                return Err(StatsError::OutOfRange { what, value, expected: "a finite number not below 0" });
            }
        }
        for (what, value) in [("samples_a", self.samples_a), ("samples_b", self.samples_b)] {
            if value.is_nan() || value < 1.0 {
                return Err(StatsError::OutOfRange { what, value, expected: "at least 1" });
            }
        }
        open_unit("alpha", self.alpha)?;
        if !(0.5..1.0).contains(&self.power) {
            return Err(StatsError::OutOfRange {
                what: "power",
                value: self.power,
                expected: "at least 0.5 and below 1",
            });
        }
        Ok(())
    }
}

/// `delta sqrt(variance / n)`, delta being the non-centrality at which a t test with n - 1 = v degrees of freedom and
/// critical value t has the wanted power: `t (1 - 1 / (4 v)) + z_power sqrt(1 + t^2 / (2 v))`, from the normal
/// approximation of the non-central t (Abramowitz, Stegun 26.7.10); within 0.2 % from 10 questions on.
pub(super) fn detectable(difference_variance: f64, n_questions: u64, alpha: f64, power: f64) -> f64 {
    let n = n_questions as f64;
    let freedom = n - 1.0;
    let t = t_quantile(1.0 - 0.5 * alpha, freedom);
    let delta = t * (1.0 - 0.25 / freedom) + normal_quantile(power) * (1.0 + t * t / (2.0 * freedom)).sqrt();
    delta * (difference_variance / n).sqrt()
}
