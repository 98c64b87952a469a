//! Families that are not built, by the part that each lacks here.

/// A part, and the families that have it: `model_type` in `config.json`, `general.architecture` in GGUF.
#[rustfmt::skip]
const MISSING_PARTS: [(&str, &[&str]); 10] = [
    ("mixtures of experts", &[
        "dbrx", "ernie4_5_moe", "glm4_moe", "granitemoe", "llama4", "llama4_text", "minimax", "mixtral", "olmoe", "phimoe", "qwen2_moe",
        "qwen2moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen35moe", "qwen3_moe", "qwen3moe", "qwen3_next", "qwen3next",
    ]),
    ("latent attention and mixtures of experts", &["deepseek2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2"]),
    ("embeddings per layer and shared keys and values", &["gemma3n", "gemma3n_text", "gemma4", "gemma4_text"]),
    ("state-space layers", &[
        "bamba", "falcon-h1", "falcon_h1", "falcon_mamba", "granitehybrid", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba2",
    ]),
    ("layers of convolutions", &["lfm2"]),
    ("norms that subtract the mean", &[
        "cohere", "cohere2", "command-r", "falcon", "gpt2", "gpt_neox", "nemotron", "olmo", "phi", "stablelm", "starcoder2",
    ]),
    ("feed-forwards without a gate", &["apertus", "arcee"]),
    ("rotary positions of neighbouring dimensions", &["ernie4_5", "glm", "glm4"]),
    ("norms of heads behind the rotary positions", &["hunyuan_v1_dense"]),
    ("vision inputs of this family", &["llava", "mistral3", "mllama", "phi4_multimodal", "phi4mm", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"]),
];
/// Families of which every part is built, but which no row of the table of families describes.
const WITHOUT_A_ROW: [&str; 6] = ["exaone4", "gemma", "internlm3", "minicpm", "ministral", "seed_oss"];

/// What a message says of a family that is not built: the part that it lacks here, where that is known.
pub(crate) fn refusal(family: &str) -> String {
    match MISSING_PARTS.iter().find(|(_, families)| families.contains(&family)) {
        Some((part, _)) => format!("{family:?} is not supported: {part} are not built"),
        None if WITHOUT_A_ROW.contains(&family) => {
            format!(
                "{family:?} is not supported: its parts are built, but its config.json has not been described"
            )
        }
        None => format!("{family:?} is not supported"),
    }
}
