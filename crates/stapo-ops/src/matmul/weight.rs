use super::cuda::{Pad, Padding};
use crate::cpu::gemm::panels_len;
use crate::cuda::ElementType;
use crate::device::Backend;
use crate::{Buffer, Device, Float, OutOfMemory, View, ViewMut, check};
use std::ops::Range;

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
/// through [`Weight::update`] and [`Weight::update_all`], which pack the panels again, so that the two copies always agree.
/// On a GPU there is one copy, except of the factors of adapters ([`Weight::factor_zeros`]).
#[derive(Debug)]
pub struct Weight<T: Float> {
    shape: Shape,
    flat: Buffer<T>,
    /// On the CPU panels; on a GPU padded rows, or nothing.
    packed: Buffer<T>,
    padding: Option<Padding>,
}

impl<T: Float> Weight<T> {
    pub fn zeros(device: &Device, shape: Shape) -> Result<Self, OutOfMemory> {
        Self::with_flat(device, shape, device.weight_zeros(shape.len())?)
    }

    /// A factor of `n_modules` adapters, one below the other. On a GPU in bf16 it keeps a second copy where the TMA could
    /// not read the first: columns are filled up with zeros to whole tiles, and the rows of each module to multiples of 8.
    pub fn factor_zeros(device: &Device, shape: Shape, n_modules: usize) -> Result<Self, OutOfMemory> {
        let mut weight = Self::zeros(device, shape)?;
        let padding = Padding::of(shape, n_modules);
        if let Backend::Cuda(_) = device.backend()
            && weight.view().cuda().kind == ElementType::Bf16
            && padding.shape() != shape
        {
            weight.packed = device.compute_zeros(padding.shape().len())?;
            weight.padding = Some(padding);
        }
        Ok(weight)
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
        let packed = device.compute_zeros(n_panels)?;
        Ok(Weight { shape, flat, packed, padding: None })
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

    /// Lets `change` write the weight, then packs the second copy.
    pub fn update<R>(&mut self, device: &Device, change: impl FnOnce(ViewMut<'_, T>) -> R) -> R {
        let result = change(self.flat.view_mut());
        Self::pack(device, &mut [self]);
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
        Self::pack(device, &mut weights);
        result
    }

    /// Makes the second copies of weights that were written.
    fn pack(device: &Device, weights: &mut [&mut Weight<T>]) {
        match device.backend() {
            Backend::Cpu(cpu) => {
                for Weight { shape: Shape { outputs, inputs }, flat, packed, .. } in weights {
                    let packed = packed.view_mut().into_host();
                    T::pack_panels(cpu, flat.view().host(), *outputs, *inputs, packed);
                }
            }
            Backend::Cuda(cuda) => {
                let padded = weights.iter().filter_map(|weight| Some((weight, weight.padding?)));
                let pads = padded.map(|(weight, to)| Pad {
                    shape: weight.shape,
                    to,
                    weight: weight.flat.view().cuda(),
                    padded: weight.packed.view().cuda(),
                });
                super::cuda::pad(cuda, &pads.collect::<Vec<_>>());
            }
        }
    }

    /// See [`Buffer::keep_masters`].
    pub fn keep_masters(&mut self, own: Range<usize>) -> Result<(), OutOfMemory> {
        self.flat.keep_masters(own)
    }

    pub(crate) fn panels(&self) -> View<'_, T> {
        self.packed.view()
    }

    /// On a GPU: the weight as the TMA reads it, and its shape.
    pub(crate) fn padded(&self) -> (View<'_, T>, Shape) {
        match self.padding {
            Some(padding) => (self.packed.view(), padding.shape()),
            None => (self.flat.view(), self.shape),
        }
    }
}
