//! Memory that ops read and write.
//!
//! The element type of a `Buffer<T>` is the one the host sees when it uploads or downloads. Where the numbers live, and
//! in which precision they are stored there, is the buffer's own affair: callers hold buffers and views, never slices.

#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::Device;

/// A type that buffers can hold.
pub trait Element: Copy + Default + PartialEq + Send + Sync + 'static {}
impl Element for f32 {}
impl Element for f64 {}
impl Element for u32 {}

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
}

/// A read-only range of a buffer. Cheap to copy.
#[derive(Debug, Clone, Copy)]
pub struct View<'a, T: Element>(Place<'a, T>);

#[derive(Debug, Clone, Copy)]
enum Place<'a, T> {
    Host(&'a [T]),
}

/// A range of a buffer that an op may write.
#[derive(Debug)]
pub struct ViewMut<'a, T: Element>(PlaceMut<'a, T>);

#[derive(Debug)]
enum PlaceMut<'a, T> {
    Host(&'a mut [T]),
}

impl<T: Element> Buffer<T> {
    pub(crate) fn host_zeros(len: usize) -> Result<Self, OutOfMemory> {
        Ok(Buffer(Storage::Host(Aligned::zeros(len)?)))
    }

    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.host().len()
    }

    pub fn view(&self) -> View<'_, T> {
        View(Place::Host(self.host()))
    }

    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut(PlaceMut::Host(self.host_mut()))
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

    fn host(&self) -> &[T] {
        let Storage::Host(memory) = &self.0;
        memory.as_slice()
    }

    fn host_mut(&mut self) -> &mut [T] {
        let Storage::Host(memory) = &mut self.0;
        memory.as_mut_slice()
    }
}

impl<'a, T: Element> View<'a, T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.host().len()
    }

    #[must_use]
    pub fn range(self, range: Range<usize>) -> View<'a, T> {
        View(Place::Host(&self.host()[range]))
    }

    /// Copies the elements to the host. Waits for the device.
    pub fn read(&self, to: &mut [T]) {
        to.copy_from_slice(self.host());
    }

    /// The elements, on the host. Waits for the device.
    pub fn to_vec(&self) -> Vec<T> {
        self.host().to_vec()
    }

    pub(crate) fn host(&self) -> &'a [T] {
        let Place::Host(slice) = self.0;
        slice
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.view().len()
    }

    /// The same range, for reading, while this view rests.
    pub fn view(&self) -> View<'_, T> {
        let PlaceMut::Host(slice) = &self.0;
        View(Place::Host(slice))
    }

    /// The same range, for one more call.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        let PlaceMut::Host(slice) = &mut self.0;
        ViewMut(PlaceMut::Host(slice))
    }

    pub fn into_view(self) -> View<'a, T> {
        View(Place::Host(self.into_host()))
    }

    #[must_use]
    pub fn into_range(self, range: Range<usize>) -> ViewMut<'a, T> {
        ViewMut(PlaceMut::Host(&mut self.into_host()[range]))
    }

    /// See [`Buffer::disjoint_mut`].
    pub fn disjoint<const N: usize>(self, ranges: [Range<usize>; N]) -> [ViewMut<'a, T>; N] {
        let len = self.len();
        let parts = self.into_host().get_disjoint_mut(ranges);
        let parts =
            parts.unwrap_or_else(|error| panic!("disjoint_mut: {error}, in a buffer of {len} elements"));
        parts.map(|part| ViewMut(PlaceMut::Host(part)))
    }

    /// Copies from the host.
    pub fn write(&mut self, from: &[T]) {
        self.host_mut().copy_from_slice(from);
    }

    /// Copies from a view of the same length.
    pub fn copy_from(&mut self, from: View<'_, T>) {
        self.host_mut().copy_from_slice(from.host());
    }

    pub fn fill(&mut self, value: T) {
        self.host_mut().fill(value);
    }

    pub(crate) fn host_mut(&mut self) -> &mut [T] {
        let PlaceMut::Host(slice) = &mut self.0;
        slice
    }

    pub(crate) fn into_host(self) -> &'a mut [T] {
        let PlaceMut::Host(slice) = self.0;
        slice
    }
}

impl Device {
    /// `len` zeros, stored exactly as `T`.
    pub fn zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        Buffer::host_zeros(len)
    }

    /// `len` zeros for weights or activations, stored in the device's compute precision: on the CPU, `T` itself.
    pub fn compute_zeros<T: Element>(&self, len: usize) -> Result<Buffer<T>, OutOfMemory> {
        Buffer::host_zeros(len)
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
