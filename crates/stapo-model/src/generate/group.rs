//! The samples of one request and the prompt they share.

use super::Request;
use super::block::{BlockPool, StateSlot};
use super::sequence::Sequence;
use super::table::BlockTable;
use std::collections::VecDeque;

/// The samples of one request.
#[derive(Debug)]
pub struct RequestGroup {
    pub request: Request,
    pub prefix: Prefix,
    pub waiting: VecDeque<Sequence>,
    /// Sequences that run or that wait for their last token to be read.
    pub n_running: usize,
    /// Sequences whose turn has ended and that may continue with another.
    pub n_parked: usize,
}

/// The keys and values of a request's prompt, which all samples share.
#[derive(Debug)]
pub enum Prefix {
    Absent,
    /// The sample of this number computes the prompt; the other samples wait for it.
    Filling(u32),
    /// The prompt's blocks and, where layers keep states, the state at its end, held for the samples that wait.
    Ready {
        tables: Vec<BlockTable>,
        state: Option<StateSlot>,
    },
}

impl RequestGroup {
    pub fn new(request: Request) -> Self {
        Self { request, prefix: Prefix::Absent, waiting: VecDeque::new(), n_running: 0, n_parked: 0 }
    }

    pub fn is_filled_by(&self, sequence: &Sequence) -> bool {
        matches!(self.prefix, Prefix::Filling(sample) if sample == sequence.sample)
    }

    /// Whether one of the group's sequences may start to run. While a sample computes the prompt, only a sequence that
    /// has kept its blocks may.
    pub fn can_admit(&self) -> bool {
        let is_filling = matches!(self.prefix, Prefix::Filling(_));
        self.waiting.front().is_some_and(|next| !is_filling || next.holds_blocks())
    }

    pub fn is_over(&self) -> bool {
        self.n_running == 0 && self.n_parked == 0 && self.waiting.is_empty()
    }

    pub fn drop_prefix(&mut self, pool: &mut BlockPool) {
        if let Prefix::Ready { tables, state } = std::mem::replace(&mut self.prefix, Prefix::Absent) {
            for mut table in tables {
                table.release(pool);
            }
            pool.release_state(state);
        }
    }

    pub fn drop_unneeded_prefix(&mut self, pool: &mut BlockPool) {
        if self.waiting.is_empty() {
            self.drop_prefix(pool);
        }
    }
}
