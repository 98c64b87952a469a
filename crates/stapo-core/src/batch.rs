//! From groups to micro-batches: a `Batch` is the result of one rollout phase, a `Microbatch` the input of one forward
//! pass.

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

/// Packs sequences in the order given into micro-batches of at most `budget_tokens`, and opens a micro-batch when the
/// next sequence does not fit. Among packings that keep the order this one has the fewest micro-batches. Gradients are
/// sums over tokens in sequence order, and every budget gives the same order, so the budget changes no bit.
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

/// What micro-batches may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    pub budget_tokens: usize,
    /// Rows of keys where sequences share prompts: attention reads a prompt's keys once for each of its sequences. `None`: no
    /// sequence shares a prompt.
    pub budget_keys: Option<usize>,
}

impl Packing {
    /// Whole sequences, none of which shares a prompt.
    pub fn whole(budget_tokens: usize) -> Self {
        Self { budget_tokens, budget_keys: None }
    }
}

/// A sequence before it is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceLength {
    pub n_tokens: usize,
    /// Leading tokens that are also those of the sequence before it: a prompt.
    pub n_shared: usize,
}

/// As [`pack_in_order`], where neighbours that begin with the same prompt share its rows: `n_tokens` of a micro-batch counts a
/// prompt once. Sequences of one prompt stay together. Where they are too many for one micro-batch, they begin one and fill as
/// many as they need, each of which computes the prompt once.
pub fn pack(sequences: &[SequenceLength], packing: Packing) -> Result<Vec<Microbatch>, SequenceTooLong> {
    let budget = packing.budget_tokens;
    let Some(budget_keys) = packing.budget_keys else {
        let lengths: Vec<usize> = sequences.iter().map(|sequence| sequence.n_tokens).collect();
        return pack_in_order(&lengths, budget);
    };
    if let Some(sequence_idx) = sequences.iter().position(|sequence| sequence.n_tokens > budget) {
        let n_tokens = sequences[sequence_idx].n_tokens;
        return Err(SequenceTooLong { sequence_idx, n_tokens, budget_tokens: budget });
    }
    let mut packed: Vec<Microbatch> = Vec::new();
    // Rows of keys of the last micro-batch.
    let mut n_keys = usize::MAX;
    let mut start = 0;
    for group in sequences.chunk_by(|_, next| next.n_shared > 0) {
        let (n_rows, n_group_keys) = (rows(group), keys(group));
        let n_open = packed.last().map_or(usize::MAX, |last| last.n_tokens);
        let fits = |n_before: usize, n_keys: usize| {
            n_before.saturating_add(n_rows) <= budget && n_keys.saturating_add(n_group_keys) <= budget_keys
        };
        if !fits(n_open, n_keys) {
            packed.push(Microbatch { sequences: Vec::new(), n_tokens: 0 });
            n_keys = 0;
        }
        let is_cut = !fits(0, 0);
        for (idx, sequence) in (start..).zip(group) {
            let is_first = idx == start;
            let last = packed.last_mut().expect("a micro-batch is open");
            let n_new = sequence.n_tokens - if is_first { 0 } else { sequence.n_shared };
            let is_full = last.n_tokens + n_new > budget || n_keys + sequence.n_tokens > budget_keys;
            if is_cut && is_full && !last.sequences.is_empty() {
                packed.push(Microbatch { sequences: vec![idx], n_tokens: sequence.n_tokens });
                n_keys = sequence.n_tokens;
            } else {
                last.sequences.push(idx);
                last.n_tokens += n_new;
                n_keys += sequence.n_tokens;
            }
        }
        start += group.len();
    }
    Ok(packed)
}

/// Rows of sequences that share their prompt.
fn rows(group: &[SequenceLength]) -> usize {
    let n_shared: usize = group.iter().skip(1).map(|sequence| sequence.n_shared).sum();
    keys(group) - n_shared
}

/// Rows of keys of sequences.
fn keys(group: &[SequenceLength]) -> usize {
    group.iter().map(|sequence| sequence.n_tokens).sum()
}

#[cfg(test)]
mod tests;
