//! Processes that train one policy together, each a rank: how they speak to each other, and which part of every
//! parameter each of them owns. What is computed does not depend on how many they are.

#[cfg(test)]
mod tests;

use stapo_ops::{Device, View, ViewMut};
use std::ops::Range;
use std::sync::Arc;

/// The ranks of a run, as one of them sees the others. Cheap to clone.
pub type Ranks = Arc<dyn Transport>;

/// A rank that cannot continue, or cannot be reached. Every rank of a run ends with the same text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("rank {rank}: {problem}")]
pub struct RankError {
    pub rank: usize,
    pub problem: String,
}

/// Moves numbers and bytes between ranks and never changes them: the rank that adds numbers does so in a fixed order. All
/// ranks make the same calls in the same order.
pub trait Transport: Send + Sync {
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world(&self) -> usize;

    /// Sends views to other ranks and fills views with what other ranks sent, each with the number of the other rank.
    /// Between two ranks, views are sent and received in the same order and have the same lengths. Where exchanges are
    /// queued, this one runs in the order of `device`'s work, and what is sent in a call is received in the same call of
    /// the others.
    fn exchange(
        &self,
        device: &Device,
        sends: Vec<(usize, View<'_, f32>)>,
        receives: Vec<(usize, ViewMut<'_, f32>)>,
    ) -> Result<(), RankError>;

    /// Whether [`Transport::exchange`] returns at once and runs in the order of a device's work. Otherwise views that were
    /// sent may change when it returns, and what was received is there.
    fn is_queued(&self) -> bool;

    /// Sends bytes to one other rank, which calls [`Transport::receive`]. Does not wait.
    fn send(&self, to: usize, bytes: Vec<u8>);

    /// The next bytes that a rank has sent, from any thread.
    fn receive(&self, from: usize) -> Result<Vec<u8>, RankError>;

    /// The bytes of every rank, by rank.
    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError>;

    /// The bytes of every rank, by rank, on rank 0; nothing on the others.
    fn gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, RankError>;

    /// The bytes of rank 0, on every rank. The other ranks give nothing.
    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, RankError>;

    /// Tells all ranks that this one cannot continue. Returns what every rank ends with: that, or what came before.
    fn fail(&self, problem: &str) -> RankError;

    /// Seconds that this rank has waited for others since the last call.
    fn take_waited(&self) -> f64;
}

/// The transport of a process that trains alone.
#[derive(Debug, Clone, Copy, Default)]
pub struct Solo;

impl Solo {
    pub fn ranks() -> Ranks {
        Arc::new(Solo)
    }
}

impl Transport for Solo {
    fn rank(&self) -> usize {
        0
    }

    fn world(&self) -> usize {
        1
    }

    fn exchange(
        &self,
        _device: &Device,
        sends: Vec<(usize, View<'_, f32>)>,
        receives: Vec<(usize, ViewMut<'_, f32>)>,
    ) -> Result<(), RankError> {
        assert!(sends.is_empty() && receives.is_empty(), "exchange: a single rank has no other");
        Ok(())
    }

    fn is_queued(&self) -> bool {
        false
    }

    fn send(&self, _to: usize, _bytes: Vec<u8>) {
        panic!("send: a single rank has no other");
    }

    fn receive(&self, _from: usize) -> Result<Vec<u8>, RankError> {
        panic!("receive: a single rank has no other");
    }

    fn all_gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        Ok(vec![bytes.to_vec()])
    }

    fn gather(&self, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, RankError> {
        Ok(vec![bytes])
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, RankError> {
        Ok(bytes.to_vec())
    }

    fn fail(&self, problem: &str) -> RankError {
        RankError { rank: 0, problem: problem.to_string() }
    }

    fn take_waited(&self) -> f64 {
        0.0
    }
}

/// Elements of a parameter that are never cut apart: blocks of 8-bit moments and of sums of squares, on every device, lie
/// within one such slice.
pub const SLICE: usize = 16_384;

/// How a parameter is shared out: whole slices, one range of them for each rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Elements of the parameter.
    pub len: usize,
    /// The index of the parameter, by which remainders go to different ranks.
    pub parameter_idx: usize,
    pub world: usize,
}

impl Share {
    /// The elements that a rank owns.
    pub fn owned_by(&self, rank: usize) -> Range<usize> {
        let turn = (rank + self.parameter_idx) % self.world;
        let n_slices = self.len.div_ceil(SLICE);
        let start = |turn: usize| (turn * n_slices / self.world * SLICE).min(self.len);
        start(turn)..start(turn + 1)
    }

    /// The ranks in the order of their elements.
    pub fn in_order(&self) -> impl Iterator<Item = usize> {
        let Share { parameter_idx, world, .. } = *self;
        (0..world).map(move |turn| (turn + world - parameter_idx % world) % world)
    }

    /// What the ranks hold of the parameter, one after another in the order of the elements.
    pub fn joined<T: Clone>(&self, by_rank: &[Vec<T>]) -> Vec<T> {
        self.in_order().flat_map(|rank| by_rank[rank].iter().cloned()).collect()
    }
}
