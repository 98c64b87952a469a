//! The GPU: libraries found at run time, kernels compiled at start.

mod blas;
mod context;
mod error;
#[cfg(test)]
mod exact;
mod fields;
mod graph;
mod grid;
pub mod kernels;
mod launch;
mod libraries;
mod map;
mod memory;
#[cfg(test)]
mod parity;
mod probe;
#[cfg(test)]
mod tests;
mod transfer;

pub(crate) use blas::{Columns, PARTS_BYTES, Product};
pub(crate) use context::Cuda;
pub use context::{CudaOptions, Precision, Training};
pub use error::{CudaError, guard, is_failing};
pub(crate) use fields::Fields;
pub(crate) use graph::Graph;
pub(crate) use grid::{add_column_sums, for_rows, parts_for};
pub(crate) use launch::Launch;
pub use libraries::{Library, SEARCH_VARIABLE};
pub(crate) use map::Map;
pub use memory::Stored;
pub(crate) use memory::{Kind, Memory, Slice};
pub use probe::{Found, Gpu, OLDEST_CAPABILITY, Part, probe};
pub(crate) use transfer::Arriving;
