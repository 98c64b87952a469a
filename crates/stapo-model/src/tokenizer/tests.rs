use super::*;
use crate::Pretrained;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::LazyLock;

fn tiny(file: &str) -> Tokenizer {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/formats").join(file);
    Pretrained::open(&path).unwrap().tokenizer().unwrap()
}

static BYTE_LEVEL: LazyLock<Tokenizer> = LazyLock::new(|| tiny("qwen2-bpe.gguf"));
static SENTENCE_PIECE: LazyLock<Tokenizer> = LazyLock::new(|| tiny("llama-spm.gguf"));

fn streamed(tokenizer: &Tokenizer, context: &[u32], ids: &[u32]) -> String {
    let mut stream = tokenizer.stream(context);
    let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    text += &stream.finish().unwrap();
    text
}

#[test]
fn a_character_is_held_back_until_it_is_whole() {
    let ids = BYTE_LEVEL.encode("a😀b").unwrap();
    let mut stream = BYTE_LEVEL.stream(&[]);
    let pieces: Vec<String> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
    assert_eq!(pieces, ["a", "", "", "", "😀", "b"]);
    assert_eq!(stream.finish().unwrap(), "");
}

#[test]
fn a_character_that_never_comes_whole_is_shown_at_the_end() {
    let ids = BYTE_LEVEL.encode("a😀").unwrap();
    let cut = &ids[..ids.len() - 1];
    assert_eq!(streamed(&BYTE_LEVEL, &[], cut), "a\u{fffd}");
    assert_eq!(BYTE_LEVEL.decode(cut).unwrap(), "a\u{fffd}");
}

#[test]
fn spaces_between_words_survive_streaming() {
    let text = "the end the  end";
    for tokenizer in [&*BYTE_LEVEL, &*SENTENCE_PIECE] {
        let ids = tokenizer.encode(text).unwrap();
        assert_eq!(streamed(tokenizer, &[], &ids), text);
    }
}

#[test]
fn a_response_goes_on_from_its_prompt_with_its_first_space() {
    let ids = SENTENCE_PIECE.encode("the lazy dog").unwrap();
    let (prompt, response) = ids.split_at(3);
    let first = SENTENCE_PIECE.decode(prompt).unwrap();
    let rest = streamed(&SENTENCE_PIECE, prompt, response);
    assert_eq!(first + &rest, "the lazy dog");
}

#[test]
fn silent_tokens_between_words_take_no_space_away() {
    let words = SENTENCE_PIECE.encode_rendered("the end").unwrap();
    let ids = [&words[..1], &[2, 2, 2], &words[1..]].concat();
    assert_eq!(SENTENCE_PIECE.decode(&ids).unwrap(), "the end");
    assert_eq!(streamed(&SENTENCE_PIECE, &[], &ids), "the end");
}

#[test]
fn special_tokens_are_one_id_and_silent() {
    let ids = BYTE_LEVEL.encode_rendered("<|im_start|>the end<|im_end|>").unwrap();
    assert_eq!((ids[0], *ids.last().unwrap()), (1, 2));
    assert_eq!(BYTE_LEVEL.decode(&ids).unwrap(), "the end");
    assert_eq!(BYTE_LEVEL.decode_all(&ids).unwrap(), "<|im_start|>the end<|im_end|>");
    assert_eq!(streamed(&BYTE_LEVEL, &[], &ids), "the end");
    assert_eq!(
        (BYTE_LEVEL.id_of("<|im_end|>"), BYTE_LEVEL.token_of(2).as_deref()),
        (Some(2), Some("<|im_end|>"))
    );
}

#[test]
fn rendered_text_gets_no_second_start_token() {
    assert_eq!(SENTENCE_PIECE.encode("the").unwrap()[0], 1);
    assert_ne!(SENTENCE_PIECE.encode_rendered("the").unwrap()[0], 1);
    let again = Tokenizer::from_json("again", SENTENCE_PIECE.to_json().unwrap().as_bytes()).unwrap();
    assert_eq!(again.encode("the").unwrap(), SENTENCE_PIECE.encode("the").unwrap());
}

#[test]
fn ids_beyond_the_vocabulary_are_silent() {
    assert_eq!(BYTE_LEVEL.decode(&[u32::MAX, 431]).unwrap(), "");
}

#[test]
fn a_tokenizer_with_more_ids_than_the_model_is_refused() {
    BYTE_LEVEL.check_vocabulary("t", BYTE_LEVEL.n_ids()).unwrap();
    let message = BYTE_LEVEL.check_vocabulary("t", BYTE_LEVEL.n_ids() - 1).unwrap_err().to_string();
    assert!(message.contains("vocabulary is 419") && message.contains("hint: "), "{message}");
}

/// Gemma 3's text models have no embedding for the last token of the tokenizer that they share with the multimodal ones.
#[test]
fn a_part_of_an_image_without_an_embedding_is_plain_text() {
    let n = BYTE_LEVEL.n_ids();
    let mut json: Value = serde_json::from_str(&BYTE_LEVEL.to_json().unwrap()).unwrap();
    let token = json!({"id": n, "content": "<image_soft_token>", "single_word": false, "lstrip": false,
        "rstrip": false, "normalized": false, "special": true});
    json["added_tokens"].as_array_mut().unwrap().push(token);
    let read = |json: &Value, n: usize| {
        let tokenizer = Tokenizer::for_vocabulary("t", json.to_string().as_bytes(), n)?;
        tokenizer.check_vocabulary("t", n).map(|()| tokenizer)
    };
    let text = "<|im_start|>the <image_soft_token> end";
    let whole = read(&json, n + 1).unwrap();
    assert!(whole.encode(text).unwrap().contains(&(n as u32)), "an id of the vocabulary");
    // Whether the vocabulary lists the token too makes no difference.
    let mut listed = json.clone();
    listed["model"]["vocab"]["<image_soft_token>"] = json!(n);
    for json in [&json, &listed] {
        let without = read(json, n).unwrap();
        assert_eq!((without.n_ids(), without.id_of("<image_soft_token>")), (n, None));
        assert_eq!(without.encode(text).unwrap(), BYTE_LEVEL.encode(text).unwrap());
        assert!(read(json, n - 1).is_err(), "another token without an embedding");
    }
}

/// Gemma's files list runs of line ends and of spaces among the added tokens.
#[test]
fn added_tokens_of_blanks_are_kept_in_text_from_outside() {
    let words = ["\n", "▁", " ", "x", "\n\n", "▁▁", "  ", "xx"];
    let vocabulary: Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).into(), json!(id))).collect();
    let merges = [["\n", "\n"], ["▁", "▁"], [" ", " "], ["x", "x"]];
    let token = |id: usize| {
        json!({"id": id, "content": words[id], "special": id == 6, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false})
    };
    let added: Vec<Value> = (4..8).map(token).collect();
    let model = json!({"type": "BPE", "vocab": vocabulary, "merges": merges});
    let file = json!({"model": model, "added_tokens": added}).to_string();
    let tokenizer = Tokenizer::from_json("t", file.as_bytes()).unwrap();
    let literally = |text: &str| tokenizer.encode_literally(text).unwrap();
    assert_eq!((literally("\n\n"), literally("▁▁")), (vec![4], vec![5]));
    assert_eq!((literally("  "), literally("xx")), (vec![2, 2], vec![3, 3]), "special, and no blank");
    assert_eq!(literally("\n\nxx"), [4, 3, 3]);
}

#[test]
fn truncation_and_padding_in_the_file_are_switched_off() {
    let mut json: Value = serde_json::from_str(&BYTE_LEVEL.to_json().unwrap()).unwrap();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"});
    let tokenizer = Tokenizer::from_json("t", json.to_string().as_bytes()).unwrap();
    let text = "the quick brown fox";
    assert_eq!(tokenizer.encode(text).unwrap(), BYTE_LEVEL.encode(text).unwrap());
}

#[test]
fn broken_tokenizer_files_are_refused() {
    for text in
        ["", "{}", "[]", "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": [\"a b\"]}}", "\u{0}"]
    {
        let error = Tokenizer::from_json("tokenizer.json", text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("tokenizer.json: "), "{error}");
    }
}

/// The JSON with `value` at `pointer`.
fn changed(json: &Value, pointer: &str, value: &Value) -> String {
    let mut json = json.clone();
    *json.pointer_mut(pointer).unwrap() = value.clone();
    json.to_string()
}

#[test]
fn what_the_tokenizers_crate_would_trip_over_is_refused() {
    let json: Value = serde_json::from_str(&SENTENCE_PIECE.to_json().unwrap()).unwrap();
    let cases = [
        ("/model/type", json!("WordPiece"), "model type WordPiece"),
        ("/model/continuing_subword_prefix", json!("###"), "continuing_subword_prefix"),
        ("/model/vocab/a", json!(4294967295u32), "out of any proportion"),
        ("/decoder/decoders/3/start", json!(4294967295u32), "strips"),
        ("/post_processor/special_tokens", json!({}), "special token \"bos\""),
        ("/post_processor/single/0/SpecialToken/id", json!("x"), "special token \"x\""),
    ];
    for (pointer, value, word) in cases {
        let message =
            Tokenizer::from_json("t", changed(&json, pointer, &value).as_bytes()).unwrap_err().to_string();
        assert!(message.contains(word), "{pointer}: {message:?} does not say {word:?}");
    }
}

#[test]
fn a_file_with_any_part_replaced_never_panics() {
    let json: Value = serde_json::from_str(&SENTENCE_PIECE.to_json().unwrap()).unwrap();
    let mut pointers = vec![String::new()];
    let mut at = 0;
    while let Some(pointer) = pointers.get(at).cloned() {
        match json.pointer(&pointer).unwrap() {
            Value::Object(map) => pointers.extend(
                map.keys().filter(|key| !key.contains('/')).take(24).map(|key| format!("{pointer}/{key}")),
            ),
            Value::Array(list) => pointers.extend((0..list.len().min(6)).map(|i| format!("{pointer}/{i}"))),
            _ => {}
        }
        at += 1;
    }
    assert!(pointers.len() > 100);
    let odd = [
        json!(null),
        json!(-1),
        json!(4294967295u32),
        json!(""),
        json!("("),
        json!([]),
        json!({}),
        json!("▁"),
    ];
    for pointer in &pointers {
        for value in &odd {
            let Ok(tokenizer) = Tokenizer::from_json("t", changed(&json, pointer, value).as_bytes()) else {
                continue;
            };
            let ids = tokenizer.encode("the end <s> 12 😀é").unwrap_or_default();
            let _ = (tokenizer.decode(&ids), tokenizer.decode(&[0, 1, 2, 3, 400]), tokenizer.to_json());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn streaming_any_ids_gives_the_text_of_decoding_them_at_once(ids in prop::collection::vec(0u32..430, 0..60)) {
        prop_assert_eq!(streamed(&BYTE_LEVEL, &[], &ids), BYTE_LEVEL.decode(&ids).unwrap());
    }

    #[test]
    fn streaming_any_text_gives_it_back(text in "\\PC{0,40}") {
        for tokenizer in [&*BYTE_LEVEL, &*SENTENCE_PIECE] {
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(streamed(tokenizer, &[], &ids), tokenizer.decode(&ids).unwrap());
        }
        prop_assert_eq!(SENTENCE_PIECE.decode(&SENTENCE_PIECE.encode(&text).unwrap()).unwrap(), text);
    }

    #[test]
    fn streaming_broken_bytes_loses_nothing_whole(ids in prop::collection::vec(0u32..480, 0..40)) {
        let text = SENTENCE_PIECE.decode(&ids).unwrap();
        let stream = streamed(&SENTENCE_PIECE, &[], &ids);
        prop_assert!(stream == text || text.contains(char::REPLACEMENT_CHARACTER));
        streamed(&SENTENCE_PIECE, &ids, &ids);
    }
}

/// A tokenizer of three letters, with or without a token for everything else.
fn letters(unknown: Option<&str>) -> Tokenizer {
    let mut vocabulary = json!({"a": 0, "b": 1, "é": 2});
    if let Some(token) = unknown {
        vocabulary[token] = 3.into();
    }
    let model = json!({"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": unknown});
    Tokenizer::from_json("t", json!({"model": model}).to_string().as_bytes()).unwrap()
}

#[test]
fn characters_without_a_token_are_named_once_in_their_order() {
    for unknown in [None, Some("?")] {
        let lost = |text: &str| letters(unknown).lost_characters(text).unwrap();
        assert_eq!((lost("abéba"), lost("")), (vec![], vec![]), "{unknown:?}");
        assert_eq!(lost("azbyzéx"), ['z', 'y', 'x'], "{unknown:?}");
        assert_eq!(lost("a b"), [' '], "a blank counts where texts are not split at blanks");
    }
    // Every byte has a token, and blanks begin words.
    assert_eq!(BYTE_LEVEL.lost_characters("né\n 😀").unwrap(), [' '; 0]);
    assert_eq!(SENTENCE_PIECE.lost_characters("né 😀").unwrap(), [' '; 0]);
}

/// The layout of Gemma's `tokenizer.json`: blanks become "▁" before a `Split` at blanks, and characters without a token become
/// bytes. The ids are those of the `tokenizers` package for Python.
#[test]
fn the_layout_of_gemma_gives_the_ids_of_the_tokenizers_package() {
    let special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"];
    let pieces = ["▁", "a", "b", "c", "▁a", "ab", "▁ab", "abc", "▁▁", "\n", "<0xC3>", "<0xA9>"];
    let vocabulary: Map<String, Value> =
        special.iter().chain(&pieces).zip(0..).map(|(piece, id)| ((*piece).to_string(), json!(id))).collect();
    let added = special.iter().zip(0..).map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let start = json!({"SpecialToken": {"id": "<bos>", "type_id": 0}});
    let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    let file = json!({
        "added_tokens": added.collect::<Vec<_>>(),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "post_processor": {"type": "TemplateProcessing", "single": [start, text("A")], "pair": [text("A"), text("B")],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary,
            "merges": [["▁", "a"], ["a", "b"], ["▁", "ab"], ["ab", "c"], ["▁", "▁"]]},
    });
    let tokenizer = Tokenizer::from_json("t", file.to_string().as_bytes()).unwrap();
    for (text, ids) in [
        ("ab  abc a\n b", &[2, 11, 6, 10, 8, 9, 10, 15, 6, 8][..]),
        ("é a", &[2, 16, 17, 10]),
        ("  a", &[2, 6, 10]),
        ("<start_of_turn>abc<end_of_turn>", &[2, 4, 13, 5]),
    ] {
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.encode_rendered(text).unwrap(), ids[1..], "{text:?}");
    }
    assert_eq!(tokenizer.decode(&[13, 6, 16, 17]).unwrap(), "abc é");
    assert_eq!(tokenizer.lost_characters("zéz ab").unwrap(), ['z']);
}
