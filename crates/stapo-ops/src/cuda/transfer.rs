//! Small copies between host and GPU that nobody waits for: through memory the GPU reaches by itself, each piece with an
//! event that says when it is free again.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::{Cuda, lock};
use super::error::OrPanic;
use super::memory::{Slice, Stored};

/// Larger uploads (weights) go straight from the caller's memory.
const MAX_STAGED_BYTES: usize = 4 << 20;

/// Host memory under the GPU's eyes.
pub(super) struct Pinned {
    start: *mut c_void,
    n_bytes: usize,
    /// Behind the last copy from or to it.
    event: sys::CUevent,
}

// SAFETY: a block of host memory and a handle of the driver, used by one holder at a time.
unsafe impl Send for Pinned {}

/// Elements on their way from the GPU.
pub(crate) struct Arriving {
    cuda: Arc<Cuda>,
    pinned: Option<Pinned>,
}

impl Cuda {
    /// A piece of at least `n_bytes` that no copy uses any more.
    fn pinned(&self, n_bytes: usize) -> Pinned {
        let mut shelf = lock(&self.pinned);
        // SAFETY: every event on the shelf is alive.
        let is_free = |p: &Pinned| p.n_bytes >= n_bytes && unsafe { result::event::query(p.event) }.is_ok();
        if let Some(at) = shelf.iter().position(is_free) {
            return shelf.swap_remove(at);
        }
        let n_bytes = n_bytes.next_power_of_two().max(1 << 16);
        // SAFETY: the memory holds anything until a copy fills it; both are released by `release_pinned`.
        let start = unsafe { result::malloc_host(n_bytes, 0) }.or_panic("asking for host memory");
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        Pinned { start, n_bytes, event: result::event::create(flags).or_panic("making an event") }
    }

    /// Back for the next who asks, once its event has passed.
    fn shelve(&self, pinned: Pinned) {
        lock(&self.pinned).push(pinned);
    }

    /// Puts the event behind the copy just queued.
    fn mark(&self, pinned: &Pinned) {
        // SAFETY: event and stream are alive.
        unsafe { result::event::record(pinned.event, self.stream) }.or_panic("marking a copy");
    }

    /// Queues a copy of `from`; true if the caller need not wait for anything. False: too large, nothing was done.
    pub(super) fn stage<T: Copy>(&self, from: &[T], address: u64) -> bool {
        let n_bytes = size_of_val(from);
        if n_bytes > MAX_STAGED_BYTES {
            return false;
        }
        let pinned = self.pinned(n_bytes);
        // SAFETY: the piece is at least as long as the slice, is no one else's, and stays until its event has passed; the
        // range on the GPU is the caller's slice.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr().cast::<u8>(), pinned.start.cast(), n_bytes);
            let staged = std::slice::from_raw_parts(pinned.start.cast::<u8>(), n_bytes);
            result::memcpy_htod_async(address, staged, self.stream).or_panic("writing to the GPU");
        }
        self.mark(&pinned);
        self.shelve(pinned);
        true
    }

    /// Starts the copy of a slice stored exactly as the host will see it.
    pub(crate) fn fetch(self: &Arc<Self>, from: Slice) -> Arriving {
        let n_bytes = from.len * from.kind.n_bytes();
        let pinned = (n_bytes > 0).then(|| {
            self.make_current();
            let pinned = self.pinned(n_bytes);
            // SAFETY: the piece is at least as long as the slice, no one else's, and read only after its event.
            unsafe {
                let to = std::slice::from_raw_parts_mut(pinned.start.cast::<u8>(), n_bytes);
                result::memcpy_dtoh_async(to, from.address, self.stream).or_panic("reading from the GPU");
            }
            self.mark(&pinned);
            pinned
        });
        Arriving { cuda: Arc::clone(self), pinned }
    }

    /// Gives the host memory back; called once, when the stream is done.
    pub(super) fn release_pinned(&self) {
        for pinned in lock(&self.pinned).drain(..) {
            // SAFETY: made by `pinned`, used by nothing any more, released once.
            unsafe {
                let _ = result::event::destroy(pinned.event);
                let _ = result::free_host(pinned.start);
            }
        }
    }
}

impl Arriving {
    /// Waits for the elements.
    pub(crate) fn read<T: Stored>(mut self, to: &mut [T]) {
        let Some(pinned) = self.pinned.take() else { return };
        self.cuda.make_current();
        // SAFETY: the copy is over once its event has passed; it wrote as many bytes as `to` has, all of them numbers.
        unsafe {
            result::event::synchronize(pinned.event).or_panic("waiting for the GPU");
            assert!(size_of_val(to) <= pinned.n_bytes, "fetched less than {} elements", to.len());
            std::ptr::copy_nonoverlapping(pinned.start.cast::<T>(), to.as_mut_ptr(), to.len());
        }
        self.cuda.shelve(pinned);
    }
}

impl std::fmt::Debug for Arriving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Arriving")
    }
}

impl Drop for Arriving {
    fn drop(&mut self) {
        // Its event still guards it.
        if let Some(pinned) = self.pinned.take() {
            self.cuda.shelve(pinned);
        }
    }
}
