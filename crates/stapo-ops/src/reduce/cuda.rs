use std::sync::Arc;

use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Cuda, ElementType, Memory, Slice};

/// Elements whose squares one block of threads adds.
const BLOCK: usize = 16384;

/// Waits once for all buffers.
pub(super) fn sum_squares(cuda: &Arc<Cuda>, buffers: &[Slice]) -> f64 {
    let n_parts: usize = buffers.iter().map(|x| x.len.div_ceil(BLOCK)).sum();
    let parts_memory = Memory::scratch(cuda, n_parts, ElementType::F64);
    let parts = parts_memory.slice();
    let mut at = 0;
    for x in buffers {
        let n = x.len.div_ceil(BLOCK);
        let launch = cuda.kernel(&ELEMENTWISE, "reduce_square_parts").arg(x.f32("reduce::sum_squares"));
        launch.arg(parts.part(at, n)).arg(x.len).run([n, 1], 256, 0);
        at += n;
    }
    let total_memory = Memory::scratch(cuda, 1, ElementType::F64);
    let total = total_memory.slice();
    cuda.kernel(&ELEMENTWISE, "reduce_sum_parts").arg(parts).arg(total).arg(n_parts).run([1, 1], 256, 0);
    let mut sum = [0.0f64];
    cuda.read(total, &mut sum);
    sum[0]
}

pub(super) fn first_non_finite(cuda: &Arc<Cuda>, x: Slice) -> Option<usize> {
    let first_memory = Memory::scratch(cuda, 1, ElementType::F64);
    let first = first_memory.slice();
    cuda.write(&[f64::from_bits(u64::MAX)], first);
    let launch = cuda.kernel(&ELEMENTWISE, "reduce_first_non_finite").arg(x.f32("reduce::first_non_finite"));
    launch.arg(first).arg(x.len).run([x.len.div_ceil(256), 1], 256, 0);
    let mut found = [0.0f64];
    cuda.read(first, &mut found);
    usize::try_from(found[0].to_bits()).ok().filter(|place| *place < x.len)
}
