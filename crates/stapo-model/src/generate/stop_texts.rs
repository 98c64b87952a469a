//! Texts that end a response.

use super::sequence::Sequence;
use super::{FinishReason, Request};
use crate::Tokenizer;

/// Tokens besides those of the longest text that are decoded, for decoders whose result depends on earlier tokens.
const CONTEXT_TOKENS: usize = 8;

/// Texts that end a response: the token that completes one of them is the response's last. Whether a token does is a
/// function of the response's last tokens, as many as the longest text has bytes and 8 more, decoded together without
/// special tokens; so a text may begin and end inside tokens.
#[derive(Debug)]
pub struct StopTexts<'a> {
    tokenizer: &'a Tokenizer,
    texts: &'a [String],
    n_window: usize,
}

impl<'a> StopTexts<'a> {
    pub fn new(tokenizer: &'a Tokenizer, texts: &'a [String]) -> Self {
        let longest = texts.iter().map(String::len).max().unwrap_or(0);
        Self { tokenizer, texts, n_window: longest + CONTEXT_TOKENS }
    }

    /// Whether a response with these tokens has come to one of the texts.
    pub fn is_complete(&self, tokens: impl DoubleEndedIterator<Item = u32>) -> bool {
        if self.texts.is_empty() {
            return false;
        }
        let mut window: Vec<u32> = tokens.rev().take(self.n_window).collect();
        window.reverse();
        let decoded = self.tokenizer.decode(&window);
        decoded.is_ok_and(|decoded| self.texts.iter().any(|text| decoded.contains(text.as_str())))
    }
}

/// Why the response of a sequence ends with the token that was read last; `None` if it continues.
pub fn finish_reason(
    sequence: &Sequence,
    request: &Request,
    stop_texts: Option<&StopTexts>,
) -> Option<FinishReason> {
    let last = sequence.sampled.last()?.token;
    let is_complete = |texts: &StopTexts| texts.is_complete(sequence.sampled.iter().map(|s| s.token));
    if request.stops.contains(&last) || stop_texts.is_some_and(is_complete) {
        Some(FinishReason::Stop(last))
    } else {
        (sequence.sampled.len() >= sequence.max_tokens).then_some(FinishReason::LengthLimit)
    }
}
