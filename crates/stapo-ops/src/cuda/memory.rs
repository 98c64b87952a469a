//! A buffer on the GPU: in which precision it is stored there, and how it gets in and out.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::{Block, Cuda, Precision, Training};
use super::error::{Code, CudaError, OrPanic, fail};
use super::kernels::{ADAMW, ELEMENTWISE};
use super::launch::Argument;
use crate::OutOfMemory;
use crate::dtype::bf16_to_f32;

/// How elements are stored on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    F32,
    F64,
    U32,
    Bf16,
    /// First and second moments in 8 bits, see adamw8.cu.
    First8,
    Second8,
}

impl Kind {
    pub(crate) fn n_bytes(self) -> usize {
        match self {
            Kind::First8 | Kind::Second8 => 1,
            Kind::Bf16 => 2,
            Kind::F32 | Kind::U32 => 4,
            Kind::F64 => 8,
        }
    }

    /// As it stands in a kernel's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Bf16 => "bf16",
            Kind::F32 => "float",
            Kind::First8 => "first",
            Kind::Second8 => "second",
            Kind::F64 | Kind::U32 => {
                panic!("kernels compute on bf16 and f32; f64 is for gradient checks on the CPU")
            }
        }
    }
}

/// A host type that a buffer can hold.
pub trait Stored: Copy + Default {
    #[doc(hidden)]
    const IS_FLOAT32: bool;
    #[doc(hidden)]
    const N_BYTES: usize;
    #[doc(hidden)]
    const IS_INTEGER: bool;
    #[doc(hidden)]
    fn from_f32(x: f32) -> Self;
    #[doc(hidden)]
    fn to_bits64(self) -> u64;
}

macro_rules! stored {
    ($type:ty, $integer:literal, $float32:literal, $bits:expr) => {
        impl Stored for $type {
            const IS_FLOAT32: bool = $float32;
            const N_BYTES: usize = size_of::<$type>();
            const IS_INTEGER: bool = $integer;
            fn from_f32(x: f32) -> Self {
                x as $type
            }
            fn to_bits64(self) -> u64 {
                $bits(self)
            }
        }
    };
}
stored!(f32, false, true, |x: f32| u64::from(x.to_bits()));
stored!(f64, false, false, |x: f64| x.to_bits());
stored!(u32, true, false, u64::from);

fn exact_kind<T: Stored>() -> Kind {
    match (T::IS_INTEGER, T::N_BYTES) {
        (true, _) => Kind::U32,
        (false, 4) => Kind::F32,
        (false, _) => Kind::F64,
    }
}

/// Memory of one buffer.
#[derive(Debug)]
pub(crate) struct Memory {
    block: Block,
    kind: Kind,
    len: usize,
    /// The same elements in f32, of which `block` holds the rounded: what an optimizer moves, files hold, hosts read.
    master: Option<Block>,
    /// Of moments in 8 bits: one f32 for each [`MOMENT_BLOCK`] elements.
    scales: Option<Block>,
}

/// Elements that share a scale.
const MOMENT_BLOCK: usize = 256;

/// A range of device memory as ops see it. Whoever holds one has checked that its buffer lives.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slice {
    pub address: u64,
    pub kind: Kind,
    pub len: usize,
    /// Where the f32 master of the same range lies.
    pub master: Option<u64>,
    /// Where the scales of moments in 8 bits lie.
    pub scales: Option<u64>,
}

impl Slice {
    /// `len` elements from `start` on.
    pub(crate) fn part(self, start: usize, len: usize) -> Slice {
        assert!(start + len <= self.len, "range {start}..{} of {}", start + len, self.len);
        Slice {
            address: self.address + (start * self.kind.n_bytes()) as u64,
            len,
            master: self.master.map(|address| address + 4 * start as u64),
            scales: self.scales.map(|address| {
                assert!(
                    start.is_multiple_of(MOMENT_BLOCK),
                    "8-bit moments: a tensor at {start}, expected a multiple of {MOMENT_BLOCK}"
                );
                address + (4 * start / MOMENT_BLOCK) as u64
            }),
            ..self
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.kind.name()
    }

    /// Panics unless elements are exact f32.
    #[track_caller]
    pub(crate) fn f32(self, what: &str) -> Slice {
        assert!(self.kind == Kind::F32, "{what}: stored as {:?}, expected F32", self.kind);
        self
    }

    /// Panics unless elements are stored as the host sees them.
    #[track_caller]
    pub(crate) fn exact<T: Stored>(self) -> Slice {
        assert_eq!(self.kind, exact_kind::<T>(), "fetch: stored type");
        self
    }

    #[track_caller]
    pub(crate) fn same(self, other: Slice, what: &str) -> Slice {
        assert!(self.kind == other.kind, "{what}: stored as {:?} beside {:?}", self.kind, other.kind);
        self
    }
}

impl Argument for Slice {
    fn bits(self) -> u64 {
        self.address
    }
}

impl Argument for Option<Slice> {
    fn bits(self) -> u64 {
        self.map_or(0, |slice| slice.address)
    }
}

/// Elements that are converted at once on their way in.
const STAGE: usize = 16 << 20;

impl Memory {
    pub(crate) fn exact<T: Stored>(cuda: &Arc<Cuda>, len: usize) -> Result<Memory, OutOfMemory> {
        Self::zeros(cuda, len, exact_kind::<T>())
    }

    /// In the precision that the device computes in.
    pub(crate) fn compute<T: Stored>(cuda: &Arc<Cuda>, len: usize) -> Result<Memory, OutOfMemory> {
        let is_bf16 = T::IS_FLOAT32 && cuda.options.precision == Precision::Bf16;
        Self::zeros(cuda, len, if is_bf16 { Kind::Bf16 } else { exact_kind::<T>() })
    }

    /// As [`Memory::compute`], with a master where the device trains and rounds.
    pub(crate) fn trained<T: Stored>(cuda: &Arc<Cuda>, len: usize) -> Result<Memory, OutOfMemory> {
        let mut memory = Self::compute::<T>(cuda, len)?;
        if memory.kind == Kind::Bf16 && cuda.options.training == Training::F32 {
            memory.master = Some(Block::zeros(cuda, 4 * len)?);
        }
        Ok(memory)
    }

    /// Moments of an optimizer; `kind` is how they are stored where they have 8 bits.
    pub(crate) fn moments<T: Stored>(
        cuda: &Arc<Cuda>,
        len: usize,
        kind: Kind,
    ) -> Result<Memory, OutOfMemory> {
        let is_8bit = T::IS_FLOAT32 && cuda.options.training == Training::EightBit;
        if !is_8bit || cuda.options.precision == Precision::F32 {
            return Self::exact::<T>(cuda, len);
        }
        let mut memory = Self::zeros(cuda, len, kind)?;
        memory.scales = Some(Block::zeros(cuda, 4 * len.div_ceil(MOMENT_BLOCK))?);
        Ok(memory)
    }

    pub(crate) fn scratch(cuda: &Arc<Cuda>, len: usize, kind: Kind) -> Memory {
        let n_bytes = len * kind.n_bytes();
        let block = Block::scratch(cuda, n_bytes);
        let block =
            block.unwrap_or_else(|error| fail(CudaError::told("scratch memory", error, Code::OutOfMemory)));
        Memory { block, kind, len, master: None, scales: None }
    }

    fn zeros(cuda: &Arc<Cuda>, len: usize, kind: Kind) -> Result<Memory, OutOfMemory> {
        let too_long = OutOfMemory { bytes: len as u128 * kind.n_bytes() as u128, device: "the GPU" };
        let n_bytes = len.checked_mul(kind.n_bytes()).ok_or(too_long)?;
        Ok(Memory { block: Block::zeros(cuda, n_bytes)?, kind, len, master: None, scales: None })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn cuda(&self) -> &Arc<Cuda> {
        &self.block.cuda
    }

    pub(crate) fn slice(&self) -> Slice {
        let master = self.master.as_ref().map(|block| block.address);
        let scales = self.scales.as_ref().map(|block| block.address);
        Slice { address: self.block.address, kind: self.kind, len: self.len, master, scales }
    }
}

impl Cuda {
    /// Copies to the host; waits.
    pub(crate) fn read<T: Stored>(self: &Arc<Self>, from: Slice, to: &mut [T]) {
        assert_eq!(from.len, to.len(), "read: {} elements into {}", from.len, to.len());
        if to.is_empty() {
            return;
        }
        if let Some(scales) = from.scales {
            let plain = Memory::scratch(self, from.len, Kind::F32);
            let name = format!("decode_{}", from.name());
            let launch = self.kernel(&ADAMW, &name).arg(from).arg(scales).arg(plain.slice()).arg(from.len);
            launch.run([from.len.div_ceil(256), 1], 256, 0);
            return self.read(plain.slice(), to);
        }
        self.make_current();
        let (address, kind) = from.master.map_or((from.address, from.kind), |master| (master, Kind::F32));
        if kind == Kind::Bf16 {
            let mut bits = vec![0u16; to.len()];
            self.download(address, &mut bits);
            for (x, bits) in to.iter_mut().zip(bits) {
                *x = T::from_f32(bf16_to_f32(bits));
            }
        } else {
            assert_eq!(kind, exact_kind::<T>(), "read: stored type");
            self.download(address, to);
        }
    }

    fn download<T>(&self, address: u64, to: &mut [T]) {
        // SAFETY: the range is inside its block by the slice; the host's is as long, and is waited for.
        unsafe { result::memcpy_dtoh_async(to, address, self.stream) }.or_panic("reading from the GPU");
        self.synchronize();
    }

    fn upload<T: Copy>(&self, from: &[T], address: u64) {
        if self.stage(from, address) {
            return;
        }
        // SAFETY: as above. The driver has taken the host's bytes before this returns, for they are pageable memory.
        unsafe { result::memcpy_htod_async(address, from, self.stream) }.or_panic("writing to the GPU");
    }

    /// Copies from the host, rounding where the buffer does.
    pub(crate) fn write<T: Stored>(self: &Arc<Self>, from: &[T], to: Slice) {
        assert_eq!(from.len(), to.len, "write: {} elements into {}", from.len(), to.len);
        if from.is_empty() {
            return;
        }
        if let Some(scales) = to.scales {
            let plain = Memory::scratch(self, to.len, Kind::F32);
            self.write(from, plain.slice());
            let name = format!("encode_{}", to.name());
            let launch = self.kernel(&ADAMW, &name).arg(plain.slice()).arg(to).arg(scales).arg(to.len);
            launch.run([to.len.div_ceil(8 * MOMENT_BLOCK), 1], 256, 0);
            return;
        }
        self.make_current();
        if to.kind != Kind::Bf16 {
            assert_eq!(to.kind, exact_kind::<T>(), "write: stored type");
            self.upload(from, to.address);
            return;
        }
        if let Some(master) = to.master {
            self.upload(from, master);
            self.round(master, to.address, to.len);
            return;
        }
        for (i, part) in from.chunks(STAGE).enumerate() {
            let stage_memory = Memory::scratch(self, part.len(), Kind::F32);
            let stage = stage_memory.slice();
            self.upload(part, stage.address);
            self.round(stage.address, to.part(i * STAGE, part.len()).address, part.len());
        }
    }

    fn round(&self, from: u64, to: u64, len: usize) {
        let launch = self.kernel(&ELEMENTWISE, "convert_float_bf16").arg(from).arg(to).arg(len);
        launch.run([len.div_ceil(256), 1], 256, 0);
    }

    pub(crate) fn copy(&self, from: Slice, to: Slice) {
        assert_eq!(from.len, to.len, "copy_from: {} elements into {}", from.len, to.len);
        assert_eq!(from.kind, to.kind, "copy_from: stored types");
        self.make_current();
        let copy = |from, to, n_bytes| {
            if n_bytes > 0 {
                // SAFETY: both ranges are inside their blocks, by their slices.
                unsafe { result::memcpy_dtod_async(to, from, n_bytes, self.stream) }
                    .or_panic("copying on the GPU");
            }
        };
        copy(from.address, to.address, from.len * from.kind.n_bytes());
        if let Some((from_master, to_master)) = from.master.zip(to.master) {
            copy(from_master, to_master, 4 * from.len);
        }
    }

    pub(crate) fn fill<T: Stored>(self: &Arc<Self>, to: Slice, value: T) {
        if to.len == 0 {
            return;
        }
        self.make_current();
        let bits = value.to_bits64();
        if bits == 0 {
            let clear = |address, n_bytes| {
                // SAFETY: the range is inside its block, by its slice.
                unsafe { result::memset_d8_async(address, 0, n_bytes, self.stream) }
                    .or_panic("clearing memory");
            };
            clear(to.address, to.len * to.kind.n_bytes());
            if let Some(master) = to.master {
                clear(master, 4 * to.len);
            }
        } else if to.kind.n_bytes() == 4 {
            // SAFETY: as above.
            let filled = unsafe { sys::cuMemsetD32Async(to.address, bits as u32, to.len, self.stream) };
            filled.result().or_panic("filling memory");
        } else {
            self.write(&vec![value; to.len], to);
        }
    }
}
