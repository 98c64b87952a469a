//! Memory that ops read and write.
//!
//! The element type of a `Buffer<T>` is the one the host sees when it uploads or downloads. Callers hold buffers and
//! views, never slices: only the buffer knows on which device the elements live and in which precision they are stored.

mod stored;
#[cfg(test)]
mod tests;

pub use stored::{Form, Stored};

use std::ops::Range;
use std::sync::Arc;

use crate::cuda::{Cuda, ElementType, Memory, PinnedDownload, Slice, copy_blocks};
use crate::device::{Backend, Device};
use crate::element::Element;
use crate::memory::{Aligned, OutOfMemory};

/// Adam's moving averages of each gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Of the gradient.
    First,
    /// Of the square of the gradient.
    Second,
}

/// Elements on a device.
#[derive(Debug)]
pub struct Buffer<T: Element>(Storage<T>);

#[derive(Debug)]
enum Storage<T> {
    Host(Aligned<T>),
    Cuda(Memory),
}

/// A read-only range of a buffer. Cheap to copy.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T: Element>(Elements<'a, T>);

#[derive(Debug, Clone, Copy)]
enum Elements<'a, T> {
    Host(&'a [T]),
    Cuda(DeviceRange<'a>),
}

/// A range of a buffer that an op may write.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element>(ElementsMut<'a, T>);

#[derive(Debug)]
enum ElementsMut<'a, T> {
    Host(&'a mut [T]),
    Cuda(DeviceRange<'a>),
}

/// A range of a buffer on the GPU.
#[derive(Debug, Clone, Copy)]
struct DeviceRange<'a> {
    memory: &'a Memory,
    start: usize,
    len: usize,
}

impl<'a> DeviceRange<'a> {
    fn whole(memory: &'a Memory) -> Self {
        DeviceRange { memory, start: 0, len: memory.len() }
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
        DeviceRange { start: self.start + range.start, len: range.end - range.start, ..self }
    }
}

impl<T: Element> Buffer<T> {
    pub(crate) fn host_zeros(len: usize) -> Result<Self, OutOfMemory> {
        Ok(Buffer(Storage::Host(Aligned::zeros(len)?)))
    }

    /// Memory on the GPU for weights in compute precision that is given back at once, holding zeros.
    pub(crate) fn temporary(cuda: &Arc<Cuda>, len: usize) -> Self {
        Buffer(Storage::Cuda(Memory::temporary::<T>(cuda, len)))
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
            Storage::Host(memory) => Elements::Host(memory.as_slice()),
            Storage::Cuda(memory) => Elements::Cuda(DeviceRange::whole(memory)),
        })
    }

    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut(match &mut self.0 {
            Storage::Host(memory) => ElementsMut::Host(memory.as_mut_slice()),
            Storage::Cuda(memory) => ElementsMut::Cuda(DeviceRange::whole(memory)),
        })
    }

    /// The elements of `range`.
    pub fn range(&self, range: Range<usize>) -> View<'_, T> {
        self.view().range(range)
    }

    pub fn range_mut(&mut self, range: Range<usize>) -> ViewMut<'_, T> {
        self.view_mut().into_range(range)
    }

    /// Of weights with exact masters, forgets the masters of all elements but those of `own`: the host and the optimizer
    /// then see exact values of these alone, and of the others what ops read. Nothing on a device without masters.
    pub fn keep_masters(&mut self, own: Range<usize>) -> Result<(), OutOfMemory> {
        match &mut self.0 {
            Storage::Host(_) => Ok(()),
            Storage::Cuda(memory) => memory.keep_masters(own),
        }
    }

    /// Several ranges of one buffer that do not overlap, such as the parts of an arena that one op reads and writes. A
    /// range that is only read becomes a [`View`] by [`ViewMut::into_view`].
    pub fn disjoint_mut<const N: usize>(&mut self, ranges: [Range<usize>; N]) -> [ViewMut<'_, T>; N] {
        self.view_mut().disjoint(ranges)
    }

    /// Copies each pair's first block over its second, of `n_blocks` of equal length. Shape: pairs `[n, 2]`; a block that one pair writes
    /// is in no other.
    pub(crate) fn copy_blocks(&mut self, device: &Device, pairs: View<'_, u32>, n_blocks: usize) {
        if let Backend::Cuda(cuda) = device.backend() {
            return copy_blocks(cuda, pairs.cuda(), self.view_mut().cuda(), n_blocks);
        }
        let len = self.len() / n_blocks.max(1);
        for pair in pairs.host().chunks_exact(2) {
            let places = [pair[0], pair[1]].map(|block| block as usize * len..(block as usize + 1) * len);
            let [from, mut to] = self.disjoint_mut(places);
            to.copy_from(from.into_view());
        }
    }
}

/// A copy from a device to the host that may still be under way.
#[derive(Debug)]
pub struct PendingDownload<T: Element>(Download<T>);

#[derive(Debug)]
enum Download<T> {
    Host(Vec<T>),
    Cuda { pinned: PinnedDownload, len: usize },
}

impl<T: Element> PendingDownload<T> {
    /// Waits for the copy and returns its elements.
    pub fn wait(self) -> Vec<T> {
        match self.0 {
            Download::Host(elements) => elements,
            Download::Cuda { pinned, len } => {
                let mut elements = vec![T::default(); len];
                pinned.read(&mut elements);
                elements
            }
        }
    }
}

/// Panics: the caller gave an op of one device the memory of another.
#[track_caller]
fn elsewhere(place: &str) -> ! {
    panic!("this buffer does not live on {place}: ops take buffers of their own device")
}

impl<'a, T: Element> View<'a, T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self.0 {
            Elements::Host(slice) => slice.len(),
            Elements::Cuda(part) => part.len,
        }
    }

    #[must_use]
    pub fn range(self, range: Range<usize>) -> View<'a, T> {
        View(match self.0 {
            Elements::Host(slice) => Elements::Host(&slice[range]),
            Elements::Cuda(part) => Elements::Cuda(part.range(&range)),
        })
    }

    /// Copies the elements to the host. Waits for the device.
    pub fn read(&self, to: &mut [T]) {
        match self.0 {
            Elements::Host(slice) => to.copy_from_slice(slice),
            Elements::Cuda(part) => part.cuda().read(part.slice(), to),
        }
    }

    /// The elements, on the host. Waits for the device.
    pub fn to_vec(&self) -> Vec<T> {
        let mut elements = vec![T::default(); self.len()];
        self.read(&mut elements);
        elements
    }

    /// Starts a copy to the host, and work queued afterwards runs meanwhile. Only for buffers that store `T` exactly.
    pub fn fetch(&self) -> PendingDownload<T> {
        PendingDownload(match self.0 {
            Elements::Host(slice) => Download::Host(slice.to_vec()),
            Elements::Cuda(part) => {
                let pinned = part.cuda().start_download(part.slice().exact::<T>());
                Download::Cuda { pinned, len: part.len }
            }
        })
    }

    #[track_caller]
    pub(crate) fn host(&self) -> &'a [T] {
        let Elements::Host(slice) = self.0 else { elsewhere("the CPU") };
        slice
    }

    #[track_caller]
    pub(crate) fn cuda(&self) -> Slice {
        let Elements::Cuda(part) = self.0 else { elsewhere("the GPU") };
        part.slice()
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// The same range for reading; this view cannot be written meanwhile.
    pub fn view(&self) -> View<'_, T> {
        View(match &self.0 {
            ElementsMut::Host(slice) => Elements::Host(slice),
            ElementsMut::Cuda(part) => Elements::Cuda(*part),
        })
    }

    /// The same range for one call; this view can be used again afterwards.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut(match &mut self.0 {
            ElementsMut::Host(slice) => ElementsMut::Host(slice),
            ElementsMut::Cuda(part) => ElementsMut::Cuda(*part),
        })
    }

    pub fn into_view(self) -> View<'a, T> {
        View(match self.0 {
            ElementsMut::Host(slice) => Elements::Host(slice),
            ElementsMut::Cuda(part) => Elements::Cuda(part),
        })
    }

    #[must_use]
    pub fn into_range(self, range: Range<usize>) -> ViewMut<'a, T> {
        ViewMut(match self.0 {
            ElementsMut::Host(slice) => ElementsMut::Host(&mut slice[range]),
            ElementsMut::Cuda(part) => ElementsMut::Cuda(part.range(&range)),
        })
    }

    /// The elements before `at` and those from `at` on.
    pub fn split_at(self, at: usize) -> (ViewMut<'a, T>, ViewMut<'a, T>) {
        let len = self.len();
        let [before, after] = self.disjoint([0..at, at..len]);
        (before, after)
    }

    /// See [`Buffer::disjoint_mut`].
    pub fn disjoint<const N: usize>(self, ranges: [Range<usize>; N]) -> [ViewMut<'a, T>; N] {
        let len = self.len();
        match self.0 {
            ElementsMut::Host(slice) => {
                let parts = slice.get_disjoint_mut(ranges);
                let parts = parts
                    .unwrap_or_else(|error| panic!("disjoint_mut: {error}, in a buffer of {len} elements"));
                parts.map(|part| ViewMut(ElementsMut::Host(part)))
            }
            ElementsMut::Cuda(part) => {
                for (i, a) in ranges.iter().enumerate() {
                    let overlaps = |b: &Range<usize>| a.start < b.end && b.start < a.end;
                    assert!(!ranges[..i].iter().any(overlaps), "disjoint_mut: {a:?} overlaps another");
                }
                ranges.map(|range| ViewMut(ElementsMut::Cuda(part.range(&range))))
            }
        }
    }

    /// Copies from the host.
    pub fn write(&mut self, from: &[T]) {
        match &mut self.0 {
            ElementsMut::Host(slice) => slice.copy_from_slice(from),
            ElementsMut::Cuda(part) => part.cuda().write(from, part.slice()),
        }
    }

    /// Copies from a view of the same length.
    pub fn copy_from(&mut self, from: View<'_, T>) {
        match &mut self.0 {
            ElementsMut::Host(slice) => slice.copy_from_slice(from.host()),
            ElementsMut::Cuda(part) => part.cuda().copy(from.cuda(), part.slice()),
        }
    }

    pub fn fill(&mut self, value: T) {
        match &mut self.0 {
            ElementsMut::Host(slice) => slice.fill(value),
            ElementsMut::Cuda(part) => part.cuda().fill(part.slice(), value),
        }
    }

    #[track_caller]
    pub(crate) fn host_mut(&mut self) -> &mut [T] {
        let ElementsMut::Host(slice) = &mut self.0 else { elsewhere("the CPU") };
        slice
    }

    #[track_caller]
    pub(crate) fn into_host(self) -> &'a mut [T] {
        let ElementsMut::Host(slice) = self.0 else { elsewhere("the CPU") };
        slice
    }

    #[track_caller]
    pub(crate) fn cuda(&self) -> Slice {
        let ElementsMut::Cuda(part) = &self.0 else { elsewhere("the GPU") };
        part.slice()
    }
}

impl Device {
    /// `len` zeros, stored exactly as `T`.
    pub fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => Ok(Buffer(Storage::Cuda(Memory::exact::<T>(cuda, self.lender(), len)?))),
        }
    }

    /// `len` zeros for activations, stored in the device's compute precision: on the CPU, `T` itself; on a GPU, bf16.
    pub fn compute_zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => Ok(Buffer(Storage::Cuda(Memory::compute::<T>(cuda, self.lender(), len)?))),
        }
    }

    /// `len` zeros for weights. Ops read the weights in compute precision; on a device for training the host and the
    /// optimizer see exact master weights.
    pub fn weight_zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => Ok(Buffer(Storage::Cuda(if self.has_masters() {
                Memory::with_masters::<T>(cuda, len)?
            } else {
                Memory::compute::<T>(cuda, self.lender(), len)?
            }))),
        }
    }

    /// `len` zeros for an optimizer's moments: f32, or 8 bits on a device made with `Training::EightBit`.
    pub fn moment_zeros<T: Element>(&self, len: usize, moment: Moment) -> Result<Buffer<T>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Buffer::host_zeros(len),
            Backend::Cuda(cuda) => {
                let kind = match moment {
                    Moment::First => ElementType::First8,
                    Moment::Second => ElementType::Second8,
                };
                Ok(Buffer(Storage::Cuda(Memory::moments::<T>(cuda, len, kind)?)))
            }
        }
    }

    /// Copies a view to one of the same length, in the order of this device's work.
    pub fn copy<T: Element>(&self, from: View<'_, T>, mut to: ViewMut<'_, T>) {
        match self.backend() {
            Backend::Cpu(_) => to.host_mut().copy_from_slice(from.host()),
            Backend::Cuda(cuda) => cuda.copy(from.cuda(), to.cuda()),
        }
    }

    /// A copy of `from`, stored exactly as `T`.
    pub fn upload<T: Element>(&self, from: &[T]) -> Result<Buffer<T>, OutOfMemory> {
        let mut buffer = self.zeros(from.len())?;
        buffer.view_mut().write(from);
        Ok(buffer)
    }
}
