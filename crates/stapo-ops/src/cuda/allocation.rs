//! Memory on the GPU, freed when dropped.

use std::sync::Arc;

use cudarc::driver::result::{self, DriverError, ctx};
use cudarc::driver::sys;

use super::context::Cuda;
use super::error::{CudaError, OrPanic, fail};
use crate::memory::OutOfMemory;

/// Largest long-lived allocation that comes from the driver's memory pool, which is fast. A larger one is allocated by
/// itself and goes back to the GPU when it is freed.
const MAX_POOLED_BYTES: usize = 32 << 20;

/// Bytes on the GPU.
pub(crate) struct Allocation {
    pub(crate) cuda: Arc<Cuda>,
    /// 0 for an allocation of no bytes.
    pub(crate) address: u64,
    n_bytes: usize,
    is_pooled: bool,
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({} bytes)", self.n_bytes)
    }
}

impl Allocation {
    /// Long-lived memory, holding anything.
    pub(crate) fn new(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Allocation, OutOfMemory> {
        Self::allocate(cuda, n_bytes, n_bytes <= MAX_POOLED_BYTES)
    }

    /// Short-lived memory, holding anything. The pool keeps the memory for the next allocation.
    pub(crate) fn scratch(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Allocation, OutOfMemory> {
        Self::allocate(cuda, n_bytes, true)
    }

    /// Long-lived memory that is cleared.
    pub(crate) fn zeros(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Allocation, OutOfMemory> {
        let allocation = Allocation::new(cuda, n_bytes)?;
        if n_bytes > 0 {
            // SAFETY: the allocation has `n_bytes`.
            unsafe { result::memset_d8_async(allocation.address, 0, n_bytes, cuda.stream) }
                .or_panic("clearing memory");
        }
        Ok(allocation)
    }

    fn allocate(cuda: &Arc<Cuda>, n_bytes: usize, is_pooled: bool) -> Result<Allocation, OutOfMemory> {
        let allocation = |address| Allocation { cuda: Arc::clone(cuda), address, n_bytes, is_pooled };
        if n_bytes == 0 {
            return Ok(allocation(0));
        }
        cuda.make_current();
        // SAFETY: the memory is used on this stream only and freed once, when the allocation is dropped.
        let address = unsafe {
            if is_pooled { result::malloc_async(cuda.stream, n_bytes) } else { result::malloc_sync(n_bytes) }
        };
        match address {
            Ok(address) => Ok(allocation(address)),
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(OutOfMemory { bytes: n_bytes as u128, device: "the GPU" })
            }
            Err(error) => fail(CudaError::failed("asking for memory", error)),
        }
    }

    /// The address of memory that its new owner frees.
    pub(super) fn leak(mut self) -> u64 {
        std::mem::take(&mut self.address)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        // SAFETY: the address is this allocation's own. Queued kernels finish first, because memory of the pool is
        // freed in the stream's order and `free_sync` waits for the whole stream. A failure means that the device is
        // lost, and the memory with it.
        unsafe {
            let _ = ctx::set_current(self.cuda.context);
            let _ = if self.is_pooled {
                result::free_async(self.address, self.cuda.stream)
            } else {
                result::free_sync(self.address)
            };
        }
    }
}
