mod by_family;
mod defaults;

use super::*;
use serde_json::{Map, Value, json};

fn keys(value: &Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu",
        "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": [2, 3], "sliding_window": null,
        "use_sliding_window": false, "max_window_layers": 2, "attention_bias": false,
    })
}

fn with(changes: &Value) -> Value {
    let mut config = qwen3();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    config
}

fn parse(value: &Value) -> Result<ModelConfig> {
    ModelConfig::from_hugging_face("config.json", &keys(value))
}

/// The attention of every layer.
fn attention(config: &ModelConfig) -> &AttentionSpec {
    config.uniform_layer().unwrap().attention().unwrap()
}

/// The changes must be refused with all of these words.
fn check_refused(changes: &Value, words: &[&str]) {
    let message = parse(&with(changes)).expect_err(&format!("{changes} was accepted")).to_string();
    for word in words {
        assert!(message.contains(word), "{changes}: {message:?} does not say {word:?}");
    }
}

#[test]
fn qwen3_reads_as_written() {
    let config = parse(&qwen3()).unwrap();
    let attention = AttentionSpec {
        heads: Heads { query: 4, kv: 2, dim: 32 },
        rule: ScoreRule::plain(32),
        qk_norm: QkNorm::PerHead,
        biases: AttentionBiases::Absent,
        has_sinks: false,
        rope: Rope { theta: 1e6, scaling: RopeScaling::None },
        rotary_dim: 32,
        has_output_gate: false,
    };
    let layer = LayerSpec {
        norms: NormPlacement::Before,
        mixer: Mixer::Attention(attention),
        feed_forward: FeedForward::Gated { width: 96, gate: Gate::Silu, has_biases: false },
        residual_scale: 1.0,
    };
    let expected = ModelConfig {
        width: 64,
        layers: vec![layer; 2],
        vocabulary: 100,
        norm_eps: 1e-6,
        max_positions: 40960,
        tied_embeddings: true,
        bos: Some(1),
        stops: vec![2, 3],
        ..ModelConfig::empty(Family::Qwen3)
    };
    assert_eq!(config, expected);
}

#[test]
fn absent_keys_take_the_values_of_transformers() {
    let mut llama = with(&json!({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}));
    for key in
        ["head_dim", "num_key_value_heads", "rope_theta", "tie_word_embeddings", "max_position_embeddings"]
    {
        llama.as_object_mut().unwrap().remove(key);
    }
    let config = parse(&llama).unwrap();
    let AttentionSpec { heads, qk_norm, biases, rope, .. } = attention(&config).clone();
    assert_eq!((heads.dim, heads.kv, config.max_positions), (16, 4, 2048));
    assert_eq!(rope, Rope { theta: 10_000.0, scaling: RopeScaling::None });
    assert_eq!((config.tied_embeddings, qk_norm, biases), (false, QkNorm::Absent, AttentionBiases::Absent));
    let mut qwen3 = qwen3();
    qwen3.as_object_mut().unwrap().remove("head_dim");
    assert_eq!(attention(&parse(&qwen3).unwrap()).heads.dim, 128);
}

#[test]
fn old_and_new_rope_layouts_agree() {
    let scaling = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let mut parameters = scaling.clone();
    parameters["rope_theta"] = json!(500000.0);
    let old = parse(&with(&json!({"rope_theta": 500000.0, "rope_scaling": scaling}))).unwrap();
    let new = parse(&with(&json!({"rope_theta": null, "rope_parameters": parameters}))).unwrap();
    assert_eq!(old, new);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_positions: 8192,
    };
    assert_eq!(attention(&new).rope, Rope { theta: 500000.0, scaling });
}

#[test]
fn yarn_works_out_its_attention_factor() {
    let yarn = |extra: &Value| {
        let mut scaling = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6});
        scaling.as_object_mut().unwrap().extend(keys(extra));
        match attention(&parse(&with(&json!({"rope_scaling": scaling}))).unwrap()).rope.scaling.clone() {
            RopeScaling::Yarn { attention_factor, beta_fast, beta_slow, truncate, .. } => {
                assert_eq!((beta_fast, beta_slow, truncate), (32.0, 1.0, true));
                attention_factor
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(yarn(&json!({})), 0.1 * 4f64.ln() + 1.0);
    assert_eq!(yarn(&json!({"attention_factor": 1.5})), 1.5);
    let ratio = (0.1 * 0.5 * 4f64.ln() + 1.0) / (0.1 * 2.0 * 4f64.ln() + 1.0);
    assert_eq!(yarn(&json!({"mscale": 0.5, "mscale_all_dim": 2.0})), ratio);
}

#[test]
fn what_is_written_reads_back_the_same() {
    let text = include_str!("../../tests/data/formats/configs.json");
    let saved: Map<String, Value> = serde_json::from_str(text).unwrap();
    assert_eq!(saved.len(), 12);
    for (name, value) in &saved {
        let config = ModelConfig::from_hugging_face(name, &keys(value)).unwrap();
        assert_eq!(config.family.name(), name.split_once('-').unwrap().0);
        let rope = name.split_once('-').unwrap().1;
        let kind = match attention(&config).rope.scaling {
            RopeScaling::None => "default",
            RopeScaling::Linear { .. } => "linear",
            RopeScaling::Llama3 { .. } => "llama3",
            RopeScaling::Yarn { .. } => "yarn",
            RopeScaling::Long { .. } => "longrope",
        };
        assert_eq!(kind, rope, "{name}");
        assert_eq!(config.tied_embeddings, rope == "yarn", "{name}");
        let again =
            ModelConfig::from_hugging_face(name, &config.to_hugging_face("float32").unwrap()).unwrap();
        assert_eq!(again, config, "{name}");
    }
}

#[test]
fn tensors_follow_the_layers() {
    let mut config = parse(&qwen3()).unwrap();
    let names = |config: &ModelConfig| config.tensors().into_iter().map(|t| t.name).collect::<Vec<_>>();
    assert_eq!(names(&config).len(), 2 + 2 * 11);
    assert!(names(&config).contains(&"model.layers.1.self_attn.q_norm.weight".into()));
    config.tied_embeddings = false;
    let AttentionSpec { heads, rope, .. } = attention(&config).clone();
    config.layers[1] = Family::Qwen2.layer(heads, rope, 96);
    assert_eq!(names(&config).len(), 3 + 11 + 12);
    assert!(!names(&config).contains(&"model.layers.1.self_attn.q_norm.weight".into()));
    let refused = config.to_hugging_face("float32").unwrap_err().to_string();
    assert!(refused.contains("the layers of a Qwen3ForCausalLM differ"), "{refused}");
    assert_eq!(names(&config).last().unwrap(), "lm_head.weight");
    let o_proj = config.tensors().into_iter().find(|t| t.name.ends_with("o_proj.weight")).unwrap();
    assert_eq!(o_proj.shape, [64, 128]);
}

#[test]
fn parameters_of_known_models_are_as_published() {
    let shape = |d, layers, heads, kv, head, ffn, tied| {
        parse(&with(&json!({
            "hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv,
            "head_dim": head, "intermediate_size": ffn, "vocab_size": 151936, "tie_word_embeddings": tied,
        })))
        .unwrap()
    };
    assert_eq!(shape(2048, 28, 16, 8, 128, 6144, true).n_parameters(), 1_720_574_976);
    assert_eq!(shape(4096, 36, 32, 8, 128, 12288, false).n_parameters(), 8_190_735_360);
    assert_eq!(shape(2048, 28, 16, 8, 128, 6144, true).kv_numbers_per_token(), 2 * 28 * 8 * 128);
}

#[test]
fn other_architectures_are_refused_with_the_supported_ones() {
    check_refused(&json!({"model_type": "gemma9"}), &["model_type", "gemma9", "Qwen3", "SmolLM2"]);
    for (family, part) in [
        ("qwen3_moe", "mixtures of experts"),
        ("deepseek_v3", "latent attention"),
        ("gemma4", "shared keys and values"),
        ("granitemoehybrid", "state-space layers"),
        ("mistral3", "vision inputs"),
        ("gpt2", "subtract the mean"),
    ] {
        check_refused(&json!({"model_type": family}), &[family, part, "are not built"]);
    }
    let gpt_oss = json!({"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]});
    check_refused(&gpt_oss, &["gpt_oss", "experts"]);
    let with_experts = json!({"model_type": "gpt_oss", "architectures": null, "num_local_experts": 32});
    check_refused(&with_experts, &["num_local_experts", "experts are not built"]);
    check_refused(&json!({"model_type": null}), &["model_type"]);
    check_refused(
        &json!({"architectures": ["Qwen3ForTokenClassification"]}),
        &["architectures", "Qwen3ForCausalLM"],
    );
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    check_refused(&json!({"num_experts": 8}), &["num_experts", "dense"]);
    check_refused(&json!({"quantization_config": {"quant_method": "awq"}}), &["quantization_config", "GGUF"]);
    let multimodal = json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "quantization_config": {}});
    check_refused(&multimodal, &["quantization_config", "GGUF"]);
    check_refused(&json!({"hidden_act": "gelu"}), &["hidden_act", "silu"]);
    check_refused(&json!({"partial_rotary_factor": 1.5}), &["partial_rotary_factor", "1.5"]);
    check_refused(&json!({"rope_scaling": {"rope_type": "dynamic"}}), &["dynamic", "llama3"]);
    let states = json!({"model_type": "qwen3_5_text", "architectures": null, "full_attention_interval": 2, "linear_key_head_dim": 0});
    check_refused(&states, &["key dimension of linear attention", "0"]);
    check_refused(
        &json!({"layer_types": ["full_attention", "linear_attention"], "use_sliding_window": true}),
        &["layer_types", "linear_attention"],
    );
}

#[test]
fn a_sliding_window_is_read_where_it_is_in_use() {
    let windows = |changes: Value| {
        let config = parse(&with(&changes)).unwrap();
        config.attentions().map(|attention| attention.rule.window).collect::<Vec<_>>()
    };
    let window = json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 1});
    assert_eq!(windows(window), [None, Some(4096)]);
    let unused = [
        json!({"use_sliding_window": false, "sliding_window": 4096, "max_window_layers": 0}),
        json!({"use_sliding_window": true, "sliding_window": 4096, "max_window_layers": 2}),
        json!({"layer_types": ["full_attention", "full_attention"]}),
    ];
    for changes in unused {
        assert_eq!(windows(changes), [None, None]);
    }
}

/// The configs that `transformers` wrote for the golden models of every family.
#[test]
fn every_family_is_written_as_it_is_read() {
    use Family::{Gemma2, Gemma3, GptOss, Olmo2, Olmo3, Phi3, SmolLm3};
    for family in Family::ALL {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens");
        let mut n_read = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path().join("config.json");
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            let keys: Map<String, Value> = serde_json::from_str(&text).unwrap();
            if keys["model_type"] != family.name() {
                continue;
            }
            let config = ModelConfig::from_hugging_face("config.json", &keys).unwrap();
            let written = config.to_hugging_face("float32").unwrap();
            // Where transformers has a token of its own vocabulary by default, the key says that there is none.
            let pads =
                config.score.is_none() && matches!(family, SmolLm3 | Olmo2 | Olmo3 | Gemma2 | Gemma3 | Phi3);
            assert_eq!(written.get("pad_token_id") == Some(&Value::Null), pads, "{path:?}");
            assert_eq!(ModelConfig::from_hugging_face("again", &written).unwrap(), config, "{path:?}");
            // transformers cannot compute some families without a window, even where no layer has one.
            let mut full = config;
            let rope = full.attentions().next().unwrap().rope.clone();
            for attention in full.attentions_mut() {
                (attention.rule.window, attention.rope) = (None, rope.clone());
            }
            let written = full.to_hugging_face("float32").unwrap();
            let has_window = written.get("sliding_window").is_some_and(Value::is_u64);
            assert_eq!(has_window, matches!(family, Gemma2 | Gemma3 | Olmo3 | GptOss), "{path:?}");
            n_read += 1;
        }
        assert!(n_read > 0, "no golden model of {family:?}");
    }
}

#[test]
fn a_multimodal_config_is_read_by_its_language_model() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/gemma3-windows");
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let inner: Value = serde_json::from_str(&text).unwrap();
    let alone = ModelConfig::from_hugging_face("config.json", &keys(&inner)).unwrap();
    let outer = json!({
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": inner,
        "vision_config": {"hidden_size": 8}, "eos_token_id": [0, 3],
    });
    let nested = ModelConfig::from_hugging_face("config.json", &keys(&outer)).unwrap();
    assert_eq!(nested, alone);
}

/// Files of published multimodal models leave out what equals the defaults of `transformers`.
#[test]
fn sizes_that_a_multimodal_config_leaves_out_are_those_of_transformers() {
    let read = |outer: &Value| ModelConfig::from_hugging_face("config.json", &keys(outer)).unwrap();
    let four = read(&json!({
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
        },
    }));
    let known = ModelConfig::known("gemma-3-4b").unwrap();
    assert_eq!(four, ModelConfig { stops: vec![1, 106], ..known });
    let nine = read(&json!({"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}));
    assert_eq!(nine, ModelConfig::known("qwen3.5-9b").unwrap());
    let tied = json!({"model_type": "qwen3_5", "tie_word_embeddings": true, "text_config": {"model_type": "qwen3_5_text"}});
    assert!(read(&tied).tied_embeddings);
}

#[test]
fn heads_of_keys_that_no_key_names_are_those_of_the_family() {
    let kv = |family: &str, given: Value| {
        let mut value =
            with(&json!({"model_type": family, "architectures": null, "num_attention_heads": 64}));
        value.as_object_mut().unwrap().remove("num_key_value_heads");
        value.as_object_mut().unwrap().extend(keys(&given));
        attention(&parse(&value).unwrap()).heads.kv
    };
    let defaults =
        ["qwen3", "qwen2", "mistral", "smollm3", "llama", "olmo2"].map(|family| kv(family, json!({})));
    assert_eq!(defaults, [32, 32, 8, 4, 64, 64]);
    assert_eq!(kv("mistral", json!({"num_key_value_heads": null})), 64);
}

#[test]
fn longrope_takes_its_factors_from_the_longest_sequence_of_a_run() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/phi3-longrope");
    let text = std::fs::read_to_string(folder.join("config.json")).unwrap();
    let mut config = ModelConfig::from_hugging_face("x", &serde_json::from_str(&text).unwrap()).unwrap();
    for (longest, expected) in [(64, LongFactors::Short), (65, LongFactors::Long)] {
        config.fit_longest(longest);
        let RopeScaling::Long { used, .. } = attention(&config).rope.scaling else { panic!("no LongRoPE") };
        assert_eq!(used, expected);
        assert!(config.to_hugging_face("float32").is_ok());
    }
}

#[test]
fn impossible_values_are_refused_by_key() {
    check_refused(&json!({"num_attention_heads": 0}), &["attention heads", "0"]);
    check_refused(&json!({"num_attention_heads": 5}), &["5 attention heads", "2 key-value heads"]);
    check_refused(&json!({"num_key_value_heads": 3}), &["3 key-value heads"]);
    check_refused(&json!({"hidden_size": -64}), &["hidden_size", "-64"]);
    check_refused(&json!({"hidden_size": 64.5}), &["hidden_size", "64.5"]);
    check_refused(&json!({"hidden_size": "64"}), &["hidden_size", "\"64\""]);
    check_refused(&json!({"hidden_size": 1_u64 << 60}), &["hidden size"]);
    check_refused(&json!({"vocab_size": u64::MAX}), &["vocabulary"]);
    check_refused(&json!({"vocab_size": null}), &["vocab_size", "missing"]);
    check_refused(&json!({"head_dim": 33}), &["head dimension", "even"]);
    check_refused(&json!({"rms_norm_eps": 0.0}), &["epsilon"]);
    check_refused(&json!({"rms_norm_eps": 1e300}), &["epsilon"]);
    check_refused(&json!({"rope_theta": -1.0}), &["theta"]);
    check_refused(&json!({"rope_scaling": {"type": "linear", "factor": 0}}), &["factor"]);
    check_refused(&json!({"rope_scaling": {"type": "linear"}}), &["rope_scaling.factor", "missing"]);
    check_refused(&json!({"rope_scaling": [1]}), &["rope_scaling", "list"]);
    check_refused(&json!({"eos_token_id": [2, "x"]}), &["eos_token_id"]);
    check_refused(&json!({"eos_token_id": 100}), &["100", "vocabulary"]);
}

#[test]
fn a_reward_model_without_a_padding_token_pads_with_its_first_stop() {
    let config = ModelConfig { stops: vec![7, 9], ..ModelConfig::known("qwen3-0.6b").unwrap() };
    let padding = |given| config.clone().with_score(given).score.unwrap().padding;
    assert_eq!((padding(None), padding(Some(3))), (Some(7), Some(3)));
}

/// The rope of the first layer, with these keys under `rope_scaling`, and others.
fn scaled(scaling: &Value, others: &Value) -> RopeScaling {
    let mut changes = keys(others);
    changes.insert("rope_scaling".into(), scaling.clone());
    attention(&parse(&with(&Value::Object(changes))).unwrap()).rope.scaling.clone()
}

/// As `transformers` does: a factor from the two lengths, and zeros as absent keys.
#[test]
fn yarn_takes_its_factor_from_the_positions_and_its_bounds_from_its_keys() {
    let yarn = |extra: Value, others: Value| {
        let mut scaling =
            json!({"rope_type": "yarn", "original_max_position_embeddings": 32_768, "factor": 4.0});
        scaling.as_object_mut().unwrap().extend(keys(&extra));
        let RopeScaling::Yarn {
            factor,
            original_positions,
            attention_factor,
            beta_fast,
            beta_slow,
            truncate,
        } = scaled(&scaling, &others)
        else {
            panic!("no YaRN")
        };
        (factor, original_positions, attention_factor, [beta_fast, beta_slow], truncate)
    };
    let magnitude = |factor: f64| 0.1 * factor.ln() + 1.0;
    let plain = (4.0, 32_768, magnitude(4.0), [32.0, 1.0], true);
    assert_eq!(yarn(json!({"factor": null}), json!({})), (1.25, 32_768, magnitude(1.25), [32.0, 1.0], true));
    assert_eq!(yarn(json!({"factor": 0.5}), json!({})), (0.5, 32_768, 1.0, [32.0, 1.0], true));
    assert_eq!(yarn(json!({"mscale": 0.0, "mscale_all_dim": 2.0}), json!({})), plain);
    assert_eq!(yarn(json!({"mscale": 2.0, "mscale_all_dim": 0.0}), json!({})), plain);
    assert_eq!(yarn(json!({"beta_fast": 0, "beta_slow": 0}), json!({})), plain);
    let given = json!({"beta_fast": 24, "beta_slow": 2, "truncate": false});
    assert_eq!(yarn(given, json!({})), (4.0, 32_768, magnitude(4.0), [24.0, 2.0], false));
    let outer = json!({"original_max_position_embeddings": 10_240});
    assert_eq!(yarn(json!({}), outer).1, 10_240, "the key of the model comes before that of its rope");
}

#[test]
fn longrope_scales_attention_by_its_lengths_unless_told_otherwise() {
    let long = |kind: &str, extra: Value| {
        let factors = |first: f64| (0..16).map(|i| first + f64::from(i)).collect::<Vec<f64>>();
        let mut scaling =
            json!({"rope_type": kind, "short_factor": factors(1.0), "long_factor": factors(2.0)});
        scaling.as_object_mut().unwrap().extend(keys(&extra));
        let scaling = scaled(&scaling, &json!({"original_max_position_embeddings": 10_240}));
        let RopeScaling::Long { short, long, used, original_positions, attention_factor } = scaling else {
            panic!("no LongRoPE")
        };
        assert_eq!((short[0], long[15], used, original_positions), (1.0, 17.0, LongFactors::Short, 10_240));
        attention_factor
    };
    let expected = (1.0 + 4f64.ln() / 10_240f64.ln()).sqrt();
    assert_eq!([long("longrope", json!({})), long("su", json!({}))], [expected; 2]);
    assert_eq!(long("longrope", json!({"factor": 1.0})), 1.0);
    assert_eq!(long("longrope", json!({"factor": 8.0})), (1.0 + 8f64.ln() / 10_240f64.ln()).sqrt());
    assert_eq!(long("longrope", json!({"attention_factor": 1.5, "factor": 8.0})), 1.5);
}

#[test]
fn a_part_of_a_head_is_rotated_where_a_key_says_so() {
    let rotary = |changes: Value| attention(&parse(&with(&changes)).unwrap()).rotary_dim;
    assert_eq!(rotary(json!({"partial_rotary_factor": 0.5})), 16);
    let inner = json!({"rope_type": "default", "partial_rotary_factor": 0.25});
    assert_eq!(rotary(json!({"partial_rotary_factor": 0.5, "rope_parameters": inner})), 8);
    assert_eq!(rotary(json!({"partial_rotary_factor": 1.0})), 32);
    check_refused(&json!({"partial_rotary_factor": 0.0}), &["partial_rotary_factor", "above 0"]);
    check_refused(&json!({"partial_rotary_factor": 0.1}), &["3 rotated dimensions"]);
}

#[test]
fn ropes_that_cannot_be_computed_are_refused() {
    let llama3 = |low: f64, high: f64| json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": low, "high_freq_factor": high}});
    assert!(parse(&with(&llama3(1.0, 4.0))).is_ok());
    check_refused(&llama3(4.0, 4.0), &["high_freq_factor - low_freq_factor is 0"]);
    let yarn = |extra: Value| {
        let mut scaling = json!({"rope_type": "yarn", "factor": 4.0});
        scaling.as_object_mut().unwrap().extend(keys(&extra));
        json!({"rope_scaling": scaling})
    };
    check_refused(&yarn(json!({"beta_fast": 2, "beta_slow": 2})), &["beta_fast - beta_slow is 0"]);
    check_refused(&yarn(json!({"attention_factor": 0})), &["attention factor is 0"]);
    check_refused(&yarn(json!({"rope_theta": 1.0})), &["theta - 1 is 0"]);
    let long = |short: Vec<f64>, long: Vec<f64>| json!({"original_max_position_embeddings": 8, "rope_scaling": {"rope_type": "longrope", "short_factor": short, "long_factor": long}});
    assert!(parse(&with(&long(vec![1.0; 16], vec![2.0; 16]))).is_ok());
    check_refused(&long(vec![1.0; 15], vec![2.0; 16]), &["short_factor has 15 entries, expected 16"]);
    check_refused(&long(vec![1.0; 16], vec![0.0; 16]), &["long_factor is 0"]);
}

/// The values of PyTorch for `torch.tensor(width ** 0.5).bfloat16()`. Gemma 2 2B and 9B, Gemma 3 270M to 27B.
#[test]
fn the_scale_of_embeddings_is_rounded_where_activations_are_bf16() {
    for (width, rounded) in
        [(2304, 48.0), (3584, 59.75), (640, 25.25), (1152, 34.0), (2560, 50.5), (3840, 62.0), (5376, 73.5)]
    {
        assert_eq!(EmbeddingScale::SqrtWidth.factor(width, 2), rounded, "{width}");
        assert_eq!(EmbeddingScale::SqrtWidth.factor(width, 4), (width as f64).sqrt(), "{width}");
    }
    assert_eq!(EmbeddingScale::Factor(12.3).factor(640, 2), 12.3);
    assert_eq!(EmbeddingScale::One.factor(640, 2), 1.0);
}
