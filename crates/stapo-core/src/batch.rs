//! From groups to micro-batches: a `Batch` is the result of one rollout phase, a `Microbatch` the input of one forward pass.

use crate::rollout::{Group, Scored};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The groups of one rollout phase, in the order the problems were drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    pub groups: Vec<Group>,
}

impl Batch {
    /// Mini-batches of `groups_per_minibatch` whole groups; the last mini-batch may be smaller.
    pub fn minibatches(&self, groups_per_minibatch: usize) -> impl Iterator<Item = &[Group]> {
        self.groups.chunks(groups_per_minibatch.max(1))
    }

    /// All responses, group by group.
    pub fn responses(&self) -> impl Iterator<Item = &Scored> {
        self.groups.iter().flat_map(|group| &group.members)
    }
}

/// Whole sequences of a mini-batch that share one forward pass, by their index in the mini-batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Microbatch {
    pub sequences: Vec<usize>,
    pub n_tokens: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "sequence {sequence_idx}: {n_tokens} tokens, the micro-batch budget is {budget_tokens}\nhint: raise the token budget to at least {n_tokens}; sequences are never split"
)]
pub struct SequenceTooLong {
    pub sequence_idx: usize,
    pub n_tokens: usize,
    pub budget_tokens: usize,
}

/// Packs sequences in the order given into micro-batches of at most `budget_tokens`, and opens a micro-batch when the next
/// sequence does not fit. Among packings that keep the order this one has the fewest micro-batches. Gradients are sums over
/// tokens in sequence order, and every budget gives the same order, so the budget changes no bit.
pub fn pack_in_order(lengths: &[usize], budget_tokens: usize) -> Result<Vec<Microbatch>, SequenceTooLong> {
    if let Some(sequence_idx) = lengths.iter().position(|&len| len > budget_tokens) {
        return Err(SequenceTooLong { sequence_idx, n_tokens: lengths[sequence_idx], budget_tokens });
    }
    let mut packed: Vec<Microbatch> = Vec::new();
    for (idx, &len) in lengths.iter().enumerate() {
        match packed.last_mut() {
            Some(last) if last.n_tokens + len <= budget_tokens => {
                last.sequences.push(idx);
                last.n_tokens += len;
            }
            _ => packed.push(Microbatch { sequences: vec![idx], n_tokens: len }),
        }
    }
    Ok(packed)
}

#[cfg(test)]
mod tests;
