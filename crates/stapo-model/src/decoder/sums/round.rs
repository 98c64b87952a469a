//! A round: the micro-batches that the ranks compute at one time, one each.

use super::stages::{N_BLOCKS_KEPT, Stage, Step};
use super::{Exchanged, GradientSums, OwnedSum};
use crate::decoder::accumulate::{Accumulate, Lookup};
use crate::decoder::gradient::Gradient;
use crate::decoder::weights::LayerWeights;
use crate::ranks::RankError;
use stapo_ops::{Mark, View, ViewMut, Write, reduce, residual};

/// Takes the gradient of this rank's micro-batch of a round. As soon as a layer's gradient is complete it goes to its
/// owners, who add it in the order of the micro-batches, while backward continues.
pub struct Round<'a> {
    sums: &'a mut GradientSums,
    /// Ranks of numbers from this on have no micro-batch.
    n_microbatches: usize,
    /// Stages whose exchanges have begun.
    n_begun: usize,
    /// Where an exchange waits for its numbers: the last one that began.
    pending: Option<Step>,
    failed: Option<RankError>,
}

impl GradientSums {
    /// Begins a round of `n_microbatches`, that of rank 0 first.
    pub fn round(&mut self, n_microbatches: usize) -> Round<'_> {
        Round { sums: self, n_microbatches, n_begun: 0, pending: None, failed: None }
    }
}

/// The number of the memory that holds the gradients of a stage: of the vocabulary, or of a block of layers.
fn memory_of(stage: Stage) -> usize {
    match stage {
        Stage::Head | Stage::Rest => 0,
        Stage::Layers(block) => 1 + block % N_BLOCKS_KEPT,
    }
}

impl Round<'_> {
    /// Ends the round. Gradients that backward has not given are zero; a rank without a micro-batch has none.
    pub fn finish(mut self) -> Result<(), RankError> {
        for number in self.n_begun..self.sums.stages.len() {
            let stage = self.sums.stages.stage(number);
            if self.has_own() {
                self.await_memory(stage);
                self.sums.microbatch.clear(stage);
            }
            self.done(stage);
        }
        self.complete();
        self.sums.n_added += self.n_microbatches;
        self.failed.map_or(Ok(()), Err)
    }

    fn has_own(&self) -> bool {
        self.sums.ranks.rank() < self.n_microbatches
    }

    /// Orders what backward writes from here on after the exchanges of what lies in the same memory.
    fn await_memory(&mut self, stage: Stage) {
        let slot = memory_of(stage);
        if self.pending.as_ref().is_some_and(|step| memory_of(step.stage) == slot) {
            self.complete();
        }
        if let Some(mark) = self.sums.sent[slot].take() {
            self.sums.wait_for(&mark);
        }
    }

    /// The gradients of a stage are complete: begins their exchange.
    fn done(&mut self, stage: Stage) {
        self.n_begun = self.sums.stages.number(stage) + 1;
        if self.has_own() {
            self.sums.microbatch.settle(stage);
        }
        if self.sums.is_queued {
            self.sums.side.wait_for(&self.sums.device.mark());
        }
        for step in self.sums.stages.steps(stage) {
            // A transport that returns when the numbers are there is asked for those of the step before, which had the
            // time of a layer's backward to arrive.
            let to_add = if self.sums.is_queued { Some(step) } else { self.pending.replace(step) };
            self.advance(Some(step), to_add);
        }
        let slot = memory_of(stage);
        self.sums.sent[slot] = self.sums.is_queued.then(|| self.sums.side.mark());
    }

    /// Adds what is still on its way.
    fn complete(&mut self) {
        if let Some(step) = self.pending.take() {
            self.advance(None, Some(step));
        }
    }

    fn advance(&mut self, to_send: Option<Step>, to_add: Option<Step>) {
        if self.failed.is_none() {
            self.failed = self.sums.advance(to_send, to_add, self.n_microbatches).err();
        }
    }
}

impl Accumulate<f32> for Round<'_> {
    fn head(&mut self) -> Option<(ViewMut<'_, f32>, Write)> {
        self.await_memory(Stage::Head);
        self.sums.microbatch.head()
    }

    fn head_done(&mut self) {
        self.done(Stage::Head);
    }

    fn final_norm(&mut self) -> Option<ViewMut<'_, f32>> {
        self.sums.microbatch.final_norm()
    }

    fn layer(&mut self, index: usize) -> &mut LayerWeights<Option<Gradient<f32>>> {
        self.await_memory(Stage::Layers(self.sums.stages.blocks.of_layer(index)));
        self.sums.microbatch.layer(index)
    }

    fn layer_done(&mut self, index: usize) {
        let blocks = self.sums.stages.blocks;
        if blocks.ends_with(index) {
            self.done(Stage::Layers(blocks.of_layer(index)));
        }
    }

    fn lookup(&mut self) -> Option<Lookup<'_, f32>> {
        self.await_memory(Stage::Rest);
        self.sums.microbatch.lookup()
    }

    fn lookup_done(&mut self) {
        self.done(Stage::Rest);
    }
}

impl GradientSums {
    /// Ordered after a mark of the exchanges; the time in which ops wait for it is counted.
    pub(super) fn wait_for(&mut self, mark: &Mark) {
        let before = self.device.mark();
        self.device.wait_for(mark);
        self.waits.push([before, self.device.mark()]);
    }

    /// Sends the gradients of one step to their owners; receives those of another step, or of the same, and adds them.
    fn advance(
        &mut self,
        to_send: Option<Step>,
        to_add: Option<Step>,
        n_microbatches: usize,
    ) -> Result<(), RankError> {
        let Self { ranks, stages, sums, microbatch, received, side, .. } = self;
        let (rank, world) = (ranks.rank(), ranks.world());
        let mut sends: Vec<(usize, View<'_, f32>)> = Vec::new();
        if let Some(step) = to_send.filter(|_| rank < n_microbatches) {
            let gradients = microbatch.views(step.stage);
            for to in (0..world).filter(|&to| to != rank) {
                let pieces = stages.pieces(step).iter();
                let wanted = pieces.map(|piece| {
                    (to, gradients[piece.source].range(piece.owned_by(sums[piece.sum].share, to)))
                });
                sends.extend(wanted.filter(|(_, view)| view.len() > 0));
            }
        }
        let mut receives: Vec<(usize, ViewMut<'_, f32>)> = Vec::new();
        if let Some(step) = to_add {
            let mut rest = received.view_mut();
            for from in (0..n_microbatches).filter(|&from| from != rank) {
                let lens = stages.pieces(step).iter().map(|p| p.owned_by(sums[p.sum].share, rank).len());
                for len in lens.filter(|len| *len > 0) {
                    let (piece, after) = rest.split_at(len);
                    receives.push((from, piece));
                    rest = after;
                }
            }
        }
        self.times.gradient_bytes += sends.iter().map(|(_, view)| 4 * view.len() as u64).sum::<u64>();
        let before = side.mark();
        ranks.exchange(side, sends, receives)?;
        let between = side.mark();
        if let Some(step) = to_add {
            self.fold(step, n_microbatches);
        }
        self.exchanges.push([before, between, self.side.mark()]);
        Ok(())
    }

    /// Adds the gradients of a step, micro-batch by micro-batch.
    fn fold(&mut self, step: Step, n_microbatches: usize) {
        let Self { side, ranks, stages, sums, microbatch, received, n_added, .. } = self;
        let rank = ranks.rank();
        let gradients = microbatch.views(step.stage);
        let pieces = stages.pieces(step);
        let n_owned: usize =
            pieces.iter().map(|piece| piece.owned_by(sums[piece.sum].share, rank).len()).sum();
        for microbatch in 0..n_microbatches {
            let sender = microbatch - usize::from(microbatch > rank);
            let mut at = sender * n_owned;
            for piece in pieces {
                let OwnedSum { share, sum, .. } = &mut sums[piece.sum];
                let owned = piece.owned_by(*share, rank);
                let from = if microbatch == rank {
                    gradients[piece.source].range(owned.clone())
                } else {
                    received.range(at..at + owned.len())
                };
                at += owned.len();
                let first = share.owned_by(rank).start;
                let sum = sum.range_mut(owned.start - first..owned.end - first);
                if *n_added + microbatch == 0 {
                    side.copy(from, sum);
                } else {
                    residual::add(side, sum, from);
                }
            }
        }
    }

    /// Reads the clocks of all exchanges since the last call.
    pub(crate) fn read_times(&mut self) {
        for [before, between, after] in self.exchanges.drain(..) {
            self.times.gradient_seconds += before.seconds_until(&between);
            self.times.fold_seconds += between.seconds_until(&after);
        }
        for [before, after] in self.waits.drain(..) {
            self.times.waited_seconds += before.seconds_until(&after);
        }
    }

    /// What this rank sent and added since the last call.
    pub fn take_exchanged(&mut self) -> Exchanged {
        self.read_times();
        std::mem::take(&mut self.times)
    }

    /// Takes the gradient of a micro-batch only to look at it: nothing is sent or added.
    pub fn probe(&mut self) -> Probe<'_> {
        self.settle();
        Probe { sums: self, is_finite: true }
    }
}

/// Finds out whether the gradient of one micro-batch has finite numbers only.
pub struct Probe<'a> {
    sums: &'a mut GradientSums,
    is_finite: bool,
}

impl Probe<'_> {
    /// Whether all gradients that backward has given are finite.
    pub fn is_finite(&self) -> bool {
        self.is_finite
    }

    fn look(&mut self, stage: Stage) {
        let GradientSums { device, microbatch, .. } = &mut *self.sums;
        microbatch.settle(stage);
        let mut views = microbatch.views(stage).into_iter();
        self.is_finite &= views.all(|view| reduce::first_non_finite(device, view).is_none());
    }
}

impl Accumulate<f32> for Probe<'_> {
    fn head(&mut self) -> Option<(ViewMut<'_, f32>, Write)> {
        self.sums.microbatch.head()
    }

    fn head_done(&mut self) {
        self.look(Stage::Head);
    }

    fn final_norm(&mut self) -> Option<ViewMut<'_, f32>> {
        self.sums.microbatch.final_norm()
    }

    fn layer(&mut self, index: usize) -> &mut LayerWeights<Option<Gradient<f32>>> {
        self.sums.microbatch.layer(index)
    }

    fn layer_done(&mut self, index: usize) {
        let blocks = self.sums.stages.blocks;
        if blocks.ends_with(index) {
            self.look(Stage::Layers(blocks.of_layer(index)));
        }
    }

    fn lookup(&mut self) -> Option<Lookup<'_, f32>> {
        self.sums.microbatch.lookup()
    }

    fn lookup_done(&mut self) {
        self.look(Stage::Rest);
    }
}
