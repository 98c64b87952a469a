//! One response on its way through the engine.

use super::block::{Block, BlockPool};
use super::scheduler::Draw;
use super::{Sampled, Ticket};
use stapo_ops::sampling;

/// Tokens so far, and how many of them have their keys and values in the cache. The last may be drawn and not yet read:
/// then it stands as the number of its draw, see `sampling::drawn`.
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
    /// Tokens drawn for it, read or not.
    pub n_drawn: usize,
    /// One for each token read.
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
            n_drawn: 0,
            sampled: Vec::new(),
        }
    }

    /// Counts the token that is drawn for it as number `number` of a step, in row of `slot`; unless it is the last, it is to
    /// be run next.
    pub fn draw(&mut self, number: usize, slot: usize, max_tokens: usize) -> Draw {
        let draw = Draw { ticket: self.ticket, sample: self.sample, position: self.n_drawn as u32, slot };
        self.n_drawn += 1;
        if self.n_drawn < max_tokens {
            self.tokens.push(sampling::drawn(number));
        }
        draw
    }

    /// Takes in the next token that was drawn for it.
    pub fn receive(&mut self, sampled: Sampled) {
        // The last token is never run, and not among these.
        if let Some(token) = self.tokens.get_mut(self.n_prompt + self.sampled.len()) {
            *token = sampled.token;
        }
        self.sampled.push(sampled);
    }

    /// Tokens still to be run: one when decoding, more while (re)filling the cache, none once all were drawn.
    pub fn n_pending(&self) -> usize {
        self.tokens.len() - self.n_cached
    }

    /// What it finds in the cache where its prompt is: that, but one token that predicts the next to draw.
    pub fn n_found(&self) -> usize {
        self.n_prompt.min(self.tokens.len() - 1)
    }

    /// Gives all memory back; what was sampled stays, its keys and values are computed anew later.
    pub fn evict(&mut self, pool: &mut BlockPool) {
        pool.release(self.blocks.drain(..));
        self.n_cached = 0;
    }
}
