//! Policies whose frozen layers stay quantised.

use super::Failure;
use stapo_model::decoder::{Policy, PolicySpec, QuantisedBase};
use stapo_model::{Device, Encoding, Pretrained};

#[path = "../../../stapo-model/tests/gguf_file.rs"]
mod gguf_file;

/// A policy whose layers are random and stay quantised, and the bytes that this saves.
pub fn policy(device: &Device, spec: PolicySpec<'_>, n_bits: usize) -> Result<(Policy, u64), Failure> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("random.gguf");
    let finer = |name: &str| name.contains("v_proj") || name.contains("down_proj");
    // llama.cpp's mix Q4_K_M has these modules in Q6_K in half of the layers.
    let is_even =
        |name: &str| name.split('.').nth(2).is_some_and(|layer| layer.ends_with(['0', '2', '4', '6', '8']));
    gguf_file::write_random(&path, spec.config, 0.02, |name| match n_bits {
        _ if !name.contains("layers") => Encoding::Bf16,
        4 if finer(name) && is_even(name) => Encoding::Q6_K,
        4 => Encoding::Q4_K,
        _ => Encoding::Q8_0,
    })?;
    let pretrained = Pretrained::open(&path)?;
    let lora = spec.lora.ok_or("--blocks: expected --lora too")?;
    let base = QuantisedBase::stored(spec.config, lora, &pretrained.weights)?;
    Ok((Policy::load_quantised(device, spec, &pretrained.weights)?, base.saved_bytes()))
}
