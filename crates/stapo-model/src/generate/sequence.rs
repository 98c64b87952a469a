//! One response on its way through the engine.

use super::block::{Block, BlockPool};
use super::{Sampled, Ticket};

/// Tokens known so far, and how many of them have their keys and values in the cache.
#[derive(Debug)]
pub struct Sequence {
    pub ticket: Ticket,
    /// Its number among the samples of its request.
    pub sample: u32,
    /// The prompt, then what was sampled.
    pub tokens: Vec<u32>,
    pub n_prompt: usize,
    /// Keys and values of `tokens[..n_cached]` lie in `blocks`.
    pub n_cached: usize,
    pub blocks: Vec<Block>,
    /// One for each token after the prompt.
    pub sampled: Vec<Sampled>,
}

impl Sequence {
    pub fn new(ticket: Ticket, sample: u32, prompt: Vec<u32>) -> Self {
        let n_prompt = prompt.len();
        Self {
            ticket,
            sample,
            tokens: prompt,
            n_prompt,
            n_cached: 0,
            blocks: Vec::new(),
            sampled: Vec::new(),
        }
    }

    /// Tokens still to be run: one when decoding, more while (re)filling the cache.
    pub fn n_pending(&self) -> usize {
        self.tokens.len() - self.n_cached
    }

    /// The prompt but its last token: what all samples of a request have in common in the cache. The last is run by
    /// each sample itself, for the row that predicts its first token.
    pub fn n_shareable(&self) -> usize {
        self.n_prompt - 1
    }

    /// Gives all memory back; what was sampled stays, its keys and values are computed anew later.
    pub fn evict(&mut self, pool: &mut BlockPool) {
        pool.release(self.blocks.drain(..));
        self.n_cached = 0;
    }
}
