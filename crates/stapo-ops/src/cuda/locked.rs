//! Host memory of others whose pages the driver locks, so that copies to it run at the speed of the bus.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::context::Cuda;

/// Memory is locked in pieces that end at multiples of so many bytes: while the driver locks a piece, nothing else can be
/// queued, and kernels that are being queued wait for one piece only.
pub(super) const PIECE: usize = 256 << 20;

/// Pages of the caller's host memory that the driver has locked, until this value is dropped.
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
