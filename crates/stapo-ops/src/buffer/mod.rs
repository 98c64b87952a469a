//! Memory that ops read and write.
//!
//! The element type of a `Buffer<T>` is the one the host sees when it uploads or downloads. Where the numbers live, and
//! in which precision they are stored there, is the buffer's own affair: callers hold buffers and views, never slices.

#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use crate::Device;
use crate::cuda::{self, Cuda, Kind, Memory, Slice, Stored};
use crate::device::Backend;

/// A type that buffers can hold.
pub trait Element: Stored + PartialEq + Send + Sync + 'static {}
impl Element for f32 {}
impl Element for f64 {}
impl Element for u32 {}

/// The averages that Adam keeps of each gradient: of itself and of its square.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    First,
    Second,
}

/// Memory that could not be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("out of memory: {bytes} bytes could not be allocated on {device}")]
pub struct OutOfMemory {
    pub bytes: u128,
    pub device: &'static str,
}

/// A block of `len` elements on a device.
#[derive(Debug)]
pub struct Buffer<T: Element>(Storage<T>);

#[derive(Debug)]
enum Storage<T> {
    Host(Aligned<T>),
    Cuda(Memory),
}

/// A read-only range of a buffer. Cheap to copy.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T: Element>(Place<'a, T>);

#[derive(Debug, Clone, Copy)]
enum Place<'a, T> {
    Host(&'a [T]),
    Cuda(Part<'a>),
}

/// A range of a buffer that an op may write.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element>(PlaceMut<'a, T>);

#[derive(Debug)]
enum PlaceMut<'a, T> {
    Host(&'a mut [T]),
    Cuda(Part<'a>),
}

/// A range of a buffer on the GPU, which lives as long as this.
#[derive(Debug, Clone, Copy)]
struct Part<'a> {
    memory: &'a Memory,
    start: usize,
    len: usize,
}

impl<'a> Part<'a> {
    fn whole(memory: &'a Memory) -> Self {
        Part { memory, start: 0, len: memory.len() }
    }

    fn cuda(&self) -> &Arc<Cuda> {
        self.memory.cuda()
    }

    fn slice(&self) -> Slice {
        self.memory.slice().part(self.start, self.len)
    }

    #[track_caller]
    fn range(self, range: &Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of {}", self.len);
        Part { start: self.start + range.start, len: range.end - range.start, ..self }
    }
}

impl<T: Element> Buffer<T> {
    pub(crate) fn host_zeros(len: usize) -> Result<Self, OutOfMemory> {
        Ok(Buffer(Storage::Host(Aligned::zeros(len)?)))
    }

    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match &self.0 {
            Storage::Host(memory) => memory.len,
            Storage::Cuda(memory) => memory.len(),
        }
    }

    pub fn view(&self) -> View<'_, T> {
        View(match &self.0 {
            Storage::Host(memory) => Place::Host(memory.as_slice()),
            Storage::Cuda(memory) => Place::Cuda(Part::whole(memory)),
        })
    }

    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut(match &mut self.0 {
            Storage::Host(memory) => PlaceMut::Host(memory.as_mut_slice()),
            Storage::Cuda(memory) => PlaceMut::Cuda(Part::whole(memory)),
        })
    }

    /// The elements of `range`.
    pub fn range(&self, range: Range<usize>) -> View<'_, T> {
        self.view().range(range)
    }

    pub fn range_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        self.view_mut().into_range(range)
    }

    /// Several ranges of one buffer at once, none overlapping another: the parts of an arena that one op reads and
    /// writes. What is only read becomes a [`View`] by [`ViewMut::into_view`].
    pub fn disjoint_mut<const N: usize>(&mut self, ranges: [Range<usize>; N]) -> [ViewMut<'_, T>; N] {
        self.view_mut().disjoint(ranges)
    }
}

/// Elements on their way from a device.
#[derive(Debug)]
pub struct Arriving<T: Element>(Coming<T>);

#[derive(Debug)]
enum Coming<T> {
    Here(Vec<T>),
    Cuda(cuda::Arriving, usize),
}

impl<T: Element> Arriving<T> {
    /// Waits for them.
    pub fn wait(self) -> Vec<T> {
        match self.0 {
            Coming::Here(elements) => elements,
            Coming::Cuda(arriving, len) => {
                let mut elements = vec![T::default(); len];
                arriving.read(&mut elements);
                elements
            }
        }
    }
}

/// A programmer's fault: an op of one device was given memory of the other.
#[track_caller]
fn elsewhere(place: &str) -> ! {
    panic!("this buffer does not live on {place}: ops take buffers of their own device")
}

impl<'a, T: Element> View<'a, T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self.0 {
            Place::Host(slice) => slice.len(),
            Place::Cuda(part) => part.len,
        }
    }

    #[must_use]
    pub fn range(self, range: Range<usize>) -> View<'a, T> {
        View(match self.0 {
            Place::Host(slice) => Place::Host(&slice[range]),
            Place::Cuda(part) => Place::Cuda(part.range(&range)),
        })
    }

    /// Copies the elements to the host. Waits for the device.
    pub fn read(&self, to: &mut [T]) {
        match self.0 {
            Place::Host(slice) => to.copy_from_slice(slice),
            Place::Cuda(part) => part.cuda().read(part.slice(), to),
        }
    }

    /// The elements, on the host. Waits for the device.
    pub fn to_vec(&self) -> Vec<T> {
        let mut elements = vec![T::default(); self.len()];
        self.read(&mut elements);
        elements
    }

    /// The elements, on their way to the host: what is queued after this runs meanwhile. Of exact buffers.
    pub fn fetch(&self) -> Arriving<T> {
        Arriving(match self.0 {
            Place::Host(slice) => Coming::Here(slice.to_vec()),
            Place::Cuda(part) => Coming::Cuda(part.cuda().fetch(part.slice().exact::<T>()), part.len),
        })
    }

    #[track_caller]
    pub(crate) fn host(&self) -> &'a [T] {
        let Place::Host(slice) = self.0 else { elsewhere("the CPU") };
        slice
    }

    #[track_caller]
    pub(crate) fn cuda(&self) -> Slice {
        let Place::Cuda(part) = self.0 else { elsewhere("the GPU") };
        part.slice()
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// The same range, for reading, while this view rests.
    pub fn view(&self) -> View<'_, T> {
        View(match &self.0 {
            PlaceMut::Host(slice) => Place::Host(slice),
            PlaceMut::Cuda(part) => Place::Cuda(*part),
        })
    }

    /// The same range, for one more call.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut(match &mut self.0 {
            PlaceMut::Host(slice) => PlaceMut::Host(slice),
            PlaceMut::Cuda(part) => PlaceMut::Cuda(*part),
        })
    }

    pub fn into_view(self) -> View<'a, T> {
        View(match self.0 {
            PlaceMut::Host(slice) => Place::Host(slice),
            PlaceMut::Cuda(part) => Place::Cuda(part),
        })
    }

    #[must_use]
    pub fn into_range(self, range: Range<usize>) -> ViewMut<'a, T> {
        ViewMut(match self.0 {
            PlaceMut::Host(slice) => PlaceMut::Host(&mut slice[range]),
            PlaceMut::Cuda(part) => PlaceMut::Cuda(part.range(&range)),
        })
    }

    /// See [`Buffer::disjoint_mut`].
    pub fn disjoint<const N: usize>(self, ranges: [Range<usize>; N]) -> [ViewMut<'a, T>; N] {
        let len = self.len();
        match self.0 {
            PlaceMut::Host(slice) => {
                let parts = slice.get_disjoint_mut(ranges);
                let parts = parts
                    .unwrap_or_else(|error| panic!("disjoint_mut: {error}, in a buffer of {len} elements"));
                parts.map(|part| ViewMut(PlaceMut::Host(part)))
            }
            PlaceMut::Cuda(part) => {
                for (i, a) in ranges.iter().enumerate() {
                    let overlaps = |b: &Range<usize>| a.start < b.end && b.start < a.end;
                    assert!(!ranges[..i].iter().any(overlaps), "disjoint_mut: {a:?} overlaps another");
                }
                ranges.map(|range| ViewMut(PlaceMut::Cuda(part.range(&range))))
            }
        }
    }

    /// Copies from the host.
    pub fn write(&mut self, from: &[T]) {
        match &mut self.0 {
            PlaceMut::Host(slice) => slice.copy_from_slice(from),
            PlaceMut::Cuda(part) => part.cuda().write(from, part.slice()),
        }
    }

    /// Copies from a view of the same length.
    pub fn copy_from(&mut self, from: View<'_, T>) {
        match &mut self.0 {
            PlaceMut::Host(slice) => slice.copy_from_slice(from.host()),
            PlaceMut::Cuda(part) => part.cuda().copy(from.cuda(), part.slice()),
        }
    }

    pub fn fill(&mut self, value: T) {
        match &mut self.0 {
            PlaceMut::Host(slice) => slice.fill(value),
            PlaceMut::Cuda(part) => part.cuda().fill(part.slice(), value),
        }
    }

    #[track_caller]
    pub(crate) fn host_mut(&mut self) -> &mut [T] {
        let PlaceMut::Host(slice) = &mut self.0 else { elsewhere("the CPU") };
        slice
    }

    #[track_caller]
    pub(crate) fn into_host(self) -> &'a mut [T] {
        let PlaceMut::Host(slice) = self.0 else { elsewhere("the CPU") };
        slice
    }

    #[track_caller]
    pub(crate) fn cuda(&self) -> Slice {
        let PlaceMut::Cuda(part) = &self.0 else { elsewhere("the GPU") };
        part.slice()
    }
}

impl Device {
    /// `len` zeros, stored exactly as `T`.
    pub fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => Ok(Buffer(Storage::Cuda(Memory::exact::<T>(cuda, len)?))),
        }
    }

    /// `len` zeros for activations, stored in the device's compute precision: on the CPU, `T` itself; on a GPU, bf16.
    pub fn compute_zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => Ok(Buffer(Storage::Cuda(Memory::compute::<T>(cuda, len)?))),
        }
    }

    /// `len` zeros for weights: what ops read is in compute precision; what the host and the optimizer see is exact where
    /// the device trains.
    pub fn weight_zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => Ok(Buffer(Storage::Cuda(Memory::trained::<T>(cuda, len)?))),
        }
    }

    /// `len` zeros for an optimizer's moments: f32, or 8 bits where the device was made so.
    pub fn moment_zeros<T: Element>(&self, len: usize, moment: Moment) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => {
                let kind = match moment {
                    Moment::First => Kind::First8,
                    Moment::Second => Kind::Second8,
                };
                Ok(Buffer(Storage::Cuda(Memory::moments::<T>(cuda, len, kind)?)))
            }
        }
    }

    /// A copy of `from`, stored exactly as `T`.
    pub fn upload<T: Element>(&self, from: &[T]) -> Result<Buffer<T>, OutOfMemory> {
        let mut buffer = self.zeros(from.len())?;
        buffer.view_mut().write(from);
        Ok(buffer)
    }
}

/// Host memory whose first element lies at the start of a cache line.
#[derive(Debug)]
struct Aligned<T> {
    memory: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Element> Aligned<T> {
    fn zeros(len: usize) -> Result<Self, OutOfMemory> {
        let error = OutOfMemory { bytes: len as u128 * size_of::<T>() as u128, device: "the host" };
        let padded = len.checked_add(LINE / size_of::<T>()).ok_or_else(|| error.clone())?;
        let memory: Vec<T> = zeroed_vec(padded).ok_or(error)?;
        let start = memory.as_ptr().align_offset(LINE);
        Ok(Aligned { memory, start, len })
    }

    fn as_slice(&self) -> &[T] {
        &self.memory[self.start..self.start + self.len]
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Zeros straight from the operating system, touched only when used; `None` when they cannot be had.
pub(crate) fn zeroed_vec<T: Element>(len: usize) -> Option<Vec<T>> {
    let layout = std::alloc::Layout::array::<T>(len).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout has a size; all elements are numbers, for which zero bytes are a value; pointer and length are
    // those of this one allocation by the global allocator.
    unsafe {
        let memory = std::alloc::alloc_zeroed(layout).cast::<T>();
        advise_huge_pages(memory.cast(), layout.size());
        (!memory.is_null()).then(|| Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, len)).into_vec())
    }
}

/// Asks for huge pages for a large block: matrix kernels step through many rows at once, each on a page of its own.
#[cfg(target_os = "linux")]
fn advise_huge_pages(memory: *mut u8, bytes: usize) {
    const HUGE: usize = 2 << 20;
    let start = memory.align_offset(HUGE);
    if !memory.is_null() && bytes >= 2 * HUGE {
        let len = (bytes - start) / HUGE * HUGE;
        // SAFETY: the range lies inside the block; the advice changes no content. Refusal only costs speed.
        unsafe { libc::madvise(memory.add(start).cast(), len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: *mut u8, _: usize) {}
