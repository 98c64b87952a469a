use std::ops::Range;

use crate::cpu::gemm::panels_len;
use crate::device::Backend;
use crate::{Buffer, Device, Float, OutOfMemory, View, ViewMut, check};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub outputs: usize,
    pub inputs: usize,
}

impl Shape {
    /// Number of elements.
    pub fn len(self) -> usize {
        self.outputs * self.inputs
    }

    pub fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// The weight of a linear layer, `[outputs, inputs]`, row-major.
///
/// On the CPU a weight keeps a second copy in column panels, the form that the forward kernel reads, so it takes 8
/// bytes in f32. The input's gradient, the embedding, the optimizer and files use the flat copy. A weight changes only
/// through [`Weight::update`] and [`Weight::update_all`], which pack the panels again, so that the two copies always agree. On a GPU there is one
/// copy.
#[derive(Debug)]
pub struct Weight<T: Float> {
    shape: Shape,
    flat: Buffer<T>,
    /// Empty on a GPU.
    panels: Buffer<T>,
}

impl<T: Float> Weight<T> {
    pub fn zeros(device: &Device, shape: Shape) -> Result<Self, OutOfMemory> {
        Self::with_flat(device, shape, device.weight_zeros(shape.len())?)
    }

    /// A weight that no optimizer updates: on a GPU it has no f32 master.
    pub fn frozen_zeros(device: &Device, shape: Shape) -> Result<Self, OutOfMemory> {
        Self::with_flat(device, shape, device.compute_zeros(shape.len())?)
    }

    fn with_flat(device: &Device, shape: Shape, flat: Buffer<T>) -> Result<Self, OutOfMemory> {
        let n_panels = match device.backend() {
            Backend::Cpu(_) => panels_len(shape.outputs, shape.inputs),
            Backend::Cuda(_) => 0,
        };
        let panels = device.compute_zeros(n_panels)?;
        Ok(Weight { shape, flat, panels })
    }

    /// A weight that holds `values`, `[outputs, inputs]`.
    pub fn from_slice(device: &Device, shape: Shape, values: &[T]) -> Result<Self, OutOfMemory> {
        check("Weight::from_slice", "values", values.len(), shape.len());
        let mut weight = Self::zeros(device, shape)?;
        weight.update(device, |mut flat| flat.write(values));
        Ok(weight)
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// `[outputs, inputs]`.
    pub fn view(&self) -> View<'_, T> {
        self.flat.view()
    }

    /// Lets `change` write the weight, then packs the panels.
    pub fn update<R>(&mut self, device: &Device, change: impl FnOnce(ViewMut<'_, T>) -> R) -> R {
        let result = change(self.flat.view_mut());
        self.pack(device);
        result
    }

    /// As [`Weight::update`], of several weights at once.
    pub fn update_all<R>(
        device: &Device,
        weights: Vec<&mut Weight<T>>,
        change: impl FnOnce(Vec<ViewMut<'_, T>>) -> R,
    ) -> R {
        let mut weights = weights;
        let result = change(weights.iter_mut().map(|weight| weight.flat.view_mut()).collect());
        weights.into_iter().for_each(|weight| weight.pack(device));
        result
    }

    fn pack(&mut self, device: &Device) {
        let Shape { outputs, inputs } = self.shape;
        if let Backend::Cpu(cpu) = device.backend() {
            T::pack_panels(cpu, self.flat.view().host(), outputs, inputs, self.panels.view_mut().host_mut());
        }
    }

    /// See [`Buffer::keep_masters`].
    pub fn keep_masters(&mut self, own: Range<usize>) -> Result<(), OutOfMemory> {
        self.flat.keep_masters(own)
    }

    pub(crate) fn panels(&self) -> View<'_, T> {
        self.panels.view()
    }
}
