use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Cuda, Slice};

pub(crate) fn add(cuda: &Cuda, x: Slice, addend: Slice) {
    let name = format!("residual_add_{}", x.same(addend, "residual::add").name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(x).arg(addend).arg(x.len);
    launch.run([x.len.div_ceil(8 * 256), 1], 256, 0);
}

pub(crate) fn scale(cuda: &Cuda, x: Slice, factor: f64) {
    let name = format!("residual_scale_{}", x.name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(x);
    launch.arg(factor as f32).arg(x.len).run([x.len.div_ceil(8 * 256), 1], 256, 0);
}

pub(crate) fn copy_rows(cuda: &Cuda, width: usize, x: Slice, out: Slice, pitch: usize) {
    let name = format!("residual_copy_rows_{}", out.same(x, "residual::copy_rows").name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(x).arg(out).arg(width).arg(pitch);
    launch.run([x.len / width.max(1), 1], 256, 0);
}
