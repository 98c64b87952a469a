//! The shapes of published models by name, so that a run can be planned, or random weights drawn, without a file.

use super::{Family, Heads, ModelConfig, Rope, RopeScaling};

/// A published model, as its `config.json` has it.
struct KnownModel {
    name: &'static str,
    family: Family,
    width: usize,
    n_layers: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    ffn_width: usize,
    vocabulary: usize,
    tied_embeddings: bool,
}

#[rustfmt::skip]
const KNOWN_MODELS: [KnownModel; 10] = [
    KnownModel { name: "qwen3-0.6b", family: Family::Qwen3, width: 1024, n_layers: 28, n_heads: 16, n_kv_heads: 8, head_dim: 128, ffn_width: 3072, vocabulary: 151_936, tied_embeddings: true },
    KnownModel { name: "qwen3-1.7b", family: Family::Qwen3, width: 2048, n_layers: 28, n_heads: 16, n_kv_heads: 8, head_dim: 128, ffn_width: 6144, vocabulary: 151_936, tied_embeddings: true },
    KnownModel { name: "qwen3-4b", family: Family::Qwen3, width: 2560, n_layers: 36, n_heads: 32, n_kv_heads: 8, head_dim: 128, ffn_width: 9728, vocabulary: 151_936, tied_embeddings: true },
    KnownModel { name: "qwen3-8b", family: Family::Qwen3, width: 4096, n_layers: 36, n_heads: 32, n_kv_heads: 8, head_dim: 128, ffn_width: 12_288, vocabulary: 151_936, tied_embeddings: false },
    KnownModel { name: "qwen3-14b", family: Family::Qwen3, width: 5120, n_layers: 40, n_heads: 40, n_kv_heads: 8, head_dim: 128, ffn_width: 17_408, vocabulary: 151_936, tied_embeddings: false },
    KnownModel { name: "qwen3-32b", family: Family::Qwen3, width: 5120, n_layers: 64, n_heads: 64, n_kv_heads: 8, head_dim: 128, ffn_width: 25_600, vocabulary: 151_936, tied_embeddings: false },
    KnownModel { name: "qwen2.5-0.5b", family: Family::Qwen2, width: 896, n_layers: 24, n_heads: 14, n_kv_heads: 2, head_dim: 64, ffn_width: 4864, vocabulary: 151_936, tied_embeddings: true },
    KnownModel { name: "qwen2.5-1.5b", family: Family::Qwen2, width: 1536, n_layers: 28, n_heads: 12, n_kv_heads: 2, head_dim: 128, ffn_width: 8960, vocabulary: 151_936, tied_embeddings: true },
    KnownModel { name: "qwen2.5-3b", family: Family::Qwen2, width: 2048, n_layers: 36, n_heads: 16, n_kv_heads: 2, head_dim: 128, ffn_width: 11_008, vocabulary: 151_936, tied_embeddings: true },
    KnownModel { name: "qwen2.5-7b", family: Family::Qwen2, width: 3584, n_layers: 28, n_heads: 28, n_kv_heads: 4, head_dim: 128, ffn_width: 18_944, vocabulary: 152_064, tied_embeddings: false },
];

/// Published models of families whose layers differ, by the keys of their `config.json`.
#[rustfmt::skip]
const KNOWN_CONFIGS: [(&str, &str); 10] = [
    ("gemma-3-270m", r#"{"model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048, "vocab_size": 262144, "sliding_window": 512, "max_position_embeddings": 32768}"#),
    ("gemma-3-4b", r#"{"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "vocab_size": 262208, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}"#),
    ("gemma-2-9b", r#"{"model_type": "gemma2", "hidden_size": 3584, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "intermediate_size": 14336, "vocab_size": 256000, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096, "max_position_embeddings": 8192}"#),
    ("granite-3.3-8b", r#"{"model_type": "granite", "hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12800, "vocab_size": 49159, "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "rope_theta": 10000000.0, "max_position_embeddings": 131072, "embedding_multiplier": 12.0, "attention_multiplier": 0.0078125, "residual_multiplier": 0.22, "logits_scaling": 16.0}"#),
    ("olmo-2-1124-7b", r#"{"model_type": "olmo2", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100352, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "max_position_embeddings": 4096}"#),
    ("phi-4-mini", r#"{"model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 200064, "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], "long_factor": [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]}}"#),
    ("qwen3.5-9b", r#"{"model_type": "qwen3_5_text", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 12288, "vocab_size": 248320}"#),
    ("smollm3-3b", r#"{"model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 11008, "vocab_size": 128256, "rope_theta": 5000000.0, "max_position_embeddings": 65536}"#),
    ("olmo-3-7b", r#"{"model_type": "olmo3", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 100278, "rms_norm_eps": 1e-6, "sliding_window": 4096, "max_position_embeddings": 65536, "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "attention_factor": 1.2079441541679836}}"#),
    ("mistral-7b", r#"{"model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": null, "max_position_embeddings": 32768}"#),
];

/// Endings of names on the hub that say how a model was trained and leave its shape as it is.
const TRAINING_SUFFIXES: [&str; 3] = ["-base", "-instruct", "-it"];

impl ModelConfig {
    /// The names that [`ModelConfig::known`] takes.
    pub fn known_names() -> impl Iterator<Item = &'static str> {
        KNOWN_MODELS.iter().map(|model| model.name).chain(KNOWN_CONFIGS.map(|(name, _)| name))
    }

    /// The shape of a published model by its name in any case: `qwen3-1.7b`, `Qwen3-1.7B-Base` and
    /// `Qwen/Qwen3-1.7B-Base` are the same. Positions reach as far as the base models'. A shape has no special tokens.
    pub fn known(name: &str) -> Option<Self> {
        let lower = name.trim_end_matches('/').to_ascii_lowercase();
        let last = lower.rsplit('/').next().unwrap_or_default();
        let plain = TRAINING_SUFFIXES.iter().find_map(|suffix| last.strip_suffix(suffix)).unwrap_or(last);
        let config = KNOWN_CONFIGS.iter().find(|(name, _)| *name == plain);
        let read = |(name, text): &(&str, &str)| {
            Self::from_hugging_face(name, &serde_json::from_str(text).ok()?).ok()
        };
        let shape = KNOWN_MODELS.iter().find(|model| model.name == plain).map(KnownModel::config);
        shape.or_else(|| config.and_then(read))
    }
}

impl KnownModel {
    fn config(&self) -> ModelConfig {
        let heads = Heads { query: self.n_heads, kv: self.n_kv_heads, dim: self.head_dim };
        let rope = Rope { theta: 1e6, scaling: RopeScaling::None };
        ModelConfig {
            width: self.width,
            layers: vec![self.family.layer(heads, rope, self.ffn_width); self.n_layers],
            vocabulary: self.vocabulary,
            max_positions: 32_768,
            tied_embeddings: self.tied_embeddings,
            ..ModelConfig::empty(self.family)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameters as the model cards count them; tied embeddings once.
    const PARAMETERS: [(&str, u64); 20] = [
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-14b", 14_768_307_200),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen2.5-1.5b", 1_543_714_304),
        ("qwen2.5-3b", 3_085_938_688),
        ("qwen2.5-7b", 7_615_616_512),
        ("gemma-3-270m", 268_098_176),
        ("gemma-3-4b", 3_880_263_168),
        ("gemma-2-9b", 9_241_705_984),
        ("granite-3.3-8b", 8_170_864_640),
        ("olmo-2-1124-7b", 7_298_617_344),
        ("phi-4-mini", 3_836_021_760),
        ("qwen3.5-9b", 8_953_803_264),
        ("smollm3-3b", 3_075_098_624),
        ("olmo-3-7b", 7_298_011_136),
        ("mistral-7b", 7_248_023_552),
    ];

    #[test]
    fn known_shapes_have_the_published_numbers_of_parameters() {
        assert_eq!(ModelConfig::known_names().count(), PARAMETERS.len());
        for (name, n_parameters) in PARAMETERS {
            let config = ModelConfig::known(name).unwrap();
            config.validate(name).unwrap();
            assert_eq!(config.n_parameters(), n_parameters, "{name}");
        }
    }

    #[test]
    fn every_fourth_layer_of_smollm3_has_no_rope() {
        let config = ModelConfig::known("smollm3-3b").unwrap();
        let has_rope: Vec<bool> = config.attentions().map(|attention| attention.rotary_dim > 0).collect();
        assert_eq!(has_rope, [true, true, true, false].repeat(9));
    }

    #[test]
    fn a_hub_name_of_any_training_is_its_shape() {
        let shape = ModelConfig::known("qwen3-1.7b");
        assert!(shape.is_some());
        for name in ["Qwen3-1.7B", "Qwen/Qwen3-1.7B-Base", "models/Qwen3-1.7B-Base/"] {
            assert_eq!(ModelConfig::known(name), shape, "{name}");
        }
        for (name, shape) in [
            ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
            ("google/gemma-2-9b-it", "gemma-2-9b"),
            ("microsoft/Phi-4-mini-instruct", "phi-4-mini"),
        ] {
            assert_eq!(ModelConfig::known(name), ModelConfig::known(shape), "{name}");
            assert!(ModelConfig::known(shape).is_some());
        }
        for name in ["", "qwen3", "qwen3-1.7b-base-instruct", "qwen4-1.7b", "-base"] {
            assert_eq!(ModelConfig::known(name), None, "{name}");
        }
    }
}
