//! A model in training: weights, optimizer state, gradients and counters.

use crate::config::GradientSum;
use crate::error::Result;
use crate::loaded_model::LoadedModel;
use crate::ranks::{RankError, Ranks, Solo};
use crate::run::{self, Checkpoint, Counters, LoopState, Run, Snapshot};
use stapo_model::decoder::{GradientSums, Gradients};
use stapo_model::optimizer::{AdamWSettings, Optimizer, StepError, Update};

/// What reinforcement learning and pretraining change.
pub struct Learner {
    pub model: LoadedModel,
    pub(crate) optimizer: Optimizer,
    /// Sums over the tokens since the last optimizer step or, where there are sums over micro-batches, since the last
    /// [`Learner::add_round`].
    pub(crate) gradients: Gradients,
    /// Sums over micro-batches since the last optimizer step.
    sums: Option<GradientSums>,
    pub counters: Counters,
    /// State of the training loop that checkpoints keep beside the counters.
    pub loop_state: LoopState,
    /// The processes that train the model together.
    pub(crate) ranks: Ranks,
}

impl Learner {
    /// The state before the first step.
    pub(crate) fn new(model: LoadedModel, settings: AdamWSettings) -> Result<Self> {
        let optimizer = Optimizer::new(&model.policy, settings)?;
        let gradients = Gradients::zeros(&model.policy)?;
        let counters = Counters::default();
        let (sums, ranks) = (None, Solo::ranks());
        Ok(Self { model, optimizer, gradients, sums, counters, loop_state: LoopState::new(), ranks })
    }

    /// As [`Learner::new`], as one of several ranks, with gradients that lie in memory of the caller's choice.
    pub(crate) fn over(
        model: LoadedModel,
        settings: AdamWSettings,
        gradients: Gradients,
        sum: GradientSum,
        ranks: Ranks,
    ) -> Result<Self> {
        let optimizer = Optimizer::over(&model.policy, settings, Ranks::clone(&ranks))?;
        let device = model.policy.device();
        // A GPU that trains alone adds micro-batches to one buffer, each from zero: the same sums.
        let is_apart = sum == GradientSum::Microbatches && (ranks.world() > 1 || !device.is_async());
        let sums = is_apart.then(|| GradientSums::new(&gradients, device, &ranks)).transpose()?;
        let counters = Counters::default();
        Ok(Self { model, optimizer, gradients, sums, counters, loop_state: LoopState::new(), ranks })
    }

    /// Takes over the weights, the optimizer state, the counters and the loop state of a checkpoint.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        self.restore_from(Some(checkpoint))
    }

    /// As [`Learner::restore`] on every rank, from the checkpoint that rank 0 has.
    pub(crate) fn restore_from(&mut self, checkpoint: Option<&Checkpoint>) -> Result<()> {
        let state = (&mut self.model.policy, &mut self.optimizer);
        let (counters, loop_state) = run::restore(checkpoint, &*self.ranks, state)?;
        self.counters = counters;
        self.loop_state = loop_state;
        Ok(())
    }

    /// Hash of weights, optimizer state, counters and loop state, on every rank.
    pub fn state_hash(&self) -> Result<String> {
        let hash = run::state_hash(self.counters, &self.loop_state, &self.model.policy, &self.optimizer)?;
        let shared = self.ranks.broadcast(hash.as_bytes())?;
        Ok(String::from_utf8_lossy(&shared).into_owned())
    }

    /// Refuses weights and optimizer states that are not finite numbers.
    pub(crate) fn check_finite(&self) -> Result<()> {
        let own = run::check_finite(self.counters.step, &self.model.policy, &self.optimizer);
        if self.ranks.world() == 1 {
            return own;
        }
        let problem = own.err().map(|error| error.to_string()).unwrap_or_default();
        let all = self.ranks.all_gather(problem.as_bytes())?;
        let found = all.iter().enumerate().find(|(_, problem)| !problem.is_empty());
        found.map_or(Ok(()), |(rank, problem)| {
            Err(RankError { rank, problem: String::from_utf8_lossy(problem).into_owned() }.into())
        })
    }

    /// Writes a checkpoint and the manifest, unless the run went on from a checkpoint of this step; only the newest
    /// `n_kept` checkpoints of the run and the best one remain. A state that is not finite is refused. The other ranks
    /// call [`Learner::send_state`] where [`Learner::is_sent`].
    pub fn save(&self, run: &mut Run, n_kept: usize) -> Result<()> {
        if run.is_saved(self.counters.step) {
            return run.prune(self.counters.step, n_kept);
        }
        let recorded = run.state_hash(self.counters.step).map(str::to_owned);
        let state_hash = recorded.map_or_else(|| self.state_hash(), Ok)?;
        if self.ranks.world() > 1 {
            self.check_finite()?;
        }
        let snapshot = |provenance| Snapshot {
            counters: self.counters,
            loop_state: &self.loop_state,
            policy: &self.model.policy,
            optimizer: &self.optimizer,
            provenance,
        };
        run.save(state_hash, snapshot, n_kept)
    }

    /// What [`Learner::save`] needs of the other ranks: nothing, or the state once for the file, or twice, first for a hash
    /// that no step has recorded.
    pub(crate) fn n_sent(&self, run: &Run) -> u8 {
        let step = self.counters.step;
        match (run.is_saved(step), run.state_hash(step)) {
            (true, _) => 0,
            (false, Some(_)) => 1,
            (false, None) => 2,
        }
    }

    /// The part of the other ranks in a save by rank 0.
    pub(crate) fn send_state(&self, n_sent: u8) -> Result<()> {
        if n_sent == 0 {
            return Ok(());
        }
        if n_sent == 2 {
            self.state_hash()?;
        }
        self.check_finite()?;
        self.optimizer.visit_state(&self.model.policy, |_, _, _| Ok(()))
    }

    /// Ends a round of micro-batches, one on each rank: where gradients are summed micro-batch by micro-batch, adds them.
    pub(crate) fn add_round(&mut self, n_microbatches: usize) -> Result<()> {
        if let Some(sums) = &mut self.sums {
            sums.add_round(&mut self.gradients, n_microbatches)?;
        }
        Ok(())
    }

    /// Forgets the gradients since the last optimizer step.
    pub(crate) fn discard_gradients(&mut self) {
        self.gradients.clear();
        self.sums.iter_mut().for_each(GradientSums::clear);
    }

    /// The squared norm of the gradient of the head.
    pub(crate) fn head_sum_squares(&mut self) -> Result<f64> {
        match &mut self.sums {
            Some(sums) => Ok(sums.head_sum_squares()?),
            None => Ok(self.gradients.head_sum_squares()),
        }
    }

    /// Tensors whose gradient is 0 everywhere though the policy depends on them.
    pub(crate) fn unreached(&mut self) -> Result<Vec<String>> {
        let policy = &self.model.policy;
        let specs = match &mut self.sums {
            Some(sums) => sums.zero_tensors(policy)?,
            None => self.gradients.zero_tensors(policy),
        };
        Ok(specs.into_iter().map(|spec| spec.name.clone()).collect())
    }

    /// One optimizer step with the accumulated gradients, which are cleared. Returns the global gradient norm before
    /// clipping. No weight changes where a gradient is not finite.
    pub(crate) fn step(&mut self, update: Update) -> std::result::Result<f64, StepError> {
        let policy = &mut self.model.policy;
        let gradient_norm = match &mut self.sums {
            Some(sums) => self.optimizer.step_sums(policy, sums, update)?,
            None => self.optimizer.step(policy, &mut self.gradients, update)?,
        };
        self.counters.n_updates += 1;
        Ok(gradient_norm)
    }
}
