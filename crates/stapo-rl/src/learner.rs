//! A model in training: weights, optimizer state, gradients and counters.

use crate::error::Result;
use crate::loaded_model::LoadedModel;
use crate::run::{Checkpoint, Counters, LoopState, Run, Snapshot, check_finite, state_hash};
use stapo_model::decoder::Gradients;
use stapo_model::optimizer::{AdamWSettings, GradientError, Optimizer, Update};

/// What reinforcement learning and pretraining change.
pub struct Learner {
    pub model: LoadedModel,
    pub(crate) optimizer: Optimizer,
    /// Sums over the micro-batches since the last optimizer step.
    pub(crate) gradients: Gradients,
    pub counters: Counters,
    /// State of the training loop that checkpoints keep beside the counters.
    pub loop_state: LoopState,
}

impl Learner {
    /// The state before the first step.
    pub(crate) fn new(model: LoadedModel, settings: AdamWSettings) -> Result<Self> {
        let optimizer = Optimizer::new(&model.policy, settings)?;
        let gradients = Gradients::zeros(&model.policy)?;
        Ok(Self::with_gradients(model, optimizer, gradients))
    }

    /// As [`Learner::new`], with gradients that lie in memory of the caller's choice.
    pub(crate) fn with_gradients(model: LoadedModel, optimizer: Optimizer, gradients: Gradients) -> Self {
        let counters = Counters::default();
        Self { model, optimizer, gradients, counters, loop_state: LoopState::new() }
    }

    /// Takes over the weights, the optimizer state, the counters and the loop state of a checkpoint.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        checkpoint.restore(&mut self.model.policy, &mut self.optimizer)?;
        self.counters = checkpoint.counters;
        self.loop_state.clone_from(&checkpoint.loop_state);
        Ok(())
    }

    /// Hash of weights, optimizer state, counters and loop state.
    pub fn state_hash(&self) -> String {
        state_hash(self.counters, &self.loop_state, &self.model.policy, &self.optimizer)
    }

    /// Refuses weights and optimizer states that are not finite numbers.
    pub(crate) fn check_finite(&self) -> Result<()> {
        check_finite(self.counters.step, &self.model.policy, &self.optimizer)
    }

    /// Writes a checkpoint and the manifest, unless the run went on from a checkpoint of this step; only the newest
    /// `n_kept` checkpoints of the run and the best one remain. A state that is not finite is refused.
    pub fn save(&self, run: &mut Run, n_kept: usize) -> Result<()> {
        if run.is_saved(self.counters.step) {
            return run.prune(self.counters.step, n_kept);
        }
        let recorded = run.state_hash(self.counters.step).map(str::to_owned);
        let state_hash = recorded.unwrap_or_else(|| self.state_hash());
        let snapshot = |provenance| Snapshot {
            counters: self.counters,
            loop_state: &self.loop_state,
            policy: &self.model.policy,
            optimizer: &self.optimizer,
            provenance,
        };
        run.save(state_hash, snapshot, n_kept)
    }

    /// One optimizer step with the accumulated gradients, which are cleared. Returns the global gradient norm before
    /// clipping. No weight changes where a gradient is not finite.
    pub(crate) fn step(&mut self, update: Update) -> std::result::Result<f64, GradientError> {
        let gradient_norm = self.optimizer.step(&mut self.model.policy, &mut self.gradients, update)?;
        self.counters.n_updates += 1;
        Ok(gradient_norm)
    }
}
