use super::cuda::{Joined, Pad, Padding};
use crate::cpu::gemm::panels_len;
use crate::cuda::ElementType;
use crate::device::Backend;
use crate::quantised::{ModuleRows, Quantised, RowParts, UnpackFactors, Unpacking};
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
///
/// Where adapters are joined (see `lora`), the rows of a frozen weight on a GPU have further columns for the second factors
/// of its adapters; [`Weight::rows`] and [`Weight::update`] leave these out.
///
/// A quantised weight (see `quantised`) must be unpacked before every op that reads it; it changes only through
/// [`Weight::write_blocks`].
#[derive(Debug)]
pub struct Weight<T: Float> {
    shape: Shape,
    flat: Buffer<T>,
    /// On the CPU panels; on a GPU padded rows, or nothing.
    packed: Buffer<T>,
    padding: Option<Padding>,
    joined: Option<Joined>,
    /// In place of `flat`, which is then empty.
    quantised: Option<Quantised<T>>,
}

/// Some rows of a weight, one after another.
#[derive(Debug)]
pub enum WeightRows<'a, T: Float> {
    InPlace(View<'a, T>),
    /// A copy of rows that have further columns between them.
    Copied(Buffer<T>),
}

impl<T: Float> WeightRows<'_, T> {
    pub fn view(&self) -> View<'_, T> {
        match self {
            WeightRows::InPlace(view) => *view,
            WeightRows::Copied(buffer) => buffer.view(),
        }
    }

    /// The elements, on the host. Waits for the device.
    pub fn to_vec(&self) -> Vec<T> {
        self.view().to_vec()
    }
}

impl<T: Float> Weight<T> {
    pub fn zeros(device: &Device, shape: Shape) -> Result<Self, OutOfMemory> {
        Self::with_flat(device, shape, device.weight_zeros(shape.len())?)
    }

    /// A factor of `n_modules` adapters, one below the other. On a GPU in bf16 it keeps a second copy where the TMA could
    /// not read the first: columns are filled up with zeros to whole tiles, and the rows of each module to multiples of 8.
    pub fn factor_zeros(device: &Device, shape: Shape, n_modules: usize) -> Result<Self, OutOfMemory> {
        let mut weight = Self::zeros(device, shape)?;
        let padding = Padding::for_shape(shape, n_modules);
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

    /// As [`Weight::frozen_zeros`], of a layer without bias or whose product does not use split-K. Where adapters are joined,
    /// with room for `columns` of second factors and, unless the product uses split-K, below the weight for as many rows of first
    /// factors, which `lora::join` fills.
    pub fn joined_zeros(device: &Device, shape: Shape, columns: usize) -> Result<Self, OutOfMemory> {
        if columns == 0 || !device.joins_adapters() {
            return Self::frozen_zeros(device, shape);
        }
        let joined = Some(Joined::for_shape(shape, columns));
        let flat = device.compute_zeros(shape.len() + Self::n_joined(shape, columns))?;
        Ok(Weight { joined, ..Self::with_flat(device, shape, flat)? })
    }

    /// As [`Weight::joined_zeros`], in the blocks of its modules. `unpacking` has room for [`Weight::n_unpacked`] numbers.
    pub fn quantised_zeros(
        device: &Device,
        shape: Shape,
        columns: usize,
        modules: Vec<ModuleRows>,
        unpacking: &Unpacking<T>,
    ) -> Result<Self, OutOfMemory> {
        check("Weight", "rows of modules", modules.iter().map(|of| of.n_rows).sum(), shape.outputs);
        let columns = if device.joins_adapters() { columns } else { 0 };
        let len = Self::n_unpacked(shape, columns);
        let quantised = Quantised::zeros(device, shape.inputs, modules, (unpacking, len))?;
        let joined = (columns > 0).then(|| Joined::for_shape(shape, columns));
        let weight = Self::with_flat(device, shape, device.compute_zeros(0)?)?;
        Ok(Weight { joined, quantised: Some(quantised), ..weight })
    }

    /// Numbers of a weight with room for joined adapters.
    pub fn n_unpacked(shape: Shape, columns: usize) -> usize {
        shape.len() + Self::n_joined(shape, columns)
    }

    pub fn is_quantised(&self) -> bool {
        self.quantised.is_some()
    }

    /// Overwrites the blocks of a module of a quantised weight.
    ///
    /// # Panics
    /// If the weight is not quantised.
    pub fn write_blocks(&mut self, module: usize, bytes: &[u8]) {
        let quantised = self.quantised.as_mut().expect("write_blocks: a quantised weight");
        quantised.write(module, bytes);
    }

    /// Unpacks a quantised weight for the ops that follow, with the factors of the adapters that are joined to it. Nothing
    /// for other weights.
    pub(crate) fn unpack(&self, device: &Device, factors: Option<&UnpackFactors>) {
        if let (Backend::Cuda(cuda), Some(quantised)) = (device.backend(), &self.quantised) {
            let joined = self.joined.unwrap_or(Joined { n_parts: 1, columns: 0 });
            let parts = RowParts { n_parts: joined.n_parts, columns: joined.columns };
            quantised.unpack(cuda, parts, factors.filter(|_| joined.columns > 0));
        }
    }

    /// All elements, the further rows and columns of joined adapters included.
    #[track_caller]
    fn elements(&self) -> View<'_, T> {
        match &self.quantised {
            Some(quantised) => quantised.view(),
            None => self.flat.view(),
        }
    }

    /// Elements that [`Weight::joined_zeros`] takes besides those of the weight.
    pub fn n_joined(shape: Shape, columns: usize) -> usize {
        let joined = Joined::for_shape(shape, columns);
        joined.n_rows(shape) * joined.pitch(shape) - shape.len()
    }

    fn with_flat(device: &Device, shape: Shape, flat: Buffer<T>) -> Result<Self, OutOfMemory> {
        let n_panels = match device.backend() {
            Backend::Cpu(_) => panels_len(shape.outputs, shape.inputs),
            Backend::Cuda(_) => 0,
        };
        let packed = device.compute_zeros(n_panels)?;
        Ok(Weight { shape, flat, packed, padding: None, joined: None, quantised: None })
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

    /// `[outputs, inputs]`; where adapters are joined, with the further columns.
    pub fn view(&self) -> View<'_, T> {
        match self.joined {
            Some(joined) => self.elements().range(0..self.shape.outputs * joined.pitch(self.shape)),
            None => self.elements(),
        }
    }

    /// `[outputs + columns, inputs + columns]`: with the first factors of joined adapters below the weight; `None` if they
    /// are not there.
    pub(crate) fn with_first_factors(&self) -> Option<View<'_, T>> {
        self.joins_gradients().then(|| self.elements())
    }

    /// Whether the first factors of joined adapters lie below the weight, so that the gradient of the input is one product
    /// too.
    pub fn joins_gradients(&self) -> bool {
        self.joined.is_some_and(|joined| joined.n_parts == 1)
    }

    /// Whether the weight has columns for second factors of adapters.
    pub fn is_joined(&self) -> bool {
        self.joined.is_some()
    }

    pub(crate) fn joined(&self) -> Option<Joined> {
        self.joined
    }

    /// `[rows, inputs]`.
    pub fn rows(&self, device: &Device, rows: Range<usize>) -> WeightRows<'_, T> {
        self.unpack(device, None);
        let shape = Shape { outputs: rows.len(), ..self.shape };
        if let (Backend::Cuda(cuda), Some(joined)) = (device.backend(), self.joined) {
            let pitch = joined.pitch(self.shape);
            let from = self.elements().range(rows.start * pitch..rows.end * pitch).cuda();
            let copy = Buffer::temporary(cuda, shape.len());
            joined.take_out(cuda, shape, from, copy.view().cuda());
            return WeightRows::Copied(copy);
        }
        let inputs = self.shape.inputs;
        if let (Backend::Cuda(cuda), true) = (device.backend(), self.is_quantised()) {
            let mut copy = Buffer::temporary(cuda, shape.len());
            copy.view_mut().copy_from(self.elements().range(rows.start * inputs..rows.end * inputs));
            return WeightRows::Copied(copy);
        }
        WeightRows::InPlace(self.flat.range(rows.start * inputs..rows.end * inputs))
    }

    /// Lets `change` write the weight, then packs the second copy.
    pub fn update<R>(&mut self, device: &Device, change: impl FnOnce(ViewMut<'_, T>) -> R) -> R {
        assert!(!self.is_quantised(), "update: a quantised weight");
        if let (Backend::Cuda(cuda), Some(joined)) = (device.backend(), self.joined)
            && let WeightRows::Copied(mut copy) = self.rows(device, 0..self.shape.outputs)
        {
            let result = change(copy.view_mut());
            joined.put_in(cuda, self.shape, copy.view().cuda(), self.flat.view().cuda());
            return result;
        }
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
        assert!(weights.iter().all(|weight| weight.joined.is_none()), "update_all: frozen weights");
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
