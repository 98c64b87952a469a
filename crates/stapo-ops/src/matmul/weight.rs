use crate::cpu::gemm::panels_len;
use crate::cuda::{ElementType, TILE_COLUMNS};
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
/// through [`Weight::update`], which packs the panels again, so that the two copies always agree. On a GPU there is one
/// copy, except of a trained weight in bf16 whose rows are not whole tiles of the TMA, such as an adapter's second factor:
/// the second copy has these rows filled up with zeros.
#[derive(Debug)]
pub struct Weight<T: Float> {
    shape: Shape,
    flat: Buffer<T>,
    /// On the CPU panels; on a GPU padded rows, or nothing.
    packed: Buffer<T>,
}

impl<T: Float> Weight<T> {
    pub fn zeros(device: &Device, shape: Shape) -> Result<Self, OutOfMemory> {
        let mut weight = Self::with_flat(device, shape, device.weight_zeros(shape.len())?)?;
        if let Backend::Cuda(_) = device.backend()
            && !shape.inputs.is_multiple_of(TILE_COLUMNS)
            && weight.view().cuda().kind == ElementType::Bf16
        {
            let n_padded = shape.outputs * shape.inputs.next_multiple_of(TILE_COLUMNS);
            weight.packed = device.compute_zeros(n_padded)?;
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
        Ok(Weight { shape, flat, packed })
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
        let Shape { outputs, inputs } = self.shape;
        match device.backend() {
            Backend::Cpu(cpu) => {
                let packed = self.packed.view_mut().into_host();
                T::pack_panels(cpu, self.flat.view().host(), outputs, inputs, packed);
            }
            Backend::Cuda(cuda) if self.packed.len() > 0 => {
                super::cuda::pad_rows(cuda, self.shape, self.flat.view().cuda(), self.packed.view().cuda());
            }
            Backend::Cuda(_) => {}
        }
        result
    }

    pub(crate) fn panels(&self) -> View<'_, T> {
        self.packed.view()
    }

    /// On a GPU: the rows as the TMA reads them, and elements from one row to the next.
    pub(crate) fn padded(&self) -> (View<'_, T>, usize) {
        let inputs = self.shape.inputs;
        if self.packed.len() == 0 {
            (self.flat.view(), inputs)
        } else {
            (self.packed.view(), inputs.next_multiple_of(TILE_COLUMNS))
        }
    }
}
