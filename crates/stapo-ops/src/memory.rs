//! Memory of the host, and the error of a host or a GPU that has none left.

use crate::element::Element;

/// Memory that could not be allocated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "out of memory: {} MiB could not be allocated on {device}\nhint: other programs may hold what is missing{}; a run takes less with lower update.microbatch_tokens and rollout.kv_mib, or update.recompute=layers, an evaluation with a lower --kv-memory",
    bytes.div_ceil(1 << 20),
    if *device == HOST { "" } else { " (nvidia-smi lists them)" }
)]
pub struct OutOfMemory {
    pub bytes: u128,
    pub device: &'static str,
}

/// The host as [`OutOfMemory`] names it.
const HOST: &str = "the host";

/// Host memory whose first element lies at the start of a cache line.
#[derive(Debug)]
pub(crate) struct Aligned<T> {
    memory: Vec<T>,
    start: usize,
    pub(crate) len: usize,
}

impl<T: Element> Aligned<T> {
    pub(crate) fn zeros(len: usize) -> Result<Self, OutOfMemory> {
        let error = OutOfMemory { bytes: len as u128 * size_of::<T>() as u128, device: HOST };
        let padded = len.checked_add(LINE / size_of::<T>()).ok_or_else(|| error.clone())?;
        let memory: Vec<T> = zeroed_vec(padded).ok_or(error)?;
        let start = memory.as_ptr().align_offset(LINE);
        Ok(Aligned { memory, start, len })
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        &self.memory[self.start..self.start + self.len]
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        &mut self.memory[self.start..self.start + self.len]
    }
}

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Zeros straight from the operating system, which provides a page when it is first touched; `None` if there is no
/// memory.
pub(crate) fn zeroed_vec<T: Element>(len: usize) -> Option<Vec<T>> {
    let layout = std::alloc::Layout::array::<T>(len).ok()?;
    if layout.size() == 0 {
        return Some(Vec::new());
    }
    // SAFETY: the layout has a size; an element is a number, for which zero bytes are a value; pointer and length are
    // those of one allocation by the global allocator.
    unsafe {
        let memory = std::alloc::alloc_zeroed(layout).cast::<T>();
        advise_huge_pages(memory.cast(), layout.size());
        (!memory.is_null()).then(|| Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, len)).into_vec())
    }
}

/// Asks for huge pages for a large allocation: matrix kernels step through many rows at once, and with small pages each
/// row lies on another page.
#[cfg(target_os = "linux")]
fn advise_huge_pages(memory: *mut u8, bytes: usize) {
    const HUGE: usize = 2 << 20;
    let start = memory.align_offset(HUGE);
    if !memory.is_null() && bytes >= 2 * HUGE {
        let len = (bytes - start) / HUGE * HUGE;
        // SAFETY: the range lies inside the allocation; the advice changes no content. A refusal only costs speed.
        unsafe { libc::madvise(memory.add(start).cast(), len, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: *mut u8, _: usize) {}
