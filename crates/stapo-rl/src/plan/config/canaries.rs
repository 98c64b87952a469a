//! Checks that stop a run or warn.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Checks that stop a run or warn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct CanaryConfig {
    /// Whether the checks run.
    pub enabled: bool,
    /// The share of responses without a judgement (unparsable, over budget) above which the run stops.
    pub max_unjudged_share: f64,
    /// A step whose mean entropy is below this multiple of the first step's warns of collapse.
    pub entropy_collapse_factor: f64,
    /// A step whose mean entropy is above this multiple of the first step's warns of explosion.
    pub entropy_explosion_factor: f64,
}

impl CanaryConfig {
    /// Whether a step's mean entropy has collapsed, given that of the run's first step.
    pub fn is_collapse(&self, first_entropy: f64, entropy: f64) -> bool {
        entropy < self.entropy_collapse_factor * first_entropy
    }
}

impl Default for CanaryConfig {
    fn default() -> Self {
        CanaryConfig {
            enabled: true,
            max_unjudged_share: 0.5,
            entropy_collapse_factor: 0.1,
            entropy_explosion_factor: 5.0,
        }
    }
}
