//! The GPU. Its libraries are found at run time, and its kernels are compiled at start.

mod allocation;
mod arguments;
mod blas;
mod context;
mod error;
mod event;
mod graph;
mod grid;
pub mod kernels;
mod launch;
mod libraries;
mod memory;
mod module;
mod nccl;
mod nccl_library;
mod pinned;
mod probe;
mod product;
mod signal;
mod slice;
mod table;
mod tensor_map;
#[cfg(test)]
mod tests;
mod transfer;

pub use allocation::Tenant;
pub(crate) use allocation::{Lender, RegionMemory};
pub(crate) use arguments::Fields;
pub(crate) use blas::{Columns, StridedBatch};
pub(crate) use context::Cuda;
pub use context::{CudaOptions, Precision, Training};
pub use error::{CudaError, guard, is_failing};
pub(crate) use event::Event;
pub(crate) use graph::Graph;
pub(crate) use grid::{add_column_sums, for_rows, parts_for};
pub(crate) use launch::Launch;
pub use libraries::{Library, SEARCH_VARIABLE};
pub(crate) use memory::Memory;
pub use nccl::{Communicator, unique_id};
pub use nccl_library::{ID_BYTES, nccl_version};
pub use probe::{Found, FoundLibrary, Gpu, OLDEST_CAPABILITY, probe};
pub(crate) use product::{MatrixProduct, Placement, SPLIT_K_BYTES};
pub(crate) use slice::{ElementType, Slice};
pub(crate) use table::upload_table;
pub(crate) use tensor_map::{TILE_COLUMNS, TensorMap};
pub(crate) use transfer::PinnedDownload;
