use super::Dims;
use crate::cuda::kernels::{SWIGLU, SWIGLU_NARROW};
use crate::cuda::{Cuda, Kind, Slice, for_rows};

const THREADS: usize = 256;

pub(super) fn forward(cuda: &Cuda, d: Dims, gate_up: Slice, out: Slice) {
    let name = format!("swiglu_forward_{}", out.same(gate_up, "swiglu::forward").name());
    for_rows(d.tokens, |start, n| {
        let gate_up = gate_up.part(2 * start * d.width, 2 * n * d.width);
        let launch = cuda.kernel(&SWIGLU, &name).arg(gate_up).arg(out.part(start * d.width, n * d.width));
        launch.arg(d.width).run([d.width.div_ceil(8 * THREADS), n], THREADS, 0);
    });
}

/// Most rows that narrow.cu takes, its columns per block, and the bytes of shared memory it works in.
const NARROW_ROWS: usize = 64;
const NARROW_COLUMNS: usize = 64;
const NARROW_BYTES: usize = 8 * 2 * (128 + 64) * 64 + 1024;

/// Product and swiglu of few rows in one kernel. False: not for this device or shape, and nothing was done.
pub(super) fn of_product(cuda: &Cuda, d: Dims, x: Slice, weight: Slice, out: Slice) -> bool {
    let depth = weight.len / (2 * d.width).max(1);
    let fits = d.tokens <= NARROW_ROWS && d.width.is_multiple_of(NARROW_COLUMNS) && depth.is_multiple_of(64);
    if !(fits && cuda.is_hopper() && weight.kind == Kind::Bf16) {
        return false;
    }
    let launch = cuda.kernel(&SWIGLU_NARROW, "swiglu_narrow_bf16").arg(weight).arg(x).arg(out);
    let launch = launch.arg(d.tokens).arg(d.width).arg(depth);
    launch.run([d.width / NARROW_COLUMNS, usize::from(d.tokens > 0)], 256, NARROW_BYTES);
    true
}

pub(super) fn backward(cuda: &Cuda, d: Dims, gate_up: Slice, d_out: Slice, d_gate_up: Slice) {
    let op = "swiglu::backward";
    let name = format!("swiglu_backward_{}", d_gate_up.same(gate_up, op).same(d_out, op).name());
    for_rows(d.tokens, |start, n| {
        let wide = |slice: Slice| slice.part(2 * start * d.width, 2 * n * d.width);
        let launch = cuda.kernel(&SWIGLU, &name).arg(wide(gate_up));
        let launch = launch.arg(d_out.part(start * d.width, n * d.width)).arg(wide(d_gate_up));
        launch.arg(d.width).run([d.width.div_ceil(8 * THREADS), n], THREADS, 0);
    });
}
