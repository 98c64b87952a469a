//! Reward models: the loss that trains one from pairs, and how its scores become rewards.

use crate::preference::{log_sigmoid, sigmoid};
use crate::stats::has_spread;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The loss of a reward model, `-ln sigmoid(s_c - s_r - m) + c (s_c + s_r)^2` for scores `s` of a chosen and a rejected
/// response and the margin `m` of their row (Bradley and Terry 1952; Touvron et al. 2023, eq. 2; the formulas of TRL's
/// `RewardTrainer`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RankingSpec {
    /// The factor c, which keeps scores near 0 (Eisenstein et al. 2023, eq. 2): 0 for none, 0.01 in their paper. TRL calls it
    /// `center_rewards_coefficient`.
    pub center_coefficient: f64,
}

/// The loss of one pair and its derivatives by the two scores.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairEffect {
    pub loss: f64,
    pub d_chosen: f64,
    pub d_rejected: f64,
}

impl RankingSpec {
    /// Whether the coefficient is one that a run can have.
    pub fn is_possible(&self) -> bool {
        self.center_coefficient.is_finite() && self.center_coefficient >= 0.0
    }

    pub fn evaluate(&self, chosen: f64, rejected: f64, margin: f64) -> PairEffect {
        let lead = chosen - rejected - margin;
        let sum = chosen + rejected;
        let d_lead = -sigmoid(-lead);
        let d_sum = 2.0 * self.center_coefficient * sum;
        PairEffect {
            loss: -log_sigmoid(lead) + self.center_coefficient * sum * sum,
            d_chosen: d_lead + d_sum,
            d_rejected: -d_lead + d_sum,
        }
    }
}

/// What scores are measured against before they are rewards.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Normalise {
    /// The scores of the same group: their mean becomes 0, their standard deviation 1.
    #[default]
    Group,
    /// All scores of the run so far, those of the step included. Checkpoints keep the moments.
    Running,
    /// Nothing.
    None,
}

/// The mean and the spread of all scores so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScoreMoments {
    n: u64,
    mean: f64,
    /// The sum of squared distances from the mean.
    squares: f64,
}

impl ScoreMoments {
    /// Takes scores in, one after another (Welford 1962).
    pub fn extend(&mut self, scores: impl Iterator<Item = f64>) {
        for score in scores {
            self.n += 1;
            let before = score - self.mean;
            self.mean += before / self.n as f64;
            self.squares += before * (score - self.mean);
        }
    }

    pub fn mean(&self) -> f64 {
        self.mean
    }

    /// The distance from the mean in standard deviations; 0 if scores have no spread.
    fn standardised(&self, score: f64) -> f64 {
        let deviation = (self.squares / self.n.max(1) as f64).sqrt();
        if deviation > 0.0 { (score - self.mean) / deviation } else { 0.0 }
    }
}

/// The rewards of the scores of groups, between `-clip` and `clip`. A response without a score, because it is too long for the
/// reward model, has the reward `-clip`. `moments` are those of all earlier steps, and take the scores in where they are read.
pub fn rewards_of_scores(
    groups: &[Vec<Option<f64>>],
    normalise: Normalise,
    clip: f64,
    moments: &mut ScoreMoments,
) -> Vec<Vec<f64>> {
    if normalise == Normalise::Running {
        moments.extend(groups.iter().flatten().copied().flatten());
    }
    let of_group = |group: &Vec<Option<f64>>| {
        let scores = || group.iter().copied().flatten();
        let mut within = ScoreMoments::default();
        within.extend(scores());
        // Scores that differ by rounding alone are equal.
        let differ = has_spread(scores());
        let reward = |score: Option<f64>| match (score, normalise) {
            (None, _) => -clip,
            (Some(score), Normalise::None) => score.clamp(-clip, clip),
            (Some(score), Normalise::Running) => moments.standardised(score).clamp(-clip, clip),
            (Some(_), Normalise::Group) if !differ => 0.0,
            (Some(score), Normalise::Group) => within.standardised(score).clamp(-clip, clip),
        };
        group.iter().copied().map(reward).collect()
    };
    groups.iter().map(of_group).collect()
}

#[cfg(test)]
mod tests;
