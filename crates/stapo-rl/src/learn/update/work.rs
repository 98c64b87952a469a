//! What goes through one forward and backward pass of an update.

use super::member::Member;
use crate::error::Result;
use crate::learn::scoring::{Sequence, microbatches, packed};
use crate::ranks::Transport;
use stapo_core::batch::{Microbatch, Packing};
use stapo_core::objective::Deferral;
use stapo_model::decoder::PackedBatch;

/// Which tokens of a micro-batch backward starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tokens {
    All,
    /// Those that do not wait for the thresholds of the mini-batch.
    Ready(Deferral),
    /// Those that waited.
    Deferred(Deferral),
}

/// A micro-batch and its tokens that backward starts from.
pub struct Work {
    packing: Packing,
    /// Sequences by their index in the mini-batch.
    pub microbatch: Microbatch,
    tokens: Tokens,
}

/// The members `chosen` of a mini-batch, in order, in micro-batches.
pub fn work(packing: Packing, members: &[Member], chosen: &[usize], tokens: Tokens) -> Result<Vec<Work>> {
    let sequences: Vec<Sequence> = chosen.iter().map(|&idx| members[idx].sequence()).collect();
    let packed = microbatches(&sequences, packing)?;
    let of_minibatch = |mut microbatch: Microbatch| {
        microbatch.sequences.iter_mut().for_each(|idx| *idx = chosen[*idx]);
        Work { packing, microbatch, tokens }
    };
    Ok(packed.into_iter().map(of_minibatch).collect())
}

/// Micro-batches that the ranks compute at one time, one each.
pub struct Round {
    /// The index of this rank's micro-batch; `None` if the last round has fewer micro-batches than there are ranks.
    pub microbatch_idx: Option<usize>,
    pub n_microbatches: usize,
}

/// Micro-batches in order, each to the next rank.
pub fn rounds(n_microbatches: usize, ranks: &dyn Transport) -> impl Iterator<Item = Round> + use<> {
    let (rank, world) = (ranks.rank(), ranks.world());
    (0..n_microbatches).step_by(world).map(move |first| Round {
        microbatch_idx: Some(first + rank).filter(|idx| *idx < n_microbatches),
        n_microbatches: world.min(n_microbatches - first),
    })
}

impl Work {
    /// The micro-batch as the model takes it.
    pub fn batch(&self, members: &[Member]) -> PackedBatch {
        let sequences: Vec<Sequence> =
            self.microbatch.sequences.iter().map(|&idx| members[idx].sequence()).collect();
        packed(&sequences, self.packing)
    }

    /// The derivatives by log-prob and entropy of each token, with which backward starts; 0 for tokens that are not
    /// this work's.
    pub fn gradients(&self, members: &[Member]) -> (Vec<f32>, Vec<f32>) {
        let mut d_logp = Vec::new();
        let mut d_entropy = Vec::new();
        for &idx in &self.microbatch.sequences {
            let effects = &members[idx].effects;
            let (deferral, takes_waiting) = match self.tokens {
                Tokens::All => (None, false),
                Tokens::Ready(deferral) => (Some(deferral), false),
                Tokens::Deferred(deferral) => (Some(deferral), true),
            };
            let waits = deferral.map(|deferral| deferral.waits(effects));
            for effect in effects {
                let is_taken = waits.as_ref().is_none_or(|waits| waits(effect) == takes_waiting);
                d_logp.push(if is_taken { effect.d_logp as f32 } else { 0.0 });
                d_entropy.push(if is_taken { effect.d_entropy as f32 } else { 0.0 });
            }
        }
        (d_logp, d_entropy)
    }
}
