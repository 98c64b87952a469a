//! Text to token ids and back.

#[cfg(test)]
mod tests;

use crate::error::{Error, Result};
use tokenizers::Tokenizer as Inner;

/// The largest `tokenizer.json` read; Qwen3's is 11 MB.
pub(crate) const MAX_TOKENIZER_JSON: u64 = 256 << 20;

/// A tokenizer as `tokenizer.json` or GGUF metadata define it. Text given to the `encode` functions may contain
/// special tokens such as `<|im_end|>`; they become their one id.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Inner,
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json`; `place` names it in errors.
    pub fn from_json(place: &str, bytes: &[u8]) -> Result<Self> {
        let inner = Inner::from_bytes(bytes)
            .map_err(|e| Error::malformed(place, format!("not a tokenizer.json that can be used: {e}")))?;
        Self::new(place, inner)
    }

    /// Padding and truncation, which a file may carry from training, are switched off: a sequence is what it is.
    pub(crate) fn new(place: &str, mut inner: Inner) -> Result<Self> {
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::malformed(place, e.to_string()))?;
        Ok(Self { inner })
    }

    /// The ids of plain text, with the token that starts a sequence where the model has one.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, true)
    }

    /// The ids of text that already holds its special tokens, as a chat template renders it: nothing is added.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        // `encode_fast` leaves out the character offsets, which nobody here asks for.
        let encoding = self.inner.encode_fast(text, add_special_tokens);
        encoding.map(|e| e.get_ids().to_vec()).map_err(|e| Error::malformed("tokenizer", e.to_string()))
    }

    /// The text of the ids without special tokens. Ids outside the vocabulary are silent; bytes that are not UTF-8
    /// become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.text(ids, true)
    }

    /// The text of the ids with special tokens written out.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String> {
        self.text(ids, false)
    }

    fn text(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        self.inner.decode(ids, skip_special_tokens).map_err(|e| Error::malformed("tokenizer", e.to_string()))
    }

    /// A decoder fed one id at a time, whose text goes on from `context` (a prompt, or nothing).
    pub fn stream(&self, context: &[u32]) -> TokenStream<'_> {
        let n_kept = context.len().min(CONTEXT_TOKENS);
        let window = context[context.len() - n_kept..].to_vec();
        TokenStream { tokenizer: self, n_emitted: None, settled: window.len(), window }
    }

    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token as the vocabulary spells it (`Ġthe`, `▁the`), not as text.
    pub fn token_of(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// One more than the largest id.
    pub fn n_ids(&self) -> usize {
        self.inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }

    /// Refuses a tokenizer with ids that the model has no embedding for.
    pub fn check_vocabulary(&self, place: &str, vocabulary: usize) -> Result<()> {
        let n_ids = self.n_ids();
        if n_ids <= vocabulary {
            return Ok(());
        }
        let problem = format!("has ids up to {}, but the model's vocabulary is {vocabulary}", n_ids - 1);
        let hint = "tokenizer and weights are of different models, or tokens were added without resizing the embedding";
        Err(Error::mismatch(place, problem, hint))
    }

    /// As `tokenizer.json`.
    pub fn to_json(&self) -> Result<String> {
        self.inner.to_string(false).map_err(|e| Error::malformed("tokenizer", e.to_string()))
    }
}

/// Tokens of context that a stream keeps: enough for the decoders that look at what came before.
const CONTEXT_TOKENS: usize = 8;
/// Bytes of a character that may still be on their way, shown by decoders as one U+FFFD each or one for all.
const MAX_PENDING: usize = 3;

/// Decodes as ids arrive. Text once given out is final: a character is held back until all of its bytes are there,
/// and spaces at token borders are those of decoding everything at once. Special tokens are silent.
#[derive(Debug)]
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text is being worked on, preceded by some whose text is done, for context.
    window: Vec<u32>,
    /// How many ids at the start of the window are context.
    settled: usize,
    /// Bytes of the window's text that are out; `None` until the context's text is measured.
    n_emitted: Option<usize>,
}

impl TokenStream<'_> {
    /// Takes the next id; returns the text that is now certain, often empty.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let n_emitted = self.measured()?;
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        let complete = without_pending(&text);
        let fresh = complete.get(n_emitted..).unwrap_or_default().to_owned();
        if complete.len() == text.len() {
            // Nothing is pending: what was under way becomes the context of what follows.
            self.window.drain(..self.settled);
            self.settled = self.window.len();
            self.n_emitted = None;
        } else {
            self.n_emitted = Some(n_emitted.max(complete.len()));
        }
        Ok(fresh)
    }

    /// The rest: a character that never became whole.
    pub fn finish(mut self) -> Result<String> {
        let n_emitted = self.measured()?;
        Ok(self.tokenizer.decode(&self.window)?.get(n_emitted..).unwrap_or_default().to_owned())
    }

    fn measured(&mut self) -> Result<usize> {
        let n_emitted = match self.n_emitted {
            Some(n_emitted) => n_emitted,
            None => self.tokenizer.decode(&self.window)?.len(),
        };
        self.n_emitted = Some(n_emitted);
        Ok(n_emitted)
    }
}

/// The text up to the characters at its end that may still become others.
fn without_pending(text: &str) -> &str {
    let mut complete = text;
    for _ in 0..MAX_PENDING {
        complete = complete.strip_suffix(char::REPLACEMENT_CHARACTER).unwrap_or(complete);
    }
    complete
}
