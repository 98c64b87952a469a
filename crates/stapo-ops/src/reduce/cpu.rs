use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Float;
use crate::cpu::simd::{Kernel, Lanes};
use crate::cpu::{Cpu, Shared};
use crate::rmsnorm::cpu::dot;

const BLOCK: usize = 4096;

pub(crate) fn square_parts<E: Float>(cpu: &Cpu, x: &[E]) -> Vec<f64> {
    let mut sums = vec![0.0; x.len().div_ceil(BLOCK)];
    let n_blocks = sums.len();
    let shared = Shared::new(&mut sums);
    cpu.rows(n_blocks, BLOCK, |blocks| {
        let part = &x[blocks.start * BLOCK..(blocks.end * BLOCK).min(x.len())];
        // SAFETY: each task has its own blocks.
        cpu.dispatch(SumSquares { x: part, sums: unsafe { shared.range(blocks) } });
    });
    sums
}

struct SumSquares<'a, E> {
    x: &'a [E],
    sums: &'a mut [f64],
}

impl<E: Float> Kernel<E> for SumSquares<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        for (x, sum) in self.x.chunks(BLOCK).zip(self.sums) {
            *sum = dot(l, x, x).to_f64();
        }
    }
}

/// The sum modulo 2^64 of a hash of place and value, for each block of elements.
pub(crate) fn fingerprints<E: Float>(cpu: &Cpu, x: &[E]) -> Vec<u64> {
    let mut sums = vec![0u64; x.len().div_ceil(BLOCK)];
    let n_blocks = sums.len();
    let shared = Shared::new(&mut sums);
    cpu.rows(n_blocks, BLOCK, |blocks| {
        let part = &x[blocks.start * BLOCK..(blocks.end * BLOCK).min(x.len())];
        // SAFETY: each task has its own blocks.
        for (part, sum) in part.chunks(BLOCK).zip(unsafe { shared.range(blocks) }) {
            // Adding 0 turns -0 into 0.
            let bits = |x: &E| (x.to_f64() + 0.0).to_bits();
            *sum = part.iter().zip(0u64..).fold(0, |sum, (x, at)| sum.wrapping_add(hash(at, bits(x))));
        }
    });
    sums
}

fn hash(at: u64, bits: u64) -> u64 {
    let x = at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ bits;
    let x = (x ^ x >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^ x >> 29
}

pub(crate) fn first_non_finite<E: Float>(cpu: &Cpu, x: &[E]) -> Option<usize> {
    let first = AtomicUsize::new(usize::MAX);
    cpu.rows(x.len().div_ceil(BLOCK), BLOCK, |blocks| {
        let start = blocks.start * BLOCK;
        for (idx, part) in x[start..(blocks.end * BLOCK).min(x.len())].chunks(BLOCK).enumerate() {
            // `0 * x` is 0 for a finite x and NaN otherwise, so the sum shows without a branch whether all are finite.
            let suspect = part.iter().fold(E::ZERO, |sum, x| sum + *x * E::ZERO);
            if suspect != E::ZERO
                && let Some(at) = part.iter().position(|x| !x.is_finite())
            {
                first.fetch_min(start + idx * BLOCK + at, Ordering::Relaxed);
                return;
            }
        }
    });
    let first = first.into_inner();
    (first != usize::MAX).then_some(first)
}
