//! `experiment.json`: which runs belong together.

use super::Extra;
use serde::{Deserialize, Serialize};

/// A matrix of runs: every arm once per seed, each in a run folder of its own.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    pub schema: u32,
    pub name: String,
    /// The arm that is proposed; the others are its baselines. Absent where none is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// In the order of the file that asked for them; runs of one arm share its name.
    pub arms: Vec<Arm>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// One arm with one seed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Arm {
    pub name: String,
    pub seed: u64,
    /// Folder of its run, below the experiment's.
    pub run: String,
    /// What it changes, `KEY=VALUE` each as `stapo train --set` takes them.
    pub settings: Vec<String>,
    /// Why it has no result, where it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Experiment {
    /// The names of the arms, each once, in order.
    pub fn arm_names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for arm in &self.arms {
            if !names.contains(&arm.name.as_str()) {
                names.push(&arm.name);
            }
        }
        names
    }
}
