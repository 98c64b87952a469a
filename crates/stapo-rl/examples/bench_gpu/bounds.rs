//! What hardware needs at least for a task: operations of training and prefill, bytes of a decode step; and the memory that a
//! plan would expect.

use super::{Options, lora};
use stapo_model::decoder::{ArenaLayout, BatchRows, Purpose, Recompute};
use stapo_model::{DeltaNetSpec, LayerSpec, ModelConfig, gpu_logit_rows};

/// bf16 products of 8192^3 on random data, measured on an H200, a second.
pub const PEAK: f64 = 790e12;

/// The weights that every token is multiplied with in the layers.
fn layer_weights(config: &ModelConfig) -> f64 {
    let n_tables = if config.tied_embeddings { 1.0 } else { 2.0 };
    config.n_parameters() as f64 - n_tables * head_weights(config)
}

fn head_weights(config: &ModelConfig) -> f64 {
    (config.vocabulary * config.width) as f64
}

/// Operations of attention's two products over `len` tokens, of all layers. A layer with a window reads the keys of its window.
fn attention_flops(config: &ModelConfig, len: usize) -> f64 {
    let pairs = |window: Option<usize>| {
        let window = window.unwrap_or(len).min(len);
        window * (window + 1) / 2 + (len - window) * window
    };
    config.attentions().map(|spec| 4.0 * (pairs(spec.rule.window) * spec.heads.out_width()) as f64).sum()
}

/// Operations of layers and attention over `n` prompts of `len` tokens, and of the head for their last tokens.
pub fn prefill_flops(config: &ModelConfig, n: usize, len: usize) -> f64 {
    let head = 2.0 * head_weights(config);
    n as f64 * (2.0 * len as f64 * layer_weights(config) + attention_flops(config, len) + head)
}

/// Operations of a training step over `n` sequences of `len` tokens, without what is computed again: 6 for each weight and token,
/// and attention's, whose backward has five products for two of forward.
pub fn train_flops(config: &ModelConfig, n: usize, len: usize) -> f64 {
    let weights = layer_weights(config) + head_weights(config);
    n as f64 * (6.0 * len as f64 * weights + 3.5 * attention_flops(config, len))
}

/// Bytes that a decode step of `n` sequences with `context` keys each reads and writes: weights, keys and values, and states.
pub fn decode_bytes(config: &ModelConfig, n: usize, context: f64) -> f64 {
    let weights = 2.0 * (layer_weights(config) + head_weights(config));
    let keys = |window: Option<usize>| window.map_or(context, |window| context.min(window as f64));
    let of_layer = |spec: &LayerSpec| match (spec.attention(), spec.delta_net()) {
        (Some(spec), _) => 4.0 * keys(spec.rule.window) * (spec.heads.kv * spec.heads.dim) as f64,
        (None, Some(spec)) => delta_net_bytes(spec),
        (None, None) => 0.0,
    };
    weights + n as f64 * config.layers.iter().map(of_layer).sum::<f64>()
}

/// Bytes of a decode step in a layer of DeltaNet: the state and on average half of a chunk's rows of keys and corrected values
/// are read, and one such row is written; of the convolution's rows three are read and one is written.
fn delta_net_bytes(DeltaNetSpec { heads, kernel }: DeltaNetSpec) -> f64 {
    let (key, value) = (heads.key * heads.key_dim, heads.value * heads.value_dim);
    let kept = heads.value * (heads.key_dim + heads.value_dim);
    let numbers = heads.value * heads.key_dim * heads.value_dim + 33 * kept + kernel * (2 * key + value);
    2.0 * numbers as f64
}

/// The expected memory: weights, gradients, optimizer states, activations, logits and libraries.
pub fn planned_gib(config: &ModelConfig, options: &Options, rows: BatchRows, recompute: Recompute) -> f64 {
    let lora = lora(options);
    let n = lora.as_ref().map_or(config.n_parameters(), |lora| lora.n_parameters(config)) as usize;
    let padded = |lora: &stapo_model::decoder::LoraSpec| {
        2 * (config.n_parameters() + lora.n_padded(config) + lora.n_joined(config)) as usize
    };
    let frozen = lora.as_ref().map_or(0, padded);
    let is_looked_up = config.tied_embeddings && lora.is_none();
    let vocabulary = config.vocabulary * config.width;
    let lookup = if is_looked_up { vocabulary } else { 0 };
    let apart = if lora.is_some() { 0 } else { vocabulary };
    let trained = if options.get("8bit", 0) == 0 { 14 * n } else { 4 * n + n / 32 };
    let adapters = lora.as_ref().map(|lora| lora.hidden_layout(config, true));
    let purpose = Purpose::Training(recompute);
    let arena = ArenaLayout::new(config, rows, purpose, adapters.as_ref()).bytes(2);
    let logits = 4 * rows.scored.min(gpu_logit_rows(config.vocabulary)) * config.vocabulary;
    (frozen + trained + 4 * (n + lookup + apart) + arena + logits + (700 << 20)) as f64 / f64::from(1 << 30)
}
