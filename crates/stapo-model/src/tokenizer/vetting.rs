//! Checks a tokenizer before the `tokenizers` crate sees it: only the components that the supported families use, with
//! values on which the crate neither panics nor allocates out of proportion, and from which one text gives one result.

use super::MAX_IDS;
use crate::error::{Error, Result};
use crate::json;
use serde_json::{Map, Value};
use std::collections::HashSet;

/// Longest token in bytes; the longest published ones are runs of about 128 characters.
pub(crate) const MAX_TOKEN_BYTES: usize = 1024;
/// Longest text of a component, such as what a normalizer puts before a text.
const MAX_TEXT_BYTES: usize = 64;
/// Most components of a kind; the published ones have up to four.
const MAX_COMPONENTS: usize = 32;
/// Most added tokens, and bytes of all of them; Llama 3 has 256.
const MAX_ADDED_TOKENS: usize = 1 << 16;
const MAX_ADDED_BYTES: usize = 1 << 22;
const MAX_STRIP: u64 = 16;
/// How many times as long one replacement may make a text, and all replacements together. SentencePiece writes three bytes for a
/// blank.
const MAX_STEP_GROWTH: f64 = 8.0;
const MAX_GROWTH: f64 = 16.0;

/// How words are cut out of a text. Patterns come from this list, because a pattern of the file's own could take
/// exponential time.
pub(crate) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const QWEN3_5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Of Phi-4-mini.
pub(crate) const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Of Mistral models with the Tekken tokenizer.
pub(crate) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const PATTERNS: [&str; 6] = [QWEN2, LLAMA3, QWEN3_5, GPT2, GPT4O, TEKKEN];

/// The object of a `tokenizer.json`, checked and without padding and truncation: a file may carry those from training,
/// and here sequences are never changed.
pub(super) fn vetted(location: &str, bytes: &[u8]) -> Result<Value> {
    let mut keys = json::parse_object(location, bytes)?;
    let vet = Vetting { location };
    let Some(Value::Object(model)) = keys.get("model") else {
        return vet.malformed("is not a tokenizer.json: no model");
    };
    vet.model(model)?;
    vet.added_tokens(keys.get("added_tokens"))?;
    for (key, children, check) in [
        ("normalizer", "normalizers", Vetting::normalizer as Check<'_>),
        ("pre_tokenizer", "pretokenizers", Vetting::pre_tokenizer),
        ("decoder", "decoders", Vetting::decoder),
        ("post_processor", "processors", Vetting::post_processor),
    ] {
        let parts = vet.parts(key, keys.get(key).unwrap_or(&Value::Null), children)?;
        for part in &parts {
            check(&vet, kind(part), part)?;
        }
        vet.growth(key, &parts)?;
    }
    keys.insert("padding".into(), Value::Null);
    keys.insert("truncation".into(), Value::Null);
    Ok(Value::Object(keys))
}

/// Refuses a merge whose parts or result are not tokens.
pub(crate) fn check_merges<'a>(
    merges: impl Iterator<Item = (&'a str, &'a str)>,
    is_token: impl Fn(&str) -> bool,
) -> std::result::Result<(), String> {
    for (idx, (left, right)) in merges.enumerate() {
        let missing = [left.to_owned(), right.to_owned(), format!("{left}{right}")];
        if let Some(token) = missing.iter().find(|token| !is_token(token)) {
            return Err(format!("merge {idx} of {left:?} and {right:?}: {token:?} is not a token"));
        }
    }
    Ok(())
}

type Check<'a> = fn(&Vetting<'a>, &str, &Value) -> Result<()>;

struct Vetting<'a> {
    location: &'a str,
}

impl Vetting<'_> {
    fn malformed<T>(&self, problem: impl Into<String>) -> Result<T> {
        Err(Error::malformed(self.location, problem.into()))
    }

    fn unsupported<T>(&self, problem: String, hint: &str) -> Result<T> {
        Err(Error::unsupported(self.location, problem, hint))
    }

    fn model(&self, model: &Map<String, Value>) -> Result<()> {
        match model.get("type") {
            None | Some(Value::Null) => {}
            Some(kind) if kind == "BPE" => {}
            Some(kind) => {
                let problem = format!("model type {} is not supported", bare(kind));
                return self
                    .unsupported(problem, "supported: BPE, the kind of Qwen, Llama, Gemma and SmolLM");
            }
        }
        if let Some(dropout) =
            model.get("dropout").filter(|value| value.as_f64() != Some(0.0) && !value.is_null())
        {
            let hint = "one text must give one result; set dropout to null in tokenizer.json";
            return self.unsupported(format!("dropout {dropout} leaves out merges at random"), hint);
        }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if let Some(text) = model.get(key).filter(|text| !text.is_null() && *text != "") {
                return self.malformed(format!("{key} {text} does not go with byte-pair merges"));
            }
        }
        let vocabulary = self.vocabulary(model.get("vocab"))?;
        if let Some(unknown) = model.get("unk_token").filter(|token| !token.is_null())
            && !unknown.as_str().is_some_and(|token| vocabulary.contains(token))
        {
            return self.malformed(format!("unk_token {unknown} is not in the vocabulary"));
        }
        let merges = self.merges(model.get("merges"))?;
        check_merges(merges.into_iter(), |token| vocabulary.contains(token))
            .or_else(|problem| self.malformed(problem))
    }

    /// The tokens of the vocabulary.
    fn vocabulary<'m>(&self, vocabulary: Option<&'m Value>) -> Result<HashSet<&'m str>> {
        let Some(Value::Object(entries)) = vocabulary else { return self.malformed("model has no vocab") };
        let mut taken = HashSet::with_capacity(entries.len());
        for (token, id) in entries {
            let Some(number) = id.as_u64() else {
                return self.malformed(format!("token {token:?} has id {id}, expected a whole number"));
            };
            if number >= MAX_IDS as u64 || number >= 4 * entries.len() as u64 + 1024 {
                return self.malformed(format!("id {number} is out of any proportion"));
            }
            if token.len() > MAX_TOKEN_BYTES {
                let problem = format!("token {number} has {} bytes, at most {MAX_TOKEN_BYTES}", token.len());
                return self.malformed(problem);
            }
            if !taken.insert(number) {
                return self.malformed(format!("id {number} has two tokens, one of them {token:?}"));
            }
        }
        Ok(entries.keys().map(String::as_str).collect())
    }

    /// Merges as pairs; old files write a pair as one text.
    fn merges<'m>(&self, merges: Option<&'m Value>) -> Result<Vec<(&'m str, &'m str)>> {
        let Some(Value::Array(merges)) = merges else { return self.malformed("model has no merges") };
        let pair = |(idx, merge): (usize, &'m Value)| {
            let pair = match merge {
                Value::String(text) => text.split_once(' '),
                Value::Array(two) if two.len() == 2 => two[0].as_str().zip(two[1].as_str()),
                _ => None,
            };
            pair.map_or_else(|| self.malformed(format!("merge {idx} is not two tokens")), Ok)
        };
        let is_comment = |merge: &Value| merge.as_str().is_some_and(|text| text.starts_with("#version"));
        merges.iter().enumerate().filter(|(_, merge)| !is_comment(merge)).map(pair).collect()
    }

    fn added_tokens(&self, added: Option<&Value>) -> Result<()> {
        let list = match added {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Array(list)) if list.len() <= MAX_ADDED_TOKENS => list,
            _ => return self.malformed(format!("added_tokens is not a list of at most {MAX_ADDED_TOKENS}")),
        };
        let mut seen = HashSet::new();
        let mut n_bytes = 0;
        for (idx, token) in list.iter().enumerate() {
            let content = token.get("content").and_then(Value::as_str).unwrap_or_default();
            let Some(id) = token.get("id").and_then(Value::as_u64) else {
                return self.malformed(format!("added token {idx} has no id"));
            };
            n_bytes += content.len();
            if content.is_empty() || content.len() > MAX_TOKEN_BYTES || n_bytes > MAX_ADDED_BYTES {
                let problem =
                    format!("added token {id} has {} bytes, expected 1 to {MAX_TOKEN_BYTES}", content.len());
                return self.malformed(problem);
            }
            if !seen.insert(content) {
                return self.malformed(format!("added token {content:?} appears twice"));
            }
        }
        Ok(())
    }

    /// The component and, where it is a sequence, the components inside, at any depth.
    fn parts<'v>(&self, key: &str, component: &'v Value, children: &str) -> Result<Vec<&'v Value>> {
        let mut found = vec![component];
        let mut at = 0;
        while let Some(&part) = found.get(at) {
            if kind(part) == "Sequence" {
                let Some(inside) = part.get(children).and_then(Value::as_array) else {
                    return self.malformed(format!("{key}: a sequence without {children}"));
                };
                found.extend(inside);
            }
            if found.len() > MAX_COMPONENTS {
                return self.malformed(format!("{key}: more than {MAX_COMPONENTS} components"));
            }
            at += 1;
        }
        Ok(found)
    }

    fn normalizer(&self, kind: &str, part: &Value) -> Result<()> {
        match kind {
            "" | "Sequence" | "NFC" => Ok(()),
            "Prepend" => self.short_text("normalizer", part, "prepend"),
            "Replace" => self.replacement("normalizer", part),
            _ => self.unknown("normalizer", part, "Sequence, NFC, Prepend, Replace"),
        }
    }

    fn pre_tokenizer(&self, kind: &str, part: &Value) -> Result<()> {
        match kind {
            "" | "Sequence" | "ByteLevel" | "Digits" | "Metaspace" => Ok(()),
            "Split" => match part.get("pattern") {
                Some(pattern) if pattern.get("String").is_some() => {
                    self.short("pre_tokenizer: pattern", &pattern["String"])
                }
                Some(pattern) if PATTERNS.iter().any(|known| pattern["Regex"] == *known) => Ok(()),
                pattern => {
                    let shown: String =
                        pattern.unwrap_or(&Value::Null).to_string().chars().take(200).collect();
                    let hint = "supported: the patterns of GPT-2 and GPT-4o, Qwen 2 to 3.5, Llama 3 and Mistral's Tekken";
                    self.unsupported(format!("pre_tokenizer: pattern {shown} is not supported"), hint)
                }
            },
            _ => self.unknown("pre_tokenizer", part, "Sequence, Split, ByteLevel, Digits, Metaspace"),
        }
    }

    fn decoder(&self, kind: &str, part: &Value) -> Result<()> {
        match kind {
            "" | "Sequence" | "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace" => Ok(()),
            "Replace" => self.replacement("decoder", part),
            "Strip" => {
                let counts = ["start", "stop"].map(|key| part.get(key).and_then(Value::as_u64).unwrap_or(0));
                if counts.iter().any(|&n| n > MAX_STRIP) {
                    let problem =
                        format!("decoder strips {counts:?} characters, at most {MAX_STRIP} make sense");
                    return self.malformed(problem);
                }
                Ok(())
            }
            _ => {
                let known = "Sequence, ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip";
                self.unknown("decoder", part, known)
            }
        }
    }

    fn post_processor(&self, kind: &str, part: &Value) -> Result<()> {
        match kind {
            "" | "Sequence" | "ByteLevel" => Ok(()),
            "TemplateProcessing" => self.template(part),
            _ => self.unknown("post_processor", part, "Sequence, ByteLevel, TemplateProcessing"),
        }
    }

    /// The tokens that start and end a sequence.
    fn template(&self, part: &Value) -> Result<()> {
        let list = |key: &str| part.get(key).and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let defined = part.get("special_tokens").and_then(Value::as_object);
        let pieces = [list("single"), list("pair")].concat();
        if pieces.len() > MAX_COMPONENTS || defined.is_some_and(|all| all.len() > MAX_COMPONENTS) {
            return self.malformed(format!("post_processor: more than {MAX_COMPONENTS} pieces"));
        }
        for id in pieces.iter().filter_map(|piece| piece.get("SpecialToken")?.get("id")) {
            if id.as_str().and_then(|id| defined?.get(id)).is_none() {
                return self.malformed(format!("post_processor uses special token {id} without defining it"));
            }
        }
        for (name, token) in defined.into_iter().flatten() {
            let length = |key: &str| token.get(key).and_then(Value::as_array).map(Vec::len);
            if length("ids") != length("tokens") || length("ids").is_none_or(|n| n > MAX_COMPONENTS) {
                let problem = format!("post_processor: special token {name:?} needs as many ids as tokens");
                return self.malformed(problem);
            }
        }
        Ok(())
    }

    fn replacement(&self, location: &str, part: &Value) -> Result<()> {
        if part.get("pattern").is_none_or(|pattern| pattern.get("String").is_none()) {
            return self.unsupported(
                format!("{location}: Replace by a pattern is not supported"),
                "supported: a text",
            );
        }
        if part["pattern"]["String"] == "" || part.get("content").is_some_and(|text| text == "") {
            return self.malformed(format!("{location}: Replace of or by an empty text"));
        }
        self.short(location, &part["pattern"]["String"])?;
        self.short_text(location, part, "content")
    }

    /// Refuses replacements that make a text longer out of proportion: a few of them in a row, each of one character by ten, would
    /// fill any memory.
    fn growth(&self, key: &str, parts: &[&Value]) -> Result<()> {
        let length = |text: Option<&Value>| text.and_then(Value::as_str).map_or(1, str::len).max(1) as f64;
        let mut growth = 1.0;
        for part in parts.iter().filter(|part| kind(part) == "Replace") {
            let step = (length(part.get("content")) / length(part["pattern"].get("String"))).max(1.0);
            if step > MAX_STEP_GROWTH {
                let problem = format!(
                    "{key}: a Replace makes a text {step:.1} times as long, at most {MAX_STEP_GROWTH} times"
                );
                return self.malformed(problem);
            }
            growth *= step;
        }
        if growth > MAX_GROWTH {
            return self.malformed(format!(
                "{key}: its Replace steps make a text up to {growth:.0} times as long, at most {MAX_GROWTH} times"
            ));
        }
        Ok(())
    }

    fn short_text(&self, location: &str, part: &Value, key: &str) -> Result<()> {
        self.short(&format!("{location}: {key}"), part.get(key).unwrap_or(&Value::Null))
    }

    fn short(&self, location: &str, text: &Value) -> Result<()> {
        if text.as_str().is_some_and(|text| text.len() <= MAX_TEXT_BYTES) {
            return Ok(());
        }
        self.malformed(format!("{location} is not a text of at most {MAX_TEXT_BYTES} bytes"))
    }

    fn unknown<T>(&self, key: &str, part: &Value, known: &str) -> Result<T> {
        let name = part.get("type").map_or_else(|| json::kind(part).to_owned(), bare);
        let name: String = name.chars().take(80).collect();
        self.unsupported(format!("{key} {name} is not supported"), &format!("supported: {known}"))
    }
}

/// The type of a component; empty for no component.
fn kind(part: &Value) -> &str {
    if part.is_null() { "" } else { part.get("type").and_then(Value::as_str).unwrap_or("untyped") }
}

fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A small tokenizer with one value replaced, vetted; the reason where it is refused.
    fn refusal(pointer: &str, value: Value) -> Option<String> {
        let mut file = json!({
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]], "unk_token": null,
                "dropout": null, "end_of_word_suffix": ""},
            "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "decoder": null, "post_processor": null,
        });
        *file.pointer_mut(pointer).unwrap() = value;
        vetted("file", file.to_string().as_bytes()).err().map(|error| error.to_string())
    }

    fn added(lengths: &[usize]) -> Value {
        let token = |(idx, n): (usize, &usize)| json!({"id": idx + 3, "content": format!("{idx:0n$}")});
        lengths.iter().enumerate().map(token).collect()
    }

    fn replaced(contents: &[usize]) -> Value {
        let part =
            |n: &usize| json!({"type": "Replace", "pattern": {"String": "a"}, "content": "x".repeat(*n)});
        json!({"type": "Sequence", "normalizers": contents.iter().map(part).collect::<Value>()})
    }

    fn template(n_pieces: usize, n_ids: usize, n_tokens: usize) -> Value {
        let piece = json!({"SpecialToken": {"id": "<s>", "type_id": 0}});
        json!({"type": "TemplateProcessing", "single": vec![piece; n_pieces], "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": vec![0; n_ids], "tokens": vec!["a"; n_tokens]}}})
    }

    fn undefined(n_pieces: usize) -> Value {
        let mut template = template(n_pieces, 1, 1);
        template.as_object_mut().unwrap().remove("special_tokens");
        template
    }

    /// A value at its limit is taken, and the next one refused.
    #[test]
    fn limits_hold_exactly() {
        let long = |n: usize| json!({"x".repeat(n): 0, "a": 1, "b": 2, "ab": 3});
        let nested = |n: usize| json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); n]});
        let strip =
            |start: u64, stop: u64| json!({"type": "Strip", "content": " ", "start": start, "stop": stop});
        // Two characters are replaced by `n`.
        let pair =
            |n: usize| json!({"type": "Replace", "pattern": {"String": "ab"}, "content": "x".repeat(n)});
        let prepend = |n: usize| json!({"type": "Prepend", "prepend": "x".repeat(n)});
        let many = |n: usize| added(&vec![MAX_TOKEN_BYTES; n]);
        let n_most = MAX_ADDED_BYTES / MAX_TOKEN_BYTES;
        for (pointer, taken, refused, reason) in [
            ("/model/vocab/ab", json!(4 * 3 + 1023), json!(4 * 3 + 1024), "out of any proportion"),
            ("/model/vocab", long(1024), long(1025), "has 1025 bytes, at most 1024"),
            ("/added_tokens", added(&[1024]), added(&[1025]), "has 1025 bytes, expected 1 to 1024"),
            ("/added_tokens", many(n_most), many(n_most + 1), "expected 1 to 1024"),
            ("/normalizer", nested(31), nested(32), "more than 32 components"),
            ("/normalizer", prepend(64), prepend(65), "at most 64 bytes"),
            ("/normalizer", replaced(&[8]), replaced(&[9]), "9.0 times as long, at most 8"),
            ("/normalizer", replaced(&[8, 2]), replaced(&[8, 3]), "24 times as long, at most 16"),
            ("/normalizer", pair(16), pair(17), "8.5 times as long, at most 8"),
            ("/decoder", strip(16, 16), strip(17, 0), "at most 16 make sense"),
            ("/decoder", strip(0, 0), strip(0, 17), "at most 16 make sense"),
            ("/post_processor", template(32, 1, 1), template(33, 1, 1), "more than 32 pieces"),
            ("/post_processor", template(1, 32, 32), template(1, 33, 33), "as many ids as tokens"),
            ("/post_processor", template(0, 2, 2), template(0, 2, 1), "as many ids as tokens"),
            ("/post_processor", undefined(0), undefined(1), "without defining it"),
            ("/model/unk_token", json!("ab"), json!("c"), "is not in the vocabulary"),
            ("/model/unk_token", json!(null), json!(1), "is not in the vocabulary"),
            ("/model/dropout", json!(0.0), json!(0.1), "leaves out merges"),
            (
                "/model/merges",
                json!(["#version: 0.2", "a b"]),
                json!(["#version: 0.2", "ab"]),
                "merge 1 is not two",
            ),
            ("/model/merges", json!([]), json!([["a"]]), "merge 0 is not two tokens"),
            ("/model/end_of_word_suffix", json!(null), json!("</w>"), "does not go with"),
        ] {
            assert_eq!(refusal(pointer, taken), None, "{pointer}: {reason}");
            let said = refusal(pointer, refused).unwrap_or_default();
            assert!(said.contains(reason), "{pointer}: {said:?} without {reason:?}");
        }
        let empty = json!({"type": "Replace", "pattern": {"String": "a"}, "content": ""});
        for (pointer, value) in [
            ("/model/vocab", json!({"a": 0, "b": 1, "ab": 1})),
            ("/added_tokens", json!([{"id": 3, "content": ""}])),
            ("/added_tokens", json!([{"id": 3, "content": "x"}, {"id": 4, "content": "x"}])),
            ("/decoder", empty),
            ("/decoder", json!({"type": "Replace", "pattern": {"String": ""}, "content": "a"})),
            ("/decoder", json!({"type": "Replace", "content": "a"})),
        ] {
            assert!(refusal(pointer, value.clone()).is_some(), "{pointer}: {value}");
        }
    }
}
