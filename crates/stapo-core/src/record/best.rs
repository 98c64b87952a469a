//! `best.json`: the best evaluation of a run, whose checkpoint the run keeps.

use super::Extra;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The best evaluation so far. Of equal values the first is the best.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Best {
    /// Version of the format.
    pub schema: u32,
    /// Training steps that the policy had made; 0 before the first step.
    pub step: u64,
    /// `held_out`, or the name of a benchmark.
    pub metric: String,
    pub value: f64,
    #[serde(flatten)]
    pub extra: Extra,
}
