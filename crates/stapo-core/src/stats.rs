//! Statistics of evaluations and experiments, with the question as the unit of chance.
//!
//! Samples of one question are alike, so the questions, not the samples, are the independent draws: every standard
//! error, interval and test here works on one number per question. Numbers are f64; results are functions of the
//! arguments alone (resampling is keyed by a seed).
//!
//! | question asked | call |
//! |---|---|
//! | how good is it | [`avg_at_k`], [`pass_at_k`], [`maj_at_k`] |
//! | ... for scores that are not right-or-wrong | [`clustered_mean`], [`mean_estimate`] |
//! | ... without the normal approximation | [`bootstrap()`], [`paired_bootstrap`], [`wilson`] |
//! | is B better than A on the same questions | [`compare_paired`], then [`holm()`] over benchmarks |
//! | could this benchmark have shown it | [`PairedDesign`] |
//! | how long until an event, and do groups differ in it | [`kaplan_meier`], [`log_rank`] |
//! | do two quantities rise together | [`spearman()`] |

mod at_k;
mod bootstrap;
mod cluster;
mod descriptive;
pub mod distribution;
mod error;
mod headline;
mod holm;
mod majority;
mod paired;
mod permutation;
mod power;
mod spearman;
mod survival;
mod wilcoxon;

#[cfg(test)]
mod tests;

pub use at_k::{QuestionCount, avg_at_k, pass_at_k};
pub use bootstrap::{Bootstrapped, Resampling, bca_interval, bootstrap, percentile_interval};
pub use cluster::{
    LEVEL, QuestionScores, VarianceComponents, clustered_mean, mean_estimate, t_interval,
    variance_components, wilson,
};
pub use descriptive::{
    area_under_curve, entropy_stability, has_spread, mean, quantile, quantile_in_place, quantile_sorted,
};
pub use error::StatsError;
pub use headline::{Contest, headline_gain};
pub use holm::holm;
pub use majority::{AnswerVotes, QuestionVotes, maj_at_k};
pub use paired::{AgainstArm, PairedComparison, compare_by_seed, compare_paired, paired_bootstrap, paired_t};
pub use permutation::paired_permutation;
pub use power::PairedDesign;
pub use spearman::spearman;
pub use survival::{Lifetime, LogRank, Subject, SurvivalStep, kaplan_meier, log_rank};
pub use wilcoxon::wilcoxon_signed_rank;

use serde::{Deserialize, Serialize};

/// A range that holds the truth in a share `level` of repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
    pub level: f64,
}

impl Interval {
    /// The part within a known range of the truth, such as 0..1 for a proportion: cutting there loses no coverage.
    #[must_use]
    pub fn within(self, low: f64, high: f64) -> Self {
        Self { low: self.low.clamp(low, high), high: self.high.clamp(low, high), level: self.level }
    }
}

/// A mean over questions. One question alone has no standard error and no interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    pub value: f64,
    pub standard_error: Option<f64>,
    pub interval: Option<Interval>,
    pub n_questions: usize,
    pub n_samples: usize,
}

/// How a p value was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// From the whole null distribution.
    Exact,
    /// From random draws of the null distribution, with the observed value counted among the draws.
    MonteCarlo,
    NormalApproximation,
    StudentT,
}

/// A two-sided test of "no difference". `statistic` is always finite.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Test {
    pub statistic: f64,
    pub p_value: f64,
    pub method: Method,
}
