//! `AdamW` over a policy's parameters.

#[cfg(test)]
mod tests;

use crate::config::TensorSpec;
use crate::decoder::{Gradients, Policy};
pub use stapo_ops::Moment;
use stapo_ops::{Buffer, Float, OutOfMemory, View, ViewMut, adamw, reduce};

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
    /// One for each trained parameter, in the order of the policy's weights.
    moments: Vec<Moments<T>>,
}

/// Running averages of one parameter's gradient and of its square.
#[derive(Debug)]
struct Moments<T: Float> {
    first: Buffer<T>,
    second: Buffer<T>,
}

impl<T: Float> Optimizer<T> {
    pub fn new(policy: &Policy<T>, settings: AdamWSettings) -> Result<Self, OutOfMemory> {
        let device = policy.device();
        let moments = policy.weights.trained().map(|parameter| {
            let len = parameter.spec.n_elements();
            Ok(Moments {
                first: device.moment_zeros(len, Moment::First)?,
                second: device.moment_zeros(len, Moment::Second)?,
            })
        });
        let moments = moments.collect::<Result<_, OutOfMemory>>()?;
        Ok(Self { settings, n_steps: 0, moments })
    }

    /// One update with the gradients, which are then zero again. Returns their norm after scaling, before clipping.
    pub fn step(
        &mut self,
        policy: &mut Policy<T>,
        gradients: &mut Gradients<T>,
        update: Update,
    ) -> Result<f64, GradientError> {
        gradients.join();
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
        let device = policy.device().clone();
        let parameters = policy.weights.trained_mut();
        for ((parameter, gradient), moments) in parameters.zip(gradients.sums()).zip(&mut self.moments) {
            let weight_decay = if parameter.spec.is_matrix() { self.settings.weight_decay } else { 0.0 };
            let rule = adamw::AdamW {
                lr: update.lr,
                beta1: self.settings.beta1,
                beta2: self.settings.beta2,
                eps: self.settings.eps,
                weight_decay,
                step: self.n_steps,
            };
            let first = moments.first.view_mut();
            let second = moments.second.view_mut();
            parameter
                .update(&device, |values| adamw::step(&device, rule, scale, values, gradient, first, second));
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
        let parameters = policy.weights.trained().zip(&self.moments);
        parameters.flat_map(|(parameter, moments)| {
            parameter
                .spec
                .tensors()
                .map(|(spec, range)| (spec, moments.first.range(range.clone()), moments.second.range(range)))
        })
    }

    /// The tensor, the moment and the place of the first moment that is not a finite number.
    pub fn first_non_finite<'a>(&'a self, policy: &'a Policy<T>) -> Option<(&'a TensorSpec, Moment, usize)> {
        let device = policy.device();
        self.state(policy).find_map(|(spec, first, second)| {
            [(Moment::First, first), (Moment::Second, second)]
                .into_iter()
                .find_map(|(moment, values)| Some((spec, moment, reduce::first_non_finite(device, values)?)))
        })
    }

    /// Takes the state of a checkpoint back: `write` overwrites a tensor's first and second moment.
    pub fn restore<E>(
        &mut self,
        policy: &Policy<T>,
        n_steps: u64,
        mut write: impl FnMut(&TensorSpec, ViewMut<'_, T>, ViewMut<'_, T>) -> Result<(), E>,
    ) -> Result<(), E> {
        for (parameter, moments) in policy.weights.trained().zip(&mut self.moments) {
            for (spec, range) in parameter.spec.tensors() {
                let first = moments.first.range_mut(range.clone());
                write(spec, first, moments.second.range_mut(range))?;
            }
        }
        self.n_steps = n_steps;
        Ok(())
    }
}
