//! The memory that a run needs, by part.

use crate::config::{Plan, States};
use crate::error::{Error, Result};
use stapo_model::decoder::{ArenaLayout, Purpose};
use stapo_model::{Device, DeviceName, ModelConfig, TensorSpec};

/// A part of a run's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPart {
    pub name: &'static str,
    pub bytes: u64,
}

/// The parts of a run's memory at its peak, on the plan's device. `frozen` are the models beside the one in training, by
/// their roles.
pub fn parts(plan: &Plan, model: &ModelConfig, frozen: &[(&'static str, ModelConfig)]) -> Vec<MemoryPart> {
    let n = model.n_parameters();
    let is_8bit = plan.config.update.states == States::EightBit;
    let device = plan.device();
    let rows = stapo_model::generate::EngineSettings::default().max_rows;
    let tokens = plan.config.update.microbatch_tokens;
    let arena = |n_tokens, purpose| {
        ArenaLayout::new(model, n_tokens, n_tokens, purpose).bytes(device.compute_bytes()) as u64
    };
    let embedding = (model.vocabulary * model.width) as u64;
    // A tied embedding has two gradients, of the lookup and of the head, until the end of a mini-batch adds these.
    let n_gradients = if model.tied_embeddings { n + embedding } else { n };
    let mut parts = vec![
        MemoryPart { name: "weights", bytes: if is_8bit { 2 * n } else { policy_bytes(device, model) } },
        MemoryPart { name: "gradients", bytes: 4 * n_gradients },
        MemoryPart { name: "optimizer", bytes: if is_8bit { 2 * n + n / 32 } else { 8 * n } },
        MemoryPart {
            name: "activations",
            bytes: arena(tokens, Purpose::Training(plan.config.update.recompute)),
        },
        MemoryPart {
            name: "keys, values",
            bytes: ((plan.config.rollout.kv_mib as u64) << 20) + arena(rows, Purpose::Inference),
        },
    ];
    let frozen = frozen.iter();
    parts.extend(frozen.map(|(name, model)| MemoryPart { name, bytes: policy_bytes(device, model) }));
    if device != DeviceName::Cpu {
        // Training holds rows of logits and of their gradient, 6 bytes per entry; sampling holds rows of logits in f32.
        let logits = ((tokens.min(GPU_LOGIT_ROWS) * 6 + rows * 4) * model.vocabulary) as u64;
        parts.push(MemoryPart { name: "logits", bytes: logits });
        parts.push(MemoryPart { name: "libraries", bytes: GPU_LIBRARY_BYTES });
    }
    parts
}

/// The most rows of logits that training holds at once on a GPU.
const GPU_LOGIT_ROWS: usize = 2048;
/// Context, kernels and workspace, as measured on an H200.
const GPU_LIBRARY_BYTES: u64 = 700 << 20;

/// Refuses a run that does not fit the device's free memory. Host memory is not checked, because the system may swap.
pub fn check(plan: &Plan, model: &ModelConfig, device: &Device) -> Result<()> {
    let Some((free, _)) = device.memory() else { return Ok(()) };
    let needed: u64 = parts(plan, model, &[]).iter().map(|part| part.bytes).sum();
    if needed <= free as u64 {
        return Ok(());
    }
    Err(Error::DoesNotFit { device: device.name(), needed_mib: needed >> 20, free_mib: free as u64 >> 20 })
}

/// Bytes of the weights. The CPU holds matrices a second time in the panel order that its kernels read; a GPU holds all
/// weights a second time in f32 for the optimizer.
fn policy_bytes(device: DeviceName, model: &ModelConfig) -> u64 {
    if device != DeviceName::Cpu {
        return 6 * model.n_parameters();
    }
    let matrices: usize =
        model.tensors().iter().filter(|spec| spec.shape.len() == 2).map(TensorSpec::n_elements).sum();
    4 * (model.n_parameters() + matrices as u64)
}
