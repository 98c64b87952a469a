//! One response in the making, in one turn or several.

use super::block::{BlockPool, StateSlot};
use super::table::BlockTable;
use super::{SampledToken, Ticket};
use stapo_ops::sampling;

/// The tokens of a response so far, and how many of them have their keys and values in the cache. A last token that was
/// drawn and not yet read by the host is known by the number of its draw, see `sampling::drawn`.
#[derive(Debug)]
pub struct Sequence {
    pub ticket: Ticket,
    /// The sequence's number among the samples of its request.
    pub sample: u32,
    /// The prompt, then what was sampled, and between two turns what the policy was given.
    pub tokens: Vec<u32>,
    pub n_prompt: usize,
    /// Index in `tokens` of the first token that the current turn samples.
    pub turn_start: usize,
    /// Keys and values of `tokens[..n_cached]` lie in the blocks of `tables`, in front of windows as long as they are seen.
    pub n_cached: usize,
    /// One for each set of layers; none before the first block.
    pub tables: Vec<BlockTable>,
    /// The states after `tokens[..n_cached]`, of a sequence that has run, in a model whose layers keep states.
    pub state: Option<StateSlot>,
    /// The longest turn.
    pub max_tokens: usize,
    /// Tokens drawn in the current turn, read or not.
    pub n_drawn: usize,
    /// One for each token of the current turn that was read.
    pub sampled: Vec<SampledToken>,
}

/// A token that was drawn for a sequence and that the host has not read yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnreadToken {
    pub ticket: Ticket,
    pub sample: u32,
    /// The token's position in the response: tokens after the prompt that come before it, sampled and given.
    pub position: u32,
    /// The token in front, where that was a guess: unless the guess is right, this token does not count.
    pub draft: Option<u32>,
}

impl Sequence {
    pub fn new(ticket: Ticket, sample: u32, prompt: Vec<u32>, max_tokens: usize) -> Self {
        let n_prompt = prompt.len();
        Self {
            ticket,
            sample,
            tokens: prompt,
            n_prompt,
            turn_start: n_prompt,
            n_cached: 0,
            tables: Vec::new(),
            state: None,
            max_tokens,
            n_drawn: 0,
            sampled: Vec::new(),
        }
    }

    /// The position in the response of the token that is drawn next.
    pub fn next_position(&self) -> u32 {
        (self.turn_start - self.n_prompt + self.n_drawn) as u32
    }

    /// The position in the response of the token that is read next.
    pub fn next_unread(&self) -> u32 {
        (self.turn_start - self.n_prompt + self.sampled.len()) as u32
    }

    /// Counts the token that is drawn for the sequence as number `number` of a step. Unless the token is the last of the
    /// turn, its row is to be run next.
    pub fn draw(&mut self, number: usize) -> UnreadToken {
        let position = self.next_position();
        self.n_drawn += 1;
        if self.n_drawn < self.max_tokens {
            self.tokens.push(sampling::drawn(number));
        }
        UnreadToken { ticket: self.ticket, sample: self.sample, position, draft: None }
    }

    /// Takes in the next token that was drawn for the sequence.
    pub fn receive(&mut self, sampled: SampledToken) {
        // The last token of a turn is not run before the next turn, so it is not among `tokens`.
        if let Some(token) = self.tokens.get_mut(self.turn_start + self.sampled.len()) {
            *token = sampled.token;
        }
        self.sampled.push(sampled);
    }

    /// Ends the turn and returns its tokens. A token drawn after the last one, which an engine that plans ahead asks for
    /// before it reads a stop token, is dropped; its row has not run.
    pub fn end_turn(&mut self) -> Vec<SampledToken> {
        let sampled = std::mem::take(&mut self.sampled);
        self.tokens.truncate(self.turn_start);
        self.tokens.extend(sampled.iter().map(|sampled| sampled.token));
        self.n_cached = self.n_cached.min(self.tokens.len());
        sampled
    }

    /// Forgets what `tokens` do not begin with, and the last of them, whose row predicts the next token.
    pub fn rewind(&mut self, tokens: &[u32]) {
        let n_common = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        self.tokens.truncate(n_common);
        self.n_cached = self.n_cached.min(n_common).min(tokens.len() - 1);
    }

    /// Begins the next turn, of at most `max_tokens`, after the tokens that the policy is given.
    pub fn begin_turn(&mut self, given: &[u32], max_tokens: usize) {
        self.tokens.extend_from_slice(given);
        self.turn_start = self.tokens.len();
        self.n_drawn = 0;
        self.max_tokens = max_tokens;
    }

    /// Tokens still to be run: one when decoding, more while the cache is (re)filled, none once all tokens were drawn.
    pub fn n_pending(&self) -> usize {
        self.tokens.len() - self.n_cached
    }

    /// Tokens whose keys and values the sequence finds in the cache when its prompt lies there already. At least one
    /// token is left to run: its row predicts the next token.
    pub fn n_found(&self) -> usize {
        self.n_prompt.min(self.tokens.len() - 1)
    }

    /// Whether the sequence has blocks.
    pub fn holds_blocks(&self) -> bool {
        !self.tables.is_empty()
    }

    /// Gives all blocks and the state back. What was sampled stays, its keys, values and states are recomputed later.
    pub fn evict(&mut self, pool: &mut BlockPool) {
        for mut table in self.tables.drain(..) {
            table.release(pool);
        }
        pool.release_state(self.state.take());
        self.n_cached = 0;
    }
}
