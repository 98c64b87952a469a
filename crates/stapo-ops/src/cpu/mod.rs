//! The CPU: threads, instruction sets and the matrix product that the ops' `cpu.rs` files share.

mod context;
pub(crate) mod gemm;
pub mod peak;
mod pool;
pub(crate) mod simd;
#[cfg(test)]
mod tests;

pub(crate) use context::{CACHED_ROWS, Cpu, Shared, with_scratch};
