//! A decoder's parameters on a device.

use super::lora::LoraSpec;
use super::weights::{DecoderWeights, ParameterKind, ParameterSpec, Role};
use crate::config::{ModelConfig, TensorSpec};
use stapo_ops::quantised::{ModuleRows, Unpacking};
use stapo_ops::{Buffer, Device, Float, OutOfMemory, Shape, View, ViewMut, Weight, WeightRows};
use std::ops::Range;

impl LoraSpec {
    /// Numbers that adapters take besides frozen weights, on a device that joins them.
    pub fn n_joined(&self, config: &ModelConfig) -> u64 {
        let frozen = DecoderWeights::specs(config, Some(self));
        let columns = |spec: &ParameterSpec| match spec.kind {
            ParameterKind::Matrix(shape) => Weight::<f32>::n_joined(shape, spec.n_joined) as u64,
            ParameterKind::Vector { .. } => 0,
        };
        frozen.all().into_iter().map(columns).sum()
    }
}

impl<T: Float> DecoderWeights<Parameter<T>> {
    /// The parameters that training changes, in the order of [`DecoderWeights::try_map`]. Gradients, optimizer state,
    /// checkpoints and state hashes follow this walk.
    pub fn trained(&self) -> impl Iterator<Item = &Parameter<T>> {
        self.all().into_iter().filter(|parameter| parameter.spec.is_trained())
    }

    pub fn trained_mut(&mut self) -> impl Iterator<Item = &mut Parameter<T>> {
        self.all_mut().into_iter().filter(|parameter| parameter.spec.is_trained())
    }
}

/// A parameter on a device.
#[derive(Debug)]
pub struct Parameter<T: Float> {
    pub spec: ParameterSpec,
    values: Values<T>,
}

#[derive(Debug)]
enum Values<T: Float> {
    Matrix(Box<Weight<T>>),
    Vector(Buffer<T>),
}

impl<T: Float> Parameter<T> {
    pub fn zeros(device: &Device, spec: &ParameterSpec) -> Result<Self, OutOfMemory> {
        let is_trained = spec.is_trained();
        let values = match spec.kind {
            ParameterKind::Matrix(shape) if spec.role == Role::Adapter => {
                Values::Matrix(Box::new(Weight::factor_zeros(device, shape, spec.parts.len())?))
            }
            ParameterKind::Matrix(shape) if is_trained => {
                Values::Matrix(Box::new(Weight::zeros(device, shape)?))
            }
            ParameterKind::Matrix(shape) => {
                Values::Matrix(Box::new(Weight::joined_zeros(device, shape, spec.n_joined)?))
            }
            ParameterKind::Vector { len } if is_trained => Values::Vector(device.weight_zeros(len)?),
            ParameterKind::Vector { len } => Values::Vector(device.compute_zeros(len)?),
        };
        Ok(Self { spec: spec.clone(), values })
    }

    /// A frozen matrix in the blocks of its tensors, as zeros.
    pub fn quantised_zeros(
        device: &Device,
        spec: &ParameterSpec,
        modules: Vec<ModuleRows>,
        unpacking: &Unpacking<T>,
    ) -> Result<Self, OutOfMemory> {
        let ParameterKind::Matrix(shape) = spec.kind else {
            panic!("{} is a vector, expected a matrix", spec.parts[0].name)
        };
        let weight = Weight::quantised_zeros(device, shape, spec.n_joined, modules, unpacking)?;
        Ok(Self { spec: spec.clone(), values: Values::Matrix(Box::new(weight)) })
    }

    pub fn is_quantised(&self) -> bool {
        matches!(&self.values, Values::Matrix(weight) if weight.is_quantised())
    }

    /// The elements, a matrix's row by row.
    pub fn view(&self) -> View<'_, T> {
        match &self.values {
            Values::Matrix(weight) => weight.view(),
            Values::Vector(buffer) => buffer.view(),
        }
    }

    /// Its tensors, each with its elements, of a parameter that no adapter is joined to.
    pub fn views(&self) -> impl Iterator<Item = (&TensorSpec, View<'_, T>)> {
        self.spec.tensors().map(|(spec, range)| (spec, self.view().range(range)))
    }

    /// Its tensors, each with its elements.
    pub fn tensors(&self, device: &Device) -> impl Iterator<Item = (&TensorSpec, WeightRows<'_, T>)> {
        self.spec.tensors().map(|(spec, range)| match (&self.values, self.spec.kind) {
            (Values::Matrix(weight), ParameterKind::Matrix(Shape { inputs, .. })) => {
                (spec, weight.rows(device, range.start / inputs..range.end / inputs))
            }
            _ => (spec, WeightRows::InPlace(self.view().range(range))),
        })
    }

    /// Lets `write` set every tensor, given as zeros on the host.
    pub fn try_fill<E>(
        &mut self,
        device: &Device,
        mut write: impl FnMut(&TensorSpec, &mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut host = vec![T::ZERO; self.spec.n_elements()];
        for (spec, range) in self.spec.tensors() {
            write(spec, &mut host[range])?;
        }
        self.update(device, |mut values| values.write(&host));
        Ok(())
    }

    /// Lets `write` overwrite every tensor where it lies.
    pub fn try_write<E>(
        &mut self,
        device: &Device,
        mut write: impl FnMut(&TensorSpec, ViewMut<'_, T>) -> Result<(), E>,
    ) -> Result<(), E> {
        let tensors: Vec<_> = self.spec.tensors().map(|(spec, range)| (spec.clone(), range)).collect();
        self.update(device, |mut values| {
            let mut parts = tensors.iter();
            parts.try_for_each(|(spec, range)| write(spec, values.reborrow().into_range(range.clone())))
        })
    }

    /// # Panics
    /// If the parameter is a vector.
    pub fn matrix(&self) -> &Weight<T> {
        match &self.values {
            Values::Matrix(weight) => weight,
            Values::Vector(_) => panic!("{} is a vector, expected a matrix", self.spec.parts[0].name),
        }
    }

    /// The same, to write it.
    pub fn matrix_mut(&mut self) -> &mut Weight<T> {
        match &mut self.values {
            Values::Matrix(weight) => weight,
            Values::Vector(_) => panic!("{} is a vector, expected a matrix", self.spec.parts[0].name),
        }
    }

    /// As [`Parameter::update`], of several parameters at once.
    pub fn update_all<R>(
        device: &Device,
        parameters: Vec<&mut Parameter<T>>,
        change: impl FnOnce(Vec<ViewMut<'_, T>>) -> R,
    ) -> R {
        let (mut weights, mut vectors) = (Vec::new(), Vec::new());
        for (parameter_idx, parameter) in parameters.into_iter().enumerate() {
            match &mut parameter.values {
                Values::Matrix(weight) => weights.push((parameter_idx, &mut **weight)),
                Values::Vector(buffer) => vectors.push((parameter_idx, buffer.view_mut())),
            }
        }
        let (indices, weights): (Vec<usize>, Vec<_>) = weights.into_iter().unzip();
        Weight::update_all(device, weights, |views| {
            let mut all: Vec<(usize, ViewMut<'_, T>)> =
                indices.into_iter().zip(views).chain(vectors).collect();
            all.sort_by_key(|(parameter_idx, _)| *parameter_idx);
            change(all.into_iter().map(|(_, view)| view).collect())
        })
    }

    /// See [`Buffer::keep_masters`].
    pub fn keep_masters(&mut self, owned: Range<usize>) -> Result<(), OutOfMemory> {
        match &mut self.values {
            Values::Matrix(weight) => weight.keep_masters(owned),
            Values::Vector(buffer) => buffer.keep_masters(owned),
        }
    }

    /// Lets `change` write the elements.
    pub fn update<R>(&mut self, device: &Device, change: impl FnOnce(ViewMut<'_, T>) -> R) -> R {
        match &mut self.values {
            Values::Matrix(weight) => weight.update(device, change),
            Values::Vector(buffer) => change(buffer.view_mut()),
        }
    }
}
