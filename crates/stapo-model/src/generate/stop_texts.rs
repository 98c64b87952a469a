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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Pretrained;
    use crate::generate::{SampledToken, Ticket};
    use std::path::Path;

    fn tokenizer() -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats/qwen2-bpe.gguf");
        Pretrained::open(&path).unwrap().tokenizer().unwrap()
    }

    #[test]
    fn a_text_is_looked_for_in_the_last_tokens_alone() {
        let tokenizer = tokenizer();
        let id = |text: &str| tokenizer.id_of(text).unwrap();
        let (texts, none) = (["#%".to_string(), "@".to_string()], []);
        let stops = StopTexts::new(&tokenizer, &texts);
        let is_complete = |tokens: &[u32]| stops.is_complete(tokens.iter().copied());
        let (first, second, other) = (id("#"), id("%"), id("!"));
        assert!(is_complete(&[other, first, second]) && is_complete(&[id("@")]));
        assert!(!is_complete(&[first, other, second]) && !is_complete(&[second, first]) && !is_complete(&[]));
        // The longest text has two bytes: ten tokens are looked at.
        let behind = |n: usize| [&[first, second][..], &vec![other; n]].concat();
        assert!(is_complete(&behind(8)) && !is_complete(&behind(9)));
        assert!(!StopTexts::new(&tokenizer, &none).is_complete([first, second].into_iter()));
    }

    #[test]
    fn a_response_stops_before_it_reaches_its_limit() {
        let tokenizer = tokenizer();
        let texts = ["#".to_string()];
        let stops = StopTexts::new(&tokenizer, &texts);
        let text = tokenizer.id_of("#").unwrap();
        let request = Request { problem: 0, prompt: vec![1], n_samples: 1, max_tokens: 3, stops: vec![7, 8] };
        let reason = |tokens: &[u32], stops: Option<&StopTexts>| {
            let mut sequence = Sequence::new(Ticket(0), 0, vec![1], 3);
            let sampled = |token: &u32| SampledToken {
                token: *token,
                logp: 0.0,
                entropy: 0.0,
                alternatives: vec![],
                kept: vec![],
            };
            sequence.sampled = tokens.iter().map(sampled).collect();
            finish_reason(&sequence, &request, stops)
        };
        assert_eq!([reason(&[], None), reason(&[5, 5], None)], [None; 2]);
        assert_eq!(reason(&[5, 5, 5], None), Some(FinishReason::LengthLimit));
        assert_eq!(
            reason(&[5, 5, 8], None),
            Some(FinishReason::Stop(8)),
            "the last token that fits may be a stop"
        );
        assert_eq!(reason(&[8, 5], None), None, "only the last token counts");
        assert_eq!(reason(&[5, text], Some(&stops)), Some(FinishReason::Stop(text)));
        assert_eq!(reason(&[5, text], None), None);
    }
}
