//! The tokenizer from GGUF metadata (`tokenizer.ggml.*`), built as the model's `tokenizer.json` would define it.

use super::Gguf;
use crate::chat::SpecialTokens;
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use crate::tokenizer::vetting::{LLAMA3, MAX_TOKEN_BYTES, QWEN2, check_merges};
use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, Prepend, Replace};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::processors::template::TemplateProcessing;
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

/// How `gpt2` vocabularies cut text into words before the merges (`tokenizer.ggml.pre`).
#[derive(Clone, Copy, PartialEq, Eq)]
enum PreTokenizer {
    Gpt2,
    Qwen2,
    Llama3,
    SmolLm,
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
        let adds_bos = self.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(adds_bos);
        if adds_bos {
            let bos = self.token_id("tokenizer.ggml.bos_token_id")?;
            let bos = bos.ok_or_else(|| self.absent("tokenizer.ggml.bos_token_id"))?;
            let text = tokens.text(bos).ok_or_else(|| self.wrong("bos_token_id", "is not a token"))?;
            inner.with_post_processor(Some(self.starts_with(text, bos)?));
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
        let builder = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .ignore_merges(pre_tokenizer == PreTokenizer::Llama3);
        let mut inner = Inner::new(builder.build().map_err(|e| self.wrong("merges", &e.to_string()))?);
        let split = |pattern: &str| {
            Split::new(SplitPattern::Regex(pattern.into()), SplitDelimiterBehavior::Isolated, false)
                .expect("the patterns above are valid")
        };
        let bytes = ByteLevel::new(false, false, false);
        match pre_tokenizer {
            PreTokenizer::Gpt2 => inner.with_pre_tokenizer(Some(ByteLevel::new(false, false, true))),
            PreTokenizer::SmolLm => inner.with_pre_tokenizer(Some(in_sequence(vec![
                Digits::new(true).into(),
                ByteLevel::new(false, false, true).into(),
            ]))),
            PreTokenizer::Qwen2 => {
                inner.with_normalizer(Some(NFC)).map_err(|e| self.wrong("pre", &e.to_string()))?;
                inner.with_pre_tokenizer(Some(in_sequence(vec![split(QWEN2).into(), bytes.into()])))
            }
            PreTokenizer::Llama3 => {
                inner.with_pre_tokenizer(Some(in_sequence(vec![split(LLAMA3).into(), bytes.into()])))
            }
        };
        inner.with_decoder(Some(bytes));
        Ok((inner, pre_tokenizer == PreTokenizer::Llama3))
    }

    fn pre_tokenizer(&self) -> Result<PreTokenizer> {
        let architecture = self.text("general.architecture")?.unwrap_or_default();
        match self.text("tokenizer.ggml.pre")?.unwrap_or("default") {
            "qwen2" | "deepseek-r1-qwen" => Ok(PreTokenizer::Qwen2),
            "llama-bpe" | "llama3" | "llama-v3" => Ok(PreTokenizer::Llama3),
            "smollm" => Ok(PreTokenizer::SmolLm),
            // Files older than the key, or written by a converter that did not know the model.
            "default" if architecture.starts_with("qwen") => Ok(PreTokenizer::Qwen2),
            "default" | "gpt-2" => Ok(PreTokenizer::Gpt2),
            other => {
                let location = format!("{}: tokenizer.ggml.pre", self.location);
                let hint =
                    "supported: qwen2, llama-bpe, smollm, gpt-2; or use the model's Hugging Face folder";
                Err(Error::unsupported(location, format!("{other:?} is not supported"), hint))
            }
        }
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

    fn starts_with(&self, bos: &str, id: u32) -> Result<TemplateProcessing> {
        // A template separates its parts by spaces, so the token goes by the name `bos`: its own text may hold a space.
        TemplateProcessing::builder()
            .try_single("bos $A")
            .and_then(|builder| builder.try_pair("bos $A bos $B"))
            .map(|builder| {
                let token = tokenizers::processors::template::SpecialToken::new(
                    "bos".into(),
                    vec![id],
                    vec![bos.into()],
                );
                builder.special_tokens(token.into_iter().collect::<Vec<_>>()).build()
            })
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
