use std::sync::Arc;

use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Cuda, Slice};

pub(super) fn fill(cuda: &Arc<Cuda>, key: u64, factor: f32, out: Slice) {
    let (exact, stored) = (out.exact_master(), out);
    if out.len == 0 {
        return;
    }
    let name = format!("noise_{}", exact.name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(exact).arg(exact.len).arg(key).arg(factor);
    launch.run([exact.len.div_ceil(256), 1], 256, 0);
    cuda.round_master(stored);
}
