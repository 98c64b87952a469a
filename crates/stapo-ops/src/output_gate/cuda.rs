use super::Dims;
use crate::cuda::kernels::OUTPUT_GATE;
use crate::cuda::{Cuda, Slice};
use crate::pitch_of;

const THREADS: usize = 256;

/// Blocks of threads for rows of `width` columns.
fn grid(d: Dims, width: usize) -> [usize; 2] {
    [d.tokens, width.div_ceil(THREADS)]
}

pub(super) fn divide(cuda: &Cuda, d: Dims, projected: Slice, qkv: Slice, gate: Slice) {
    let op = "output_gate::divide";
    let name = format!("output_gate_divide_{}", projected.same(qkv, op).same(gate, op).name());
    let (query, width) = (d.heads.out_width(), d.heads.qkv_width());
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(projected).arg(qkv).arg(gate);
    launch.arg(d.heads.dim).arg(query).arg(width).run(grid(d, width), THREADS, 0);
}

pub(super) fn join(cuda: &Cuda, d: Dims, qkv: Slice, gate: Slice, projected: Slice) {
    let op = "output_gate::join";
    let name = format!("output_gate_join_{}", projected.same(qkv, op).same(gate, op).name());
    let (query, width) = (d.heads.out_width(), d.heads.qkv_width());
    let pitch = pitch_of(op, "projected", projected.len, d.tokens, d.projected_width());
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(qkv).arg(gate).arg(projected);
    launch.arg(d.heads.dim).arg(query).arg(width).arg(pitch).run(grid(d, width), THREADS, 0);
}

pub(super) fn forward(cuda: &Cuda, d: Dims, attended: Slice, gate: Slice, out: Slice) {
    let op = "output_gate::forward";
    let name = format!("output_gate_forward_{}", out.same(attended, op).same(gate, op).name());
    let width = d.heads.out_width();
    let pitch = pitch_of(op, "out", out.len, d.tokens, width);
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(attended).arg(gate).arg(out).arg(width).arg(pitch);
    launch.run(grid(d, width), THREADS, 0);
}

pub(super) fn backward(
    cuda: &Cuda,
    d: Dims,
    (attended, gate): (Slice, Slice),
    d_out: Slice,
    (d_attended, d_gate): (Slice, Slice),
) {
    let op = "output_gate::backward";
    let kind = d_gate.same(attended, op).same(gate, op).same(d_out, op).same(d_attended, op).name();
    let name = format!("output_gate_backward_{kind}");
    let width = d.heads.out_width();
    let launch = cuda.kernel(&OUTPUT_GATE, &name).arg(attended).arg(gate).arg(d_out);
    launch.arg(d_attended).arg(d_gate).arg(width).run(grid(d, width), THREADS, 0);
}
