//! A model's parameters on a device.

use super::weights::{DecoderWeights, Parameter};
use crate::config::{ModelConfig, TensorSpec};
use crate::error::{Error, Result};
use crate::weights::Weights;
use stapo_ops::rng::RngKey;
use stapo_ops::{Device, Float, OutOfMemory, View, ViewMut, noise, reduce};
use std::sync::atomic::{AtomicU64, Ordering};

/// The parameters of one model. Generating and scoring take `&Policy`, the optimizer `&mut Policy`: half-updated
/// weights cannot be read. `T` is `f64` in gradient checks only.
pub struct Policy<T: Float = f32> {
    id: PolicyId,
    device: Device,
    config: ModelConfig,
    pub(crate) weights: DecoderWeights<Parameter<T>>,
    n_updates: u64,
}

/// Tells the policies of a process apart: a recorded CUDA graph holds the addresses of one policy's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyId(u64);

impl PolicyId {
    fn next() -> Self {
        static N_POLICIES: AtomicU64 = AtomicU64::new(0);
        Self(N_POLICIES.fetch_add(1, Ordering::Relaxed))
    }
}

impl Policy<f32> {
    /// Reads every weight of `config`; the files were checked against it when they were opened.
    pub fn load(device: &Device, config: &ModelConfig, weights: &Weights) -> Result<Self> {
        let mut policy = Self::zeros(device, config).map_err(Error::OutOfMemory)?;
        policy.try_fill(|spec, values| weights.read_f32(&spec.name, &spec.shape, values))?;
        Ok(policy)
    }
}

impl<T: Float> Policy<T> {
    pub fn zeros(device: &Device, config: &ModelConfig) -> std::result::Result<Self, OutOfMemory> {
        let specs = DecoderWeights::specs(config);
        Ok(Self {
            id: PolicyId::next(),
            device: device.clone(),
            config: config.clone(),
            weights: specs.try_map(&mut |spec| Parameter::zeros(device, spec))?,
            n_updates: 0,
        })
    }

    /// Normal weights of standard deviation `deviation` (divided by sqrt(2 layers) where a matrix writes to the residual
    /// stream), norms one, biases zero. A tensor depends on `seed` and its name only.
    pub fn random(
        device: &Device,
        config: &ModelConfig,
        seed: u64,
        deviation: f64,
    ) -> std::result::Result<Self, OutOfMemory> {
        let mut policy = Self::zeros(device, config)?;
        let residual_deviation = deviation / (2.0 * config.n_layers as f64).sqrt();
        policy.fill(|spec, values| {
            let key = spec.name.bytes().fold(RngKey::new(seed), |key, byte| key.derive(byte.into()));
            let writes_residual =
                spec.name.ends_with("o_proj.weight") || spec.name.ends_with("down_proj.weight");
            let deviation = if writes_residual { residual_deviation } else { deviation };
            for (idx, value) in values.iter_mut().enumerate() {
                *value = match spec.shape.len() {
                    2 => T::from_f64(key.normal(idx as u64) * deviation),
                    _ if spec.name.ends_with("bias") => T::from_f64(0.0),
                    _ => T::from_f64(1.0),
                };
            }
        });
        Ok(policy)
    }

    /// Random weights that are drawn where they lie, for models of any size: matrices of standard deviation `deviation`,
    /// norms one, biases zero. A parameter depends on `seed` and the name of its first tensor only.
    pub fn noise(
        device: &Device,
        config: &ModelConfig,
        seed: u64,
        deviation: f64,
    ) -> std::result::Result<Self, OutOfMemory> {
        let mut policy = Self::zeros(device, config)?;
        for parameter in policy.weights.all_mut() {
            let name = parameter.spec.parts[0].name.clone();
            let key = name.bytes().fold(RngKey::new(seed), |key, byte| key.derive(byte.into()));
            let is_matrix = parameter.spec.is_matrix();
            parameter.update(device, |mut values| {
                if is_matrix {
                    noise::fill(device, key.bits(), deviation, values);
                } else if !name.ends_with("bias") {
                    let ones = vec![T::from_f64(1.0); values.len()];
                    values.write(&ones);
                }
            });
        }
        Ok(policy)
    }

    /// Lets `write` set every tensor, one after another, in the Hugging Face layout; `write` is given zeros.
    pub fn fill(&mut self, mut write: impl FnMut(&TensorSpec, &mut [T])) {
        let Ok(()) = self.try_fill(|spec, values| {
            write(spec, values);
            Ok::<_, std::convert::Infallible>(())
        });
    }

    fn try_fill<E>(
        &mut self,
        mut write: impl FnMut(&TensorSpec, &mut [T]) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        for parameter in self.weights.all_mut() {
            let mut host = vec![T::ZERO; parameter.spec.n_elements()];
            for (spec, range) in parameter.spec.tensors() {
                write(spec, &mut host[range])?;
            }
            parameter.update(&self.device, |mut values| values.write(&host));
        }
        Ok(())
    }

    /// Lets `write` overwrite every tensor where it lies, one after another.
    pub fn try_write<E>(
        &mut self,
        mut write: impl FnMut(&TensorSpec, ViewMut<'_, T>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        for parameter in self.weights.all_mut() {
            let tensors: Vec<_> =
                parameter.spec.tensors().map(|(spec, range)| (spec.clone(), range)).collect();
            parameter.update(&self.device, |mut values| {
                tensors
                    .iter()
                    .try_for_each(|(spec, range)| write(spec, values.reborrow().into_range(range.clone())))
            })?;
        }
        Ok(())
    }

    /// A hash of all weights, by which a change is found; 0 and -0 are the same weight.
    pub fn fingerprint(&self) -> u64 {
        reduce::fingerprint(&self.device, self.weights.all().into_iter().map(Parameter::view))
    }

    /// The tensor and the place in it of the first weight that is not a finite number.
    pub fn first_non_finite(&self) -> Option<(&TensorSpec, usize)> {
        self.tensors()
            .find_map(|(spec, values)| Some((spec, reduce::first_non_finite(&self.device, values)?)))
    }

    pub fn id(&self) -> PolicyId {
        self.id
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Optimizer steps since the parameters were made or loaded.
    pub fn n_updates(&self) -> u64 {
        self.n_updates
    }

    pub(crate) fn count_update(&mut self) {
        self.n_updates += 1;
    }

    /// Every tensor under its Hugging Face name.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, View<'_, T>)> {
        self.weights.all().into_iter().flat_map(|parameter| {
            parameter.spec.tensors().map(|(spec, range)| (spec, parameter.view().range(range)))
        })
    }
}
