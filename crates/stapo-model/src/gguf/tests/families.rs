//! What metadata says of a model beyond its sizes: windows, scales and ropes by family, stop tokens, vocabularies.

use super::*;
use crate::config::EmbeddingScale;
use stapo_ops::rope::LongFactors;

/// The metadata of a small Llama under the name of another family. Its config can be read, but not its weights.
fn named(family: &str, n_layers: u32) -> Draft {
    let mut draft = Draft::default().field("general.architecture", string_field(family));
    for (key, value) in llama().fields {
        if let Some(key) = key.strip_prefix("llama.") {
            draft = draft.field(&format!("{family}.{key}"), value);
        }
    }
    draft.field(&format!("{family}.block_count"), u32_field(n_layers)).tensor(
        "token_embd.weight",
        &[8, 3],
        0.5,
    )
}

fn config(draft: &Draft) -> ModelConfig {
    open_bytes(&draft.bytes()).unwrap().config().unwrap()
}

fn windows(config: &ModelConfig) -> Vec<Option<usize>> {
    config.attentions().map(|attention| attention.rule.window).collect()
}

fn scale(config: &ModelConfig) -> f64 {
    config.attentions().next().unwrap().rule.scale
}

/// In files of Gemma 2 every other layer has the window, and the 27B model scores by the width per head.
#[test]
fn gemma_2_has_softcaps_windows_and_the_scale_of_its_size() {
    let draft = |n_layers| {
        named("gemma2", n_layers)
            .field("gemma2.attention.key_length", u32_field(16))
            .field("gemma2.attention.sliding_window", u32_field(7))
            .field("gemma2.attn_logit_softcapping", f32_field(50.0))
            .field("gemma2.final_logit_softcapping", f32_field(30.0))
    };
    let small = config(&draft(4));
    assert_eq!(windows(&small), [Some(7), None, Some(7), None]);
    assert_eq!((small.logits.softcap, small.embedding_scale), (Some(30.0), EmbeddingScale::SqrtWidth));
    assert!(small.attentions().all(|attention| attention.rule.softcap == Some(50.0)));
    // Heads of 16, and a width of 8 for two heads.
    assert_eq!((scale(&small), scale(&config(&draft(46)))), (0.25, 0.5));
    // The first files of Gemma 2 hold none of these keys, and llama.cpp takes the constants of the published models.
    let without = named("gemma2", 2).field("gemma2.attention.key_length", u32_field(16));
    let plain = config(&without);
    assert_eq!((windows(&plain), plain.logits.softcap), (vec![Some(4096), None], Some(30.0)));
    assert!(plain.attentions().all(|attention| attention.rule.softcap == Some(50.0)));
    let full = config(&without.field("gemma2.attention.sliding_window", u32_field(0)));
    assert_eq!(windows(&full), [None, None]);
}

#[test]
fn gemma_3_scales_the_rope_of_its_full_layers_alone() {
    let draft = named("gemma3", 7)
        .field("gemma3.attention.sliding_window", u32_field(5))
        .field("gemma3.rope.freq_base", f32_field(1e6))
        .field("gemma3.rope.scaling.type", string_field("linear"))
        .field("gemma3.rope.scaling.factor", f32_field(8.0));
    let ropes = |draft: &Draft| {
        let config = config(draft);
        assert_eq!(windows(&config), [Some(5), Some(5), Some(5), Some(5), Some(5), None, Some(5)]);
        config.attentions().map(|attention| attention.rope.clone()).collect::<Vec<_>>()
    };
    let rope = |theta, scaling| crate::config::Rope { theta, scaling };
    let found = ropes(&draft);
    assert_eq!(found[5], rope(1e6, RopeScaling::Linear { factor: 8.0 }));
    assert_eq!((&found[0], &found[6]), (&rope(1e4, RopeScaling::None), &rope(1e4, RopeScaling::None)));
    let given = draft.field("gemma3.rope.freq_base_swa", f32_field(500.0));
    assert_eq!(ropes(&given)[0].theta, 500.0);
}

#[test]
fn granite_has_four_multipliers() {
    let draft = named("granite", 2)
        .field("granite.attention.scale", f32_field(0.125))
        .field("granite.residual_scale", f32_field(0.25))
        .field("granite.embedding_scale", f32_field(12.0))
        .field("granite.logit_scale", f32_field(8.0));
    let scaled = config(&draft);
    assert_eq!((scale(&scaled), scaled.logits.divisor), (0.125, 8.0));
    assert_eq!(scaled.embedding_scale, EmbeddingScale::Factor(12.0));
    assert!(scaled.layers.iter().all(|layer| layer.residual_scale == 0.25));
    let plain = config(&named("granite", 2));
    assert_eq!((scale(&plain), plain.logits.divisor, plain.layers[1].residual_scale), (0.5, 1.0, 1.0));
    assert_eq!(plain.embedding_scale, EmbeddingScale::Factor(1.0));
}

#[test]
fn every_fourth_layer_of_smollm_3_has_no_positions() {
    let rotary: Vec<usize> =
        config(&named("smollm3", 8)).attentions().map(|attention| attention.rotary_dim).collect();
    assert_eq!(rotary, [4, 4, 4, 0, 4, 4, 4, 0]);
    let refused = open_bytes(&named("qwen35", 4).bytes()).unwrap().config().unwrap_err().to_string();
    assert!(refused.contains("gated DeltaNet layers are not read from GGUF"), "{refused}");
}

#[test]
fn phi_3_has_two_lists_of_factors_and_rotates_a_part_of_a_head() {
    let draft = named("phi3", 1)
        .field("phi3.rope.dimension_count", u32_field(2))
        .field("phi3.rope.scaling.original_context_length", u32_field(16))
        .field("phi3.rope.scaling.attn_factor", f32_field(1.25))
        .tensor("rope_factors_short.weight", &[1], 2.0)
        .tensor("rope_factors_long.weight", &[1], 3.0);
    let read = config(&draft);
    let attention = read.attentions().next().unwrap();
    assert_eq!(attention.rotary_dim, 2);
    let expected = RopeScaling::Long {
        short: [2.0].as_slice().into(),
        long: [3.0].as_slice().into(),
        used: LongFactors::Short,
        original_positions: 16,
        attention_factor: 1.25,
    };
    assert_eq!(attention.rope.scaling, expected);
    assert_eq!((read.position_limit(), read.max_positions), (16, 64));
    let whole = config(&draft.clone().without("phi3.rope.scaling.original_context_length"));
    assert_eq!(whole.position_limit(), 64);
    for name in ["rope_factors_short.weight", "rope_factors_long.weight"] {
        check_refused(&draft.clone().without(name), &["no tensor", name]);
    }
    let mut halves = draft;
    halves.tensors.iter_mut().for_each(|(_, _, encoding, _)| *encoding = 1);
    check_refused(&halves, &["rope_factors_short.weight", "is stored as F16, expected F32"]);
}

#[test]
fn a_window_in_every_so_many_layers_is_read_from_a_number() {
    let window = |value| {
        llama()
            .field("llama.block_count", u32_field(4))
            .field("llama.attention.sliding_window", u32_field(value))
    };
    let periodic = window(5).field("llama.attention.sliding_window_pattern", u32_field(2));
    assert_eq!(windows(&config(&periodic)), [Some(5), None, Some(5), None]);
    assert_eq!(windows(&config(&window(5))), [Some(5); 4]);
    let none = config(&window(0));
    assert_eq!((none.family, windows(&none)), (Family::Llama, vec![None; 4]));
}

#[test]
fn every_kind_of_end_stops_a_response_once() {
    let ends = |ids: [(&str, u32); 3]| {
        let draft = ids.into_iter().fold(llama(), |draft, (name, id)| {
            draft.field(&format!("tokenizer.ggml.{name}_token_id"), u32_field(id))
        });
        config(&draft.field("tokenizer.ggml.bos_token_id", u32_field(0)))
    };
    let config = ends([("eom", 2), ("eot", 0), ("eos", 1)]);
    assert_eq!((config.stops, config.bos), (vec![1, 0, 2], Some(0)));
    assert_eq!(ends([("eos", 2), ("eot", 2), ("eom", 1)]).stops, [2, 1]);
}

#[test]
fn yarn_has_the_values_of_its_keys_and_the_scale_of_its_factor() {
    let yarn = |draft: Draft| {
        let draft = draft.field("llama.rope.scaling.type", string_field("yarn"));
        load(&draft.bytes()).unwrap().0.layers[0].attention().unwrap().rope.scaling.clone()
    };
    let factor = |value| llama().field("llama.rope.scaling.factor", f32_field(value));
    let given = factor(4.0)
        .field("llama.rope.scaling.attn_factor", f32_field(1.5))
        .field("llama.rope.scaling.yarn_beta_fast", f32_field(24.0))
        .field("llama.rope.scaling.yarn_beta_slow", f32_field(2.0));
    let expected = |factor, attention_factor, beta_fast, beta_slow| RopeScaling::Yarn {
        factor,
        original_positions: 64,
        beta_fast,
        beta_slow,
        attention_factor,
        truncate: true,
    };
    assert_eq!(yarn(given), expected(4.0, 1.5 * (1.0 + 0.1 * 4f64.ln()), 24.0, 2.0));
    assert_eq!(yarn(factor(0.5)), expected(0.5, 1.0, 32.0, 1.0));
    let linear = llama().field("llama.rope.scaling.type", string_field("linear"));
    check_refused(&linear, &["llama.rope.scaling.factor", "missing"]);
}

/// llama.cpp may list a number for each layer.
#[test]
fn heads_are_listed_once_or_for_each_layer() {
    let list = |values: &[i32]| {
        let head = [9u32.to_le_bytes(), 5u32.to_le_bytes()].concat();
        let values = values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        [head, (values.len() as u64 / 4).to_le_bytes().to_vec(), values].concat()
    };
    let heads = |query: &[i32], kv: &[i32]| {
        let draft = named("qwen3", 2)
            .field("qwen3.attention.head_count", list(query))
            .field("qwen3.attention.head_count_kv", list(kv));
        open_bytes(&draft.bytes()).unwrap().config().map(|config| config.layers[1].attention().unwrap().heads)
    };
    assert_eq!(heads(&[4, 4], &[2, 2]).unwrap(), Heads { query: 4, kv: 2, dim: 2 });
    assert!(heads(&[4, 4], &[2, 1]).unwrap_err().to_string().contains("differs between layers"));
    assert!(heads(&[-4, -4], &[2, 2]).is_err());
    let values = llama().field("llama.attention.value_length", u32_field(8));
    check_refused(&values, &["llama.attention.value_length is 8", "4"]);
}

#[test]
fn both_versions_are_read_and_tensors_lie_at_multiples_of_the_alignment() {
    let mut second = llama().bytes();
    second[4] = 2;
    assert_eq!(load(&second).unwrap().0, load(&llama().bytes()).unwrap().0);
    check_refused(&llama().field("general.alignment", u32_field(64)), &["multiple of 64"]);
    check_refused(&llama().field("general.alignment", u32_field(4)), &["general.alignment", "is 4"]);
    assert!(load(&llama().field("general.alignment", u32_field(32)).bytes()).is_ok());
}

/// In front of the feed-forward Llama has `post_attention_layernorm`, which in Gemma is the norm behind attention.
#[test]
fn norms_have_the_names_of_their_family() {
    let draft = ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
        .iter()
        .fold(named("gemma2", 1), |draft, name| draft.tensor(&format!("blk.0.{name}.weight"), &[8], 1.0));
    let gguf = open_bytes(&draft.bytes()).unwrap();
    let weights = gguf.weights(&gguf.config().unwrap()).unwrap();
    let names: Vec<&str> = weights.names().filter_map(|name| name.strip_prefix("model.layers.0.")).collect();
    let expected = [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "pre_feedforward_layernorm.weight",
    ];
    assert_eq!(names, expected);
    let (_, llama) = load(&llama().bytes()).unwrap();
    assert!(llama.contains("model.layers.0.post_attention_layernorm.weight"));
}

/// A vocabulary of `SentencePiece`: each token with its type and its score.
fn sentence_piece(tokens: &[(&str, i32, f32)]) -> Draft {
    let list = |kind: u32, bytes: Vec<u8>| {
        [&9u32.to_le_bytes()[..], &kind.to_le_bytes(), &(tokens.len() as u64).to_le_bytes(), &bytes].concat()
    };
    let texts: Vec<&str> = tokens.iter().map(|(text, ..)| *text).collect();
    llama()
        .field("tokenizer.ggml.model", string_field("llama"))
        .field("tokenizer.ggml.tokens", strings_field(&texts))
        .field(
            "tokenizer.ggml.token_type",
            list(5, tokens.iter().flat_map(|(_, kind, _)| kind.to_le_bytes()).collect()),
        )
        .field(
            "tokenizer.ggml.scores",
            list(6, tokens.iter().flat_map(|(.., score)| score.to_le_bytes()).collect()),
        )
        .field("tokenizer.ggml.unknown_token_id", u32_field(0))
        .field("tokenizer.ggml.bos_token_id", u32_field(1))
        .field("tokenizer.ggml.padding_token_id", u32_field(2))
}

#[test]
fn a_sentence_piece_vocabulary_merges_by_score_and_begins_with_a_blank() {
    let tokens = [
        ("<unk>", 2, 0.0),
        ("<s>", 3, 0.0),
        ("<pad>", 3, 0.0),
        ("▁", 1, -9.0),
        ("a", 1, -9.0),
        ("b", 1, -9.0),
        ("c", 1, -9.0),
        ("ab", 1, -2.0),
        ("bc", 1, -1.0),
        ("▁a", 1, -3.0),
        ("<0x64>", 6, 0.0),
        ("<x>", 4, 0.0),
        ("spare", 5, 0.0),
    ];
    let flag = |name: &str, is_on: u8| {
        let value = [&7u32.to_le_bytes()[..], &[is_on]].concat();
        sentence_piece(&tokens).field(&format!("tokenizer.ggml.{name}"), value)
    };
    let tokenizer = |draft: Draft| open_bytes(&draft.bytes()).unwrap().tokenizer().unwrap();
    let plain = tokenizer(sentence_piece(&tokens));
    // Of a, b and c, the last two are joined first, and then the blank and the first.
    assert_eq!(plain.encode_rendered("abc").unwrap(), [9, 8]);
    assert_eq!(plain.encode("abc").unwrap(), [1, 9, 8], "the token that starts a sequence comes by itself");
    assert_eq!(plain.encode_rendered("d").unwrap(), [3, 10], "an unknown character is its bytes");
    assert_eq!(plain.encode_rendered("b<x>").unwrap(), [3, 5, 11]);
    assert_eq!(
        plain.decode(&[1, 9, 8, 11, 2]).unwrap(),
        "abc<x>",
        "a token of the user has a text, a control token none"
    );
    assert_eq!((plain.id_of("spare"), plain.id_of("<x>")), (None, Some(11)));
    assert_eq!(tokenizer(flag("add_space_prefix", 0)).encode_rendered("abc").unwrap(), [4, 8]);
    assert_eq!(tokenizer(flag("add_bos_token", 0)).encode("abc").unwrap(), [9, 8]);
    let special = open_bytes(&sentence_piece(&tokens).bytes()).unwrap().special_tokens().unwrap();
    let expected = [("bos_token", "<s>"), ("pad_token", "<pad>"), ("unk_token", "<unk>")];
    assert_eq!(special, expected.map(|(name, text)| (name.to_string(), text.to_string())).into());
}
