//! `AdamW` over a policy's parameters.

#[cfg(test)]
mod tests;

use crate::config::TensorSpec;
use crate::decoder::layout::{Slot, SlotKind};
use crate::decoder::{Gradients, Policy};
use stapo_ops::{Buffer, Float, Moment, OutOfMemory, View, adamw};

/// What stays the same from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    /// Decoupled; pulls on matrices (embeddings and head included), never on norm weights and biases.
    pub weight_decay: f64,
}

impl Default for AdamWSettings {
    fn default() -> Self {
        Self { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.0 }
    }
}

/// What is decided anew for each step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Update {
    pub lr: f64,
    /// The gradients' common factor, usually 1 / tokens: they are sums until now.
    pub scale: f64,
    /// Longest gradient, over all parameters, after scaling; infinite for no limit.
    pub max_norm: f64,
}

/// The gradients of a step cannot be used; parameters and state are as before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GradientError {
    #[error("gradient of {tensor}: element {element} is not a finite number")]
    NotFinite { tensor: String, element: usize },
    #[error("gradients are finite, but too large for their norm to be")]
    TooLarge,
}

/// `AdamW` with its two moments per parameter.
#[derive(Debug)]
pub struct Optimizer<T: Float = f32> {
    settings: AdamWSettings,
    n_steps: u64,
    m: Vec<Buffer<T>>,
    v: Vec<Buffer<T>>,
}

impl<T: Float> Optimizer<T> {
    pub fn new(policy: &Policy<T>, settings: AdamWSettings) -> Result<Self, OutOfMemory> {
        let zeros = |moment| {
            let slots = policy.layout.slots.iter();
            let zeros = |slot: &Slot| policy.device.moment_zeros(slot.n_elements(), moment);
            slots.map(zeros).collect::<Result<Vec<_>, _>>()
        };
        Ok(Self { settings, n_steps: 0, m: zeros(Moment::First)?, v: zeros(Moment::Second)? })
    }

    /// One update with the gradients, which are then zero again. Returns their norm after scaling, before clipping.
    pub fn step(
        &mut self,
        policy: &mut Policy<T>,
        gradients: &mut Gradients<T>,
        update: Update,
    ) -> Result<f64, GradientError> {
        gradients.finish();
        let norm = gradients.sum_squares().sqrt() * update.scale.abs();
        if !norm.is_finite() {
            let not_finite = |(spec, element): (&TensorSpec, usize)| GradientError::NotFinite {
                tensor: spec.name.clone(),
                element,
            };
            return Err(gradients.first_non_finite().map_or(GradientError::TooLarge, not_finite));
        }
        self.n_steps += 1;
        let scale = update.scale * adamw::clip_factor(norm, update.max_norm);
        let device = policy.device.clone();
        for slot in 0..policy.layout.slots.len() {
            let decays = policy.layout.slots[slot].kind == SlotKind::Matrix;
            let rule = adamw::AdamW {
                lr: update.lr,
                beta1: self.settings.beta1,
                beta2: self.settings.beta2,
                eps: self.settings.eps,
                weight_decay: if decays { self.settings.weight_decay } else { 0.0 },
                step: self.n_steps,
            };
            let (m, v) = (self.m[slot].view_mut(), self.v[slot].view_mut());
            let gradient = gradients.slot(slot);
            policy.update_slot(slot, |values| adamw::step(&device, rule, scale, values, gradient, m, v));
        }
        policy.count_update();
        gradients.clear();
        Ok(norm)
    }

    pub fn n_steps(&self) -> u64 {
        self.n_steps
    }

    /// The state to keep in a checkpoint beside [`Optimizer::n_steps`]: each tensor's first and second moment.
    pub fn state<'a>(
        &'a self,
        policy: &'a Policy<T>,
    ) -> impl Iterator<Item = (&'a TensorSpec, View<'a, T>, View<'a, T>)> {
        policy
            .layout
            .tensors()
            .map(|(spec, slot, range)| (spec, self.m[slot].range(range.clone()), self.v[slot].range(range)))
    }

    /// Takes the state of a checkpoint back: `read` fills a tensor's first and second moment.
    pub fn restore<E>(
        &mut self,
        policy: &Policy<T>,
        n_steps: u64,
        mut read: impl FnMut(&TensorSpec, &mut [T], &mut [T]) -> Result<(), E>,
    ) -> Result<(), E> {
        for (spec, slot, range) in policy.layout.tensors() {
            let mut m = vec![T::ZERO; spec.n_elements()];
            let mut v = m.clone();
            read(spec, &mut m, &mut v)?;
            self.m[slot].range_mut(range.clone()).write(&m);
            self.v[slot].range_mut(range).write(&v);
        }
        self.n_steps = n_steps;
        Ok(())
    }
}
