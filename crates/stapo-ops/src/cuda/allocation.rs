//! Memory on the GPU, freed when dropped, and regions that tenants use in turn.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::result::{self, DriverError, ctx};
use cudarc::driver::sys;

use super::context::{Cuda, lock};
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
    source: Source,
}

/// Where the bytes of an allocation come from.
enum Source {
    /// The driver's memory pool.
    Pool,
    /// An allocation of the driver's for these bytes alone.
    Driver,
    /// A region that tenants share.
    Region(Lender),
}

impl std::fmt::Debug for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Allocation({} bytes)", self.n_bytes)
    }
}

impl Allocation {
    /// Long-lived memory, holding anything.
    pub(crate) fn new(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Allocation, OutOfMemory> {
        Self::allocate(cuda, n_bytes, if n_bytes <= MAX_POOLED_BYTES { Source::Pool } else { Source::Driver })
    }

    /// Long-lived memory of a region, holding anything.
    fn lent(cuda: &Arc<Cuda>, n_bytes: usize, lender: &Lender) -> Result<Allocation, OutOfMemory> {
        Self::allocate(cuda, n_bytes, Source::Region(lender.clone()))
    }

    /// Short-lived memory, holding anything. The pool keeps the memory for the next allocation.
    pub(crate) fn scratch(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Allocation, OutOfMemory> {
        Self::allocate(cuda, n_bytes, Source::Pool)
    }

    /// Long-lived memory that is cleared, of a region where there is a lender.
    pub(crate) fn zeros(
        cuda: &Arc<Cuda>,
        lender: Option<&Lender>,
        n_bytes: usize,
    ) -> Result<Allocation, OutOfMemory> {
        let allocation = match lender {
            Some(lender) => Allocation::lent(cuda, n_bytes, lender)?,
            None => Allocation::new(cuda, n_bytes)?,
        };
        if n_bytes > 0 {
            // SAFETY: the allocation has `n_bytes`.
            unsafe { result::memset_d8_async(allocation.address, 0, n_bytes, cuda.stream) }
                .or_panic("clearing memory");
        }
        Ok(allocation)
    }

    fn allocate(cuda: &Arc<Cuda>, n_bytes: usize, source: Source) -> Result<Allocation, OutOfMemory> {
        let mut allocation = Allocation { cuda: Arc::clone(cuda), address: 0, n_bytes, source };
        if n_bytes == 0 {
            return Ok(allocation);
        }
        cuda.make_current();
        // SAFETY: the memory is used on this stream only and freed once, when the allocation is dropped.
        let address = unsafe {
            match &allocation.source {
                Source::Pool => result::malloc_async(cuda.stream, n_bytes),
                Source::Driver => result::malloc_sync(n_bytes),
                Source::Region(lender) => Ok(lender.lend(n_bytes)?),
            }
        };
        match address {
            Ok(address) => {
                allocation.address = address;
                Ok(allocation)
            }
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                Err(OutOfMemory { bytes: n_bytes as u128, device: "the GPU" })
            }
            Err(error) => fail(CudaError::failed("asking for memory", error)),
        }
    }

    /// Panics for memory of a region that is lent to another tenant.
    #[track_caller]
    pub(super) fn check_tenant(&self) {
        if let Source::Region(lender) = &self.source {
            lender.check();
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
        // freed in the stream's order, `free_sync` waits for the whole stream, and a region's next tenant works on the
        // same stream. A failure means that the device is lost, and the memory with it.
        unsafe {
            let _ = ctx::set_current(self.cuda.context);
            let _ = match &self.source {
                Source::Pool => result::free_async(self.address, self.cuda.stream),
                Source::Driver => result::free_sync(self.address),
                Source::Region(lender) => {
                    lender.take_back(self.address);
                    Ok(())
                }
            };
        }
    }
}

/// Whose buffers a region holds at the moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tenant {
    /// Keys, values and activations of generation.
    Sampling,
    /// Gradients, and activations of training and scoring.
    Updating,
    /// Weights and activations of a model that judges responses.
    Judging,
}

impl Tenant {
    const ALL: [Tenant; 3] = [Tenant::Sampling, Tenant::Updating, Tenant::Judging];
}

/// Every lent range starts at a multiple of this, as allocations of the driver do.
const ALIGN: usize = 512;

/// Memory that each tenant divides as if it had the memory alone. Only buffers of the present tenant may be used: those
/// of the other tenants lie in the same bytes and hold anything when their turn comes.
pub(crate) struct RegionMemory {
    memory: Allocation,
    n_bytes: usize,
    present: AtomicUsize,
    /// For each tenant, the ranges that are lent, in order.
    lent: Mutex<[Vec<Lent>; Tenant::ALL.len()]>,
}

struct Lent {
    start: usize,
    end: usize,
    is_free: bool,
}

/// A tenant's claim on a region: long-lived allocations that are made with a lender come from its region.
#[derive(Clone)]
pub(crate) struct Lender {
    pub region: Arc<RegionMemory>,
    pub tenant: Tenant,
}

impl RegionMemory {
    pub(crate) fn new(cuda: &Arc<Cuda>, n_bytes: usize) -> Result<Arc<RegionMemory>, OutOfMemory> {
        let memory = Allocation::new(cuda, n_bytes)?;
        Ok(Arc::new(RegionMemory {
            memory,
            n_bytes,
            present: AtomicUsize::new(Tenant::Sampling as usize),
            lent: Mutex::default(),
        }))
    }

    pub(crate) fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    pub(crate) fn enter(&self, tenant: Tenant) -> Tenant {
        Tenant::ALL[self.present.swap(tenant as usize, Ordering::SeqCst)]
    }
}

impl Lender {
    /// Panics unless it is the tenant's turn.
    #[track_caller]
    pub(crate) fn check(&self) {
        let present = self.region.present.load(Ordering::SeqCst);
        assert!(
            present == self.tenant as usize,
            "a buffer of {:?} was used while the region's memory is lent to another tenant",
            self.tenant
        );
    }

    /// The address of `n_bytes` after the tenant's last range.
    pub(super) fn lend(&self, n_bytes: usize) -> Result<u64, OutOfMemory> {
        self.check();
        let lent = &mut lock(&self.region.lent)[self.tenant as usize];
        let start = lent.last().map_or(0, |last| last.end);
        let end = start.saturating_add(n_bytes).next_multiple_of(ALIGN);
        if end > self.region.n_bytes {
            return Err(OutOfMemory { bytes: n_bytes as u128, device: "the region of the GPU" });
        }
        lent.push(Lent { start, end, is_free: false });
        Ok(self.region.memory.address + start as u64)
    }

    /// Takes a range back. Its bytes can be lent again when every range after it is free too.
    pub(super) fn take_back(&self, address: u64) {
        let start = (address - self.region.memory.address) as usize;
        let lent = &mut lock(&self.region.lent)[self.tenant as usize];
        if let Some(range) = lent.iter_mut().find(|range| range.start == start && !range.is_free) {
            range.is_free = true;
        }
        while lent.last().is_some_and(|last| last.is_free) {
            lent.pop();
        }
    }
}
