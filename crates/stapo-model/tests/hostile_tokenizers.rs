//! Tokenizers with seeded faults: refused in words or used, and never a panic, an abort or two results for one text.

use crate::inside::{in_own_process, peak_mib};
use serde_json::{Value, json};
use stapo_model::{Pretrained, Tokenizer};
use std::path::{Path, PathBuf};

/// Faults per file; `STAPO_TRIALS` sets another number.
const N_TRIALS: usize = 150;
const MAX_RESIDENT_MIB: u64 = 1024;
const TEXTS: [&str; 4] =
    ["", "the end <s> 12 😀é\u{0}\u{301}", "  <|im_start|>\n\n\tx  ", "ααααααα 1234567 don't"];

fn n_trials() -> usize {
    std::env::var("STAPO_TRIALS").map_or(N_TRIALS, |text| text.parse().unwrap())
}

/// A sequence of numbers that depends on its seed only (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

fn data(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(file)
}

/// Tokenizers of each kind: byte-level, SentencePiece, single characters.
fn originals() -> Vec<String> {
    let mut found: Vec<String> = ["qwen2-bpe.gguf", "llama-spm.gguf"]
        .map(|file| {
            Pretrained::open(&data("data/formats").join(file))
                .unwrap()
                .tokenizer()
                .unwrap()
                .to_json()
                .unwrap()
        })
        .into();
    found.push(std::fs::read_to_string(data("goldens/qwen3-tied-gqa2/tokenizer.json")).unwrap());
    found.push(std::fs::read_to_string(data("../../../models/base/tokenizer.json")).unwrap());
    found
}

/// Every place in a JSON value, but of long lists and maps only the first entries.
fn pointers(json: &Value) -> Vec<String> {
    let mut found = vec![String::new()];
    let mut at = 0;
    while let Some(pointer) = found.get(at).cloned() {
        match json.pointer(&pointer).unwrap() {
            Value::Object(map) => found.extend(
                map.keys()
                    .filter(|key| !key.contains(['/', '~']))
                    .take(24)
                    .map(|key| format!("{pointer}/{key}")),
            ),
            Value::Array(list) => found.extend((0..list.len().min(8)).map(|idx| format!("{pointer}/{idx}"))),
            _ => {}
        }
        at += 1;
    }
    found
}

fn odd_value(numbers: &mut Numbers, json: &Value, places: &[String]) -> Value {
    let deep = (0..100).fold(json!(1), |inner, _| json!([inner]));
    let odd = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0.5),
        json!(4_294_967_295_u32),
        json!(u64::MAX),
        json!(1e308),
        json!(""),
        json!("("),
        json!("(a+)+$"),
        json!("a{1000000000}"),
        json!("▁"),
        json!("\u{0}"),
        json!("x".repeat(5000)),
        json!([]),
        json!({}),
        deep,
        json!({"Regex": "(a*)*b"}),
        json!({"String": "a"}),
        json!({"type": "Sequence"}),
        json!({"type": "Replace", "pattern": {"String": "a"}, "content": "a".repeat(100_000)}),
        json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        json!({"type": "BertPreTokenizer"}),
    ];
    match numbers.below(odd.len() + 6) {
        choice if choice < odd.len() => odd[choice].clone(),
        _ => json.pointer(&places[numbers.below(places.len())]).unwrap().clone(),
    }
}

/// The file with one to three faults.
fn faulty(numbers: &mut Numbers, original: &str, places: &[String]) -> Vec<u8> {
    let mut json: Value = serde_json::from_str(original).unwrap();
    for _ in 0..=numbers.below(2) {
        let place = &places[numbers.below(places.len())];
        let value = odd_value(numbers, &json.clone(), &[String::new()]);
        let copied = json.pointer(&places[numbers.below(places.len())]).cloned();
        let n = numbers.below(1000);
        let Some(target) = json.pointer_mut(place) else { continue };
        match (numbers.below(6), &mut *target) {
            (0, Value::Array(list)) if !list.is_empty() => drop(list.remove(n % list.len())),
            (1, Value::Array(list)) if !list.is_empty() => list.extend(list.clone()),
            (2, Value::Array(list)) if !list.is_empty() => list.rotate_left(1),
            (0, Value::Object(map)) if !map.is_empty() => {
                let key = map.keys().nth(n % map.len()).unwrap().clone();
                map.remove(&key);
            }
            (1, Value::Object(map)) => drop(map.insert(format!("token{n}"), json!(n))),
            (3, Value::Number(_)) => *target = json!(n),
            (0..5, Value::Bool(flag)) => *flag = !*flag,
            (4, _) => *target = copied.unwrap_or_default(),
            _ => *target = value,
        }
    }
    let mut bytes = json.to_string().into_bytes();
    if numbers.below(4) == 0 {
        let at = numbers.below(bytes.len());
        match numbers.below(3) {
            0 => bytes.truncate(at),
            1 => bytes[at] ^= 1 << numbers.below(8),
            _ => bytes.insert(at, numbers.below(256) as u8),
        }
    }
    bytes
}

/// Uses a tokenizer; one text gives one result.
fn exercise(tokenizer: &Tokenizer) {
    for text in TEXTS {
        let once = tokenizer.encode(text).ok();
        assert_eq!(tokenizer.encode(text).ok(), once, "{text:?}");
        let ids = once.unwrap_or_default();
        let _ = (tokenizer.decode(&ids), tokenizer.decode_all(&ids), tokenizer.encode_rendered(text));
    }
    let _ = (tokenizer.decode(&[0, 1, 2, 3, 400, u32::MAX]), tokenizer.to_json());
}

#[test]
fn tokenizer_files_with_faults_are_refused_or_used() {
    in_own_process("hostile_tokenizers::tokenizer_files_with_faults_are_refused_or_used", || {
        let (mut n_refused, mut n_used) = (0, 0);
        for (file, original) in originals().iter().enumerate() {
            Tokenizer::from_json("t", original.as_bytes()).unwrap();
            let mut places = pointers(&serde_json::from_str(original).unwrap());
            // A file without its model or vocabulary is refused at once and teaches nothing.
            places.retain(|place| {
                !["", "/model", "/model/vocab", "/model/merges", "/model/type"].contains(&&place[..])
            });
            for trial in 0..n_trials() {
                println!("file {file}, trial {trial}");
                let mut numbers = Numbers((file << 32 | trial) as u64);
                match Tokenizer::from_json("t", &faulty(&mut numbers, original, &places)) {
                    Ok(tokenizer) => {
                        n_used += 1;
                        exercise(&tokenizer);
                    }
                    Err(error) => {
                        n_refused += 1;
                        assert!(error.to_string().starts_with("t: "), "{error}");
                    }
                }
            }
        }
        println!("{n_refused} refused, {n_used} used; peak memory {} MiB", peak_mib());
        assert!(n_refused > n_used / 4 && n_used > n_refused / 40, "{n_refused} refused, {n_used} used");
        assert!(peak_mib() < MAX_RESIDENT_MIB);
    });
}

#[test]
fn gguf_tokenizers_with_faults_are_refused_or_used() {
    in_own_process("hostile_tokenizers::gguf_tokenizers_with_faults_are_refused_or_used", || {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let (mut n_refused, mut n_used) = (0, 0);
        for (file, name) in ["qwen2-bpe.gguf", "llama-spm.gguf"].into_iter().enumerate() {
            let original = std::fs::read(data("data/formats").join(name)).unwrap();
            // The vocabulary and the merges stand between the first key of the tokenizer and the tensors.
            let start = original.windows(14).position(|bytes| bytes == b"tokenizer.ggml").unwrap();
            let end =
                original.windows(10).rposition(|bytes| bytes == b"token_embd").unwrap_or(original.len());
            for trial in 0..n_trials() {
                println!("file {name}, trial {trial}");
                let mut numbers = Numbers(((file + 8) << 32 | trial) as u64);
                let mut bytes = original.clone();
                for _ in 0..=numbers.below(4) {
                    let at = start + numbers.below(end - start);
                    match numbers.below(4) {
                        0 => bytes[at] ^= 1 << numbers.below(8),
                        1 => bytes[at] = [0, 0x20, 0x41, 0xff][numbers.below(4)],
                        2 => bytes.swap(at, start + numbers.below(end - start)),
                        _ => {
                            let from = start + numbers.below(end - start - 8);
                            let copied: [u8; 4] = bytes[from..from + 4].try_into().unwrap();
                            bytes[at.min(end - 4)..][..4].copy_from_slice(&copied);
                        }
                    }
                }
                std::fs::write(&path, &bytes).unwrap();
                let opened = Pretrained::open(&path).and_then(|model| {
                    let _ = model.chat_template();
                    model.tokenizer()
                });
                match opened {
                    Ok(tokenizer) => {
                        n_used += 1;
                        exercise(&tokenizer);
                    }
                    Err(_) => n_refused += 1,
                }
            }
        }
        println!("{n_refused} refused, {n_used} used; peak memory {} MiB", peak_mib());
        assert!(n_refused > 0 && n_used > 0 && peak_mib() < MAX_RESIDENT_MIB);
    });
}

/// A few replacements in a row, each of which makes a text longer, fill any memory by a text of a few bytes.
#[test]
fn replacements_that_feed_each_other_are_refused() {
    let original: Value = serde_json::from_str(&originals()[0]).unwrap();
    let replace = |n: usize| json!({"type": "Replace", "pattern": {"String": "1"}, "content": "1".repeat(n)});
    let chain = |key: &str, n_steps: usize, n: usize| {
        let steps: Vec<Value> = (0..n_steps).map(|_| replace(n)).collect();
        json!({"type": "Sequence", key: steps})
    };
    for (pointer, children) in [("/normalizer", "normalizers"), ("/decoder", "decoders")] {
        let read = |component: Value| {
            let mut json = original.clone();
            *json.pointer_mut(pointer).unwrap() = component;
            Tokenizer::from_json("t", json.to_string().as_bytes())
        };
        for (component, words) in [
            (chain(children, 8, 10), "10.0 times as long, at most 8 times"),
            (chain(children, 7, 2), "up to 128 times as long, at most 16 times"),
            (
                json!({"type": "Sequence", children: [chain(children, 2, 4), chain(children, 1, 4)]}),
                "up to 64 times",
            ),
        ] {
            let error = read(component).unwrap_err().to_string();
            assert!(error.contains(pointer.trim_start_matches('/')) && error.contains(words), "{error}");
        }
        let blank = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        read(json!({"type": "Sequence", children: [blank]})).unwrap();
    }
}

/// What the `tokenizers` crate would accept, and what would then depend on chance, take for ever or fail later.
#[test]
fn what_no_supported_family_uses_is_refused_by_name() {
    let original: Value = serde_json::from_str(&originals()[0]).unwrap();
    let split = |pattern: Value| json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false});
    let cases = [
        ("/model/dropout", json!(0.1), "dropout 0.1"),
        ("/model/dropout", json!("x"), "dropout"),
        ("/model/end_of_word_suffix", json!("</w>"), "end_of_word_suffix"),
        ("/model/unk_token", json!("<nothing>"), "unk_token"),
        ("/model/vocab", json!({"a": 0, "b": 0}), "id 0 has two tokens"),
        ("/model/vocab", json!({"a": 0, "b": -1}), "id -1"),
        ("/model/vocab", json!({"a": 0, "b": 9999}), "id 9999"),
        ("/model/merges/0", json!("nothing here"), "is not a token"),
        ("/model/merges/0", json!(["a"]), "merge 0 is not two tokens"),
        ("/added_tokens/0/id", json!(77), "has id 77, expected the id in the vocabulary"),
        ("/added_tokens/0/content", json!("<new>"), "expected the id in the vocabulary"),
        ("/added_tokens/1", original["added_tokens"][0].clone(), "appears twice"),
        ("/added_tokens/0/content", json!(""), "0 bytes"),
        ("/normalizer", json!({"type": "Precompiled", "precompiled_charsmap": ""}), "normalizer Precompiled"),
        (
            "/normalizer",
            json!({"type": "Replace", "pattern": {"Regex": "(a+)+"}, "content": "b"}),
            "by a pattern",
        ),
        ("/normalizer", json!({"type": "Prepend", "prepend": "x".repeat(65)}), "at most 64 bytes"),
        ("/pre_tokenizer", split(json!({"Regex": "(a+)+$"})), "pattern"),
        ("/pre_tokenizer", split(json!({"Regex": "a{1000000000}"})), "pattern"),
        ("/pre_tokenizer", json!({"type": "BertPreTokenizer"}), "pre_tokenizer BertPreTokenizer"),
        ("/decoder", json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), "decoder WordPiece"),
        ("/post_processor", json!({"type": "RobertaProcessing"}), "post_processor RobertaProcessing"),
        (
            "/post_processor",
            json!({"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens":
                {"<s>": {"id": "<s>", "ids": [1, 2], "tokens": ["<s>"]}}}),
            "needs as many ids as tokens",
        ),
    ];
    for (pointer, value, words) in cases {
        let mut json = original.clone();
        *json.pointer_mut(pointer).unwrap() = value;
        let error = Tokenizer::from_json("t", json.to_string().as_bytes()).unwrap_err().to_string();
        assert!(error.contains(words), "{pointer}: {error:?} does not say {words:?}");
    }
    let with_components = |n: usize| {
        let mut json = original.clone();
        json["normalizer"] = json!({"type": "Sequence", "normalizers": vec![json!({"type": "NFC"}); n - 1]});
        Tokenizer::from_json("t", json.to_string().as_bytes()).map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(with_components(32), Ok(()));
    assert!(with_components(33).unwrap_err().contains("more than 32 components"));
}
