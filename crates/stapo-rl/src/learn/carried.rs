//! What a training loop carries from one optimizer step to the next besides weights, moments and counters. A run keeps
//! these values in its checkpoints.

use crate::error::{Error, Result};
use crate::plan::config::{Gate, Plan, Reuse};
use crate::run::LoopState;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use stapo_core::objective::Controls;
use stapo_core::record::ReusedUpdate;
use stapo_core::reward_model::{Normalise, ScoreMoments};
use std::collections::VecDeque;

/// The keys of the loop state.
const CONTROLS: &str = "controls";
const ENERGIES: &str = "energies";
const SCORES: &str = "score_moments";

/// Checkpoints are made between training steps, so the state does not include which use of a rollout batch comes next.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Carried {
    pub controls: Controls,
    pub energies: EnergyWindow,
    /// Of a reward model's scores, where rewards are measured against all scores of the run.
    pub scores: ScoreMoments,
}

impl Carried {
    pub fn read(state: &LoopState) -> Result<Self> {
        let (controls, energies) = (value(state, CONTROLS)?, value(state, ENERGIES)?);
        Ok(Carried { controls, energies, scores: value(state, SCORES)? })
    }

    /// Writes the values that the plan makes use of.
    pub fn write(&self, plan: &Plan, state: &mut LoopState) {
        let text = |value: serde_json::Result<String>| value.expect("finite numbers are JSON");
        if plan.objective.is_adaptive() {
            state.insert(CONTROLS.to_string(), text(serde_json::to_string(&self.controls)));
        }
        if plan.config.update.reuse.is_some() {
            state.insert(ENERGIES.to_string(), text(serde_json::to_string(&self.energies)));
        }
        if plan.scored_reward().is_some_and(|(_, spec)| spec.normalise == Normalise::Running) {
            state.insert(SCORES.to_string(), text(serde_json::to_string(&self.scores)));
        }
    }
}

/// The value of a key; the default where the key is absent, as at the start of a run.
fn value<T: DeserializeOwned + Default>(state: &LoopState, key: &'static str) -> Result<T> {
    let Some(text) = state.get(key) else { return Ok(T::default()) };
    serde_json::from_str(text).map_err(|error| Error::LoopState { key, problem: error.to_string() })
}

/// The energies of past updates: the squared norms of the gradient of the output head.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnergyWindow {
    last: Option<f64>,
    /// Differences of successive energies, oldest first; at most `window` of them.
    increments: VecDeque<f64>,
}

impl EnergyWindow {
    /// Takes the energy of the next update, and decides whether the update is discarded. Every energy enters the window
    /// after it was judged, that of a discarded update as well. An energy that is not finite is left to the optimizer,
    /// which refuses the gradients.
    pub fn judge(&mut self, reuse: &Reuse, use_idx: usize, energy: f64) -> ReusedUpdate {
        let z = self.z(energy, reuse.window);
        let gated = reuse.gate == Gate::LmHead && use_idx > 0 && z.is_some_and(|z| z > reuse.tau);
        if energy.is_finite() {
            self.increments.extend(self.last.map(|last| energy - last));
            let n_over = self.increments.len().saturating_sub(reuse.window);
            self.increments.drain(..n_over);
            self.last = Some(energy);
        }
        ReusedUpdate { use_idx, energy, z, gated }
    }

    /// The z-score of the increment to `energy` among the increments of a full window; `None` before the window is full,
    /// and where its increments have no spread.
    fn z(&self, energy: f64, window: usize) -> Option<f64> {
        let increment = energy - self.last?;
        if self.increments.len() < window {
            return None;
        }
        let n = self.increments.len() as f64;
        let mean = self.increments.iter().sum::<f64>() / n;
        let squares: f64 = self.increments.iter().map(|x| (x - mean) * (x - mean)).sum();
        let z = (increment - mean) / (squares / (n - 1.0)).sqrt();
        z.is_finite().then_some(z)
    }
}

#[cfg(test)]
mod tests;
