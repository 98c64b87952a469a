//! `OLMo` 2: norms on the results of attention and feed-forward, and a norm of all query heads and all key heads together.

use super::{FamilyRow, NormPlacement, QkNorm, llama, write_biases, write_no_padding};

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "olmo2",
    architecture: "Olmo2ForCausalLM",
    gguf: "olmo2",
    gguf_pairs_rows: false,
    norms: NormPlacement::After,
    qk_norm: QkNorm::PerProjection,
    norm_eps: 1e-5,
    write: |config, keys| {
        write_biases(config, keys);
        write_no_padding(keys);
    },
    ..llama::ROW
};
