//! The memory an engine works in: caches, activations, the buffers of a step, and recorded CUDA graphs.

use super::SamplingRule;
use super::scheduler::states_within;
use super::step::{Spare, StepBuffers, StepShape};
use crate::config::{LayerSets, LayerSpec, ModelConfig};
use crate::decoder::workspace::Workspace;
use crate::decoder::{ArenaLayout, Policy, PolicyId, Purpose};
use stapo_ops::attention::paged::{Cache, CacheDims};
use stapo_ops::deltanet::States;
use stapo_ops::{Device, OutOfMemory, Recording, sampling};
use std::collections::BTreeMap;

/// The memory of an engine. Its owner keeps it from one engine to the next: fresh memory is slow to touch, and recorded
/// CUDA graphs stay valid only as long as every buffer in them stays at its address.
#[derive(Default)]
pub struct EngineMemory {
    /// The device that keys, values, activations and logits are asked of; by default the policy's.
    lender: Option<Device>,
    allocated: Option<Allocated>,
}

impl EngineMemory {
    /// Memory that an engine will allocate when it is made.
    pub fn new() -> Self {
        Self::default()
    }

    /// As [`EngineMemory::new`], with keys, values, activations and logits in the memory of `memory`.
    pub fn new_in(memory: Device) -> Self {
        Self { lender: Some(memory), allocated: None }
    }

    /// The memory for `policy`, allocated again unless it was allocated for the same policy and of the same size.
    pub(super) fn fit(
        &mut self,
        policy: &Policy,
        size: MemorySize,
        rule: SamplingRule,
    ) -> Result<&mut Allocated, OutOfMemory> {
        // The old memory is given back first: old and new need not fit at the same time.
        let kept = self.allocated.take().filter(|kept| kept.policy == policy.id() && kept.size == size);
        let memory = self.lender.as_ref().unwrap_or(policy.device());
        let allocated = self.allocated.insert(match kept {
            Some(kept) => kept,
            None => Allocated::new(policy, memory, size, rule)?,
        });
        if allocated.rule != rule {
            allocated.recordings.clear();
            allocated.rule = rule;
        }
        Ok(allocated)
    }
}

/// How much memory an engine needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySize {
    /// Blocks of each cache, and positions in a block.
    pub n_blocks: usize,
    pub block_tokens: usize,
    /// States that each layer that keeps states has room for.
    pub n_states: usize,
    pub max_rows: usize,
    pub max_drawn: usize,
    pub n_alternatives: usize,
    pub n_kept: usize,
}

impl MemorySize {
    pub fn spare(self) -> Spare {
        Spare { block: self.n_blocks - 1, state: self.n_states.saturating_sub(1) }
    }
}

/// Caches hold what earlier engines left there; a sequence attends only to the keys and values that it stored itself.
pub struct Allocated {
    policy: PolicyId,
    pub size: MemorySize,
    pub layer_sets: LayerSets,
    /// As many as a set of layers has, see [`LayerSets`].
    pub caches: Vec<Cache<f32>>,
    /// One for each layer that keeps states of sequences.
    pub states: Vec<Option<States<f32>>>,
    pub workspace: Workspace<f32>,
    pub buffers: StepBuffers,
    pub logits: sampling::Logits<f32>,
    /// Decode steps by their shape, on a device that records: `None` for a shape that ran once.
    pub recordings: BTreeMap<StepShape, Option<Recording>>,
    /// The sampling rule of the recorded steps.
    rule: SamplingRule,
}

impl Allocated {
    fn new(
        policy: &Policy,
        memory: &Device,
        size: MemorySize,
        rule: SamplingRule,
    ) -> Result<Self, OutOfMemory> {
        let device = policy.device();
        let config = policy.config();
        let MemorySize { n_blocks, block_tokens, n_states, max_rows, max_drawn, n_alternatives, n_kept } =
            size;
        let mut workspace = Workspace::new(device, memory, config)?;
        let rows = (max_rows, max_drawn);
        let layout = ArenaLayout::new(config, rows, Purpose::Inference, policy.hidden_layout());
        workspace.reserve(device, &layout, 0)?;
        let layer_sets = LayerSets::new(config);
        let cache =
            |index: &usize| Cache::zeros(memory, cache_dims(&config.layers[*index], n_blocks, block_tokens));
        let caches = layer_sets.cache_layers.iter().map(cache).collect::<Result<_, _>>()?;
        let states = |layer: &LayerSpec| {
            let spec = layer.delta_net();
            spec.map(|spec| States::zeros(memory, spec.heads, spec.kernel, n_states)).transpose()
        };
        Ok(Self {
            policy: policy.id(),
            size,
            layer_sets,
            caches,
            states: config.layers.iter().map(states).collect::<Result<_, _>>()?,
            workspace,
            buffers: StepBuffers::new(device, config, rows, (n_alternatives, n_kept))?,
            logits: sampling::Logits::new(memory, config.vocabulary, max_drawn)?,
            recordings: BTreeMap::new(),
            rule,
        })
    }
}

/// The keys and values of one layer with attention.
fn cache_dims(layer: &LayerSpec, n_blocks: usize, block_tokens: usize) -> CacheDims {
    let heads = layer.attention().expect("a layer with a cache has attention").heads;
    CacheDims { blocks: n_blocks, block_size: block_tokens, kv_heads: heads.kv, head_dim: heads.dim }
}

/// Blocks, and states where layers keep them, that fit into `kv_bytes`.
pub fn divide_memory(
    device: &Device,
    config: &ModelConfig,
    kv_bytes: usize,
    max_sequences: usize,
) -> (usize, Option<usize>) {
    let state_bytes = config.state_bytes(device.compute_bytes()) as usize;
    let n_states = states_within(kv_bytes as u64, state_bytes as u64, max_sequences);
    let left = kv_bytes.saturating_sub(n_states.unwrap_or(0) * state_bytes);
    (left / block_bytes(device, config), n_states)
}

/// Bytes of one block, in all caches of a set of layers.
fn block_bytes(device: &Device, config: &ModelConfig) -> usize {
    let block_tokens = CacheDims::best_block_size(device);
    let sets = LayerSets::new(config);
    let caches = sets.cache_layers.iter().map(|index| cache_dims(&config.layers[*index], 1, block_tokens));
    caches.map(|dims| dims.keys_len() + dims.values_len()).sum::<usize>() * device.compute_bytes()
}
