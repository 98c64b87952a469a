//! Buffers and kernels.
//!
//! One folder per op: `mod.rs` holds the signature, the shapes and the contract, `cpu.rs` the kernel. Kernels are
//! written once over sixteen virtual lanes and instantiated for every instruction set and for f64; the laws that make
//! their results independent of batch, threads and instruction set are in `docs/numerics.md`.
//!
//! Callers hold a [`Device`], [`Buffer`]s and views; they never see an address or a backend. `T` is `f32`, or `f64` for
//! gradient checks. Lengths that do not fit are a programmer's fault and panic with the op, the argument and both
//! lengths.

mod buffer;
mod device;
mod gemm;
mod pool;
mod simd;

pub mod adamw;
pub mod attention;
pub mod cuda;
pub mod dtype;
pub mod embedding;
pub mod fused;
pub mod lm_head;
pub mod mapped;
pub mod matmul;
pub mod peak;
pub mod reduce;
pub mod residual;
pub mod rmsnorm;
pub mod rng;
pub mod rope;
pub mod sampling;
pub mod swiglu;
#[cfg(test)]
mod testing;

pub use buffer::{Arriving, Buffer, Element, Moment, OutOfMemory, View, ViewMut};
pub use device::{CpuOptions, Device, DeviceName, DeviceNameError, OptionError, Recording};
pub use matmul::{Shape, Weight};
pub use simd::{Float, Simd, SimdError};

/// What a gradient does to its destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// Overwrites it.
    Set,
    /// Adds to it; a chain continues from the value already there.
    Add,
}

#[track_caller]
fn check(op: &str, argument: &str, got: usize, expected: usize) {
    assert!(got == expected, "{op}: {argument} has {got} elements, expected {expected}");
}
