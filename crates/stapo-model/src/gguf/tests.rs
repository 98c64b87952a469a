mod families;

use super::*;
use crate::config::{AttentionBiases, Family, Heads, RopeScaling};

mod tokens;

/// Name, dimensions innermost first, type, offset.
type Tensor = (String, Vec<u64>, u32, u64);

/// A GGUF file put together by hand, so that a test can make any part of the file wrong.
#[derive(Clone, Default)]
struct Draft {
    fields: Vec<(String, Vec<u8>)>,
    tensors: Vec<Tensor>,
    numbers: Vec<u8>,
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

fn u32_field(value: u32) -> Vec<u8> {
    [4u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn f32_field(value: f32) -> Vec<u8> {
    [6u32.to_le_bytes(), value.to_le_bytes()].concat()
}

fn string_field(text: &str) -> Vec<u8> {
    [8u32.to_le_bytes().to_vec(), string(text.as_bytes())].concat()
}

fn strings_field<T: AsRef<str>>(texts: &[T]) -> Vec<u8> {
    let mut bytes = [9u32.to_le_bytes(), 8u32.to_le_bytes()].concat();
    bytes.extend((texts.len() as u64).to_le_bytes());
    bytes.extend(texts.iter().flat_map(|text| string(text.as_ref().as_bytes())));
    bytes
}

impl Draft {
    fn field(mut self, key: &str, value: Vec<u8>) -> Self {
        self.fields.retain(|(old, _)| old != key);
        self.fields.push((key.into(), value));
        self
    }

    fn without(mut self, key: &str) -> Self {
        self.fields.retain(|(old, _)| old != key);
        self.tensors.retain(|(old, ..)| old != key);
        self
    }

    /// An F32 tensor filled with the number `fill`, dimensions innermost first.
    fn tensor(mut self, name: &str, dims: &[u64], fill: f32) -> Self {
        self.numbers.resize(self.numbers.len().next_multiple_of(32), 0);
        self.tensors.push((name.into(), dims.to_vec(), 0, self.numbers.len() as u64));
        for _ in 0..dims.iter().product::<u64>() {
            self.numbers.extend(fill.to_le_bytes());
        }
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = [&b"GGUF"[..], &3u32.to_le_bytes()].concat();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.fields.len() as u64).to_le_bytes());
        for (key, value) in &self.fields {
            out.extend(string(key.as_bytes()));
            out.extend(value);
        }
        for (name, dims, kind, offset) in &self.tensors {
            out.extend(string(name.as_bytes()));
            out.extend((dims.len() as u32).to_le_bytes());
            out.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.numbers);
        out
    }
}

/// A Llama of one layer, width 8, two heads.
fn llama() -> Draft {
    let norm = |draft: Draft, name: &str| draft.tensor(name, &[8], 1.0);
    let mut draft = Draft::default()
        .field("general.architecture", string_field("llama"))
        .field("llama.block_count", u32_field(1))
        .field("llama.context_length", u32_field(64))
        .field("llama.embedding_length", u32_field(8))
        .field("llama.feed_forward_length", u32_field(4))
        .field("llama.attention.head_count", u32_field(2))
        .field("llama.attention.layer_norm_rms_epsilon", f32_field(1e-5))
        .tensor("token_embd.weight", &[8, 3], 0.5);
    for name in ["attn_norm", "ffn_norm"] {
        draft = norm(draft, &format!("blk.0.{name}.weight"));
    }
    for (name, dims) in [
        ("attn_q", [8, 8]),
        ("attn_k", [8, 8]),
        ("attn_v", [8, 8]),
        ("attn_output", [8, 8]),
        ("ffn_gate", [8, 4]),
        ("ffn_up", [8, 4]),
        ("ffn_down", [4, 8]),
    ] {
        draft = draft.tensor(&format!("blk.0.{name}.weight"), &dims, 0.25);
    }
    norm(draft, "output_norm.weight")
}

fn open_bytes(bytes: &[u8]) -> Result<Gguf> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    Gguf::open(&path)
}

/// Reads everything that opening a model reads.
fn load(bytes: &[u8]) -> Result<(ModelConfig, Weights)> {
    let gguf = open_bytes(bytes)?;
    let config = gguf.config()?;
    let weights = gguf.weights(&config)?;
    weights.check(&config)?;
    Ok((config, weights))
}

fn check_refused(draft: &Draft, words: &[&str]) {
    let message = load(&draft.bytes()).expect_err("accepted").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn a_small_llama_reads_as_written() {
    let (config, weights) = load(&llama().bytes()).unwrap();
    let heads = config.uniform_layer().unwrap().attention().unwrap().heads;
    assert_eq!((config.width, heads), (8, Heads { query: 2, kv: 2, dim: 4 }));
    assert_eq!((config.vocabulary, config.tied_embeddings, config.norm_eps), (3, true, 1e-5));
    let mut out = [0.0; 24];
    weights.read_f32("model.embed_tokens.weight", &[3, 8], &mut out).unwrap();
    assert_eq!(out, [0.5; 24]);
}

#[test]
fn llama_query_rows_return_to_two_halves() {
    let mut draft = llama();
    let (_, _, _, offset) = draft.tensors.iter().find(|t| t.0 == "blk.0.attn_q.weight").unwrap().clone();
    for row in 0..8 {
        for column in 0..8 {
            let at = offset as usize + 4 * (row * 8 + column);
            draft.numbers[at..at + 4].copy_from_slice(&(row as f32).to_le_bytes());
        }
    }
    let (_, weights) = load(&draft.bytes()).unwrap();
    let mut out = [0.0; 64];
    weights.read_f32("model.layers.0.self_attn.q_proj.weight", &[8, 8], &mut out).unwrap();
    let rows: Vec<f32> = out.chunks(8).map(|row| row[0]).collect();
    assert_eq!(rows, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
}

/// Biases have no key, and those of queries and keys are stored in the order of the rows of their matrices.
#[test]
fn biases_are_found_by_their_tensors_and_return_to_two_halves() {
    let mut draft = llama();
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_down"] {
        draft = draft.tensor(&format!("blk.0.{name}.bias"), &[8], 0.5);
    }
    draft = draft.tensor("blk.0.ffn_gate.bias", &[4], 0.5).tensor("blk.0.ffn_up.bias", &[4], 0.5);
    let (_, _, _, offset) = draft.tensors.iter().find(|t| t.0 == "blk.0.attn_k.bias").unwrap().clone();
    let numbers = (0..8u8).flat_map(|row| f32::from(row).to_le_bytes());
    draft.numbers.splice(offset as usize..offset as usize + 32, numbers);
    let (config, weights) = load(&draft.bytes()).unwrap();
    assert_eq!(config.layers[0].attention().unwrap().biases, AttentionBiases::All);
    let mut bias = [0.0; 8];
    weights.read_f32("model.layers.0.self_attn.k_proj.bias", &[8], &mut bias).unwrap();
    assert_eq!(bias, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
}

/// As llama.cpp writes it for OLMo 3.
#[test]
fn windowed_layers_are_read_from_a_list_of_flags() {
    let flags = |flags: &[u8]| {
        let head = [9u32.to_le_bytes(), 7u32.to_le_bytes()].concat();
        [&head, &(flags.len() as u64).to_le_bytes()[..], flags].concat()
    };
    let windowed = llama().field("llama.attention.sliding_window", u32_field(5));
    let window = |list: &[u8]| {
        let draft = windowed.clone().field("llama.attention.sliding_window_pattern", flags(list));
        load(&draft.bytes()).map(|(config, _)| config.layers[0].attention().unwrap().rule.window)
    };
    assert_eq!((window(&[1]).unwrap(), window(&[0]).unwrap()), (Some(5), None));
    assert!(window(&[1, 0]).unwrap_err().to_string().contains("2 entries for 1 layers"));
}

/// OLMo 2 and 3 have one name in GGUF, and the third has windows in three of four layers, with a rope of their own.
#[test]
fn windows_make_the_third_olmo() {
    let mut draft = Draft::default().field("general.architecture", string_field("olmo2"));
    for (key, value) in llama().fields {
        if let Some(key) = key.strip_prefix("llama.") {
            draft = draft.field(&format!("olmo2.{key}"), value);
        }
    }
    let draft = draft
        .field("olmo2.block_count", u32_field(4))
        .field("olmo2.rope.freq_base", f32_field(500.0))
        .field("olmo2.rope.freq_base_swa", f32_field(40.0))
        .tensor("token_embd.weight", &[8, 3], 0.5);
    let config = |draft: Draft| open_bytes(&draft.bytes()).unwrap().config().unwrap();
    let layers = |config: &ModelConfig| {
        config.attentions().map(|attention| (attention.rule.window, attention.rope.theta)).collect::<Vec<_>>()
    };
    let second = config(draft.clone());
    assert_eq!((second.family, layers(&second)), (Family::Olmo2, vec![(None, 500.0); 4]));
    let third = config(draft.field("olmo2.attention.sliding_window", u32_field(5)));
    let expected = vec![(Some(5), 40.0), (Some(5), 40.0), (Some(5), 40.0), (None, 500.0)];
    assert_eq!((third.family, layers(&third)), (Family::Olmo3, expected));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = llama().bytes();
    for length in 0..whole.len() {
        assert!(load(&whole[..length]).is_err(), "cut at {length} of {}", whole.len());
    }
}

#[test]
fn a_file_with_any_header_byte_changed_never_panics() {
    let draft = llama();
    let whole = draft.bytes();
    for at in 0..whole.len() - draft.numbers.len() {
        for flip in [0x01, 0x10, 0x80, 0xff] {
            let mut changed = whole.clone();
            changed[at] ^= flip;
            let _ = load(&changed);
        }
    }
}

#[test]
fn wrong_beginnings_are_refused() {
    let with = |at: usize, bytes: &[u8]| {
        let mut file = llama().bytes();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        load(&file).unwrap_err().to_string()
    };
    assert!(with(0, b"GGML").contains("does not begin with GGUF"));
    assert!(with(4, &1u32.to_le_bytes()).contains("version 1"));
    assert!(with(4, &3u32.to_be_bytes()).contains("big-endian"));
    assert!(with(8, &u64::MAX.to_le_bytes()).contains("0 dimensions"));
    assert!(with(16, &u64::MAX.to_le_bytes()).contains("at byte"));
}

#[test]
fn lying_metadata_is_refused_without_asking_for_memory() {
    let huge = u64::MAX.to_le_bytes();
    let array = |kind: u32, n: &[u8]| [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), n].concat();
    check_refused(
        &llama().field("x", [&8u32.to_le_bytes()[..], &huge].concat()),
        &["needs 18446744073709551615 bytes"],
    );
    check_refused(&llama().field("x", array(4, &huge)), &["x", "truncated?"]);
    check_refused(&llama().field("x", array(8, &huge)), &["x", "truncated?"]);
    check_refused(&llama().field("x", array(4, &(1u64 << 62).to_le_bytes())), &["x", "truncated?"]);
    check_refused(&llama().field("x", 13u32.to_le_bytes().to_vec()), &["x", "unknown type 13"]);
    let mut deep = 9u32.to_le_bytes().to_vec();
    for _ in 0..1000 {
        deep.extend(9u32.to_le_bytes());
        deep.extend(1u64.to_le_bytes());
    }
    check_refused(&llama().field("x", deep), &["x", "deep"]);
    let mut twice = llama();
    twice.fields.push(("llama.block_count".into(), u32_field(2)));
    check_refused(&twice, &["llama.block_count", "twice"]);
    let mut key = llama();
    key.fields.push(("\u{fffd}".into(), u32_field(1)));
    let mut bytes = key.bytes();
    let at = bytes.windows(3).position(|w| w == "\u{fffd}".as_bytes()).unwrap();
    bytes[at] = 0xff;
    assert!(load(&bytes).unwrap_err().to_string().contains("not UTF-8"));
}

#[test]
fn lying_tensors_are_refused_by_name() {
    let change = |edit: &dyn Fn(&mut Tensor)| {
        let mut draft = llama();
        edit(&mut draft.tensors[3]);
        draft
    };
    let name = "blk.0.attn_q.weight";
    check_refused(&change(&|t| t.1 = vec![]), &[name, "0 dimensions"]);
    check_refused(&change(&|t| t.1 = vec![1; 5]), &[name, "5 dimensions"]);
    check_refused(&change(&|t| t.1 = vec![u64::MAX, u64::MAX]), &[name, "impossible"]);
    check_refused(&change(&|t| t.1 = vec![1 << 40, 1]), &[name, "beyond the end"]);
    check_refused(&change(&|t| t.1 = vec![8, 4]), &["q_proj", "[4, 8]", "[8, 8]"]);
    check_refused(&change(&|t| t.1 = vec![8, 6]), &[name, "heads"]);
    check_refused(&change(&|t| t.2 = 8), &[name, "Q8_0", "impossible"]);
    check_refused(&change(&|t| t.2 = 10), &[name, "Q2_K", "supported: F32"]);
    check_refused(&change(&|t| t.2 = 999), &[name, "unknown"]);
    check_refused(&change(&|t| t.3 += 8), &[name, "multiple of 32"]);
    check_refused(&change(&|t| t.3 -= 32), &["overlaps"]);
    check_refused(&change(&|t| t.3 = u64::MAX), &[name, "impossible"]);
    check_refused(&change(&|t| t.3 = 1 << 40), &[name, "beyond the end"]);
    check_refused(&change(&|t| t.0 = "blk.0.attn_k.weight".into()), &["blk.0.attn_k.weight", "twice"]);
    check_refused(&change(&|t| t.0 = "blk.0.attn_x.weight".into()), &["q_proj"]);
    check_refused(&llama().without("output_norm.weight"), &["no tensor model.norm.weight"]);
}

#[test]
fn tensors_that_would_change_the_model_are_refused_and_others_reported() {
    check_refused(&llama().tensor("blk.0.attn_k.bias", &[8], 0.1), &["k_proj.bias", "not part of"]);
    check_refused(&llama().tensor("blk.0.attn_q.bias", &[8], 0.1), &["no tensor", "k_proj.bias"]);
    check_refused(&llama().tensor("blk.1.attn_norm.weight", &[8], 0.1), &["layers.1", "not part of"]);
    check_refused(
        &llama().tensor("blk.0.ffn_gate_exps.weight", &[8], 0.1),
        &["ffn_gate_exps", "not part of"],
    );
    check_refused(&llama().tensor("model.norm.weight", &[8], 0.1), &["another name"]);
    let gguf = open_bytes(&llama().tensor("v_head.weight", &[8], 0.1).bytes()).unwrap();
    let config = gguf.config().unwrap();
    assert_eq!(gguf.weights(&config).unwrap().check(&config).unwrap(), ["v_head.weight"]);
}

#[test]
fn impossible_shapes_in_metadata_are_refused_by_key() {
    let key = |key: &str, value: Vec<u8>| llama().field(key, value);
    check_refused(
        &key("general.architecture", string_field("gemma")),
        &["\"gemma\" is not supported", "qwen3, qwen2, llama"],
    );
    check_refused(
        &key("general.architecture", string_field("qwen3moe")),
        &["qwen3moe", "mixtures of experts"],
    );
    check_refused(&key("llama.rope.dimension_count", u32_field(7)), &["rope.dimension_count", "7"]);
    let windowed = key("llama.attention.sliding_window", u32_field(8));
    let config = load(&windowed.bytes()).unwrap().0;
    assert_eq!(
        (config.family, config.layers[0].attention().unwrap().rule.window),
        (Family::Mistral, Some(8))
    );
    check_refused(&key("general.architecture", u32_field(1)), &["general.architecture", "a string"]);
    check_refused(&llama().without("llama.block_count"), &["llama.block_count", "missing"]);
    check_refused(&key("llama.block_count", f32_field(1.0)), &["llama.block_count", "whole number"]);
    check_refused(&key("llama.attention.head_count", u32_field(0)), &["heads"]);
    check_refused(&key("llama.attention.head_count_kv", u32_field(3)), &["key-value heads"]);
    check_refused(&key("llama.vocab_size", u32_field(9)), &["llama.vocab_size", "3 rows"]);
    check_refused(&key("llama.rope.dimension_count", u32_field(2)), &["rope.dimension_count"]);
    check_refused(&key("llama.rope.scaling.type", string_field("longrope")), &["longrope"]);
    check_refused(&key("llama.expert_count", u32_field(8)), &["experts"]);
    check_refused(&key("split.count", u32_field(2)), &["split", "--merge"]);
    check_refused(&key("general.alignment", u32_field(0)), &["general.alignment"]);
    check_refused(&key("general.alignment", u32_field(12)), &["general.alignment"]);
    check_refused(&key("tokenizer.ggml.eos_token_id", u32_field(3)), &["token id 3", "vocabulary"]);
}

#[test]
fn rope_scaling_is_read_from_metadata() {
    let rope = |draft: Draft| load(&draft.bytes()).unwrap().0.layers[0].attention().unwrap().rope.clone();
    let linear = llama().field("llama.rope.scaling.type", string_field("linear"));
    let linear = linear.field("llama.rope.scaling.factor", f32_field(4.0));
    assert_eq!(rope(linear).scaling, RopeScaling::Linear { factor: 4.0 });
    let yarn = llama()
        .field("llama.rope.freq_base", f32_field(1e6))
        .field("llama.rope.scaling.type", string_field("yarn"))
        .field("llama.rope.scaling.factor", f32_field(4.0))
        .field("llama.rope.scaling.original_context_length", u32_field(16));
    let rope = rope(yarn);
    assert_eq!(rope.theta, 1e6);
    match rope.scaling {
        RopeScaling::Yarn { factor, original_positions, attention_factor, .. } => {
            assert_eq!((factor, original_positions), (4.0, 16));
            assert_eq!(attention_factor, 1.0 + 0.1 * 4f64.ln());
        }
        other => panic!("{other:?}"),
    }
    check_refused(&llama().tensor("rope_freqs.weight", &[2], 3.0), &["rope_freqs", "Llama 3"]);
    check_refused(&llama().tensor("rope_freqs.weight", &[4], 1.0), &["rope_freqs", "[2]"]);
}

/// llama.cpp multiplies YaRN's own factor by the key's number. Files of OLMo 3 from one converter give all of the factor of
/// Hugging Face's config, 1.2079 for a factor of 8.
#[test]
fn yarn_scales_attention_once() {
    let by_factor = 1.0 + 0.1 * 8f64.ln();
    for (given, expected) in [
        (None, by_factor),
        (Some(1.0), by_factor),
        (Some(by_factor as f32), by_factor),
        (Some(1.2079), by_factor),
        (Some(0.5), 0.5 * by_factor),
        (Some(1.25), 1.25 * by_factor),
    ] {
        let mut draft = llama()
            .field("llama.rope.scaling.type", string_field("yarn"))
            .field("llama.rope.scaling.factor", f32_field(8.0));
        if let Some(given) = given {
            draft = draft.field("llama.rope.scaling.attn_factor", f32_field(given));
        }
        let config = load(&draft.bytes()).unwrap().0;
        match config.layers[0].attention().unwrap().rope.scaling {
            RopeScaling::Yarn { attention_factor, .. } => assert_eq!(attention_factor, expected, "{given:?}"),
            ref other => panic!("{other:?}"),
        }
    }
}
