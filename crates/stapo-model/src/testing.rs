//! The tiny model of this crate's tests. Tests in `tests/` include this file as a module of their own, so its names come
//! from the module above.

use super::{Family, ModelConfig, Rope, RopeKind};

/// A model of two layers whose sizes are multiples of nothing that a kernel would like.
pub fn tiny_config(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        width: 12,
        n_layers: 2,
        n_heads: 3,
        n_kv_heads: 1,
        head_dim: 6,
        ffn_width: 11,
        vocabulary: 17,
        norm_eps: 1e-5,
        rope: Rope { theta: 100.0, kind: RopeKind::Default },
        max_positions: 64,
        qk_norm: family == Family::Qwen3,
        qkv_bias: family == Family::Qwen2,
        tied_embeddings: family != Family::Llama,
        bos: None,
        stops: vec![],
    }
}
