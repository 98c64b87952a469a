//! The state of a run in host memory, as the bytes of its files: what a checkpoint costs a trainer is this copy.

use super::state::{self, Part};
use stapo_model::HostBuffer;
use stapo_model::decoder::Policy;
use stapo_model::optimizer::{Optimizer, OwnedPiece};
use std::ops::Range;

/// The files of weights and moments, one after another in one buffer.
pub struct Image {
    buffer: HostBuffer,
    weights: Range<usize>,
    moments: Range<usize>,
}

impl Image {
    /// The bytes that a copy of the state takes.
    pub fn n_bytes(policy: &Policy, optimizer: &Optimizer) -> usize {
        let heads = [Part::Weights, Part::Moments].map(|part| state::head(policy, optimizer, part).len());
        let (weights, moments) = optimizer.n_stored_bytes(policy);
        heads.iter().sum::<usize>() + weights + moments
    }

    /// Copies the state of a process that trains alone, to the buffer of an earlier copy where there is one.
    pub fn copy(policy: &Policy, optimizer: &Optimizer, buffer: Option<HostBuffer>) -> Self {
        let heads = [Part::Weights, Part::Moments].map(|part| state::head(policy, optimizer, part));
        let (n_weights, n_moments) = optimizer.n_stored_bytes(policy);
        let weights = 0..heads[0].len() + n_weights;
        let moments = weights.end..weights.end + heads[1].len() + n_moments;
        let reused = buffer.filter(|buffer| buffer.len() == moments.end);
        let mut buffer = reused.unwrap_or_else(|| HostBuffer::new(policy.device(), moments.end));
        let (of_weights, of_moments) = buffer.split_at_mut(weights.end);
        let mut tensors = [of_weights, of_moments];
        for (file, head) in tensors.iter_mut().zip(&heads) {
            let (to_head, rest) = std::mem::take(file).split_at_mut(head.len());
            to_head.copy_from_slice(head);
            *file = rest;
        }
        for OwnedPiece { ranges, elements } in optimizer.owned_pieces(policy) {
            let file = &mut tensors[usize::from(ranges.is_moment)];
            let (before, scales) = file.split_at_mut(ranges.scales.start);
            elements.copy_stored(&mut before[ranges.elements], &mut scales[..ranges.scales.len()]);
        }
        Self { buffer, weights, moments }
    }

    pub fn weights(&self) -> &[u8] {
        &self.buffer[self.weights.clone()]
    }

    pub fn moments(&self) -> &[u8] {
        &self.buffer[self.moments.clone()]
    }

    /// The buffer, for the next copy.
    pub fn into_buffer(self) -> HostBuffer {
        self.buffer
    }
}
