//! The memory of a buffer on the GPU: the type it is stored in, and how the host reads and writes it.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::allocation::{Allocation, Lender};
use super::context::{Cuda, Precision, Training};
use super::error::{Code, CudaError, OrPanic, fail};
use super::kernels::{ADAMW, ELEMENTWISE};
use super::locked::PIECE;
use super::slice::{ElementType, MOMENT_BLOCK, Masters, Slice};
use crate::dtype::bf16_to_f32;
use crate::element::Element;
use crate::memory::OutOfMemory;

/// Memory of one buffer.
#[derive(Debug)]
pub(crate) struct Memory {
    elements: Allocation,
    kind: ElementType,
    len: usize,
    /// f32 master weights, of which `elements` holds the rounded copy. The optimizer updates them, files store them,
    /// and the host reads them. The range says which elements have one.
    masters: Option<(Allocation, Range<usize>)>,
    /// The scales of 8-bit moments: one f32 for each [`MOMENT_BLOCK`] elements.
    scales: Option<Allocation>,
}

/// Elements that are uploaded in f32 and rounded at once.
const STAGE: usize = 16 << 20;

impl Memory {
    /// Cleared, stored as the host sees it.
    pub(crate) fn exact<T: Element>(
        cuda: &Arc<Cuda>,
        lender: Option<&Lender>,
        len: usize,
    ) -> Result<Memory, OutOfMemory> {
        Self::zeros(cuda, lender, len, ElementType::exact::<T>())
    }

    /// Cleared, stored in the precision that the device computes in.
    pub(crate) fn compute<T: Element>(
        cuda: &Arc<Cuda>,
        lender: Option<&Lender>,
        len: usize,
    ) -> Result<Memory, OutOfMemory> {
        let is_bf16 = T::IS_FLOAT32 && cuda.options.precision == Precision::Bf16;
        let kind = if is_bf16 { ElementType::Bf16 } else { ElementType::exact::<T>() };
        Self::zeros(cuda, lender, len, kind)
    }

    /// As [`Memory::compute`], with f32 master weights where elements are stored rounded.
    pub(crate) fn with_masters<T: Element>(cuda: &Arc<Cuda>, len: usize) -> Result<Memory, OutOfMemory> {
        let mut memory = Self::compute::<T>(cuda, None, len)?;
        if memory.kind == ElementType::Bf16 {
            memory.masters = Some((Allocation::zeros(cuda, None, 4 * len)?, 0..len));
        }
        Ok(memory)
    }

    /// Cleared, for moments of an optimizer. `kind` is their type on a device that keeps them in 8 bits.
    pub(crate) fn moments<T: Element>(
        cuda: &Arc<Cuda>,
        len: usize,
        kind: ElementType,
    ) -> Result<Memory, OutOfMemory> {
        let is_8bit = T::IS_FLOAT32 && cuda.options.training == Training::EightBit;
        if !is_8bit || cuda.options.precision == Precision::F32 {
            return Self::exact::<T>(cuda, None, len);
        }
        let mut memory = Self::zeros(cuda, None, len, kind)?;
        memory.scales = Some(Allocation::zeros(cuda, None, 4 * len.div_ceil(MOMENT_BLOCK))?);
        Ok(memory)
    }

    /// Short-lived memory, holding anything.
    pub(crate) fn scratch(cuda: &Arc<Cuda>, len: usize, kind: ElementType) -> Memory {
        let n_bytes = len * kind.n_bytes();
        let elements = Allocation::scratch(cuda, n_bytes);
        let elements = elements
            .unwrap_or_else(|error| fail(CudaError::reported("scratch memory", error, Code::OutOfMemory)));
        Memory { elements, kind, len, masters: None, scales: None }
    }

    /// As [`Memory::compute`], for large copies that no pool should keep.
    pub(crate) fn temporary<T: Element>(cuda: &Arc<Cuda>, len: usize) -> Memory {
        let memory = Self::compute::<T>(cuda, None, len);
        memory
            .unwrap_or_else(|error| fail(CudaError::reported("a copy of weights", error, Code::OutOfMemory)))
    }

    fn zeros(
        cuda: &Arc<Cuda>,
        lender: Option<&Lender>,
        len: usize,
        kind: ElementType,
    ) -> Result<Memory, OutOfMemory> {
        let too_long = OutOfMemory { bytes: len as u128 * kind.n_bytes() as u128, device: "the GPU" };
        let n_bytes = len.checked_mul(kind.n_bytes()).ok_or(too_long)?;
        let elements = Allocation::zeros(cuda, lender, n_bytes)?;
        Ok(Memory { elements, kind, len, masters: None, scales: None })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn cuda(&self) -> &Arc<Cuda> {
        &self.elements.cuda
    }

    /// Panics for memory of a region that is lent to another tenant.
    #[track_caller]
    pub(crate) fn slice(&self) -> Slice {
        self.elements.check_tenant();
        let masters = self.masters.as_ref().map(|(memory, range)| Masters {
            address: memory.address,
            start: range.start,
            end: range.end,
        });
        let scales = self.scales.as_ref().map(|scales| scales.address);
        Slice { address: self.elements.address, kind: self.kind, len: self.len, masters, scales }
    }

    /// Forgets the masters of all elements but those of `own`.
    pub(crate) fn keep_masters(&mut self, own: Range<usize>) -> Result<(), OutOfMemory> {
        let Some((_, range)) = &self.masters else { return Ok(()) };
        assert!(range.start <= own.start && own.end <= range.end, "masters {own:?} of {range:?}");
        let cuda = Arc::clone(self.cuda());
        let kept = Allocation::zeros(&cuda, None, 4 * own.len())?;
        if let Some(from) = self.slice().part(own.start, own.len()).master().filter(|_| !own.is_empty()) {
            let plain = |address| Slice::plain(address, ElementType::F32, own.len());
            cuda.copy(plain(from), plain(kept.address));
        }
        self.masters = Some((kept, own));
        Ok(())
    }
}

impl Cuda {
    /// Copies to the host, and waits for the copy.
    pub(crate) fn read<T: Element>(self: &Arc<Self>, from: Slice, to: &mut [T]) {
        assert_eq!(from.len, to.len(), "read: {} elements into {}", from.len, to.len());
        if to.is_empty() {
            return;
        }
        if let Some(scales) = from.scales {
            let plain = Memory::scratch(self, from.len, ElementType::F32);
            let name = format!("decode_{}", from.name());
            let launch = self.kernel(&ADAMW, &name).arg(from).arg(scales).arg(plain.slice()).arg(from.len);
            launch.run([from.len.div_ceil(256), 1], 256, 0);
            return self.read(plain.slice(), to);
        }
        self.make_current();
        let (address, kind) =
            from.master().map_or((from.address, from.kind), |master| (master, ElementType::F32));
        if kind == ElementType::Bf16 {
            let mut bits = vec![0u16; to.len()];
            self.download(address, &mut bits);
            for (x, bits) in to.iter_mut().zip(bits) {
                *x = T::from_f32(bf16_to_f32(bits));
            }
        } else {
            assert_eq!(kind, ElementType::exact::<T>(), "read: stored type");
            self.download(address, to);
        }
    }

    /// Where a slice is stored, that is its masters where there are any, and in how many bytes.
    fn stored(from: Slice) -> (u64, usize) {
        match (from.master(), from.masters) {
            (Some(master), _) => (master, 4 * from.len),
            (None, None) => (from.address, from.len * from.kind.n_bytes()),
            (None, Some(_)) => panic!("read_stored: other ranks have masters of these {} weights", from.len),
        }
    }

    /// Copies the bytes of a slice as they are stored, and those of its scales.
    pub(crate) fn copy_stored(&self, from: Slice, elements: &mut [u8], scales: &mut [u8]) {
        let (address, n_bytes) = Self::stored(from);
        assert_eq!(elements.len(), n_bytes, "copy_stored: bytes");
        self.make_current();
        self.download_in_pieces(address, elements);
        if let Some(address) = from.scales.filter(|_| !scales.is_empty()) {
            self.download_in_pieces(address, scales);
        }
        self.synchronize();
    }

    /// Queues copies of which none crosses a border of a [`crate::HostBuffer`]'s pieces: the driver takes a range for
    /// pinned only where it lies in one piece.
    fn download_in_pieces(&self, mut address: u64, mut to: &mut [u8]) {
        while !to.is_empty() {
            let in_piece = PIECE - to.as_ptr() as usize % PIECE;
            let (now, later) = to.split_at_mut(in_piece.min(to.len()));
            // SAFETY: the range on the GPU is the caller's slice and as long as `now`, which is not read before the caller
            // has waited for the stream.
            unsafe { result::memcpy_dtoh_async(now, address, self.stream) }.or_panic("reading from the GPU");
            address += now.len() as u64;
            to = later;
        }
    }

    /// Overwrites a slice without a master with bytes as [`Cuda::copy_stored`] gave them, in pieces as there.
    pub(crate) fn copy_from_stored(&self, mut bytes: &[u8], to: Slice) {
        assert_eq!(bytes.len(), to.len * to.kind.n_bytes(), "copy_from_stored: bytes");
        assert!(
            to.masters.is_none(),
            "copy_from_stored: the rounded copy of a master follows from the master"
        );
        self.make_current();
        let mut address = to.address;
        while !bytes.is_empty() {
            let in_piece = PIECE - bytes.as_ptr() as usize % PIECE;
            let (now, later) = bytes.split_at(in_piece.min(bytes.len()));
            // SAFETY: the range on the GPU is the caller's slice and as long as `now`, which lives until the stream has been
            // waited for below.
            unsafe { result::memcpy_htod_async(address, now, self.stream) }.or_panic("writing to the GPU");
            address += now.len() as u64;
            bytes = later;
        }
        self.synchronize();
    }

    /// The bytes of a slice as they are stored, and its scales.
    pub(crate) fn read_stored(&self, from: Slice, n_scales: usize) -> (Vec<u8>, Vec<f32>) {
        let (address, n_bytes) = Self::stored(from);
        self.make_current();
        let mut bytes = vec![0; n_bytes];
        if n_bytes > 0 {
            self.download(address, &mut bytes);
        }
        let mut scales = vec![0.0; n_scales];
        if let Some(address) = from.scales.filter(|_| n_scales > 0) {
            self.download(address, &mut scales);
        }
        (bytes, scales)
    }

    /// Overwrites a slice without a master with bytes as [`Cuda::read_stored`] gave them.
    pub(crate) fn write_stored(&self, bytes: &[u8], scales: &[f32], to: Slice) {
        assert_eq!(bytes.len(), to.len * to.kind.n_bytes(), "write_stored: bytes");
        assert!(to.masters.is_none(), "write_stored: the rounded copy of a master follows from the master");
        self.make_current();
        if !bytes.is_empty() {
            self.upload(bytes, to.address);
        }
        if let Some(address) = to.scales.filter(|_| !scales.is_empty()) {
            self.upload(scales, address);
        }
    }

    fn download<T>(&self, address: u64, to: &mut [T]) {
        // SAFETY: the range on the GPU is the caller's slice and as long as `to`; the copy is done when this returns.
        unsafe { result::memcpy_dtoh_async(to, address, self.stream) }.or_panic("reading from the GPU");
        self.synchronize();
    }

    /// Copies from the host, and rounds where the buffer is stored in bf16 or 8 bits.
    pub(crate) fn write<T: Element>(self: &Arc<Self>, from: &[T], to: Slice) {
        assert_eq!(from.len(), to.len, "write: {} elements into {}", from.len(), to.len);
        if from.is_empty() {
            return;
        }
        if let Some(scales) = to.scales {
            let plain = Memory::scratch(self, to.len, ElementType::F32);
            self.write(from, plain.slice());
            let name = format!("encode_{}", to.name());
            let launch = self.kernel(&ADAMW, &name).arg(plain.slice()).arg(to).arg(scales).arg(to.len);
            launch.run([to.len.div_ceil(8 * MOMENT_BLOCK), 1], 256, 0);
            return;
        }
        self.make_current();
        if to.kind != ElementType::Bf16 {
            assert_eq!(to.kind, ElementType::exact::<T>(), "write: stored type");
            self.upload(from, to.address);
            return;
        }
        if let Some(master) = to.master() {
            self.upload(from, master);
            self.round(master, to.address, to.len);
            return;
        }
        if let Some(masters) = to.masters.filter(|masters| masters.start < masters.end) {
            self.upload(&from[masters.start..masters.end], masters.address);
        }
        for (i, part) in from.chunks(STAGE).enumerate() {
            let stage_memory = Memory::scratch(self, part.len(), ElementType::F32);
            let stage = stage_memory.slice();
            self.upload(part, stage.address);
            self.round(stage.address, to.part(i * STAGE, part.len()).address, part.len());
        }
    }

    /// Rounds the master of a weight that has one to the copy that ops read.
    pub(crate) fn round_master(&self, weight: Slice) {
        if let Some(master) = weight.master() {
            self.round(master, weight.address, weight.len);
        }
    }

    /// Rounds `len` elements from f32 to bf16.
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
                // SAFETY: both ranges are those of slices.
                unsafe { result::memcpy_dtod_async(to, from, n_bytes, self.stream) }
                    .or_panic("copying on the GPU");
            }
        };
        copy(from.address, to.address, from.len * from.kind.n_bytes());
        if let Some((from_master, to_master)) = from.master().zip(to.master()) {
            copy(from_master, to_master, 4 * from.len);
        }
    }

    pub(crate) fn fill<T: Element>(self: &Arc<Self>, to: Slice, value: T) {
        if to.len == 0 {
            return;
        }
        self.make_current();
        let bits = value.to_bits64();
        if bits == 0 {
            let clear = |address, n_bytes| {
                // SAFETY: the range is that of a slice.
                unsafe { result::memset_d8_async(address, 0, n_bytes, self.stream) }
                    .or_panic("clearing memory");
            };
            clear(to.address, to.len * to.kind.n_bytes());
            if let Some(masters) = to.masters.filter(|masters| masters.start < masters.end) {
                clear(masters.address, 4 * (masters.end - masters.start));
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
