//! How the rewards of a group become one advantage per response.

use super::ObjectiveError;
use serde::{Deserialize, Serialize};

/// Group-relative advantage.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Advantage {
    /// `(R - mean) / (std + epsilon)`; 0 in a group whose rewards are all equal.
    /// `ddof` 1 is the sample deviation, with which the advantages printed in the STAPO paper come out.
    GroupZScore {
        #[serde(default = "one")]
        ddof: u8,
        #[serde(default)]
        epsilon: f64,
    },
    /// `R - mean` (Dr. GRPO).
    GroupMean,
    /// `R` minus the mean reward of the group's other responses (RLOO).
    LeaveOneOut,
}

fn one() -> u8 {
    1
}

impl Default for Advantage {
    fn default() -> Self {
        Advantage::GroupZScore { ddof: 1, epsilon: 0.0 }
    }
}

impl Advantage {
    /// The advantages of one group, in the order of `rewards`.
    pub fn of_group(self, rewards: &[f64]) -> Result<Vec<f64>, ObjectiveError> {
        if let Some(reward_idx) = rewards.iter().position(|r| !r.is_finite()) {
            return Err(ObjectiveError::Reward { reward_idx, value: rewards[reward_idx] });
        }
        let n = rewards.len() as f64;
        if self == Advantage::LeaveOneOut && rewards.len() == 1 {
            return Err(ObjectiveError::LoneResponse);
        }
        // The rounded mean of equal rewards can differ from the rewards, which would give advantages other than 0.
        if rewards.windows(2).all(|pair| pair[0] == pair[1]) {
            return Ok(vec![0.0; rewards.len()]);
        }
        let mean = rewards.iter().sum::<f64>() / n;
        let centred = rewards.iter().map(|r| r - mean);
        Ok(match self {
            Advantage::GroupMean => centred.collect(),
            Advantage::LeaveOneOut => centred.map(|d| d * (n / (n - 1.0))).collect(),
            Advantage::GroupZScore { ddof, epsilon } => {
                let squares: f64 = centred.clone().map(|d| d * d).sum();
                let std = (squares / (n - f64::from(ddof))).sqrt();
                centred.map(|d| d / (std + epsilon)).collect()
            }
        })
    }
}
