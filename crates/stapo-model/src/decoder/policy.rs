//! A model's parameters on a device.

use super::layout::{Layout, SlotKind};
use crate::config::{ModelConfig, TensorSpec};
use crate::error::{Error, Result};
use crate::generate::room::Room;
use crate::weights::Weights;
use stapo_ops::rng::RngKey;
use stapo_ops::{Buffer, Device, Float, OutOfMemory, Shape, View, ViewMut, Weight};
use std::sync::Mutex;

/// The parameters of one model, and all that reading them needs. Generating and scoring take `&Policy`, the optimizer
/// `&mut Policy`: nobody reads half-updated weights. `T` is `f64` in gradient checks only.
pub struct Policy<T: Float = f32> {
    pub(crate) device: Device,
    config: ModelConfig,
    pub(crate) layout: Layout,
    parameters: Vec<Parameter<T>>,
    n_updates: u64,
    /// Memory of the last engine that generated from it, for the next.
    pub(crate) room: Mutex<Option<Room>>,
}

#[derive(Debug)]
enum Parameter<T: Float> {
    Matrix(Weight<T>),
    Vector(Buffer<T>),
}

impl Policy<f32> {
    /// Reads every weight of `config`; the files were checked against it when they were opened.
    pub fn load(device: &Device, config: &ModelConfig, weights: &Weights) -> Result<Self> {
        let mut policy = Self::zeros(device, config).map_err(Error::OutOfMemory)?;
        let mut host = Vec::new();
        for index in 0..policy.layout.slots.len() {
            host.clear();
            host.resize(policy.layout.slots[index].n_elements(), 0.0);
            let mut start = 0;
            for part in &policy.layout.slots[index].parts {
                let end = start + part.n_elements();
                weights.read_f32(&part.name, &part.shape, &mut host[start..end])?;
                start = end;
            }
            policy.update_slot(index, |mut values| values.write(&host));
        }
        Ok(policy)
    }
}

impl<T: Float> Policy<T> {
    pub fn zeros(device: &Device, config: &ModelConfig) -> std::result::Result<Self, OutOfMemory> {
        let layout = Layout::new(config);
        let parameters = layout
            .slots
            .iter()
            .map(|slot| match slot.kind {
                SlotKind::Matrix => {
                    let shape = Shape { outputs: slot.rows, inputs: slot.columns };
                    Ok(Parameter::Matrix(Weight::zeros(device, shape)?))
                }
                SlotKind::Vector => Ok(Parameter::Vector(device.weight_zeros(slot.n_elements())?)),
            })
            .collect::<std::result::Result<_, OutOfMemory>>()?;
        let (device, config) = (device.clone(), config.clone());
        Ok(Self { device, config, layout, parameters, n_updates: 0, room: Mutex::default() })
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

    /// Lets `write` set every tensor, one after another, in the Hugging Face layout. It is given zeros.
    pub fn fill(&mut self, mut write: impl FnMut(&TensorSpec, &mut [T])) {
        for index in 0..self.layout.slots.len() {
            let mut host = vec![T::ZERO; self.layout.slots[index].n_elements()];
            let mut rest = host.as_mut_slice();
            for part in &self.layout.slots[index].parts {
                let (values, after) = rest.split_at_mut(part.n_elements());
                write(part, values);
                rest = after;
            }
            self.update_slot(index, |mut values| values.write(&host));
        }
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
        self.layout.tensors().map(|(spec, slot, range)| (spec, self.slot(slot).range(range)))
    }

    pub(crate) fn matrix(&self, slot: usize) -> &Weight<T> {
        match &self.parameters[slot] {
            Parameter::Matrix(weight) => weight,
            Parameter::Vector(_) => panic!("slot {slot} is a vector"),
        }
    }

    pub(crate) fn slot(&self, slot: usize) -> View<'_, T> {
        match &self.parameters[slot] {
            Parameter::Matrix(weight) => weight.view(),
            Parameter::Vector(buffer) => buffer.view(),
        }
    }

    pub(crate) fn update_slot<R>(&mut self, slot: usize, change: impl FnOnce(ViewMut<'_, T>) -> R) -> R {
        match &mut self.parameters[slot] {
            Parameter::Matrix(weight) => weight.update(&self.device, change),
            Parameter::Vector(buffer) => change(buffer.view_mut()),
        }
    }
}
