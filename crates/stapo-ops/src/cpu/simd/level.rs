//! The instruction-set level, chosen at run time.

use super::{Kernel, scalar};

/// An instruction-set level of the f32 kernels. All levels give the same bits; they differ in speed only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Simd {
    /// Plain Rust; slow, runs anywhere.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512F.
    Avx512,
    /// 64-bit Arm.
    Neon,
}

/// A name that is no level, or a level that this CPU lacks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SimdError {
    #[error("simd level {0:?} is unknown\nhint: use scalar, avx2, avx512 or neon")]
    Unknown(String),
    #[error("simd level {} is not supported by this cpu\nhint: the best here is {}", .0.name(), Simd::best().name())]
    Unsupported(Simd),
}

impl Simd {
    const ALL: [Simd; 4] = [Simd::Scalar, Simd::Avx2, Simd::Avx512, Simd::Neon];

    /// The fastest level of this CPU.
    pub fn best() -> Simd {
        Self::available().last().copied().unwrap_or(Simd::Scalar)
    }

    /// Every level this CPU can run, slowest first.
    pub fn available() -> Vec<Simd> {
        Self::ALL.into_iter().filter(|level| level.is_supported()).collect()
    }

    pub fn is_supported(self) -> bool {
        match self {
            Simd::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => is_x86_feature_detected!("avx512f") && Simd::Avx2.is_supported(),
            #[cfg(target_arch = "aarch64")]
            Simd::Neon => true,
            _ => false,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Simd::Scalar => "scalar",
            Simd::Avx2 => "avx2",
            Simd::Avx512 => "avx512",
            Simd::Neon => "neon",
        }
    }

    /// The supported level called `name`.
    pub fn parse(name: &str) -> Result<Simd, SimdError> {
        let level = Self::ALL.into_iter().find(|level| level.name() == name);
        let level = level.ok_or_else(|| SimdError::Unknown(name.to_owned()))?;
        if level.is_supported() { Ok(level) } else { Err(SimdError::Unsupported(level)) }
    }
}

/// Runs the kernel at the level, which the CPU must support: levels come from [`Simd::best`] or [`Simd::parse`], and
/// `Device::cpu` checks them again.
#[inline]
pub(super) fn run<K: Kernel<f32>>(simd: Simd, kernel: K) {
    match simd {
        Simd::Scalar => kernel.run(scalar::Wide32),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Device::cpu` refuses levels that are not supported.
        Simd::Avx2 => unsafe { super::x86_token::run_avx2(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Simd::Avx512 => unsafe { super::x86_token::run_avx512(kernel) },
        #[cfg(target_arch = "aarch64")]
        Simd::Neon => kernel.run(super::neon::Neon),
        #[allow(unreachable_patterns)]
        other => panic!("simd level {} does not exist on this architecture", other.name()),
    }
}
