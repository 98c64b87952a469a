//! The samples of one request and the prompt they share.

use super::Request;
use super::block::{Block, BlockPool};
use super::sequence::Sequence;
use std::collections::VecDeque;

/// The samples of one request.
#[derive(Debug)]
pub struct RequestGroup {
    pub request: Request,
    pub prefix: Prefix,
    pub waiting: VecDeque<Sequence>,
    /// Sequences that run or that wait for their last token to be read.
    pub n_running: usize,
}

/// The keys and values of a request's prompt, which all samples share.
#[derive(Debug)]
pub enum Prefix {
    Absent,
    /// The sample of this number computes the prompt; the other samples wait for it.
    Filling(u32),
    /// The prompt's blocks, held for the samples that wait.
    Ready(Vec<Block>),
}

impl RequestGroup {
    pub fn is_filled_by(&self, sequence: &Sequence) -> bool {
        matches!(self.prefix, Prefix::Filling(sample) if sample == sequence.sample)
    }

    /// Whether one of the group's sequences may start to run. While a sample computes the prompt the others wait.
    pub fn can_admit(&self) -> bool {
        !self.waiting.is_empty() && !matches!(self.prefix, Prefix::Filling(_))
    }

    pub fn drop_prefix(&mut self, pool: &mut BlockPool) {
        if let Prefix::Ready(blocks) = std::mem::replace(&mut self.prefix, Prefix::Absent) {
            pool.release(blocks);
        }
    }

    pub fn drop_unneeded_prefix(&mut self, pool: &mut BlockPool) {
        if self.waiting.is_empty() {
            self.drop_prefix(pool);
        }
    }
}
