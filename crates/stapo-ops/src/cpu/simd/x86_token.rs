//! Tokens that prove that the CPU has an instruction set: a function that is given a token may use the instructions.

use super::Kernel;

/// Proof of AVX2 and FMA: only [`run_avx2`] makes it.
#[derive(Clone, Copy)]
pub struct Avx2(());
/// Proof of AVX-512F, AVX2 and FMA: only [`run_avx512`] makes it.
#[derive(Clone, Copy)]
pub struct Avx512(());

/// # Safety
/// The CPU must have AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn run_avx2<K: Kernel<f32>>(kernel: K) {
    kernel.run(Avx2(()));
}

/// # Safety
/// The CPU must have AVX2, FMA and AVX-512F.
#[target_feature(enable = "avx2,fma,avx512f")]
pub(super) unsafe fn run_avx512<K: Kernel<f32>>(kernel: K) {
    kernel.run(Avx512(()));
}
