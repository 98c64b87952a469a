//! Llama 2 and 3 and the models of the same shape.

use super::{AttentionBiases, FamilyRow, Gate, NormPlacement, QkNorm, set_biases, write_biases};

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "llama",
    architecture: "LlamaForCausalLM",
    gguf: "llama",
    gguf_pairs_rows: true,
    norms: NormPlacement::Before,
    qk_norm: QkNorm::Absent,
    biases: AttentionBiases::Absent,
    has_sinks: false,
    gate: Gate::Silu,
    joins_projections: false,
    norms_less_one: false,
    theta: 10_000.0,
    max_positions: 2048,
    window: None,
    norm_eps: 1e-6,
    tied_embeddings: false,
    head_dim: None,
    n_kv_heads: None,
    sizes: None,
    activation_key: "hidden_act",
    describe: set_biases,
    write: write_biases,
};
