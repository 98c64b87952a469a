//! What absent keys mean in every family, what a reward model needs, and the largest sizes.

use super::*;
use crate::config::families::FamilyRow;

/// The defaults of the configuration classes of `transformers` 5.
struct Defaults {
    family: Family,
    theta: f64,
    max_positions: usize,
    norm_eps: f32,
    is_tied: bool,
    head_dim: usize,
    /// Of four layers.
    windows: [Option<usize>; 4],
}

/// Llama's, which many classes have taken over. The head dimension is that of the test's width and heads.
const fn as_llama(family: Family) -> Defaults {
    Defaults {
        family,
        theta: 10_000.0,
        max_positions: 2048,
        norm_eps: 1e-6,
        is_tied: false,
        head_dim: 16,
        windows: [None; 4],
    }
}

const DEFAULTS: [Defaults; 13] = [
    as_llama(Family::Llama),
    as_llama(Family::Granite),
    Defaults { max_positions: 32_768, ..as_llama(Family::Qwen2) },
    Defaults { max_positions: 32_768, head_dim: 128, ..as_llama(Family::Qwen3) },
    Defaults { max_positions: 32_768, head_dim: 256, ..as_llama(Family::Qwen35) },
    Defaults { theta: 2e6, max_positions: 32_768, is_tied: true, ..as_llama(Family::SmolLm3) },
    Defaults { max_positions: 131_072, windows: [Some(4096); 4], ..as_llama(Family::Mistral) },
    Defaults { norm_eps: 1e-5, ..as_llama(Family::Olmo2) },
    Defaults {
        theta: 500_000.0,
        norm_eps: 1e-5,
        windows: [Some(4096), Some(4096), Some(4096), None],
        ..as_llama(Family::Olmo3)
    },
    Defaults { max_positions: 4096, norm_eps: 1e-5, ..as_llama(Family::Phi3) },
    Defaults {
        max_positions: 8192,
        is_tied: true,
        head_dim: 256,
        windows: [Some(4096), None, Some(4096), None],
        ..as_llama(Family::Gemma2)
    },
    Defaults {
        max_positions: 131_072,
        is_tied: true,
        head_dim: 256,
        windows: [Some(4096); 4],
        ..as_llama(Family::Gemma3)
    },
    Defaults {
        theta: 150_000.0,
        max_positions: 131_072,
        norm_eps: 1e-5,
        head_dim: 64,
        windows: [Some(128), None, Some(128), None],
        ..as_llama(Family::GptOss)
    },
];

/// A config of the sizes alone.
fn bare(family: Family, more: &Value) -> Result<ModelConfig> {
    let mut keys = keys(&json!({
        "model_type": family.name(), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100, "num_local_experts": 0,
    }));
    keys.extend(super::keys(more));
    ModelConfig::from_hugging_face("config.json", &keys)
}

#[test]
fn absent_keys_have_the_defaults_of_their_family() {
    for Defaults { family, theta, max_positions, norm_eps, is_tied, head_dim, windows } in DEFAULTS {
        let config = bare(family, &json!({})).unwrap();
        let attention = config.attentions().last().unwrap();
        assert_eq!((attention.rope.theta, config.max_positions), (theta, max_positions), "{family:?}");
        assert_eq!((config.norm_eps, config.tied_embeddings), (norm_eps, is_tied), "{family:?}");
        assert_eq!(attention.heads, Heads { query: 4, kv: 4, dim: head_dim }, "{family:?}");
        let window = |layer: &LayerSpec| layer.attention().and_then(|attention| attention.rule.window);
        assert_eq!(config.layers.iter().map(window).collect::<Vec<_>>(), windows, "{family:?}");
        assert_eq!((config.bos, config.stops.len()), (None, 0), "{family:?}");
    }
    let all: Vec<&FamilyRow> = DEFAULTS.iter().map(|defaults| defaults.family.row()).collect();
    assert_eq!(all.len(), Family::ALL.len());
}

/// Gemma 3 turns its windowed layers with another theta; a quarter of a head of Qwen3.5 is turned.
#[test]
fn gemma_qwen_3_5_and_granite_have_constants_of_their_own() {
    let gemma = bare(Family::Gemma3, &json!({"sliding_window_pattern": 4})).unwrap();
    let of_layers: Vec<_> =
        gemma.attentions().map(|attention| (attention.rule.window, attention.rope.theta)).collect();
    assert_eq!(of_layers, [&[(Some(4096), 1e4); 3][..], &[(None, 1e6)]].concat());
    let softcaps = |family, more: Value| {
        let config = bare(family, &more).unwrap();
        (config.attentions().next().unwrap().rule.softcap, config.logits.softcap)
    };
    assert_eq!(softcaps(Family::Gemma2, json!({})), (Some(50.0), Some(30.0)));
    assert_eq!(softcaps(Family::Gemma3, json!({})), (None, None));
    let none = json!({"attn_logit_softcapping": null, "final_logit_softcapping": null});
    assert_eq!(softcaps(Family::Gemma2, none), (None, None));
    let scale = |more: Value| bare(Family::Gemma2, &more).unwrap().attentions().next().unwrap().rule.scale;
    assert_eq!((scale(json!({})), scale(json!({"query_pre_attn_scalar": 64}))), (1.0 / 16.0, 1.0 / 8.0));

    let hybrid = bare(Family::Qwen35, &json!({})).unwrap();
    let linear: Vec<bool> = hybrid.layers.iter().map(|layer| layer.delta_net().is_some()).collect();
    assert_eq!((linear, hybrid.attentions().next().unwrap().rotary_dim), (vec![true, true, true, false], 64));
    let heads = DeltaNetHeads { key: 16, value: 32, key_dim: 128, value_dim: 128 };
    assert_eq!(hybrid.layers[0].delta_net(), Some(DeltaNetSpec { heads, kernel: 4 }));

    let granite = bare(Family::Granite, &json!({})).unwrap();
    let rule = granite.attentions().next().unwrap().rule;
    assert_eq!((rule.scale, granite.logits.divisor, granite.layers[0].residual_scale), (1.0, 1.0, 1.0));
}

/// The layers of SmolLM3 that have a window are those without positions, unless they are listed.
#[test]
fn windows_of_smollm_3_are_in_its_layers_without_positions() {
    let windows = |more: Value| {
        let mut keys = json!({"sliding_window": 8, "use_sliding_window": true});
        keys.as_object_mut().unwrap().extend(super::keys(&more));
        let config = bare(Family::SmolLm3, &keys).unwrap();
        let written = config.to_hugging_face("float32").unwrap();
        assert_eq!(ModelConfig::from_hugging_face("again", &written).unwrap(), config);
        config.attentions().map(|attention| attention.rule.window).collect::<Vec<_>>()
    };
    assert_eq!(windows(json!({})), [None, None, None, Some(8)]);
    assert_eq!(windows(json!({"no_rope_layers": [0, 1, 1, 1]})), [Some(8), None, None, None]);
    assert_eq!(windows(json!({"no_rope_layer_interval": 2})), [None, Some(8), None, Some(8)]);
    let listed = ["sliding_attention", "full_attention", "full_attention", "full_attention"];
    assert_eq!(windows(json!({"layer_types": listed})), [Some(8), None, None, None]);
    assert_eq!(windows(json!({"use_sliding_window": false})), [None; 4]);
}

/// `transformers` gives a model two labels, and Gemma a padding token.
#[test]
fn a_reward_model_has_one_label_and_its_padding_token() {
    let score = |family: Family, more: Value| {
        let mut keys = json!({"architectures": [family.classifier().unwrap()], "num_labels": 1});
        keys.as_object_mut().unwrap().extend(super::keys(&more));
        bare(family, &keys).map(|config| {
            assert!(!config.tied_embeddings, "there is no head to tie");
            config.score.unwrap().padding
        })
    };
    let refused = |more: Value| score(Family::Qwen3, more).unwrap_err().to_string();
    assert!(refused(json!({"num_labels": null})).contains("2 labels"));
    assert!(refused(json!({"num_labels": 3})).contains("3 labels"));
    assert!(refused(json!({"id2label": ["a"]})).contains("expected an object"));
    assert_eq!(score(Family::Qwen3, json!({"num_labels": 3, "id2label": {"0": "x"}})).unwrap(), None);
    for (given, of_qwen, of_gemma) in [
        (json!({}), None, Some(0)),
        (json!({"pad_token_id": 5}), Some(5), Some(5)),
        (json!({"pad_token_id": null}), None, None),
    ] {
        assert_eq!(score(Family::Qwen3, given.clone()).unwrap(), of_qwen);
        assert_eq!(score(Family::Gemma2, given.clone()).unwrap(), of_gemma);
        assert_eq!(score(Family::Gemma3, given).unwrap(), of_gemma);
    }
    assert_eq!(Family::Granite.classifier(), None);
    assert_eq!(Family::Gemma3.classifier().as_deref(), Some("Gemma3TextForSequenceClassification"));
}

#[test]
fn the_largest_sizes_are_accepted_and_no_larger_ones() {
    let config = || parse(&qwen3()).unwrap();
    let check = |config: ModelConfig| config.validate("x").map_err(|error| error.to_string());
    let of_heads = |query: usize, kv: usize, dim: usize| {
        let mut config = config();
        for attention in config.attentions_mut() {
            attention.heads = Heads { query, kv, dim };
            attention.rotary_dim = attention.rotary_dim.min(dim);
        }
        config
    };
    for (largest, larger, words) in [
        (
            ModelConfig { width: 1 << 18, ..config() },
            ModelConfig { width: (1 << 18) + 1, ..config() },
            "hidden size",
        ),
        (
            ModelConfig { vocabulary: 1 << 24, ..config() },
            ModelConfig { vocabulary: (1 << 24) + 1, ..config() },
            "vocabulary",
        ),
        (
            ModelConfig { max_positions: 1 << 31, ..config() },
            ModelConfig { max_positions: (1 << 31) + 1, ..config() },
            "maximum positions",
        ),
        (of_heads(4096, 4096, 32), of_heads(8192, 4096, 32), "number of attention heads"),
        (of_heads(4, 2, 1 << 14), of_heads(4, 2, (1 << 14) + 2), "head dimension"),
        (
            ModelConfig { bos: Some(99), ..config() },
            ModelConfig { bos: Some(100), ..config() },
            "token id 100",
        ),
        (
            ModelConfig { stops: vec![99], ..config() },
            ModelConfig { stops: vec![1, 100], ..config() },
            "token id 100",
        ),
        (config(), ModelConfig { layers: Vec::new(), ..config() }, "number of layers"),
    ] {
        assert_eq!(check(largest), Ok(()), "{words}");
        assert!(check(larger).unwrap_err().contains(words), "{words}");
    }
    for bad in [0.0, -1.0, f64::INFINITY, f64::NAN] {
        let divisor = ModelConfig { logits: LogitRule { divisor: bad, ..LogitRule::default() }, ..config() };
        assert!(check(divisor).unwrap_err().contains("the divisor of logits"), "{bad}");
        let softcap =
            ModelConfig { logits: LogitRule { softcap: Some(bad), ..LogitRule::default() }, ..config() };
        assert!(check(softcap).unwrap_err().contains("the softcap of logits"), "{bad}");
        let mut scaled = config();
        scaled.layers[1].residual_scale = bad;
        assert!(check(scaled).unwrap_err().contains("the residual stream"), "{bad}");
        let rule = |change: &dyn Fn(&mut ScoreRule)| {
            let mut config = config();
            config.attentions_mut().for_each(|attention| change(&mut attention.rule));
            check(config).unwrap_err()
        };
        assert!(rule(&|rule| rule.scale = bad).contains("the scale of attention scores"), "{bad}");
        assert!(rule(&|rule| rule.softcap = Some(bad)).contains("the softcap of attention scores"), "{bad}");
        assert!(rule(&|rule| rule.window = Some(0)).contains("the window of attention"));
    }
}
