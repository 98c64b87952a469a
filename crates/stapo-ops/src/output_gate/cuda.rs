use super::Dims;
use crate::cuda::kernels::OUTPUT_GATE;
use crate::cuda::{Cuda, Slice};
use crate::matmul::small_m;
use crate::pitch_of;

const THREADS: usize = 256;

/// Columns of a thread, for rows `pitch` apart: heads and rows of whole eights begin at multiples of 16 bytes.
fn columns(d: Dims, pitch: usize) -> usize {
    if d.heads.dim.is_multiple_of(8) && pitch.is_multiple_of(8) { 8 } else { 1 }
}

fn name(kernel: &str, rows: Slice, each: usize) -> String {
    format!("output_gate_{kernel}_{}_{each}", rows.name())
}

/// Whether the kernels in front and behind are decode's, which use programmatic dependent launch.
fn is_decode(cuda: &Cuda, d: Dims) -> bool {
    cuda.is_hopper() && d.tokens <= small_m::MAX_ROWS
}

/// Blocks of threads for rows of `width` columns, `each` for a thread.
fn grid(d: Dims, width: usize, each: usize) -> [usize; 2] {
    [d.tokens, width.div_ceil(each * THREADS)]
}

pub(super) fn divide(cuda: &Cuda, d: Dims, projected: Slice, qkv: Slice, gate: Slice) {
    let op = "output_gate::divide";
    let each = columns(d, d.projected_width());
    let name = name("divide", projected.same(qkv, op).same(gate, op), each);
    let (query, width) = (d.heads.out_width(), d.heads.qkv_width());
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(projected).arg(qkv).arg(gate);
    launch.arg(d.heads.dim).arg(query).arg(width).programmatic_launch(is_decode(cuda, d)).run(
        grid(d, width, each),
        THREADS,
        0,
    );
}

pub(super) fn join(cuda: &Cuda, d: Dims, qkv: Slice, gate: Slice, projected: Slice) {
    let op = "output_gate::join";
    let (query, width) = (d.heads.out_width(), d.heads.qkv_width());
    let pitch = pitch_of(op, "projected", projected.len, d.tokens, d.projected_width());
    let each = columns(d, pitch);
    let name = name("join", projected.same(qkv, op).same(gate, op), each);
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(qkv).arg(gate).arg(projected);
    launch.arg(d.heads.dim).arg(query).arg(width).arg(pitch).run(grid(d, width, each), THREADS, 0);
}

pub(super) fn forward(cuda: &Cuda, d: Dims, attended: Slice, gate: Slice, out: Slice) {
    let op = "output_gate::forward";
    let width = d.heads.out_width();
    let pitch = pitch_of(op, "out", out.len, d.tokens, width);
    let each = columns(d, pitch);
    let name = name("forward", out.same(attended, op).same(gate, op), each);
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(attended).arg(gate).arg(out).arg(width).arg(pitch);
    launch.programmatic_launch(is_decode(cuda, d)).run(grid(d, width, each), THREADS, 0);
}

pub(super) fn backward(
    cuda: &Cuda,
    d: Dims,
    (attended, gate): (Slice, Slice),
    d_out: Slice,
    (d_attended, d_gate): (Slice, Slice),
) {
    let op = "output_gate::backward";
    let width = d.heads.out_width();
    let each = columns(d, width);
    let rows = d_gate.same(attended, op).same(gate, op).same(d_out, op).same(d_attended, op);
    let name = name("backward", rows, each);
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(attended).arg(gate).arg(d_out);
    launch.arg(d_attended).arg(d_gate).arg(width).run(grid(d, width, each), THREADS, 0);
}
