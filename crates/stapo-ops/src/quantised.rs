//! Frozen weights that stay in the blocks of their file on a GPU. Before a product reads such a weight, a kernel unpacks
//! it to bf16 into memory that all quantised weights of a model use in turn. The product is that of a weight in bf16, and
//! so are its bits.
//!
//! Law: an unpacked number is the f32 number that the file means, by the operations of the file format's reference in
//! their order, rounded once to bf16; that is what a weight in bf16 is filled with.

mod cuda;
mod encoding;

use crate::cuda::Cuda;
use crate::{Buffer, Device, Float, OutOfMemory, View, check};
pub(crate) use cuda::{RowParts, UnpackFactors};
pub use encoding::Encoding;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The rows of one module, one module below the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleRows {
    pub n_rows: usize,
    /// Blocks, or bf16 for a module of the weight that the file does not quantise.
    pub encoding: Encoding,
}

impl ModuleRows {
    /// Bytes of all rows. Panics unless a row is whole blocks.
    fn n_bytes(&self, inputs: usize) -> usize {
        let n_bytes = self.encoding.n_bytes(&[self.n_rows, inputs]);
        n_bytes.unwrap_or_else(|| panic!("quantised: {inputs} inputs in blocks of {}", self.encoding.name()))
    }
}

/// Bytes that the blocks of a weight of `inputs` take on a GPU.
pub fn n_bytes(inputs: usize, modules: &[ModuleRows]) -> usize {
    modules.iter().map(|module| padded(module.n_bytes(inputs))).sum()
}

/// Whole vectors of 16 bytes, in which the kernel reads.
fn padded(n_bytes: usize) -> usize {
    n_bytes.next_multiple_of(16)
}

/// Memory that holds one unpacked weight at a time. The device runs the kernels of a model in the order in which they are
/// queued, so a weight may be unpacked over another one as soon as the product with the other is queued.
#[derive(Debug, Clone)]
pub struct Unpacking<T: Float> {
    memory: Arc<Buffer<T>>,
    /// The weight that was unpacked last, by its number.
    holder: Arc<AtomicU64>,
}

impl<T: Float> Unpacking<T> {
    /// Room for weights of up to `len` numbers, those of joined adapters included.
    pub fn new(device: &Device, len: usize) -> Result<Self, OutOfMemory> {
        Ok(Self { memory: Arc::new(device.compute_zeros(len)?), holder: Arc::default() })
    }
}

/// The blocks of a weight, and where it is unpacked.
#[derive(Debug)]
pub(crate) struct Quantised<T: Float> {
    /// Tells the weights that share an [`Unpacking`] apart.
    number: u64,
    inputs: usize,
    modules: Vec<ModuleRows>,
    /// The modules' blocks, each from a multiple of 16 bytes on, four bytes to a number.
    blocks: Buffer<u32>,
    unpacking: Unpacking<T>,
    /// Numbers of the unpacked weight.
    len: usize,
}

impl<T: Float> Quantised<T> {
    /// Blocks of zeros. Panics unless rows are whole blocks of every module's format.
    pub(crate) fn zeros(
        device: &Device,
        inputs: usize,
        modules: Vec<ModuleRows>,
        (unpacking, len): (&Unpacking<T>, usize),
    ) -> Result<Self, OutOfMemory> {
        static N_WEIGHTS: AtomicU64 = AtomicU64::new(1);
        assert!(modules.len() <= cuda::MODULES, "quantised: {} modules", modules.len());
        for module in &modules {
            let encoding = module.encoding;
            assert!(encoding.is_unpacked(), "quantised: {} is not unpacked", encoding.name());
            // The kernel unpacks eight numbers of a row at a time.
            let unit = encoding.block().0.max(8);
            assert!(inputs.is_multiple_of(unit), "quantised: {inputs} inputs in blocks of {unit}");
        }
        assert!(
            len <= unpacking.memory.len(),
            "quantised: {len} numbers, room for {}",
            unpacking.memory.len()
        );
        let blocks = device.zeros(n_bytes(inputs, &modules) / 4)?;
        let number = N_WEIGHTS.fetch_add(1, Ordering::Relaxed);
        Ok(Self { number, inputs, modules, blocks, unpacking: unpacking.clone(), len })
    }

    /// Overwrites the blocks of a module, which are those of its rows one after another.
    pub(crate) fn write(&mut self, module: usize, bytes: &[u8]) {
        check("quantised", "blocks", bytes.len(), self.modules[module].n_bytes(self.inputs));
        let start = n_bytes(self.inputs, &self.modules[..module]) / 4;
        let mut words = vec![0u32; padded(bytes.len()) / 4];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks(4)) {
            let mut four = [0; 4];
            four[..bytes.len()].copy_from_slice(bytes);
            *word = u32::from_le_bytes(four);
        }
        self.blocks.range_mut(start..start + words.len()).write(&words);
    }

    /// The weight as it was unpacked.
    ///
    /// # Panics
    /// If another weight was unpacked since.
    #[track_caller]
    pub(crate) fn view(&self) -> View<'_, T> {
        let is_held = self.unpacking.holder.load(Ordering::Relaxed) == self.number;
        assert!(is_held, "quantised: a weight is read that was not unpacked before");
        self.unpacking.memory.range(0..self.len)
    }

    /// Unpacks the weight, and copies the factors of its adapters to their places next to it.
    pub(crate) fn unpack(&self, cuda: &Cuda, parts: RowParts, factors: Option<&UnpackFactors>) {
        self.unpacking.holder.store(self.number, Ordering::Relaxed);
        let to = self.view().cuda();
        cuda::unpack(cuda, (self.inputs, &self.modules), self.blocks.view().cuda(), parts, factors, to);
    }
}
