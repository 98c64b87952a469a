use super::simd::Simd;
use super::{Cpu, Shared, with_scratch};

#[test]
fn rows_are_covered_once_whatever_the_threads() {
    for threads in [1, 2, 7] {
        let cpu = Cpu::new(threads, Simd::Scalar);
        for (rows, cost) in [(0, 1), (1, 1 << 20), (5, 1 << 20), (1000, 1), (1000, 1000)] {
            let mut seen = vec![0u32; rows];
            let shared = Shared::new(&mut seen);
            cpu.rows(rows, cost, |range| {
                // SAFETY: ranges are disjoint; the assertion below would show it if they were not.
                unsafe { shared.range(range) }.iter_mut().for_each(|n| *n += 1);
            });
            assert!(seen.iter().all(|n| *n == 1), "{rows} rows of {cost} on {threads} threads");
        }
    }
}

#[test]
fn scratch_is_aligned_and_nests() {
    with_scratch(100, |a: &mut [f32]| {
        a.fill(1.0);
        with_scratch(50, |b: &mut [f32]| b.fill(2.0));
        assert_eq!(a.as_ptr().align_offset(64), 0);
        assert!(a.iter().all(|x| *x == 1.0));
    });
}
