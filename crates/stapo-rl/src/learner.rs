//! A model in training: weights, optimizer state, gradients and counters.

use crate::error::Result;
use crate::loaded_model::LoadedModel;
use crate::run::{Checkpoint, Counters, Run, state_hash};
use stapo_model::decoder::Gradients;
use stapo_model::optimizer::{AdamWSettings, GradientError, Optimizer, Update};

/// What reinforcement learning and pretraining change.
pub struct Learner {
    pub model: LoadedModel,
    pub(crate) optimizer: Optimizer,
    /// Sums over the micro-batches since the last optimizer step.
    pub(crate) gradients: Gradients,
    pub counters: Counters,
}

impl Learner {
    /// The state before the first step.
    pub(crate) fn new(model: LoadedModel, settings: AdamWSettings) -> Result<Self> {
        Ok(Self {
            optimizer: Optimizer::new(&model.policy, settings)?,
            gradients: Gradients::zeros(&model.policy)?,
            model,
            counters: Counters::default(),
        })
    }

    /// Takes over the weights, the optimizer state and the counters of a checkpoint.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.restore(&mut self.model.policy, &mut self.optimizer)?;
        self.counters = checkpoint.counters;
        Ok(())
    }

    /// Hash of weights, optimizer state and counters.
    pub fn state_hash(&self) -> String {
        state_hash(self.counters, &self.model.policy, &self.optimizer)
    }

    /// Writes a checkpoint and the manifest; only the newest `n_kept` checkpoints of the run remain.
    pub fn save(&self, run: &Run, n_kept: usize) -> Result<()> {
        Checkpoint::save(run.folder(), self.counters, &self.model.policy, &self.optimizer, n_kept)?;
        run.write_manifest()
    }

    /// One optimizer step with the accumulated gradients, which are cleared. Returns the global gradient norm before clipping.
    /// No weight changes where a gradient is not finite.
    pub(crate) fn step(&mut self, update: Update) -> std::result::Result<f64, GradientError> {
        let gradient_norm = self.optimizer.step(&mut self.model.policy, &mut self.gradients, update)?;
        self.counters.n_updates += 1;
        Ok(gradient_norm)
    }
}
