//! The CPU: threads, instruction sets, and the matrix product that the `cpu.rs` files of the ops share.

mod context;
pub(crate) mod gemm;
pub mod peak;
mod pool;
pub(crate) mod simd;
#[cfg(test)]
mod tests;

pub(crate) use context::{CACHED_ROWS, Cpu, Shared, with_scratch};
