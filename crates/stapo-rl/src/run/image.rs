//! The state of a run in host memory, as the bytes of its files: what a checkpoint costs a trainer is this copy.

use super::state::{self, Part};
use crate::ranks::RankError;
use stapo_model::HostBuffer;
use stapo_model::decoder::Policy;
use stapo_model::optimizer::Optimizer;
use std::ops::Range;

/// The files of weights and moments, one behind the other in one buffer.
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

    /// Copies the state on rank 0, to the buffer of an earlier copy where there is one. The other ranks call
    /// [`state::send_state`].
    pub fn copy(
        policy: &Policy,
        optimizer: &Optimizer,
        buffer: Option<HostBuffer>,
    ) -> Result<Self, RankError> {
        let heads = [Part::Weights, Part::Moments].map(|part| state::head(policy, optimizer, part));
        let (n_weights, n_moments) = optimizer.n_stored_bytes(policy);
        let weights = 0..heads[0].len() + n_weights;
        let moments = weights.end..weights.end + heads[1].len() + n_moments;
        let reused = buffer.filter(|buffer| buffer.len() == moments.end);
        let mut buffer = reused.unwrap_or_else(|| HostBuffer::new(policy.device(), moments.end));
        let (of_weights, of_moments) = buffer.split_at_mut(weights.end);
        of_weights[..heads[0].len()].copy_from_slice(&heads[0]);
        of_moments[..heads[1].len()].copy_from_slice(&heads[1]);
        optimizer.copy_weights(policy, &mut of_weights[heads[0].len()..])?;
        optimizer.copy_moments(policy, &mut of_moments[heads[1].len()..])?;
        Ok(Self { buffer, weights, moments })
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
