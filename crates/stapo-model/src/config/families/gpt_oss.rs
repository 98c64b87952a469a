//! gpt-oss: Llama with learned sinks, biases on all attention projections and windows in every other layer. Its feed-forward, a
//! mixture of experts, is not built: only a description without experts is read, which tests of its attention use.

use super::{AttentionBiases, FamilyRow, ObjectReader, llama, set_windows, sliding_layers, write_windows};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use serde_json::json;

/// 0 stands for a dense feed-forward, the absent key for 128 experts.
const EXPERTS: &str = "num_local_experts";

pub(super) const ROW: FamilyRow = FamilyRow {
    name: "gpt_oss",
    architecture: "GptOssForCausalLM",
    gguf: "gpt-oss",
    gguf_pairs_rows: false,
    biases: AttentionBiases::All,
    has_sinks: true,
    theta: 150_000.0,
    max_positions: 131_072,
    window: Some(128),
    norm_eps: 1e-5,
    head_dim: Some(64),
    n_kv_heads: Some(8),
    describe,
    write: |config, keys| {
        keys.insert("attention_bias".into(), json!(true));
        keys.insert(EXPERTS.into(), json!(0));
        write_windows(config, keys);
    },
    ..llama::ROW
};

fn describe(keys: &ObjectReader<'_>, config: &mut ModelConfig) -> Result<()> {
    if keys.get(EXPERTS).is_none() {
        let problem = "gpt_oss is not supported: mixtures of experts are not built";
        return Err(Error::unsupported(keys.path(EXPERTS), problem, "use a dense model"));
    }
    if keys.flag("attention_bias")? == Some(false) {
        let hint = "expected true, the value of all published models";
        return Err(Error::unsupported(keys.path("attention_bias"), "false is not supported", hint));
    }
    let sliding = sliding_layers(keys, config.layers.len(), |index| index.is_multiple_of(2))?;
    set_windows(keys, config, &sliding)
}
