//! A teacher's log-probs in the advantage: one number per token of the student's own response.

use super::ScoredResponse;
use crate::objective::Advantages;
use crate::stats::quantile_in_place;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a teacher adds to the advantage. `d_t = teacher_logp_t - behavior_logp_t` on the student's own tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Distillation {
    /// No teacher.
    #[default]
    None,
    /// On-policy distillation: `A_t = reward_weight A + beta d_t`. The mean of d over the student's tokens is minus the
    /// reverse KL to the teacher, so this minimises that divergence.
    ReverseKl {
        /// The factor on the teacher's part.
        #[serde(default = "one")]
        beta: f64,
        /// The factor on the advantage of the rewards.
        #[serde(default)]
        reward_weight: f64,
    },
    /// Direction-adaptive self-distillation: `A_t = A + beta w_t e_t` with `e_t = d_t / normalizer` and `w_t =
    /// tanh((tau - H_t) / sigma) sigmoid(|e_t| - 1)`; tau is the `quantile` of the response's entropies, sigma their mean
    /// absolute deviation from their mean. Where the student was surer than tau the teacher pulls, elsewhere it pushes.
    /// A response whose entropies are all equal, or whose normalizer is 0, keeps its advantage.
    Dasd {
        /// The factor on the teacher's part.
        #[serde(default = "default_beta")]
        beta: f64,
        /// The quantile of the response's entropies up to which the teacher pulls.
        #[serde(default = "default_quantile")]
        quantile: f64,
        /// What the log-ratios of a response are divided by.
        #[serde(default)]
        normalizer: Normalizer,
    },
}

/// What DASD divides the teacher's log-ratios of a response by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Normalizer {
    /// The response's mean |d|: the gate's centre, |e| = 1, is then the usual difference.
    #[default]
    MeanAbs,
    /// The root of the response's mean d^2.
    RootMeanSquare,
    /// 1: nats.
    None,
}

fn one() -> f64 {
    1.0
}
fn default_beta() -> f64 {
    0.1
}
fn default_quantile() -> f64 {
    0.8
}

impl Distillation {
    /// Adds the teacher's part. [`crate::ObjectiveSpec::advantages`] has checked that the columns are there.
    pub(super) fn add(self, response: &ScoredResponse, advantages: &mut Advantages) {
        let (Some(teacher), Some(student)) = (response.teacher_logp, response.behavior_logp) else { return };
        let differences = teacher.iter().zip(student).map(|(teacher, student)| teacher - student);
        let (reward_weight, added) = match self {
            Distillation::None => return,
            Distillation::ReverseKl { beta, reward_weight } => {
                (reward_weight, differences.map(|d| beta * d).collect())
            }
            Distillation::Dasd { beta, quantile, normalizer } => {
                let Some(entropy) = response.behavior_entropy else { return };
                (1.0, dasd(&differences.collect::<Vec<f64>>(), entropy, beta, quantile, normalizer))
            }
        };
        let view = advantages.view();
        let tokens =
            added.iter().enumerate().map(|(t, added): (usize, &f64)| reward_weight * view.at(t) + added);
        *advantages = Advantages::Tokens(tokens.collect());
    }
}

/// `beta w_t e_t` for each token of a response.
fn dasd(differences: &[f64], entropy: &[f64], beta: f64, quantile: f64, normalizer: Normalizer) -> Vec<f64> {
    let n = differences.len().max(1) as f64;
    let unit = match normalizer {
        Normalizer::MeanAbs => differences.iter().map(|d| d.abs()).sum::<f64>() / n,
        Normalizer::RootMeanSquare => (differences.iter().map(|d| d * d).sum::<f64>() / n).sqrt(),
        Normalizer::None => 1.0,
    };
    let mean_entropy = entropy.iter().sum::<f64>() / n;
    let sigma = entropy.iter().map(|h| (h - mean_entropy).abs()).sum::<f64>() / n;
    let tau = quantile_in_place(&mut entropy.to_vec(), quantile);
    let Some(tau) = tau.filter(|_| sigma > 0.0 && unit > 0.0) else {
        return vec![0.0; differences.len()];
    };
    let of_token = |(d, h): (&f64, &f64)| {
        let e = d / unit;
        let direction = libm::tanh((tau - h) / sigma);
        let gate = 1.0 / (1.0 + libm::exp(1.0 - e.abs()));
        beta * direction * gate * e
    };
    differences.iter().zip(entropy).map(of_token).collect()
}
