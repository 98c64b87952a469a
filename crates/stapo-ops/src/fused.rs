//! Ops that do the work of several in one kernel.
//!
//! Law: a fused path gives the bits of its parts, one by one. Each file has the same shape: `fits` says whether the
//! fused kernel serves this GPU and these shapes, `run` launches the kernel, and the public `forward` takes the fused
//! kernel where it fits and calls the parts where it does not.

pub mod matmul_add_rmsnorm;
pub mod matmul_add_rmsnorm_matmul;
pub mod matmul_lora;
pub mod matmul_rmsnorm_add;
pub mod matmul_swiglu;
pub mod rope_paged_attention;
