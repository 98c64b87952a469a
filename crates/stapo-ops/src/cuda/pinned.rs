//! Pinned host memory: pages that the driver locks, so that the GPU copies from and to them while the host goes on.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::context::Cuda;
use super::error::OrPanic;

/// A block of pinned host memory.
pub(super) struct Pinned {
    pub start: *mut c_void,
    pub n_bytes: usize,
    /// Recorded behind the last copy that uses the block.
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

/// Memory is locked in pieces that end at multiples of so many bytes: while the driver locks a piece, nothing else can be
/// queued, and kernels that are being queued wait for one piece only.
pub(super) const PIECE: usize = 256 << 20;

/// Pages of somebody's host memory that the driver has locked, until this value is dropped.
pub(crate) struct PinnedPieces {
    cuda: Arc<Cuda>,
    starts: Vec<*mut c_void>,
}

// SAFETY: addresses that only the driver uses, to unlock the pages once.
unsafe impl Send for PinnedPieces {}
// SAFETY: as above; a shared reference does nothing.
unsafe impl Sync for PinnedPieces {}

impl PinnedPieces {
    /// Locks whole pages, which must stay where they are for as long as the value lives. Where the system does not lock
    /// them, the rest is left as it is.
    pub(crate) fn lock(cuda: &Arc<Cuda>, pages: &[u8]) -> Self {
        cuda.make_current();
        let mut locked = Self { cuda: Arc::clone(cuda), starts: Vec::new() };
        let mut rest = pages;
        while !rest.is_empty() {
            let n_bytes = (PIECE - rest.as_ptr() as usize % PIECE).min(rest.len());
            let start = rest.as_ptr().cast_mut().cast::<c_void>();
            // SAFETY: the range is memory of this process, and the owner unlocks it before giving it back.
            if unsafe { sys::cuMemHostRegister_v2(start, n_bytes, 0) }.result().is_err() {
                break;
            }
            locked.starts.push(start);
            rest = &rest[n_bytes..];
        }
        locked
    }
}

impl Drop for PinnedPieces {
    fn drop(&mut self) {
        // A failure means that the device is lost, and the caller may be unwinding for that reason.
        self.cuda.try_make_current();
        for start in &self.starts {
            // SAFETY: `lock` locked the pages, which are unlocked once.
            let _ = unsafe { sys::cuMemHostUnregister(*start) }.result();
        }
    }
}
