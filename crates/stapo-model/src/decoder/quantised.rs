//! Models with adapters whose frozen layers stay on a GPU in the blocks of their file.

use super::lora::LoraSpec;
use super::parameter::Parameter;
use super::policy::{Policy, PolicySpec, read_tensor};
use super::weights::{DecoderWeights, ParameterKind, ParameterSpec};
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::weights::Weights;
use stapo_ops::quantised::{Encoding, ModuleRows, Unpacking, n_bytes};
use stapo_ops::{Device, Shape, Weight};

/// What the quantised layers of a model take of a GPU's memory, as a Hopper GPU lays it out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuantisedBase {
    /// Weights that stay quantised.
    pub n_weights: u64,
    /// Bytes of their blocks.
    pub n_bytes: u64,
    /// Numbers that adapters would take besides these weights, were they not quantised.
    pub n_joined: u64,
    /// Numbers of the largest of them as products read it, with what adapters add.
    pub n_unpacked: u64,
}

impl QuantisedBase {
    /// Of the layers that `weights` holds quantised. Refuses files in which no layer is.
    pub fn stored(config: &ModelConfig, lora: &LoraSpec, weights: &Weights) -> Result<Self> {
        let base = Self::counted(config, lora, |name| weights.encoding(name));
        if base.n_weights == 0 {
            let hint = "model.lora.base = \"quantised\" is for GGUF files with layers in Q8_0, Q4_K and the like; leave it out";
            return Err(Error::unsupported(weights.location(), "no layer of the model is quantised", hint));
        }
        if base.n_unpacked > u64::from(u32::MAX) {
            let problem = format!("a layer of {} numbers cannot be unpacked", base.n_unpacked);
            return Err(Error::unsupported(
                weights.location(),
                problem,
                "expected fewer than 2^32; leave model.lora.base out",
            ));
        }
        Ok(base)
    }

    /// Of a model whose files are not here, with all layers in `Q4_K`, or in `Q8_0` where a row is no multiple of 256.
    pub fn assumed(config: &ModelConfig, lora: &LoraSpec) -> Self {
        let tensors = config.tensors();
        let inputs = |name: &str| tensors.iter().find(|spec| spec.name == name)?.shape.last().copied();
        Self::counted(config, lora, |name| {
            let encodings = [Encoding::Q4_K, Encoding::Q8_0];
            let inputs = inputs(name)?;
            encodings.into_iter().find(|encoding| inputs.is_multiple_of(encoding.block().0))
        })
    }

    fn counted(config: &ModelConfig, lora: &LoraSpec, encoding: impl Fn(&str) -> Option<Encoding>) -> Self {
        let mut sum = Self::default();
        for spec in DecoderWeights::specs(config, Some(lora)).all() {
            let Some((shape, modules)) = stored_blocks(spec, &encoding) else { continue };
            let n_joined = Weight::<f32>::n_joined(shape, spec.n_joined) as u64;
            sum.n_weights += shape.len() as u64;
            sum.n_bytes += n_bytes(shape.inputs, &modules) as u64;
            sum.n_joined += n_joined;
            sum.n_unpacked = sum.n_unpacked.max(shape.len() as u64 + n_joined);
        }
        sum
    }

    /// Bytes of a GPU's memory that are saved against the same layers in bf16.
    pub fn saved_bytes(&self) -> u64 {
        (2 * (self.n_weights + self.n_joined)).saturating_sub(self.n_bytes + 2 * self.n_unpacked)
    }
}

/// The shape of a layer's matrix and how its modules are kept, given the `encoding` of each tensor in the file; `None` for
/// another parameter, or where no module of it is quantised.
fn stored_blocks(
    spec: &ParameterSpec,
    encoding: &impl Fn(&str) -> Option<Encoding>,
) -> Option<(Shape, Vec<ModuleRows>)> {
    let ParameterKind::Matrix(shape) = spec.kind else { return None };
    // The embedding and the head stay in bf16: rows of the embedding are looked up, and the head is read whole at every step.
    let is_of_layer = !spec.is_trained() && spec.parts[0].name.starts_with("model.layers.");
    let modules = spec.parts.iter().map(|part| ModuleRows {
        n_rows: part.shape[0],
        encoding: encoding(&part.name).filter(|stored| stored.is_quantised()).unwrap_or(Encoding::Bf16),
    });
    let modules: Vec<_> = modules.collect();
    let is_quantised = modules.iter().any(|module| module.encoding.is_quantised());
    (is_of_layer && is_quantised).then_some((shape, modules))
}

impl Policy<f32> {
    /// As [`Policy::load`] of a model with adapters, with its quantised layers as they are stored: what the policy computes
    /// has the same bits. Refuses the CPU, files in which no layer is quantised, and a policy without adapters.
    pub fn load_quantised(device: &Device, spec: PolicySpec<'_>, weights: &Weights) -> Result<Self> {
        let refuse = |problem: &str, hint: &str| Err(Error::unsupported("a quantised base", problem, hint));
        if !device.is_async() {
            return refuse(
                "the CPU computes in f32",
                "leave model.lora.base out, or choose device = \"cuda\"",
            );
        }
        if device.compute_bytes() != 2 {
            return refuse("weights are unpacked to bf16, and this device computes in f32", "choose bf16");
        }
        let Some(lora) = spec.lora else {
            return refuse("only models with adapters have frozen layers", "add [model.lora]");
        };
        let base = QuantisedBase::stored(spec.config, lora, weights)?;
        let specs = DecoderWeights::specs(spec.config, spec.lora);
        let encoding = |name: &str| weights.encoding(name);
        let unpacking = Unpacking::new(device, base.n_unpacked as usize).map_err(Error::OutOfMemory)?;
        let parameters = specs.try_map(&mut |spec| match stored_blocks(spec, &encoding) {
            Some((_, modules)) => Parameter::quantised_zeros(device, spec, modules, &unpacking),
            None => Parameter::zeros(device, spec),
        });
        let mut policy = Self::of_parameters(device, spec, parameters.map_err(Error::OutOfMemory)?);
        for parameter in policy.base_mut() {
            if parameter.is_quantised() {
                for (idx, part) in parameter.spec.parts.clone().iter().enumerate() {
                    let blocks = weights.read_blocks(&part.name, &part.shape)?;
                    parameter.matrix_mut().write_blocks(idx, &blocks);
                }
            } else {
                parameter.try_fill(device, |spec, values| read_tensor(weights, spec, values))?;
            }
        }
        Ok(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::lora::{LoraScale, LoraTarget};

    #[test]
    fn memory_that_is_saved_is_the_difference_to_bf16() {
        let base = QuantisedBase { n_weights: 1000, n_bytes: 500, n_joined: 20, n_unpacked: 300 };
        assert_eq!(base.saved_bytes(), 2 * 1020 - 500 - 600);
        let small = QuantisedBase { n_unpacked: 2000, ..base };
        assert_eq!(small.saved_bytes(), 0);
    }

    /// Layers of Qwen3 0.6B: 28 of 15,728,640 weights, in blocks of 256 that take 144 bytes.
    #[test]
    fn a_model_without_files_is_counted_in_q4_k() {
        let config = ModelConfig::known("qwen3-0.6b").unwrap();
        let targets = LoraTarget::ALL.to_vec();
        let lora = LoraSpec { rank: 8, alpha: 16.0, scale: LoraScale::default(), targets };
        let base = QuantisedBase::assumed(&config, &lora);
        assert_eq!((base.n_weights, base.n_bytes), (28 * 15_728_640, 28 * 15_728_640 / 256 * 144));
        // Gate and up together are the largest matrix: 6144 rows of 1024, and 64 rows and columns more for adapters.
        assert_eq!((base.n_unpacked, base.n_joined), ((6144 + 64) * (1024 + 64), 28 * 1_318_912));
    }
}
