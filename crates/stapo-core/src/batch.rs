//! From groups to micro-batches: a `Batch` is what one rollout phase gave, a `Microbatch` what one forward pass sees.

use crate::rollout::{Group, Scored};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The groups of one rollout phase, in the order the problems were drawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    pub groups: Vec<Group>,
}

impl Batch {
    /// Cuts into mini-batches of `groups_per_minibatch` whole groups; the last may be smaller.
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

/// Packs sequences into few micro-batches of at most `budget_tokens`: best fit, longest first, which needs at most
/// 11/9 of the optimum plus a constant (Johnson 1974). Sequences keep their order inside a micro-batch; micro-batches are ordered by
/// their first sequence. Deterministic: equal lengths are taken in index order.
pub fn pack_tight(lengths: &[usize], budget_tokens: usize) -> Result<Vec<Microbatch>, SequenceTooLong> {
    check(lengths, budget_tokens)?;
    let mut longest_first: Vec<usize> = (0..lengths.len()).collect();
    longest_first.sort_by_key(|&idx| (std::cmp::Reverse(lengths[idx]), idx));

    // (free tokens, bin), so that the first entry at or above a length is its best fit.
    let mut room = std::collections::BTreeSet::new();
    let mut bins: Vec<Vec<usize>> = Vec::new();
    for idx in longest_first {
        let best = room.range((lengths[idx], 0)..).next().copied();
        let (free, bin) = best.unwrap_or((budget_tokens, bins.len()));
        if best.is_some() {
            room.remove(&(free, bin));
        } else {
            bins.push(Vec::new());
        }
        bins[bin].push(idx);
        room.insert((free - lengths[idx], bin));
    }
    for bin in &mut bins {
        bin.sort_unstable();
    }
    bins.sort_unstable();
    Ok(bins.into_iter().map(|sequences| microbatch(sequences, lengths)).collect())
}

/// Packs sequences in the order given, opening a micro-batch when the next sequence does not fit: the fewest
/// micro-batches among those that keep the order. Use it where sums run over tokens in sequence order, so that
/// the budget cannot change a bit.
pub fn pack_in_order(lengths: &[usize], budget_tokens: usize) -> Result<Vec<Microbatch>, SequenceTooLong> {
    check(lengths, budget_tokens)?;
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

fn check(lengths: &[usize], budget_tokens: usize) -> Result<(), SequenceTooLong> {
    match lengths.iter().position(|&len| len > budget_tokens) {
        Some(sequence_idx) => {
            Err(SequenceTooLong { sequence_idx, n_tokens: lengths[sequence_idx], budget_tokens })
        }
        None => Ok(()),
    }
}

fn microbatch(sequences: Vec<usize>, lengths: &[usize]) -> Microbatch {
    let n_tokens = sequences.iter().map(|&idx| lengths[idx]).sum();
    Microbatch { sequences, n_tokens }
}

#[cfg(test)]
mod tests;
