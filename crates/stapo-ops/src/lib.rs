//! Buffers and kernels.
//!
//! One module per op: `<op>.rs` holds the signature, the shapes and the contract, `cpu.rs` the CPU kernel, `cuda.rs` and
//! a `.cu` file the GPU kernel. CPU kernels are written once over sixteen virtual lanes and instantiated for every
//! instruction set and for f64; the laws that make their results independent of batch, threads and instruction set are
//! in `docs/numerics.md`. `fused` holds the paths that do the work of several ops in one kernel.
//!
//! Callers hold a [`Device`], [`Buffer`]s and views; they never see an address or a backend. `T` is `f32`, or `f64` for
//! gradient checks. Lengths that do not fit are a programmer's fault and panic with the op, the argument and both
//! lengths.

mod buffer;
mod cpu;
mod device;
mod element;
mod heads;
mod host;
mod kernels;
mod memory;
mod reader;

pub mod adamw;
pub mod attention;
pub mod cuda;
pub mod deltanet;
pub mod dtype;
pub mod embedding;
pub mod fused;
pub mod lm_head;
pub mod lora;
pub mod mapped;
pub mod matmul;
pub mod noise;
pub mod output_gate;
pub mod quantised;
pub mod reduce;
pub mod residual;
pub mod rmsnorm;
pub mod rng;
pub mod rope;
pub mod sampling;
pub mod sha256;
pub mod swiglu;
#[cfg(test)]
mod testing;

// The tests on a GPU look at private items, so they are built with the library. Their files are with the other tests.
#[cfg(test)]
#[path = "../tests/cuda"]
mod cuda_tests {
    mod exact;
    mod exact_deltanet;
    mod exact_few_rows;
    mod exact_lora;
    mod exact_many_rows;
    mod exact_prefill;
    mod exact_shared;
    mod exact_short;
    mod lora_case;
    mod parity;
    mod parts;
    mod shared_out;
}

pub use buffer::{Buffer, Form, Moment, PendingDownload, Stored, View, ViewMut};
pub use cpu::peak;
pub use cpu::simd::{Simd, SimdError};
pub use device::{
    CpuOptions, Device, DeviceName, DeviceNameError, Mark, OptionError, Recording, Region, Tenant,
};
pub use element::Element;
pub use host::HostBuffer;
pub use matmul::{Shape, Weight, WeightRows};
pub use memory::OutOfMemory;
pub use reader::Reader;

/// A floating-point element type of the ops: `f32`, or `f64` for gradient checks.
pub trait Float: cpu::simd::Real + kernels::Kernels {}
impl Float for f32 {}
impl Float for f64 {}

/// What an op does to the destination of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// Overwrites the destination.
    Set,
    /// Adds to the destination; a chain of additions continues from the value already there.
    Add,
}

/// Elements from one row to the next of a view of `rows` rows. A row may have further elements after its `width`: where
/// adapters are joined, see `lora`.
#[track_caller]
fn pitch_of(op: &str, argument: &str, len: usize, rows: usize, width: usize) -> usize {
    let pitch = len.checked_div(rows).unwrap_or(width);
    let is_whole = pitch >= width && len == rows * pitch;
    assert!(is_whole, "{op}: {argument} has {len} elements, expected {rows} rows of at least {width}");
    pitch
}

#[track_caller]
fn check(op: &str, argument: &str, got: usize, expected: usize) {
    assert!(got == expected, "{op}: {argument} has {got} elements, expected {expected}");
}
