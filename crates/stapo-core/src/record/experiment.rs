//! `experiment.json`: the runs of an experiment.

use super::Extra;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A matrix of runs: one run per arm and seed, each in its own run folder.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Experiment {
    /// Version of the format.
    pub schema: u32,
    pub name: String,
    /// The name of the proposed arm; the other arms are baselines. Absent if the experiment names no such arm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// The name of the arm whose last accuracy the costs of all arms are measured to. Absent if costs are not compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reach: Option<String>,
    /// In the order of the experiment's file; all runs of an arm have the arm's name.
    pub arms: Vec<Arm>,
    #[serde(flatten)]
    pub extra: Extra,
}

/// One arm with one seed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Arm {
    pub name: String,
    pub seed: u64,
    /// The run's folder, relative to the experiment's folder.
    pub run: String,
    /// The arm's settings, each as `KEY=VALUE` in the form that `stapo train --set` takes.
    pub settings: Vec<String>,
    /// The error of a run that failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Experiment {
    /// The distinct names of the arms, in order of first appearance.
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
