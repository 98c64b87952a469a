//! Vocabularies of GGUF files: their tokenizers and the tokens that end responses.

use super::*;
use serde_json::{Map, Value};

/// A draft with the vocabulary of one kind from the goldens.
fn byte_level(kind: &str, vocabulary: &Value) -> Draft {
    let list = |key: &str| -> Vec<String> { serde_json::from_value(vocabulary[key].clone()).unwrap() };
    let tokens = list("tokens");
    let mut types = [9u32.to_le_bytes(), 5u32.to_le_bytes()].concat();
    types.extend((tokens.len() as u64).to_le_bytes());
    types.extend(tokens.iter().flat_map(|t| if t.starts_with("<|") { 3i32 } else { 1 }.to_le_bytes()));
    llama()
        .field("tokenizer.ggml.model", string_field("gpt2"))
        .field("tokenizer.ggml.pre", string_field(kind))
        .field("tokenizer.ggml.tokens", strings_field(&tokens))
        .field("tokenizer.ggml.token_type", types)
        .field("tokenizer.ggml.merges", strings_field(&list("merges")))
        .field("tokenizer.ggml.bos_token_id", u32_field(0))
        .field("tokenizer.ggml.eos_token_id", u32_field(2))
}

fn goldens() -> Map<String, Value> {
    serde_json::from_str(include_str!("../../../tests/data/formats/tokenizers.json")).unwrap()
}

fn words() -> Value {
    serde_json::from_str(include_str!("../../../tests/data/formats/words.json")).unwrap()
}

#[test]
fn byte_level_vocabularies_of_every_kind_give_the_ids_of_the_tokenizers_package() {
    for (kind, golden) in goldens().iter().filter(|(kind, _)| *kind != "sentence piece") {
        let draft = byte_level(kind, golden);
        let tokenizer = open_bytes(&draft.bytes()).unwrap().tokenizer().unwrap();
        for case in golden["cases"].as_array().unwrap() {
            let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
            let text = case["text"].as_str().unwrap();
            assert_eq!(tokenizer.encode_rendered(text).unwrap(), ids, "{kind} {text:?}");
        }
    }
}

/// Names of llama.cpp, each with ids by the `tokenizers` package (`make_words.py`), for a vocabulary whose merges go across
/// words.
#[test]
fn every_name_of_a_pre_tokenizer_cuts_words_at_its_places() {
    let golden = words();
    let texts = golden["texts"].as_array().unwrap();
    let names = golden["names"].as_object().unwrap();
    assert_eq!(names.len(), 15);
    for (name, expected) in names {
        let tokenizer = open_bytes(&byte_level(name, &golden).bytes()).unwrap().tokenizer().unwrap();
        for (text, expected) in texts.iter().zip(expected.as_array().unwrap()) {
            let text = text.as_str().unwrap();
            let expected: Vec<u32> = serde_json::from_value(expected.clone()).unwrap();
            assert_eq!(tokenizer.encode_rendered(text).unwrap(), expected, "{name} {text:?}");
        }
    }
    let qwen = byte_level("default", &golden).field("general.architecture", string_field("qwen3"));
    let ids = open_bytes(&qwen.bytes()).unwrap().tokenizer().unwrap().encode("The end, 12").unwrap();
    let named = byte_level("qwen2", &golden);
    assert_eq!(ids, open_bytes(&named.bytes()).unwrap().tokenizer().unwrap().encode("The end, 12").unwrap());
}

#[test]
fn only_llama_3_and_tekken_start_with_bos_by_themselves() {
    let golden = words();
    for name in golden["names"].as_object().unwrap().keys() {
        let draft = byte_level(name, &golden);
        let first =
            |draft: &Draft| open_bytes(&draft.bytes()).unwrap().tokenizer().unwrap().encode("x").unwrap()[0];
        let starts = ["llama-bpe", "llama3", "llama-v3", "tekken"].contains(&name.as_str());
        assert_eq!(first(&draft) == 0, starts, "{name}");
        for adds in [false, true] {
            let flag = [&7u32.to_le_bytes()[..], &[u8::from(adds)]].concat();
            let draft = draft.clone().field("tokenizer.ggml.add_bos_token", flag);
            assert_eq!(first(&draft) == 0, adds, "{name}");
        }
    }
}

#[test]
fn the_end_of_a_text_is_there_where_the_file_asks_for_it() {
    let flag = |value: u8| [&7u32.to_le_bytes()[..], &[value]].concat();
    let ids = |bos, eos| {
        let draft = byte_level("qwen2", &words()).field("tokenizer.ggml.add_bos_token", flag(bos));
        let draft = draft.field("tokenizer.ggml.add_eos_token", flag(eos));
        let tokenizer = open_bytes(&draft.bytes()).unwrap().tokenizer().unwrap();
        (tokenizer.encode("x").unwrap(), tokenizer.encode_rendered("x").unwrap())
    };
    let plain = ids(0, 0).0;
    for (bos, eos, expected) in [(0, 1, [&plain[..], &[2]]), (1, 0, [&[0], &plain]), (0, 0, [&plain, &[]])] {
        assert_eq!(ids(bos, eos), (expected.concat(), plain.clone()));
    }
    assert_eq!(ids(1, 1).0, [&[0], &plain[..], &[2]].concat());
}

/// A vocabulary of control tokens, numbered from 0, and two others.
fn with_control(control: &[&str]) -> Draft {
    let tokens = [control, &["plain", "<|eot_id|>"]].concat();
    let mut types = [9u32.to_le_bytes(), 5u32.to_le_bytes()].concat();
    types.extend((tokens.len() as u64).to_le_bytes());
    types.extend((0..tokens.len()).flat_map(|id| if id < control.len() { 3i32 } else { 1 }.to_le_bytes()));
    llama()
        .without("token_embd.weight")
        .tensor("token_embd.weight", &[8, 9], 0.5)
        .field("tokenizer.ggml.tokens", strings_field(&tokens))
        .field("tokenizer.ggml.token_type", types)
        .field("tokenizer.ggml.eos_token_id", u32_field(1))
}

/// As in llama.cpp. Qwen3's and Phi-4-mini's files name one of two tokens.
#[test]
fn control_tokens_that_end_turns_are_stops() {
    let stops = |draft: &Draft| open_bytes(&draft.bytes()).unwrap().config().unwrap().stops;
    let qwen = with_control(&["<|endoftext|>", "<|im_end|>", "<|im_start|>"]);
    assert_eq!(stops(&qwen), [1, 0]);
    let phi = with_control(&["<|end|>", "<|endoftext|>", "<|user|>", "<|return|>"]);
    assert_eq!(stops(&phi), [1, 0, 3]);
    // In the format of gpt-oss, `<|end|>` ends a message and the turn goes on.
    let harmony = with_control(&["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]);
    assert_eq!(stops(&harmony), [1, 2, 3]);
    let named = phi.clone().field("tokenizer.ggml.eot_token_id", u32_field(4));
    assert_eq!(stops(&named), [1, 4, 0, 3]);
    assert_eq!(stops(&qwen.clone().without("tokenizer.ggml.token_type")), [1]);
    // A vocabulary that cannot be read is the tokenizer's matter.
    let broken = qwen.field("tokenizer.ggml.token_type", strings_field(&["x"]));
    assert_eq!(stops(&broken), [1]);
}

#[test]
fn broken_vocabularies_are_refused_by_key() {
    let golden = &goldens()["qwen2"];
    let refused = |draft: Draft, words: &[&str]| {
        let message = open_bytes(&draft.bytes()).unwrap().tokenizer().expect_err("accepted").to_string();
        for word in words {
            assert!(message.contains(word), "{message:?} does not say {word:?}");
        }
    };
    let key = |name: &str, value: Vec<u8>| {
        byte_level("qwen2", golden).field(&format!("tokenizer.ggml.{name}"), value)
    };
    refused(key("model", string_field("bert")), &["tokenizer.ggml.model", "bert"]);
    refused(key("pre", string_field("bloom")), &["tokenizer.ggml.pre", "bloom", "hint: supported: qwen2"]);
    refused(key("merges", strings_field(&["ab"])), &["tokenizer.ggml.merges", "two tokens"]);
    refused(key("merges", strings_field(&["ab cd"])), &["tokenizer.ggml.merges"]);
    refused(key("tokens", strings_field(&["a", "a"])), &["token_type", "2 tokens"]);
    let twice = key("tokens", strings_field(&["a", "a"])).without("tokenizer.ggml.token_type");
    refused(twice, &["tokenizer.ggml.tokens", "twice"]);
    let long = key("tokens", strings_field(&["a".repeat(5000)])).without("tokenizer.ggml.token_type");
    refused(long, &["tokenizer.ggml.tokens", "longer"]);
    refused(key("model", string_field("llama")), &["tokenizer.ggml.scores", "missing"]);
    refused(
        byte_level("qwen2", golden).without("tokenizer.ggml.tokens"),
        &["tokenizer.ggml.tokens", "missing"],
    );
    let with_flag = key("add_bos_token", [&7u32.to_le_bytes()[..], &[1]].concat());
    refused(with_flag.clone().without("tokenizer.ggml.bos_token_id"), &["bos_token_id", "missing"]);
    refused(
        with_flag.field("tokenizer.ggml.bos_token_id", u32_field(9999)),
        &["bos_token_id", "not a token"],
    );
}
