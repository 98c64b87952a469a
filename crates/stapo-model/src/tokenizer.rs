//! Text to token ids and back.

#[cfg(test)]
mod tests;
pub(crate) mod vetting;

use crate::chat::Segment;
use crate::error::{Error, Result};
use crate::untrusted::caught;
use serde_json::Value;
use tokenizers::{
    AddedToken, Model, ModelWrapper, Normalizer, OffsetType, PreTokenizedString, PreTokenizer,
    Tokenizer as Inner,
};

/// The largest `tokenizer.json` read; Qwen3's is 11 MB.
pub(crate) const MAX_TOKENIZER_JSON: u64 = 256 << 20;
const MAX_IDS: usize = 1 << 24;
/// Stands for a part of an image in Gemma 3.
const IMAGE_PART: &str = "<image_soft_token>";

/// A tokenizer as `tokenizer.json` or GGUF metadata define it. Text given to the `encode` functions may contain
/// special tokens such as `<|im_end|>`; they become their one id.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Inner,
    n_ids: usize,
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json`; `location` names the file in errors.
    pub fn from_json(location: &str, bytes: &[u8]) -> Result<Self> {
        Self::from_vetted(location, vetting::vetted(location, bytes)?)
    }

    /// The same for a model with a vocabulary. The text models of Gemma 3 come with the tokenizer of the
    /// multimodal ones, whose last token stands for a part of an image and has no embedding in them: it is plain text there.
    pub(crate) fn for_vocabulary(location: &str, bytes: &[u8], vocabulary: usize) -> Result<Self> {
        let mut file = vetting::vetted(location, bytes)?;
        let has_embedding = |id: &Value| id.as_u64() < Some(vocabulary as u64);
        if let Some(added) = file["added_tokens"].as_array_mut() {
            added.retain(|token| token["content"] != IMAGE_PART || has_embedding(&token["id"]));
        }
        if let Some(tokens) = file.pointer_mut("/model/vocab").and_then(Value::as_object_mut) {
            tokens.retain(|content, id| content != IMAGE_PART || has_embedding(id));
        }
        Self::from_vetted(location, file)
    }

    fn from_vetted(location: &str, file: Value) -> Result<Self> {
        let added: Vec<(String, u32)> = file["added_tokens"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|token| Some((token["content"].as_str()?.to_owned(), token["id"].as_u64()? as u32)))
            .collect();
        let tokenizer = Self::built(location, || {
            serde_json::from_value(file)
                .map_err(|e| Error::malformed(location, format!("cannot be used: {e}")))
        })?;
        // The crate numbers added tokens itself: as the vocabulary does, or from its end.
        match added.iter().find(|(content, id)| tokenizer.id_of(content) != Some(*id)) {
            Some((content, id)) => {
                let problem = format!(
                    "added token {content:?} has id {id}, expected the id in the vocabulary or the next one after it"
                );
                Err(Error::malformed(location, problem))
            }
            None => Ok(tokenizer),
        }
    }

    /// Builds a tokenizer from what was checked. The checks leave no panic of the crate that is known; one that is not
    /// becomes an error.
    pub(crate) fn built(location: &str, build: impl FnOnce() -> Result<Inner>) -> Result<Self> {
        caught(|| Self::new(location, build()?))
            .unwrap_or_else(|_| Err(Error::malformed(location, "the tokenizers library fails on it")))
    }

    fn new(location: &str, inner: Inner) -> Result<Self> {
        let n_ids = inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1);
        if n_ids > MAX_IDS {
            return Err(Error::malformed(location, format!("id {} is out of any proportion", n_ids - 1)));
        }
        Ok(Self { inner, n_ids })
    }

    /// The ids of plain text, after the token that starts a sequence where the model has such a token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, true)
    }

    /// The ids of text that already holds its special tokens, as rendered by a chat template: no token is added.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.ids(text, false)
    }

    fn ids(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        // `encode_fast` leaves out the character offsets, which are not used.
        caught(|| self.inner.encode_fast(text, add_special_tokens))
            .unwrap_or_else(|_| Err("the tokenizers library failed on a text".into()))
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|e| Error::malformed("tokenizer", e.to_string()))
    }

    /// The ids of a continuation, segment by segment: special tokens have their meaning in text of the template and are
    /// plain characters in observations. A tokenizer that begins every text with a space does so for every segment.
    pub fn encode_segments(&self, segments: &[Segment]) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        for segment in segments {
            ids.extend(match segment {
                Segment::Template(text) => self.encode_rendered(text)?,
                Segment::Observation(text) => self.encode_literally(text)?,
            });
        }
        Ok(ids)
    }

    /// The ids that follow a turn of the assistant: [`Tokenizer::encode_segments`], without the end of the turn where
    /// the model sampled it. `ended_with` is the stop token at the end of the turn; `None` for a turn that was cut off.
    /// Any stop token ends a turn: Llama 3 ends a call with `<|eom_id|>`, where its template writes `<|eot_id|>`.
    pub fn encode_continuation(&self, segments: &[Segment], ended_with: Option<u32>) -> Result<Vec<u32>> {
        let mut ids = self.encode_segments(segments)?;
        let is_template = matches!(segments.first(), Some(Segment::Template(_)));
        if let (Some(stop), Some(&first)) = (ended_with, ids.first())
            && is_template
            && (first == stop || self.is_special(first))
        {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Whether the id is a special token, which structures a conversation and has no text.
    fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).is_some_and(|token| token.special)
    }

    /// The ids of text from outside. No id is that of an added token, whatever the text spells. Blanks are an exception: Gemma lists
    /// its tokens of several line ends or spaces as added ones, and they structure nothing.
    pub fn encode_literally(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.ids_without_added(text)?;
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let is_blank = |content: &str| content.chars().all(|c| c.is_whitespace() || c == '▁');
        let is_markup = |token: &AddedToken| token.special || !is_blank(&token.content);
        if !ids.iter().any(|id| added.get(id).is_some_and(is_markup)) {
            return Ok(ids);
        }
        // Some vocabularies hold the added tokens too, and the model finds them there. The text is cut after the first
        // character of each, so that no part spells one.
        let mut parts = Vec::new();
        let mut start = 0;
        for (at, first) in text.char_indices() {
            let end = at + first.len_utf8();
            let spells = |content: &str| content.len() > first.len_utf8() && text[at..].starts_with(content);
            if added.values().any(|token| is_markup(token) && spells(&token.content)) {
                parts.push(&text[start..end]);
                start = end;
            }
        }
        parts.push(&text[start..]);
        let ids: Vec<Vec<u32>> =
            parts.into_iter().map(|part| self.ids_without_added(part)).collect::<Result<_>>()?;
        Ok(ids.concat())
    }

    /// The ids that the tokenizer's model gives to a text, without a search for added tokens.
    fn ids_without_added(&self, text: &str) -> Result<Vec<u32>> {
        let encode = || -> tokenizers::Result<Vec<u32>> {
            let mut parts = PreTokenizedString::from(text);
            if let Some(normalizer) = self.inner.get_normalizer() {
                parts.normalize(|part| normalizer.normalize(part))?;
            }
            if let Some(pre_tokenizer) = self.inner.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut parts)?;
            }
            parts.tokenize(|part| self.inner.get_model().tokenize(part.get()))?;
            Ok(parts.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
        };
        caught(encode)
            .unwrap_or_else(|_| Err("the tokenizers library failed on a text".into()))
            .map_err(|e| Error::malformed("tokenizer", e.to_string()))
    }

    /// The characters of a text that no token stands for, each once, in the order of the text: encoding loses them or
    /// puts the unknown token in their place. Blanks count only where the tokenizer does not split texts at blanks.
    pub fn lost_characters(&self, text: &str) -> Result<Vec<char>> {
        let encode = |text: &str| {
            caught(|| self.inner.encode(text, false))
                .unwrap_or_else(|_| Err("the tokenizers library failed on a text".into()))
                .map_err(|e| Error::malformed("tokenizer", e.to_string()))
        };
        let unknown = match self.inner.get_model() {
            ModelWrapper::BPE(model) => model.unk_token.as_ref().and_then(|token| self.id_of(token)),
            _ => None,
        };
        let encoding = encode(text)?;
        let mut is_kept = vec![false; text.len()];
        for (id, &(start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            if Some(*id) != unknown {
                is_kept[start.min(text.len())..end.min(text.len())].fill(true);
            }
        }
        let splits = self.inner.get_pre_tokenizer().is_some();
        let counts = |c: char| !(splits && c.is_whitespace());
        if text.char_indices().all(|(at, c)| is_kept[at] || !counts(c)) {
            return Ok(Vec::new());
        }
        // The offsets of tokens after a lost character are wrong, so every character is tried alone.
        let mut tried = Vec::new();
        let mut lost = Vec::new();
        for c in text.chars().filter(|&c| counts(c)) {
            if tried.contains(&c) {
                continue;
            }
            tried.push(c);
            if encode(c.encode_utf8(&mut [0; 4]))?.get_ids().iter().all(|id| Some(*id) == unknown) {
                lost.push(c);
            }
        }
        Ok(lost)
    }

    /// The text of the ids without special tokens. Ids outside the vocabulary have no text; bytes that are not UTF-8
    /// become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.text(ids, true)
    }

    /// The text of the ids with special tokens written out.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String> {
        self.text(ids, false)
    }

    fn text(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        caught(|| self.inner.decode(ids, skip_special_tokens))
            .unwrap_or_else(|_| Err("the tokenizers library failed on tokens".into()))
            .map_err(|e| Error::malformed("tokenizer", e.to_string()))
    }

    /// A decoder that takes one id at a time and continues the text of `context` (a prompt, or empty).
    pub fn stream(&self, context: &[u32]) -> TokenStream<'_> {
        let n_kept = context.len().min(CONTEXT_TOKENS);
        let window = context[context.len() - n_kept..].to_vec();
        TokenStream { tokenizer: self, n_context: window.len(), window }
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
        self.n_ids
    }

    /// Refuses a tokenizer with ids that the model has no embedding for.
    pub fn check_vocabulary(&self, location: &str, vocabulary: usize) -> Result<()> {
        if self.n_ids <= vocabulary {
            return Ok(());
        }
        let problem = format!("has ids up to {}, but the model's vocabulary is {vocabulary}", self.n_ids - 1);
        let hint = "tokenizer and weights are of different models, or tokens were added without resizing the embedding";
        Err(Error::mismatch(location, problem, hint))
    }

    /// The text of the tokenizer's `tokenizer.json`.
    pub fn to_json(&self) -> Result<String> {
        self.inner.to_string(false).map_err(|e| Error::malformed("tokenizer", e.to_string()))
    }
}

/// Tokens of context that a stream keeps: enough for decoders whose result depends on earlier tokens.
const CONTEXT_TOKENS: usize = 8;

/// Decodes ids as they arrive. Text once returned is final: a character is held back until all of its bytes have
/// arrived, and spaces between tokens are those of decoding all ids at once. Special tokens have no text.
#[derive(Debug)]
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Ids whose text has not been returned, preceded by `n_context` ids whose text has been.
    window: Vec<u32>,
    /// How many ids at the start of `window` are context.
    n_context: usize,
}

impl TokenStream<'_> {
    /// Takes the next id; returns the text that has become final, often none.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window)?;
        // U+FFFD at the end may stand for the first bytes of a character that is not complete.
        if text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let fresh = self.after_context(&text)?;
        // An id without text stays in the window, because it may change the text of the next id, as a leading ▁ does.
        if !fresh.is_empty() {
            self.window.drain(..self.n_context);
            self.n_context = self.window.len();
        }
        Ok(fresh)
    }

    /// The remaining text: a character that was never completed.
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window)?;
        self.after_context(&text)
    }

    /// The part of `text`, the decoded window, that follows the text of the context. Byte-fallback decoders decode a
    /// run of bytes as a whole, so later bytes can change the text of the context; the new ids are then decoded alone.
    fn after_context(&self, text: &str) -> Result<String> {
        let (context, fresh) = self.window.split_at(self.n_context);
        match text.strip_prefix(self.tokenizer.decode(context)?.as_str()) {
            Some(rest) => Ok(rest.to_owned()),
            None => self.tokenizer.decode(fresh),
        }
    }
}
