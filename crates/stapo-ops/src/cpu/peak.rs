//! The measured arithmetic peak of the CPU, which benchmarks compare with.

use std::time::Instant;

use crate::Device;
use crate::cpu::simd::{Kernel, Lanes, Real};

/// Floating-point operations per second in f32 on all threads of the device, a fused multiply-add counted as two:
/// independent chains in registers, the best of several tries.
pub fn flops(device: &Device) -> f64 {
    let cpu = device.as_cpu();
    let one = || {
        let start = Instant::now();
        let n_tasks = 4 * cpu.threads();
        cpu.tasks(n_tasks, |_| cpu.dispatch::<f32, _>(Burn));
        (n_tasks * CHAINS * STEPS * crate::cpu::simd::WIDTH * 2) as f64 / start.elapsed().as_secs_f64()
    };
    (0..20).map(|_| one()).fold(0.0, f64::max)
}

/// Chains of each half: enough to hide the latency of two arithmetic units at four cycles, and few enough for AVX2,
/// where sixteen lanes take two of the sixteen registers.
const CHAINS: usize = 6;
const STEPS: usize = 400_000;

struct Burn;

impl<E: Real> Kernel<E> for Burn {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let factor = l.splat(E::from_f64(0.999));
        let mut low = [l.splat(E::ONE); CHAINS];
        let mut high = [l.splat(E::ONE); CHAINS];
        for _ in 0..STEPS / 2 {
            for x in &mut low {
                *x = l.fma(*x, factor, factor);
            }
            for x in &mut high {
                *x = l.fma(*x, factor, factor);
            }
        }
        for x in low.into_iter().chain(high) {
            std::hint::black_box(l.sum(x));
        }
    }
}
