//! The tokenizer from GGUF metadata (`tokenizer.ggml.*`), built as the model's `tokenizer.json` would define it.

use super::Gguf;
use crate::chat::SpecialTokens;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::vetting::{GPT4O, LLAMA3, MAX_TOKEN_BYTES, QWEN2, QWEN3_5, TEKKEN, check_merges};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, Prepend, Replace};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::{SpecialToken, TemplateProcessing};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer as Inner};

/// Most work to find the merges that the scores imply: the sum of the squares of the tokens' bytes. Llama 2 has 2 million.
const MAX_MERGE_WORK: usize = 1 << 30;

/// The meaning of the numbers 1 to 6 in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

/// Control tokens at which a turn or a text ends, whatever `eos_token_id` says: those of llama.cpp.
const ENDS: [&str; 12] = [
    "<|im_end|>",
    "<|end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "<end_of_utterance>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
];

/// How `gpt2` vocabularies cut text into words before the merges (`tokenizer.ggml.pre`). Patterns are those of the models'
/// `tokenizer.json`, of which llama.cpp has approximations.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PreTokenizer {
    Gpt2,
    /// Each digit is a word, the rest as GPT-2.
    SingleDigits,
    Pattern(&'static str),
    /// A pattern behind Unicode's composition (NFC).
    Composed(&'static str),
    /// A pattern whose words are tokens as they are, where the vocabulary has them, without merges. Such vocabularies start
    /// sequences with bos unless the file says otherwise.
    WholeWords(&'static str),
}

impl Gguf {
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::built(&self.location, || self.crate_tokenizer())
    }

    fn crate_tokenizer(&self) -> Result<Inner> {
        let model = self.text("tokenizer.ggml.model")?.ok_or_else(|| self.absent("tokenizer.ggml.model"))?;
        let tokens = self.tokens()?;
        let (mut inner, adds_bos) = match model {
            "gpt2" => self.byte_level(&tokens)?,
            "llama" => self.sentence_piece(&tokens)?,
            other => {
                let location = format!("{}: tokenizer.ggml.model", self.location);
                return Err(Error::unsupported(
                    location,
                    format!("{other:?} is not supported"),
                    "supported: gpt2, llama",
                ));
            }
        };
        let bos = self.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos).then_some("bos");
        let eos = self.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false).then_some("eos");
        if bos.is_some() || eos.is_some() {
            inner.with_post_processor(Some(self.framed(&tokens, bos, eos)?));
        }
        let added = tokens.added();
        inner.add_tokens(added).map_err(|e| self.wrong("tokens", &e.to_string()))?;
        Ok(inner)
    }

    pub fn chat_template(&self) -> Result<Option<&str>> {
        self.text("tokenizer.chat_template")
    }

    pub fn special_tokens(&self) -> Result<SpecialTokens> {
        let tokens = self.tokens()?;
        let mut special = SpecialTokens::new();
        for (name, key) in
            [("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")]
        {
            if let Some(id) = self.token_id(&format!("tokenizer.ggml.{key}_token_id"))?
                && let Some(text) = tokens.text(id)
            {
                special.insert(name.into(), text.into());
            }
        }
        Ok(special)
    }

    /// The control tokens at which a turn or a text ends by their texts. None where the vocabulary cannot be read, which the
    /// tokenizer reports.
    pub(super) fn ends_by_text(&self) -> Vec<u32> {
        let Ok(tokens) = self.tokens() else { return Vec::new() };
        let id_of = |text: &str| {
            let id = tokens.texts.iter().position(|token| *token == text)?;
            (tokens.types[id] == TokenType::Control).then_some(id as u32)
        };
        // In the format of gpt-oss `<|end|>` ends a message, of which a turn has several.
        let is_harmony = id_of("<|return|>").is_some() && id_of("<|call|>").is_some();
        ENDS.iter()
            .filter(|text| !(is_harmony && **text == "<|end|>"))
            .filter_map(|text| id_of(text))
            .collect()
    }

    fn tokens(&self) -> Result<Tokens<'_>> {
        let texts =
            self.strings("tokenizer.ggml.tokens")?.ok_or_else(|| self.absent("tokenizer.ggml.tokens"))?;
        if let Some(id) = texts.iter().position(|text| text.len() > MAX_TOKEN_BYTES) {
            return Err(self.wrong("tokens", &format!("token {id} is longer than {MAX_TOKEN_BYTES} bytes")));
        }
        let types = self.numbers("tokenizer.ggml.token_type")?.map_or_else(
            || Ok(vec![TokenType::Normal; texts.len()]),
            |numbers| {
                let types: Option<Vec<_>> = numbers.into_iter().map(TokenType::from_number).collect();
                types.ok_or_else(|| self.wrong("token_type", "holds a number other than 1 to 6"))
            },
        )?;
        if types.len() != texts.len() {
            let problem = format!("has {} entries for {} tokens", types.len(), texts.len());
            return Err(self.wrong("token_type", &problem));
        }
        Ok(Tokens { texts, types })
    }

    /// A byte-level vocabulary as of GPT-2: bytes spelled as characters, merges listed in order. The flag says whether
    /// such a vocabulary starts sequences with bos by default.
    fn byte_level(&self, tokens: &Tokens) -> Result<(Inner, bool)> {
        let pre_tokenizer = self.pre_tokenizer()?;
        let merges =
            self.strings("tokenizer.ggml.merges")?.ok_or_else(|| self.absent("tokenizer.ggml.merges"))?;
        let merges: Option<Vec<_>> = merges
            .into_iter()
            .map(|m| m.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())))
            .collect();
        let merges = merges.ok_or_else(|| self.wrong("merges", "has an entry that is not two tokens"))?;
        let vocabulary = tokens.vocabulary().map_err(|problem| self.wrong("tokens", &problem))?;
        let pairs = merges.iter().map(|(left, right)| (left.as_str(), right.as_str()));
        check_merges(pairs, |token| vocabulary.contains_key(token))
            .map_err(|problem| self.wrong("merges", &problem))?;
        let takes_whole_words = matches!(pre_tokenizer, PreTokenizer::WholeWords(_));
        let builder = BPE::builder().vocab_and_merges(vocabulary, merges).ignore_merges(takes_whole_words);
        let mut inner = Inner::new(builder.build().map_err(|e| self.wrong("merges", &e.to_string()))?);
        let bytes = ByteLevel::new(false, false, false);
        let gpt2 = ByteLevel::new(false, false, true);
        match pre_tokenizer {
            PreTokenizer::Gpt2 => inner.with_pre_tokenizer(Some(gpt2)),
            PreTokenizer::SingleDigits => {
                inner.with_pre_tokenizer(Some(in_sequence(vec![Digits::new(true).into(), gpt2.into()])))
            }
            PreTokenizer::Pattern(pattern)
            | PreTokenizer::Composed(pattern)
            | PreTokenizer::WholeWords(pattern) => {
                let pattern = SplitPattern::Regex(pattern.into());
                let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
                    .expect("the patterns of this program are valid");
                inner.with_pre_tokenizer(Some(in_sequence(vec![split.into(), bytes.into()])))
            }
        };
        if matches!(pre_tokenizer, PreTokenizer::Composed(_)) {
            inner.with_normalizer(Some(NFC)).map_err(|e| self.wrong("pre", &e.to_string()))?;
        }
        inner.with_decoder(Some(bytes));
        Ok((inner, takes_whole_words))
    }

    fn pre_tokenizer(&self) -> Result<PreTokenizer> {
        let architecture = self.text("general.architecture")?.unwrap_or_default();
        Ok(match self.text("tokenizer.ggml.pre")?.unwrap_or("default") {
            "qwen2" | "deepseek-r1-qwen" => PreTokenizer::Composed(QWEN2),
            "qwen35" => PreTokenizer::Composed(QWEN3_5),
            "llama-bpe" | "llama3" | "llama-v3" => PreTokenizer::WholeWords(LLAMA3),
            // Mistral from Nemo on.
            "tekken" => PreTokenizer::WholeWords(TEKKEN),
            // SmolLM3; OLMo 2 and 3, Phi-4, Granite 4.
            "smaug-bpe" | "dbrx" => PreTokenizer::Pattern(LLAMA3),
            // Phi-4-mini.
            "gpt-4o" => PreTokenizer::Pattern(GPT4O),
            // SmolLM 1 and 2; Granite 3; Granite's models of code.
            "smollm" | "refact" | "starcoder" => PreTokenizer::SingleDigits,
            // Files older than the key, or written by a converter that did not know the model.
            "default" if architecture.starts_with("qwen") => PreTokenizer::Composed(QWEN2),
            "default" | "gpt-2" => PreTokenizer::Gpt2,
            other => {
                let location = format!("{}: tokenizer.ggml.pre", self.location);
                let hint = "supported: qwen2, qwen35, llama-bpe, smaug-bpe, dbrx, tekken, gpt-4o, smollm, refact, starcoder, gpt-2; or use the model's Hugging Face folder";
                return Err(Error::unsupported(location, format!("{other:?} is not supported"), hint));
            }
        })
    }

    /// A `SentencePiece` vocabulary: words begin with ▁, the scores imply the merges, unknown characters become bytes.
    /// The flag says that such a vocabulary starts sequences with bos by default.
    fn sentence_piece(&self, tokens: &Tokens) -> Result<(Inner, bool)> {
        let scores =
            self.numbers("tokenizer.ggml.scores")?.ok_or_else(|| self.absent("tokenizer.ggml.scores"))?;
        if scores.len() != tokens.texts.len() {
            let problem = format!("has {} entries for {} tokens", scores.len(), tokens.texts.len());
            return Err(self.wrong("scores", &problem));
        }
        let vocabulary = tokens.vocabulary().map_err(|problem| self.wrong("tokens", &problem))?;
        let work: usize = tokens.texts.iter().map(|text| text.len() * text.len()).sum();
        if work > MAX_MERGE_WORK {
            return Err(self.wrong("tokens", "are too many and too long for the merges that scores imply"));
        }
        let merges = merges_by_score(tokens, &scores, &vocabulary);
        let mut builder =
            BPE::builder().vocab_and_merges(vocabulary, merges).byte_fallback(true).fuse_unk(true);
        let unknown = self.token_id("tokenizer.ggml.unknown_token_id")?.and_then(|id| tokens.text(id));
        if let Some(unknown) = unknown {
            builder = builder.unk_token(unknown.to_owned());
        }
        let wrong = |e: tokenizers::Error| self.wrong("tokens", &e.to_string());
        let mut inner = Inner::new(builder.build().map_err(wrong)?);
        let replace = |from: &str, to: &str| Replace::new(from, to).map_err(wrong);
        let mut normalizers = vec![replace(" ", "▁")?.into()];
        let mut decoders = vec![replace("▁", " ")?.into(), ByteFallback::new().into(), Fuse::new().into()];
        if self.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true) {
            normalizers.insert(0, Prepend::new("▁".into()).into());
            decoders.push(Strip::new(' ', 1, 0).into());
        }
        inner.with_normalizer(Some(tokenizers::normalizers::Sequence::new(normalizers))).map_err(wrong)?;
        inner.with_decoder(Some(tokenizers::decoders::sequence::Sequence::new(decoders)));
        Ok((inner, true))
    }

    /// Puts the tokens of these names before and behind a text.
    fn framed(&self, tokens: &Tokens, bos: Option<&str>, eos: Option<&str>) -> Result<TemplateProcessing> {
        let mut special = Vec::new();
        for name in bos.into_iter().chain(eos) {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let id = self.token_id(&key)?.ok_or_else(|| self.absent(&key))?;
            let key = format!("{name}_token_id");
            let text = tokens.text(id).ok_or_else(|| self.wrong(&key, "is not a token"))?;
            let token = SpecialToken::new(name.into(), vec![id], vec![text.into()]);
            special.push(token.map_err(|e| self.wrong(&key, &e.to_string()))?);
        }
        // A template separates its parts by spaces, so the tokens go by their names: their texts may hold a space.
        let framed = |text| [bos, Some(text), eos].into_iter().flatten().collect::<Vec<&str>>().join(" ");
        TemplateProcessing::builder()
            .try_single(framed("$A"))
            .and_then(|builder| builder.try_pair(format!("{} {}", framed("$A"), framed("$B"))))
            .map(|builder| builder.special_tokens(special).build())
            .map_err(|e| self.wrong("bos_token_id", &e))?
            .map_err(|e| self.wrong("bos_token_id", &e.to_string()))
    }

    fn wrong(&self, key: &str, problem: &str) -> Error {
        Error::malformed(format!("{}: tokenizer.ggml.{key}", self.location), problem)
    }
}

fn in_sequence(
    parts: Vec<tokenizers::PreTokenizerWrapper>,
) -> tokenizers::pre_tokenizers::sequence::Sequence {
    tokenizers::pre_tokenizers::sequence::Sequence::new(parts)
}

/// The vocabulary as the file lists it: text and type of each id.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    types: Vec<TokenType>,
}

impl<'a> Tokens<'a> {
    fn text(&self, id: u32) -> Option<&'a str> {
        self.texts.get(id as usize).copied()
    }

    /// Ids by text; unused tokens, which only pad the embedding, are left out.
    fn vocabulary(&self) -> std::result::Result<Vocab, String> {
        let mut ids = Vocab::new();
        for (id, (&text, &kind)) in self.texts.iter().zip(&self.types).enumerate() {
            if kind != TokenType::Unused && ids.insert(text.to_owned(), id as u32).is_some() {
                return Err(format!("token {text:?} appears twice, the second time as {id}"));
            }
        }
        Ok(ids)
    }

    /// Tokens that are matched in a text before the merges.
    fn added(&self) -> Vec<AddedToken> {
        let both = self.texts.iter().zip(&self.types);
        both.filter_map(|(&text, &kind)| match kind {
            _ if text.is_empty() => None,
            TokenType::Control | TokenType::Unknown => Some(AddedToken::from(text, true)),
            TokenType::UserDefined => Some(AddedToken::from(text, false).normalized(false)),
            TokenType::Normal | TokenType::Unused | TokenType::Byte => None,
        })
        .collect()
    }
}

impl TokenType {
    fn from_number(number: f64) -> Option<Self> {
        let types = [Self::Normal, Self::Unknown, Self::Control, Self::UserDefined, Self::Unused, Self::Byte];
        types.get((number as usize).checked_sub(1)?).copied()
    }
}

/// Every pair of tokens that joins to a token, ordered by descending score of the result, then by the ids of the pair.
fn merges_by_score(tokens: &Tokens, scores: &[f64], ids: &Vocab) -> Vec<(String, String)> {
    let mut merges = Vec::new();
    for ((&text, &kind), &score) in tokens.texts.iter().zip(&tokens.types).zip(scores) {
        if kind != TokenType::Normal {
            continue;
        }
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if let (Some(&left_id), Some(&right_id)) = (ids.get(left), ids.get(right)) {
                merges.push((score, left_id, right_id, left, right));
            }
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.cmp(&b.2)));
    merges.into_iter().map(|(_, _, _, left, right)| (left.to_owned(), right.to_owned())).collect()
}
