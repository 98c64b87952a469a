//! Checks a `tokenizer.json` for faults that the `tokenizers` crate does not check and would panic on.

use crate::error::{Error, Result};
use serde::Deserialize;
use serde_json::Value;

/// The parts of the file that are checked; the rest only has to be JSON.
#[derive(Deserialize)]
struct TokenizerFile {
    model: MergeModel,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    post_processor: Value,
}

#[derive(Deserialize)]
struct MergeModel {
    r#type: Option<String>,
    continuing_subword_prefix: Option<String>,
}

/// Refuses a file on which the crate would panic while reading or in use.
pub(super) fn vet(place: &str, bytes: &[u8]) -> Result<()> {
    let malformed = |problem: String| Err(Error::malformed(place, problem));
    let TokenizerFile { model, decoder, post_processor } = serde_json::from_slice(bytes)
        .map_err(|e| Error::malformed(place, format!("is not a tokenizer.json: {e}")))?;
    if let Some(kind) = model.r#type.filter(|kind| kind != "BPE") {
        let hint = "supported: BPE, the kind of Qwen, Llama and SmolLM";
        return Err(Error::unsupported(place, format!("model type {kind} is not supported"), hint));
    }
    if let Some(prefix) = model.continuing_subword_prefix.filter(|prefix| !prefix.is_empty()) {
        return malformed(format!("continuing_subword_prefix {prefix:?} does not go with byte-pair merges"));
    }
    for part in parts(&decoder, "decoders") {
        let counts = ["start", "stop"].map(|key| part.get(key).and_then(Value::as_u64).unwrap_or(0));
        if part.get("type").is_some_and(|kind| kind == "Strip") && counts.iter().any(|&n| n > MAX_STRIP) {
            return malformed(format!(
                "decoder strips {counts:?} characters, at most {MAX_STRIP} make sense"
            ));
        }
    }
    for part in parts(&post_processor, "processors") {
        if let Some(name) = undefined_special_token(part) {
            return malformed(format!("post_processor uses special token {name} without defining it"));
        }
    }
    Ok(())
}

const MAX_STRIP: u64 = 16;

/// The component and, where it is a sequence, the components inside, at any depth.
fn parts<'a>(component: &'a Value, children: &str) -> Vec<&'a Value> {
    let mut found = vec![component];
    let mut at = 0;
    while let Some(part) = found.get(at) {
        found.extend(part.get(children).and_then(Value::as_array).into_iter().flatten());
        at += 1;
    }
    found
}

/// A special token in a template that `special_tokens` does not list.
fn undefined_special_token(part: &Value) -> Option<&Value> {
    let pieces = ["single", "pair"].into_iter().filter_map(|key| part.get(key)?.as_array()).flatten();
    let mut used = pieces.filter_map(|piece| piece.get("SpecialToken")?.get("id"));
    let defined = part.get("special_tokens");
    used.find(|id| id.as_str().and_then(|id| defined?.get(id)).is_none())
}
