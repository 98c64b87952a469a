//! Seconds of each kind of work, from its operations and bytes and the machine's rates. The terms are those of
//! `docs/performance.md`.

use super::machine::{Machine, Processor, at_length};
use crate::plan::config::States;
use stapo_model::config::{AttentionSpec, LayerSets, NormPlacement};
use stapo_model::decoder::{QuantisedBase, Recompute};
use stapo_model::generate::EngineSettings;
use stapo_model::{LayerSpec, ModelConfig};

/// Tokens of a training or scoring pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tokens {
    /// All tokens, prompts included.
    pub all: f64,
    /// Tokens whose log-prob is computed: the responses.
    pub scored: f64,
    /// Length of the sequences.
    pub length: f64,
}

/// The sequences of one decode step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeRows {
    pub n_sequences: f64,
    /// Keys that belong to one sequence each, and keys of prompts that several sequences read together.
    pub own_keys: f64,
    pub shared_keys: f64,
}

/// The costs of one model on one machine, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Costs<'a> {
    pub model: &'a ModelConfig,
    /// Numbers in the adapters that are trained instead of the model's weights.
    pub n_adapter: Option<u64>,
    /// The layers that stay quantised below adapters.
    pub quantised: Option<QuantisedBase>,
    pub machine: &'a Machine,
}

/// Bytes that move per entry of a row of logits in a training pass: written, read for log-prob and entropy, computed
/// again, turned into gradients and read by two products.
const LOGIT_BYTES: f64 = 22.0;
/// The same for a scoring pass, which has no gradients.
const SCORED_LOGIT_BYTES: f64 = 8.0;
/// Bytes per weight of an optimizer step with f32 states (gradient norm, AdamW) and with 8-bit states.
const OPTIMIZER_BYTES: f64 = 32.0;
const OPTIMIZER_8BIT_BYTES: f64 = 14.0;
/// Operations of attention's backward relative to its forward: five products instead of two.
const BACKWARD_ATTENTION: f64 = 2.5;
/// Chains of the down product on a GPU; each is written and read as f32.
const SPLIT_K: f64 = 4.0;

/// Linear layers of a layer, each unpacked by a separate kernel.
const UNPACKED_PER_LAYER: f64 = 4.0;
/// Seconds for which unpacking a linear layer leaves a GPU idle: the product after it cannot start early.
const UNPACKING_START: f64 = 1e-6;
/// The share of a GPU's bandwidth that unpacking reaches, of blocks read and bf16 written.
const UNPACKING_SHARE: f64 = 0.7;

impl Costs<'_> {
    fn n_layers(&self) -> f64 {
        self.model.layers.len() as f64
    }

    /// The sum of a number of each layer.
    fn sum_layers(&self, number: impl Fn(&LayerSpec) -> usize) -> f64 {
        self.model.layers.iter().map(number).sum::<usize>() as f64
    }

    /// Weights of all layers' matrices.
    fn layer_weights(&self) -> f64 {
        self.sum_layers(|layer| layer.n_matrix_weights(self.model.width))
    }

    /// Weights of all layers' down products.
    fn down_weights(&self) -> f64 {
        self.sum_layers(|layer| self.model.width * layer.ffn_width())
    }

    fn adapter_weights(&self) -> f64 {
        self.n_adapter.unwrap_or(0) as f64
    }

    /// Numbers that training changes.
    pub fn n_trained(&self) -> u64 {
        self.n_adapter.unwrap_or_else(|| self.model.n_parameters())
    }

    fn head_weights(&self) -> f64 {
        (self.model.vocabulary * self.model.width) as f64
    }

    /// Bytes of an activation or a weight as products read it.
    pub fn compute_bytes(&self) -> f64 {
        match self.machine.processor {
            Processor::Gpu => 2.0,
            Processor::Cpu => 4.0,
        }
    }

    /// Bytes of one key and its value in all layers.
    pub fn key_bytes(&self) -> f64 {
        self.model.kv_numbers_per_token() as f64 * self.compute_bytes()
    }

    /// Bytes of one key and its value in the layers of one set, whose blocks lie together.
    pub fn set_key_bytes(&self) -> f64 {
        let layers = LayerSets::new(self.model).cache_layers;
        let numbers = layers.iter().map(|index| self.model.layers[*index].kv_numbers_per_token());
        numbers.sum::<usize>() as f64 * self.compute_bytes()
    }

    /// Matrix products of a forward and a backward pass: 6 operations per weight and token, and the head's 8 because its
    /// logits are computed twice; 2 fewer where the weight is frozen. An adapter has 7: its first factor's product, half
    /// of its numbers, is computed twice. Where layers are recomputed, all products of a layer but the down product run
    /// again.
    pub fn training_products(&self, tokens: Tokens, recompute: Recompute) -> f64 {
        let again = match recompute {
            Recompute::Nothing | Recompute::Inputs => 0.0,
            Recompute::Layers => self.layer_weights() - self.down_weights(),
        };
        let (layers, head) = if self.n_adapter.is_some() { (4.0, 6.0) } else { (6.0, 8.0) };
        let per_token = layers * self.layer_weights() + 7.0 * self.adapter_weights() + 2.0 * again;
        let operations = per_token * tokens.all + head * self.head_weights() * tokens.scored;
        operations / (self.machine.products.per_second * self.machine.shares.training)
    }

    /// Causal attention, forward: each token sees half of its sequence, in layers with a window less.
    pub fn attention_forward(&self, tokens: Tokens) -> f64 {
        self.attention_operations(tokens) / at_length(&self.machine.attention_forward, tokens.length)
    }

    /// Causal attention, backward.
    pub fn attention_backward(&self, tokens: Tokens) -> f64 {
        let operations = BACKWARD_ATTENTION * self.attention_operations(tokens);
        operations / at_length(&self.machine.attention_backward, tokens.length)
    }

    fn attention_operations(&self, tokens: Tokens) -> f64 {
        // The mean number of keys that a token sees, relative to half of its sequence.
        let share = |window: Option<usize>| match window.map(|window| window as f64) {
            Some(window) if window < tokens.length => {
                (window - window * window / (2.0 * tokens.length)) / (tokens.length / 2.0)
            }
            _ => 1.0,
        };
        let seen =
            |attention: &AttentionSpec| attention.heads.out_width() as f64 * share(attention.rule.window);
        let query_widths: f64 = self.model.attentions().map(seen).sum();
        // DeltaNet reads its state, changes it and reads it again, a multiplication and an addition for each number.
        let states = self.sum_layers(|layer| layer.delta_net().map_or(0, |spec| spec.heads.state_len()));
        4.0 * tokens.all * (tokens.length / 2.0) * query_widths + 6.0 * tokens.all * states
    }

    /// Norms, rope, swiglu and residual additions of a forward pass.
    pub fn elementwise_forward(&self, n_tokens: f64) -> f64 {
        let chains = match self.machine.processor {
            Processor::Gpu => 2.0 * SPLIT_K * 4.0 * self.model.width as f64 * self.n_layers(),
            Processor::Cpu => 0.0,
        };
        self.elementwise((self.forward_numbers() * self.compute_bytes() + chains) * n_tokens)
    }

    /// Numbers that norms, rope and swiglu of all layers read and write for a token.
    fn forward_numbers(&self) -> f64 {
        self.sum_layers(|layer| {
            let norms = if layer.norms == NormPlacement::Both { 4 } else { 0 };
            (8 + norms) * self.model.width + 2 * layer.mixer_widths().0 + 3 * layer.ffn_width()
        })
    }

    /// The same of a backward pass, with what it recomputes.
    pub fn elementwise_backward(&self, n_tokens: f64, recompute: Recompute) -> f64 {
        let backward = self.sum_layers(|layer| {
            let norms = if layer.norms == NormPlacement::Both { 4 } else { 0 };
            (8 + norms) * self.model.width + 3 * layer.mixer_widths().0 + 5 * layer.ffn_width()
        });
        let again = match recompute {
            Recompute::Nothing => 0.0,
            Recompute::Inputs | Recompute::Layers => self.forward_numbers(),
        };
        self.elementwise((backward + again) * self.compute_bytes() * n_tokens)
    }

    fn elementwise(&self, bytes: f64) -> f64 {
        bytes / (self.machine.bandwidth.per_second * self.machine.shares.elementwise)
    }

    /// Rows of logits and their gradient in memory, products aside.
    pub fn training_logits(&self, n_scored: f64) -> f64 {
        LOGIT_BYTES * self.model.vocabulary as f64 * n_scored / self.machine.bandwidth.per_second
    }

    /// Unpacking all quantised layers once, for products that then read them as they read others.
    fn unpacking(&self) -> f64 {
        let Some(QuantisedBase { n_weights, n_bytes, .. }) = self.quantised else { return 0.0 };
        let bytes = n_bytes as f64 + self.compute_bytes() * n_weights as f64;
        bytes / (self.machine.bandwidth.per_second * UNPACKING_SHARE)
            + UNPACKED_PER_LAYER * self.n_layers() * UNPACKING_START
    }

    /// One optimizer step: gradient norm, clip and AdamW.
    pub fn optimizer_step(&self, states: States) -> f64 {
        let bytes = match states {
            States::F32 => OPTIMIZER_BYTES,
            States::EightBit => OPTIMIZER_8BIT_BYTES,
        };
        let bandwidth = self.machine.bandwidth.per_second * self.machine.shares.optimizer;
        bytes * self.n_trained() as f64 / bandwidth
    }

    /// Forward and backward of tokens in `n_passes` micro-batches.
    pub fn training(&self, tokens: Tokens, n_passes: f64, recompute: Recompute) -> f64 {
        let forwards = if recompute == Recompute::Layers { 2.0 } else { 1.0 };
        self.training_products(tokens, recompute)
            + forwards * self.attention_forward(tokens)
            + self.attention_backward(tokens)
            + self.elementwise_forward(tokens.all)
            + self.elementwise_backward(tokens.all, recompute)
            + self.training_logits(tokens.scored)
            + (1.0 + forwards) * n_passes * self.unpacking()
            + (2.0 + forwards) * n_passes * self.n_layers() * self.machine.fixed.layer
    }

    /// Log-probs and entropies of given tokens in `n_passes` micro-batches: a forward pass.
    pub fn scoring(&self, tokens: Tokens, n_passes: f64) -> f64 {
        let per_token = self.layer_weights() + self.adapter_weights();
        let operations = 2.0 * (per_token * tokens.all + self.head_weights() * tokens.scored);
        let logits = SCORED_LOGIT_BYTES * self.model.vocabulary as f64 * tokens.scored;
        operations / (self.machine.products.per_second * self.machine.shares.training)
            + self.attention_forward(tokens)
            + self.elementwise_forward(tokens.all)
            + logits / self.machine.bandwidth.per_second
            + n_passes * self.unpacking()
            + n_passes * self.n_layers() * self.machine.fixed.layer
    }

    /// The prompts' pass through the layers, whose last rows alone reach the head.
    pub fn prefill(&self, tokens: Tokens) -> f64 {
        let per_token = self.layer_weights() + self.adapter_weights();
        let operations = 2.0 * (per_token * tokens.all + self.head_weights() * tokens.scored);
        let n_passes = (tokens.all / EngineSettings::default().max_rows as f64).ceil();
        operations / (self.machine.products.per_second * self.machine.shares.prefill)
            + self.attention_forward(tokens)
            + n_passes * self.unpacking()
    }

    /// One token for each sequence. Products take the longer of reading all weights and multiplying; a GPU hides the
    /// host's scheduling behind its work.
    pub fn decode_step(&self, rows: DecodeRows) -> f64 {
        let rates = &self.machine.shares;
        let bandwidth = self.machine.bandwidth.per_second;
        let n_weights = self.layer_weights() + self.adapter_weights() + self.head_weights();
        let reading = n_weights * self.compute_bytes() / bandwidth;
        let multiplying =
            2.0 * n_weights * rows.n_sequences / (self.machine.products.per_second * rates.decode);
        let keys = self.key_bytes() / bandwidth
            * (rows.own_keys / rates.own_keys + rows.shared_keys / rates.shared_keys);
        // A row of logits is written and read once in f32.
        let logits = 8.0 * self.model.vocabulary as f64 * rows.n_sequences / bandwidth;
        let layers = self.n_layers() * self.machine.fixed.layer;
        let device = reading.max(multiplying) + keys + logits + layers + self.unpacking();
        let host = rows.n_sequences * self.machine.fixed.sampled_token;
        match self.machine.processor {
            Processor::Gpu => device.max(host),
            Processor::Cpu => device + self.elementwise_forward(rows.n_sequences) + host,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_model::Heads;

    /// Asserts that a prediction is within a share of a figure of docs/performance.md or docs/performance-cpu.md.
    fn near(what: &str, predicted: f64, measured: f64, share: f64) {
        let error = predicted / measured - 1.0;
        assert!(
            error.abs() <= share,
            "{what}: predicted {predicted:.5}, measured {measured:.5}, {error:+.3}"
        );
    }

    fn with_costs<T>(model: &str, machine: &str, test: impl Fn(Costs) -> T) -> T {
        let machine = Machine::by_name(machine).unwrap();
        test(Costs {
            model: &ModelConfig::known(model).unwrap(),
            n_adapter: None,
            quantised: None,
            machine: &machine,
        })
    }

    fn packed(n_sequences: f64, length: f64) -> Tokens {
        Tokens { all: n_sequences * length, scored: n_sequences * length, length }
    }

    #[test]
    fn floors_of_ops_are_those_counted_in_the_table_of_hot_ops() {
        with_costs("qwen3-1.7b", "h200", |costs| {
            // 8192 tokens of one layer: the four products 0.825 TFLOP, attention 0.069 TFLOP.
            let per_layer = 2.0 * costs.layer_weights() / 28.0 * 8192.0;
            near("products", per_layer, 0.825e12, 0.01);
            near("attention", costs.attention_operations(packed(4.0, 2048.0)) / 28.0, 0.069e12, 0.01);
            near("head", 2.0 * costs.head_weights() * 8192.0, 5.10e12, 0.01);
            assert_eq!(costs.key_bytes(), 114_688.0);
            near("AdamW with the norm", costs.optimizer_step(States::F32) * 4.26e12 * 0.93, 55e9, 0.01);
        });
    }

    #[test]
    fn training_steps_are_predicted_within_eight_percent() {
        let step = |model, states, tokens: Tokens, n_passes, recompute| {
            with_costs(model, "h200", |costs| {
                costs.training(tokens, n_passes, recompute) + costs.optimizer_step(states)
            })
        };
        let short = packed(8.0, 2048.0);
        let long = packed(2.0, 16384.0);
        let f32 = States::F32;
        let eight = States::EightBit;
        let rows = [
            ("1.7B", step("qwen3-1.7b", f32, short, 2.0, Recompute::Nothing), 16384.0 / 48_429.0),
            ("inputs", step("qwen3-1.7b", f32, short, 2.0, Recompute::Inputs), 16384.0 / 45_966.0),
            ("layers", step("qwen3-1.7b", f32, short, 2.0, Recompute::Layers), 16384.0 / 39_165.0),
            ("16k", step("qwen3-1.7b", f32, long, 1.0, Recompute::Nothing), 32768.0 / 32_389.0),
            ("16k layers", step("qwen3-1.7b", f32, long, 1.0, Recompute::Layers), 32768.0 / 26_355.0),
            ("8B", step("qwen3-8b", eight, short, 2.0, Recompute::Nothing), 16384.0 / 12_500.0),
            (
                "8B layers",
                step("qwen3-8b", eight, packed(4.0, 2048.0), 4.0, Recompute::Layers),
                8192.0 / 9_219.0,
            ),
        ];
        for (what, predicted, measured) in rows {
            near(what, predicted, measured, 0.08);
        }
    }

    #[test]
    fn decode_steps_are_predicted_within_three_percent() {
        let rows = [
            ("2 of 260", 2.0, 2.0 * 260.0, 0.0, 1_237.0),
            ("4 of 15,054", 4.0, 4.0 * 15_054.0, 0.0, 1_214.0),
            ("16 of 15,054", 16.0, 16.0 * 15_054.0, 0.0, 1_912.0),
            ("40 of 15,054", 40.0, 40.0 * 15_054.0, 0.0, 2_207.0),
            ("128 of 4,054", 128.0, 128.0 * 4_054.0, 0.0, 7_844.0),
            ("64 of 8 prompts of 8,192", 64.0, 64.0 * 54.0, 8.0 * 8_192.0, 13_613.0),
            ("64 of 8 prompts", 64.0, 64.0 * 64.0, 8.0 * 128.0, 35_937.0),
            ("512 of 64 prompts", 512.0, 512.0 * 64.0, 64.0 * 128.0, 93_162.0),
            ("512 with a prompt each", 512.0, 512.0 * 192.0, 0.0, 72_627.0),
        ];
        for (what, n_sequences, own_keys, shared_keys, tokens_per_second) in rows {
            let rows = DecodeRows { n_sequences, own_keys, shared_keys };
            let predicted = with_costs("qwen3-1.7b", "h200", |costs| costs.decode_step(rows));
            near(what, predicted, n_sequences / tokens_per_second, 0.03);
        }
    }

    #[test]
    fn prompts_are_predicted_from_the_rates_with_and_without_them() {
        // 65,536 tokens of 512 sequences, of which decoding alone takes the second rate.
        for (n_prompts, with, alone) in [(64.0, 87_903.0, 93_162.0), (512.0, 51_576.0, 72_627.0)] {
            let measured = 65_536.0 / with - 65_536.0 / alone;
            let tokens = Tokens { all: 128.0 * n_prompts, scored: n_prompts, length: 128.0 };
            near("prefill", with_costs("qwen3-1.7b", "h200", |costs| costs.prefill(tokens)), measured, 0.10);
        }
    }

    /// The 4.8M model of docs/performance-cpu.md.
    fn small() -> ModelConfig {
        let known = ModelConfig::known("qwen3-0.6b").unwrap();
        let heads = Heads { query: 8, kv: 4, dim: 32 };
        let layer = known.family.layer(heads, known.attentions().next().unwrap().rope.clone(), 768);
        ModelConfig { width: 256, layers: vec![layer; 6], vocabulary: 256, ..known }
    }

    #[test]
    fn the_cpu_is_predicted_within_fifteen_percent() {
        let model = small();
        let costs = Costs {
            model: &model,
            n_adapter: None,
            quantised: None,
            machine: &Machine::by_name("cpu").unwrap(),
        };
        let step =
            costs.training(packed(64.0, 96.0), 1.0, Recompute::Nothing) + costs.optimizer_step(States::F32);
        near("training 4.8M", step, 6144.0 / 7_063.0, 0.15);
        // 32 prompts of 16 tokens are shared by 8 samples each; 40 new tokens on average.
        let rows = DecodeRows { n_sequences: 256.0, own_keys: 256.0 * 40.0, shared_keys: 32.0 * 16.0 };
        near("generation 4.8M", costs.decode_step(rows), 256.0 / 14_546.0, 0.15);
    }

    #[test]
    fn unpacking_a_quantised_base_takes_what_was_measured() {
        // Qwen3-1.7B in Q4_K with half of the values and down products in Q6_K, bench_gpu decode --lora=32 --blocks=4.
        let quantised = Some(QuantisedBase {
            n_weights: 1_409_286_144,
            n_bytes: 845_709_312,
            ..QuantisedBase::default()
        });
        let step = |quantised, n_sequences| {
            let rows =
                DecodeRows { n_sequences, own_keys: 68.0 * n_sequences, shared_keys: 128.0 * n_sequences };
            with_costs("qwen3-1.7b", "h200", |costs| Costs { quantised, ..costs }.decode_step(rows))
        };
        for (n_sequences, plain, unpacked) in [(64.0, 27_789.0, 17_516.0), (512.0, 85_684.0, 69_685.0)] {
            let more = step(quantised, n_sequences) - step(None, n_sequences);
            near("unpacking", more, n_sequences / unpacked - n_sequences / plain, 0.15);
        }
    }
}
