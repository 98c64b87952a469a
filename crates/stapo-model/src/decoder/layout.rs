//! Which parameters a model has, and in which slot each lies.

use crate::config::{ModelConfig, TensorSpec};
use std::ops::Range;

/// One slot per array an op takes: q, k and v are stacked into one matrix, and so are gate and up.
#[derive(Debug, Clone)]
pub struct Layout {
    pub slots: Vec<Slot>,
    pub embedding: usize,
    pub layers: Vec<LayerSlots>,
    pub final_norm: usize,
    /// The embedding's own slot when tied.
    pub head: usize,
}

#[derive(Debug, Clone)]
pub struct Slot {
    /// The tensors in it by their Hugging Face names, one below the other.
    pub parts: Vec<TensorSpec>,
    /// `[rows, columns]`; a vector has one column.
    pub rows: usize,
    pub columns: usize,
    pub kind: SlotKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotKind {
    /// Multiplies; weight decay pulls on it.
    Matrix,
    /// Norm weights and biases: no weight decay.
    Vector,
}

/// Slots of one layer.
#[derive(Debug, Clone, Copy)]
pub struct LayerSlots {
    pub attention_norm: usize,
    pub qkv: usize,
    pub qkv_bias: Option<usize>,
    pub q_norm: Option<usize>,
    pub k_norm: Option<usize>,
    pub output: usize,
    pub ffn_norm: usize,
    pub gate_up: usize,
    pub down: usize,
}

impl LayerSlots {
    pub fn matrices(&self) -> [usize; 4] {
        [self.qkv, self.output, self.gate_up, self.down]
    }
}

impl Layout {
    pub fn new(config: &ModelConfig) -> Self {
        let mut builder = Builder { specs: config.tensors(), slots: Vec::new() };
        let embedding = builder.add(&["model.embed_tokens.weight"]);
        let layers = (0..config.n_layers).map(|layer| builder.layer(layer, config)).collect();
        let final_norm = builder.add(&["model.norm.weight"]);
        let head = if config.tied_embeddings { embedding } else { builder.add(&["lm_head.weight"]) };
        debug_assert!(builder.specs.is_empty(), "every tensor has a slot: {:?}", builder.specs);
        Self { slots: builder.slots, embedding, layers, final_norm, head }
    }

    pub fn is_tied(&self) -> bool {
        self.head == self.embedding
    }

    /// Every tensor with its slot and its range of elements there, in the order of the slots.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, usize, Range<usize>)> {
        self.slots.iter().enumerate().flat_map(|(index, slot)| {
            let mut end = 0;
            slot.parts.iter().map(move |spec| {
                let start = end;
                end += spec.n_elements();
                (spec, index, start..end)
            })
        })
    }
}

impl Slot {
    pub fn n_elements(&self) -> usize {
        self.rows * self.columns
    }
}

struct Builder {
    specs: Vec<TensorSpec>,
    slots: Vec<Slot>,
}

impl Builder {
    /// Moves the named tensors into one new slot.
    fn add(&mut self, names: &[&str]) -> usize {
        let parts: Vec<TensorSpec> = names
            .iter()
            .map(|name| {
                let place = self.specs.iter().position(|spec| spec.name == *name);
                self.specs.remove(place.unwrap_or_else(|| panic!("layout: config lists no tensor {name}")))
            })
            .collect();
        let rows = parts.iter().map(|part| part.shape[0]).sum();
        let (columns, kind) = match parts[0].shape.get(1) {
            Some(&columns) => (columns, SlotKind::Matrix),
            None => (1, SlotKind::Vector),
        };
        self.slots.push(Slot { parts, rows, columns, kind });
        self.slots.len() - 1
    }

    fn layer(&mut self, layer: usize, config: &ModelConfig) -> LayerSlots {
        let mut add = |names: &[&str]| {
            let names: Vec<String> =
                names.iter().map(|name| format!("model.layers.{layer}.{name}")).collect();
            self.add(&names.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let (q, k, v) = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj");
        LayerSlots {
            attention_norm: add(&["input_layernorm.weight"]),
            qkv: add(&[q, k, v].map(|name| format!("{name}.weight")).each_ref().map(String::as_str)),
            qkv_bias: config
                .qkv_bias
                .then(|| add(&[q, k, v].map(|name| format!("{name}.bias")).each_ref().map(String::as_str))),
            q_norm: config.qk_norm.then(|| add(&["self_attn.q_norm.weight"])),
            k_norm: config.qk_norm.then(|| add(&["self_attn.k_norm.weight"])),
            output: add(&["self_attn.o_proj.weight"]),
            ffn_norm: add(&["post_attention_layernorm.weight"]),
            gate_up: add(&["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
            down: add(&["mlp.down_proj.weight"]),
        }
    }
}
