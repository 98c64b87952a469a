//! A model in training: weights, optimizer state, gradients and counters.

use crate::error::Result;
use crate::plan::config::Keeping;
use crate::policy::loaded::LoadedModel;
use crate::ranks::{RankError, Ranks, Solo};
use crate::run::{self, Checkpoint, Counters, Image, LoopState, Part, PartOrder, Run, ToSave, has_room_for};
use serde::{Deserialize, Serialize};
use stapo_model::decoder::{Exchanged, GradientSums, Gradients, Pass};
use stapo_model::optimizer::{AdamWSettings, Optimizer, StepError, Update};

/// How gradients are summed from micro-batch to micro-batch.
pub enum Accumulated {
    /// Backward adds to the sums.
    InPlace(Gradients),
    /// The owner of an element adds the gradients of whole micro-batches.
    ByOwner(GradientSums),
}

impl Accumulated {
    /// Forgets all gradients.
    pub(crate) fn clear(&mut self) {
        match self {
            Accumulated::InPlace(gradients) => gradients.clear(),
            Accumulated::ByOwner(sums) => sums.clear(),
        }
    }
}

/// What a checkpoint needs of all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Saving {
    /// The folder has a checkpoint of this step.
    Nothing,
    /// The hash of the state, which is the model that the run started from.
    Start,
    /// The state, for the files.
    State,
}

/// What reinforcement learning and pretraining change.
pub struct Learner {
    pub model: LoadedModel,
    pub(crate) optimizer: Optimizer,
    /// The gradients since the last optimizer step.
    pub(crate) gradients: Accumulated,
    pub counters: Counters,
    /// State of the training loop that checkpoints keep besides the counters.
    pub loop_state: LoopState,
    /// The processes that train the model together.
    pub(crate) ranks: Ranks,
    /// What this process writes of a checkpoint that is written in parts.
    pub(crate) part: Part,
}

impl Learner {
    /// The state before the first step.
    pub(crate) fn new(model: LoadedModel, settings: AdamWSettings) -> Result<Self> {
        let gradients = Accumulated::InPlace(Gradients::zeros(&model.policy)?);
        Self::on_ranks(model, settings, gradients, Solo::ranks())
    }

    /// As [`Learner::new`], as one of several ranks, with gradients that lie in memory of the caller's choice.
    pub(crate) fn on_ranks(
        model: LoadedModel,
        settings: AdamWSettings,
        gradients: Accumulated,
        ranks: Ranks,
    ) -> Result<Self> {
        let optimizer = Optimizer::on_ranks(&model.policy, settings, Ranks::clone(&ranks))?;
        let counters = Counters::default();
        let (loop_state, part) = (LoopState::new(), Part::default());
        Ok(Self { model, optimizer, gradients, counters, loop_state, ranks, part })
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
        let shared = self.ranks.broadcast(hash.unwrap_or_default().as_bytes())?;
        Ok(String::from_utf8_lossy(&shared).into_owned())
    }

    /// Refuses weights and optimizer states that are not finite numbers.
    pub(crate) fn check_finite(&self) -> Result<()> {
        let checked = run::check_finite(self.counters.step, &self.model.policy, &self.optimizer);
        if self.ranks.world() == 1 {
            return checked;
        }
        let problem = checked.err().map(|error| error.to_string()).unwrap_or_default();
        let all = self.ranks.all_gather(problem.as_bytes())?;
        let found = all.iter().enumerate().find(|(_, problem)| !problem.is_empty());
        found.map_or(Ok(()), |(rank, problem)| {
            Err(RankError { rank, problem: String::from_utf8_lossy(problem).into_owned() }.into())
        })
    }

    /// What a checkpoint of the present state needs of all ranks. The weights before the first step are those of the model that the
    /// run's plan names; adapters are not, and they are small.
    pub(crate) fn saving(&self, run: &Run) -> Saving {
        let Counters { step, n_updates, .. } = self.counters;
        match (run.is_saved(step), step == 0 && n_updates == 0 && self.model.policy.lora().is_none()) {
            (true, _) => Saving::Nothing,
            (false, true) => Saving::Start,
            (false, false) => Saving::State,
        }
    }

    /// Writes a checkpoint and the manifest, unless the run went on from a checkpoint of this step; only what is to be kept of the
    /// run's checkpoints remains. Where host memory has room for a copy of the state, the checkpoint is written while the
    /// caller continues. A state that is not finite is refused.
    pub fn save(&mut self, run: &mut Run, keeping: Keeping) -> Result<()> {
        self.save_on_all_ranks(self.saving(run), Some((run, keeping)))?;
        self.land_part(Some(run))
    }

    /// Makes ready for checkpoints of this state, with the run folder on rank 0.
    pub(crate) fn prepare_saving(&mut self, run: Option<&mut Run>) {
        if self.ranks.world() > 1 {
            return self.part.prepare(&self.model.policy, &self.optimizer);
        }
        let n_bytes = Image::n_bytes(&self.model.policy, &self.optimizer);
        if let Some(run) = run.filter(|_| has_room_for(n_bytes)) {
            run.prepare_buffer(self.model.policy.device(), n_bytes);
        }
    }

    /// As [`Learner::save`] on every rank. Rank 0 gives its folder and what is kept of its checkpoints, and says what the
    /// checkpoint needs of all.
    pub(crate) fn save_on_all_ranks(
        &mut self,
        saving: Saving,
        folder: Option<(&mut Run, Keeping)>,
    ) -> Result<()> {
        if saving == Saving::Nothing {
            return folder.map_or(Ok(()), |(run, keeping)| run.prune(self.counters.step, keeping));
        }
        self.check_finite()?;
        if saving == Saving::Start {
            let state_hash = self.state_hash()?;
            let resumable = (self.counters, &self.loop_state);
            return folder
                .map_or(Ok(()), |(run, keeping)| run.save(resumable, ToSave::Start { state_hash }, keeping));
        }
        match folder {
            Some((run, keeping)) if self.ranks.world() == 1 => {
                run.settle()?;
                let (policy, optimizer) = (&self.model.policy, &self.optimizer);
                let buffer = run.take_buffer();
                let n_bytes = Image::n_bytes(policy, optimizer);
                let is_prepared = buffer.as_ref().is_some_and(|buffer| buffer.len() == n_bytes);
                if !is_prepared && !has_room_for(n_bytes) {
                    return self.save_in_parts(Some((run, keeping)));
                }
                let image = Image::copy(policy, optimizer, buffer);
                run.save((self.counters, &self.loop_state), ToSave::Copied(image), keeping)
            }
            folder => self.save_in_parts(folder),
        }
    }

    /// Begins a checkpoint of which every rank writes what it owns. Where a rank does not see rank 0's disk, rank 0 writes
    /// everything while all wait.
    fn save_in_parts(&mut self, mut folder: Option<(&mut Run, Keeping)>) -> Result<()> {
        let (policy, optimizer) = (&self.model.policy, &self.optimizer);
        let resumable = (self.counters, &self.loop_state);
        let order =
            folder.as_mut().map(|(run, keeping)| run.begin_parts(resumable, (policy, optimizer), *keeping));
        let order = PartOrder::share(order.transpose()?, &*self.ranks)?;
        let files = order.open();
        let sight = self.ranks.all_gather(&[u8::from(files.is_ok())])?;
        match sight.iter().position(|sees| sees != &[1]) {
            Some(rank) if self.ranks.world() > 1 => {
                let Some((run, keeping)) = folder else { return Ok(run::send_state(policy, optimizer)?) };
                run.forget_parts();
                let folder = run.folder().display().to_string();
                run.warn_once(&format!(
                    "rank {rank} does not see the folder {folder}: rank 0 writes the checkpoints of all ranks, and training waits for it"
                ))?;
                return run.save(resumable, ToSave::Streamed(policy, optimizer), keeping);
            }
            _ => self.part.begin(files?, policy, optimizer)?,
        }
        if !order.is_waited_for {
            return Ok(());
        }
        let mut run = folder.map(|(run, _)| run);
        self.land_part(run.as_deref_mut())?;
        run.map_or(Ok(()), Run::settle)
    }

    /// Whether every rank has written its part of the checkpoint that is being written.
    pub(crate) fn is_written_by_all(&self) -> Result<bool> {
        let written = self.ranks.all_gather(&[u8::from(self.part.is_written())])?;
        Ok(written.iter().all(|written| written == &[1]))
    }

    /// Waits until all ranks have written their parts of a checkpoint, where there is one; rank 0, which has the run folder, then
    /// begins to seal it.
    pub(crate) fn land_part(&mut self, run: Option<&mut Run>) -> Result<()> {
        if !self.part.is_under_way() {
            return Ok(());
        }
        self.part.land(&self.model.policy, &self.optimizer)?;
        // A rank that has failed does not come here, and all others learn of its error.
        self.ranks.all_gather(&[])?;
        run.map_or(Ok(()), Run::seal_parts)
    }

    /// Backward of a round of micro-batches, one on each rank: of this rank's, whose last forward was `pass`'s, from the
    /// derivatives by log-prob and entropy of each of its tokens. `None` for a rank that has none in this round.
    pub(crate) fn backward(
        &mut self,
        pass: &mut Pass,
        derivatives: Option<(&[f32], &[f32])>,
        n_microbatches: usize,
    ) -> Result<()> {
        let policy = &self.model.policy;
        match (&mut self.gradients, derivatives) {
            (Accumulated::InPlace(gradients), Some((d_logp, d_entropy))) => {
                pass.backward(policy, d_logp, d_entropy, gradients)?;
            }
            (Accumulated::InPlace(_), None) => {}
            (Accumulated::ByOwner(sums), derivatives) => {
                let mut round = sums.round(n_microbatches);
                if let Some((d_logp, d_entropy)) = derivatives {
                    pass.backward(policy, d_logp, d_entropy, &mut round)?;
                }
                round.finish()?;
            }
        }
        Ok(())
    }

    /// Backward of the micro-batch of the last forward of `pass`, which gave scores of a reward model, from the derivatives by them.
    pub(crate) fn backward_scores(&mut self, pass: &mut Pass, d_scores: &[f32]) {
        let policy = &self.model.policy;
        match &mut self.gradients {
            Accumulated::InPlace(gradients) => pass.backward_scores(policy, d_scores, gradients),
            Accumulated::ByOwner(_) => unreachable!("reward models are trained by one process"),
        }
    }

    /// Whether the gradient of the micro-batch of the last forward has finite numbers only. Forgets all gradients where
    /// they are summed in place.
    pub(crate) fn is_finite_backward(
        &mut self,
        pass: &mut Pass,
        (d_logp, d_entropy): (&[f32], &[f32]),
    ) -> Result<bool> {
        let policy = &self.model.policy;
        match &mut self.gradients {
            Accumulated::InPlace(gradients) => {
                gradients.clear();
                pass.backward(policy, d_logp, d_entropy, gradients)?;
                Ok(gradients.tensors().all(|(_, values)| values.iter().all(|value| value.is_finite())))
            }
            Accumulated::ByOwner(sums) => {
                let mut probe = sums.probe();
                pass.backward(policy, d_logp, d_entropy, &mut probe)?;
                Ok(probe.is_finite())
            }
        }
    }

    /// What this rank has sent to others since the last call, and how long that took.
    pub fn take_exchanged(&mut self) -> Exchanged {
        let gradients = match &mut self.gradients {
            Accumulated::InPlace(_) => Exchanged::default(),
            Accumulated::ByOwner(sums) => sums.take_exchanged(),
        };
        let (weight_seconds, weight_bytes) = self.optimizer.take_sent();
        Exchanged { weight_seconds, weight_bytes, ..gradients }
    }

    /// The squared norm of the gradient of the head.
    pub(crate) fn head_sum_squares(&mut self) -> Result<f64> {
        match &mut self.gradients {
            Accumulated::ByOwner(sums) => Ok(sums.head_sum_squares()?),
            Accumulated::InPlace(gradients) => Ok(gradients.head_sum_squares()),
        }
    }

    /// Tensors whose gradient is 0 everywhere though the policy depends on them.
    pub(crate) fn unreached(&mut self) -> Result<Vec<String>> {
        let policy = &self.model.policy;
        let specs = match &mut self.gradients {
            Accumulated::ByOwner(sums) => sums.zero_tensors(policy)?,
            Accumulated::InPlace(gradients) => gradients.zero_tensors(policy),
        };
        Ok(specs.into_iter().map(|spec| spec.name.clone()).collect())
    }

    /// Whether any rank finds its weights changed since it had the fingerprint `before`.
    pub(crate) fn has_moved(&self, before: u64) -> Result<bool> {
        let has_moved = [u8::from(self.model.policy.fingerprint() != before)];
        Ok(self.ranks.all_gather(&has_moved)?.concat().contains(&1))
    }

    /// One optimizer step with the accumulated gradients, which are cleared. Returns the global gradient norm before
    /// clipping. No weight changes where a gradient is not finite.
    pub(crate) fn step(&mut self, update: Update) -> std::result::Result<f64, StepError> {
        let policy = &mut self.model.policy;
        let gradient_norm = match &mut self.gradients {
            Accumulated::ByOwner(sums) => self.optimizer.step_sums(policy, sums, update)?,
            Accumulated::InPlace(gradients) => self.optimizer.step(policy, gradients, update)?,
        };
        self.counters.n_updates += 1;
        Ok(gradient_norm)
    }
}
