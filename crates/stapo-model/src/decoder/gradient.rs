//! The gradient of one parameter.

use super::weights::ParameterSpec;
use stapo_ops::{Buffer, Device, Float, OutOfMemory, View, ViewMut, Write};

/// The gradient of one parameter.
#[derive(Debug)]
pub struct Gradient<T: Float> {
    pub(super) spec: ParameterSpec,
    pub(super) sum: Buffer<T>,
    /// The gradient is logically zero but `sum` was not cleared: the first micro-batch overwrites it, later ones add.
    pub(super) is_stale: bool,
}

impl<T: Float> Gradient<T> {
    pub(super) fn zeros(device: &Device, spec: &ParameterSpec) -> Result<Self, OutOfMemory> {
        Ok(Self { spec: spec.clone(), sum: device.zeros(spec.n_elements())?, is_stale: false })
    }

    /// The sum, for an op that adds to it.
    ///
    /// # Panics
    /// If the sum is stale: only matrices are left stale, and backward writes those by [`Gradient::writable`].
    pub fn sum_mut(&mut self) -> ViewMut<'_, T> {
        assert!(!self.is_stale, "the gradient of {} was not cleared", self.spec.parts[0].name);
        self.sum.view_mut()
    }

    /// The sum, and whether an op overwrites it or adds to it.
    pub fn writable(&mut self) -> (ViewMut<'_, T>, Write) {
        let write = if std::mem::take(&mut self.is_stale) { Write::Set } else { Write::Add };
        (self.sum.view_mut(), write)
    }

    pub(super) fn view(&self) -> View<'_, T> {
        self.sum.view()
    }

    pub(super) fn clear(&mut self) {
        self.sum.view_mut().fill(T::ZERO);
        self.is_stale = false;
    }

    /// Makes the gradient zero. A matrix of a layer is only marked, since the first micro-batch overwrites it.
    pub(super) fn clear_for_layer(&mut self) {
        if self.spec.is_matrix() {
            self.is_stale = true;
        } else {
            self.clear();
        }
    }

    /// Clears what is stale: the buffer then holds its gradient.
    pub(super) fn settle(&mut self) {
        if self.is_stale {
            self.clear();
        }
    }
}
