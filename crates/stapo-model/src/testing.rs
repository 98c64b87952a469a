//! The tiny model of this crate's tests. Tests in `tests/` include this file as a module of their own, so its names come
//! from the module above.

use super::{Family, Heads, LayerSpec, ModelConfig, Rope, RopeScaling};

/// A model of two layers whose sizes are multiples of nothing that a kernel would like.
pub fn tiny_config(family: Family) -> ModelConfig {
    ModelConfig {
        family,
        width: 12,
        layers: tiny_layers(family, Heads { query: 3, kv: 1, dim: 6 }, 11, 2),
        vocabulary: 17,
        norm_eps: 1e-5,
        max_positions: 64,
        tied_embeddings: family != Family::Llama,
        bos: None,
        stops: vec![],
    }
}

/// Layers of these sizes, for variants of the tiny model.
pub fn tiny_layers(family: Family, heads: Heads, ffn_width: usize, n_layers: usize) -> Vec<LayerSpec> {
    let rope = Rope { theta: 100.0, scaling: RopeScaling::None };
    vec![family.layer(heads, rope, ffn_width); n_layers]
}
