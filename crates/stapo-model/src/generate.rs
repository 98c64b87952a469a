//! Batched generation with continuous batching: sequences join and leave at every step, their keys and values live in
//! blocks of a fixed budget, a prompt is computed once for all samples of its request, and no result depends on which
//! sequences run at the same time.
//!
//! Five nouns: a [`Sequence`](sequence::Sequence) is one response in the making, a [`Block`](block::Block) holds keys
//! and values of a few positions, the [`BlockPool`](block::BlockPool) knows which blocks are free, the
//! [`Scheduler`] decides which sequences run, the [`Engine`] runs them in an [`EngineMemory`].

mod block;
mod draft_model;
mod drafts;
mod engine;
mod group;
mod lengths;
mod memory;
mod running;
mod scheduler;
mod sequence;
mod speculation;
mod step;
mod stop_texts;
mod table;
#[cfg(test)]
mod tests;

pub use draft_model::MODEL_DRAFT_ROWS;
pub use engine::{Engine, EngineSettings};
pub use lengths::ForcedLengths;
pub use memory::EngineMemory;
pub use scheduler::{Capacity, Scheduler, Windows, states_within};
pub use speculation::{Speculation, StepCounts};
pub use stapo_ops::sampling::{Filter, SamplingRule};
pub use stop_texts::StopTexts;

use std::fmt;

/// A prompt and how to continue it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Keys the randomness, with the engine's seed, the sample's number and the position in its response: the same
    /// problem draws the same numbers whatever else the engine generates.
    pub problem: u64,
    /// At least one token.
    pub prompt: Vec<u32>,
    pub n_samples: u32,
    /// Longest response; the model's own limit may end it sooner.
    pub max_tokens: usize,
    /// Tokens that end the response; the one that did is its last.
    pub stops: Vec<u32>,
}

/// The engine's name for a request, in the order of submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Why a response ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// This token was sampled, which is a stop token or completes a stop text.
    Stop(u32),
    /// The request's or the model's length limit.
    LengthLimit,
}

/// One sampled token. `logp` and `entropy` are those of the full distribution at the sampling temperature, before any
/// top-k, top-p or min-p cut, or where the kept tokens are listed, those of the distribution over these: what a training
/// forward pass gives, bit for bit.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    pub token: u32,
    pub logp: f32,
    pub entropy: f32,
    /// The likeliest tokens in the token's place, likeliest first; as many as the settings ask for.
    pub alternatives: Vec<Alternative>,
    /// The tokens that could have been drawn, in ascending order; empty if the settings do not ask for them.
    pub kept: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative {
    pub token: u32,
    pub logp: f32,
}

/// What happened in a step.
#[derive(Debug)]
pub enum Event<'a> {
    Token { ticket: Ticket, sample: u32, sampled: &'a SampledToken },
    Finished(Completion),
}

/// A finished response.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    pub ticket: Ticket,
    pub sample: u32,
    pub tokens: Vec<SampledToken>,
    pub finish: FinishReason,
}

/// Why a request cannot be taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    #[error("prompt: empty, expected at least one token")]
    EmptyPrompt,
    #[error("prompt: token {token} is outside the vocabulary of {vocabulary}")]
    UnknownToken { token: u32, vocabulary: usize },
    #[error(
        "prompt: {n_prompt} tokens, the model takes {max_positions} with the response\nhint: shorten the prompt"
    )]
    PromptTooLong { n_prompt: usize, max_positions: usize },
    #[error(
        "kv memory: {n_tokens} tokens of prompt and response need more than the {n_cache_tokens} it holds\n\
         hint: raise the kv memory or lower the longest response"
    )]
    CacheTooSmall { n_tokens: usize, n_cache_tokens: usize },
    #[error("samples and longest response: {n_samples} and {max_tokens}, expected at least 1 of each")]
    NothingAsked { n_samples: u32, max_tokens: usize },
}

/// The word that records use: `stop` or `length`.
impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stop(_) => "stop",
            Self::LengthLimit => "length",
        })
    }
}
