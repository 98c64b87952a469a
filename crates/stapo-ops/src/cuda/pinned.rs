//! Pinned host memory: pages that the driver locks, so that the GPU copies from and to them while the host continues.

use std::ffi::c_void;

use cudarc::driver::{result, sys};

use super::error::OrPanic;

/// A block of pinned host memory.
pub(super) struct Pinned {
    pub start: *mut c_void,
    pub n_bytes: usize,
    /// Recorded after the last copy that uses the block.
    event: sys::CUevent,
}

// SAFETY: a block of host memory and a handle of the driver, used by one holder at a time.
unsafe impl Send for Pinned {}

impl Pinned {
    /// At least `n_bytes`, holding anything. The CUDA context must be current.
    pub(super) fn new(n_bytes: usize) -> Pinned {
        let n_bytes = n_bytes.next_power_of_two().max(1 << 16);
        // SAFETY: the memory holds anything until a copy fills it; `release` frees it.
        let start = unsafe { result::malloc_host(n_bytes, 0) }.or_panic("asking for host memory");
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        Pinned { start, n_bytes, event: result::event::create(flags).or_panic("making an event") }
    }

    /// Whether the last copy that uses the block is done.
    pub(super) fn is_free(&self) -> bool {
        // SAFETY: the event lives as long as the block.
        unsafe { result::event::query(self.event) }.is_ok()
    }

    /// Marks the copy that was just queued on `stream` as the last one that uses the block.
    ///
    /// # Safety
    /// The stream must be alive.
    pub(super) unsafe fn record(&self, stream: sys::CUstream) {
        // SAFETY: the event lives as long as the block; the stream is alive by the caller's word.
        unsafe { result::event::record(self.event, stream) }.or_panic("marking a copy");
    }

    /// Waits until the last copy that uses the block is done.
    pub(super) fn wait(&self) {
        // SAFETY: the event lives as long as the block.
        unsafe { result::event::synchronize(self.event) }.or_panic("waiting for the GPU");
    }

    /// Frees the block.
    ///
    /// # Safety
    /// No copy may use the block any more.
    pub(super) unsafe fn release(self) {
        // SAFETY: both were made by `new` and are released once. A failure means that the device is lost.
        unsafe {
            let _ = result::event::destroy(self.event);
            let _ = result::free_host(self.start);
        }
    }
}
