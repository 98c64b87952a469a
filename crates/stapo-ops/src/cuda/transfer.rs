//! Copies between host and GPU that the host does not wait for. The copies go through pinned host memory; each pinned
//! block carries an event that shows when its last copy is done and the block may be used again.

use std::sync::Arc;

use cudarc::driver::result;

use super::context::{Cuda, lock};
use super::error::OrPanic;
use super::pinned::Pinned;
use super::slice::Slice;
use crate::element::Element;

/// Largest upload that goes through pinned memory. Larger ones (weights) are copied from the caller's pageable memory.
const MAX_STAGED_BYTES: usize = 4 << 20;

/// A copy from the GPU into pinned host memory that may still be under way.
pub(crate) struct PinnedDownload {
    cuda: Arc<Cuda>,
    /// `None` for a download of nothing, and after the elements were read.
    pinned: Option<Pinned>,
}

impl Cuda {
    /// A pinned block of at least `n_bytes` that no copy uses any more.
    fn pinned(&self, n_bytes: usize) -> Pinned {
        let mut blocks = lock(&self.pinned);
        let at = blocks.iter().position(|block| block.n_bytes >= n_bytes && block.is_free());
        at.map_or_else(|| Pinned::new(n_bytes), |at| blocks.swap_remove(at))
    }

    /// Keeps the block for a later copy; its event says when it is free.
    fn keep_pinned(&self, pinned: Pinned) {
        lock(&self.pinned).push(pinned);
    }

    /// Queues a copy of `from` to `address` on the GPU. The caller may change `from` as soon as this returns.
    pub(super) fn upload<T: Copy>(&self, from: &[T], address: u64) {
        let n_bytes = size_of_val(from);
        if n_bytes > MAX_STAGED_BYTES {
            // SAFETY: the range on the GPU is the caller's slice. The driver has read pageable host memory before the
            // call returns.
            unsafe { result::memcpy_htod_async(address, from, self.stream) }.or_panic("writing to the GPU");
            return;
        }
        let pinned = self.pinned(n_bytes);
        // SAFETY: the pinned block is at least as long as `from`, has no other user, and is kept until its event has
        // passed; the range on the GPU is the caller's slice; the stream lives as long as this.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr().cast::<u8>(), pinned.start.cast(), n_bytes);
            let staged = std::slice::from_raw_parts(pinned.start.cast::<u8>(), n_bytes);
            result::memcpy_htod_async(address, staged, self.stream).or_panic("writing to the GPU");
            pinned.record(self.stream);
        }
        self.keep_pinned(pinned);
    }

    /// Queues the copy of a slice that is stored as the host will see it.
    pub(crate) fn start_download(self: &Arc<Self>, from: Slice) -> PinnedDownload {
        let n_bytes = from.len * from.kind.n_bytes();
        let pinned = (n_bytes > 0).then(|| {
            self.make_current();
            let pinned = self.pinned(n_bytes);
            // SAFETY: the pinned block is at least as long as the slice, has no other user, and is read only after its
            // event; the stream lives as long as this.
            unsafe {
                let to = std::slice::from_raw_parts_mut(pinned.start.cast::<u8>(), n_bytes);
                result::memcpy_dtoh_async(to, from.address, self.stream).or_panic("reading from the GPU");
                pinned.record(self.stream);
            }
            pinned
        });
        PinnedDownload { cuda: Arc::clone(self), pinned }
    }
}

impl PinnedDownload {
    /// Waits for the copy and reads its elements.
    pub(crate) fn read<T: Element>(mut self, to: &mut [T]) {
        let Some(pinned) = self.pinned.take() else { return };
        self.cuda.make_current();
        pinned.wait();
        assert!(size_of_val(to) <= pinned.n_bytes, "fetched less than {} elements", to.len());
        // SAFETY: the copy is done; it wrote as many bytes as `to` has, all of them numbers.
        unsafe { std::ptr::copy_nonoverlapping(pinned.start.cast::<T>(), to.as_mut_ptr(), to.len()) };
        self.cuda.keep_pinned(pinned);
    }
}

impl std::fmt::Debug for PinnedDownload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PinnedDownload")
    }
}

impl Drop for PinnedDownload {
    fn drop(&mut self) {
        // The copy may still be under way: the block's event keeps others from using it until then.
        if let Some(pinned) = self.pinned.take() {
            self.cuda.keep_pinned(pinned);
        }
    }
}
