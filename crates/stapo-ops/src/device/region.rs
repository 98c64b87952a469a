//! Memory that the phases of training use in turn.

use std::sync::Arc;

use super::{Backend, Device};
pub use crate::cuda::Tenant;
use crate::cuda::{self, Lender};
use crate::memory::OutOfMemory;

/// Memory of a GPU that several tenants use in turn, each as if it had the memory alone. Buffers stay at their addresses, so
/// recorded CUDA graphs stay valid; their contents are lost while another tenant has its turn.
#[derive(Clone)]
pub struct Region(Arc<cuda::RegionMemory>);

impl Region {
    /// Begins the turn of a tenant, and returns the tenant before it. Its buffers hold anything. Using a buffer of another tenant
    /// panics from here on.
    pub fn enter(&self, tenant: Tenant) -> Tenant {
        self.0.enter(tenant)
    }

    pub fn n_bytes(&self) -> usize {
        self.0.n_bytes()
    }
}

impl Device {
    /// A region of `n_bytes`, whose first turn is [`Tenant::Sampling`]'s; `None` on a CPU, where the system hands out
    /// memory as it is touched.
    pub fn region(&self, n_bytes: usize) -> Result<Option<Region>, OutOfMemory> {
        match self.backend() {
            Backend::Cpu(_) => Ok(None),
            Backend::Cuda(cuda) => Ok(Some(Region(cuda::RegionMemory::new(cuda, n_bytes)?))),
        }
    }

    /// The same device with separate memory.
    #[must_use]
    pub fn outside_regions(&self) -> Device {
        Device { lender: None, ..self.clone() }
    }

    /// The same device with the memory of exact and compute buffers from `region`, as the tenant's, and that of weights on a
    /// device that trains none; weights in training and moments stay outside. Memory can be asked for only in the tenant's turn.
    #[must_use]
    pub fn in_region(&self, region: &Region, tenant: Tenant) -> Device {
        let lender = Lender { region: Arc::clone(&region.0), tenant };
        Device { lender: Some(lender), ..self.clone() }
    }
}
