//! How often a rollout batch is used.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Several uses of a rollout batch, ended early by a gate (DGG, Dynamic Gradient Gating).
///
/// Every optimizer step measures the energy g of the gradient of the output head: its squared norm after 1/N, before
/// clipping and Adam. From the second use of a batch on, the gate compares the increment `g_t - g_(t-1)` with the
/// `window` increments before it: where its z-score (sample deviation) is above `tau`, the gradients are discarded, the
/// batch is left and the next one is sampled. The gate stays open until the window is full.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Reuse {
    /// Uses of a rollout batch, at most.
    pub max: usize,
    /// What ends the uses of a batch before the last.
    pub gate: Gate,
    /// The z-score above which the gate closes. DGG recommends 0.1 to 0.5.
    pub tau: f64,
    /// Increments that a z-score is computed from. DGG does not state a size; 32 are the updates of four default batches used four times.
    pub window: usize,
}

impl Default for Reuse {
    fn default() -> Self {
        Reuse { max: 4, gate: Gate::LmHead, tau: 0.5, window: 32 }
    }
}

/// What ends the uses of a rollout batch before the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// The energy of the gradient of the output head.
    LmHead,
    /// Nothing: every batch is used `max` times. Energies and z-scores are recorded all the same.
    None,
}
