use super::{Dims, Gate};
use crate::cuda::kernels::SWIGLU;
use crate::cuda::{Cuda, Slice, for_rows};
use crate::pitch_of;

const THREADS: usize = 256;

impl Gate {
    /// The kernels' name for the gated product.
    fn name(self) -> &'static str {
        match self {
            Self::Silu => "swiglu",
            Self::GeluTanh => "geglu",
        }
    }
}

pub(super) fn forward(cuda: &Cuda, d: Dims, gate_up: Slice, out: Slice) {
    let op = "swiglu::forward";
    let name = format!("{}_forward_{}", d.gate.name(), out.same(gate_up, op).name());
    let pitch = pitch_of(op, "out", out.len, d.tokens, d.width);
    for_rows(d.tokens, |start, n| {
        let gate_up = gate_up.part(2 * start * d.width, 2 * n * d.width);
        let launch = cuda.kernel(&SWIGLU, &name).arg(gate_up).arg(out.part(start * pitch, n * pitch));
        let launch = launch.arg(d.width).arg(pitch).programmatic_launch(cuda.launches_ahead(d.tokens));
        launch.run([d.width.div_ceil(8 * THREADS), n], THREADS, 0);
    });
}

pub(super) fn backward(cuda: &Cuda, d: Dims, gate_up: Slice, d_out: Slice, d_gate_up: Slice) {
    let op = "swiglu::backward";
    let name = format!("{}_backward_{}", d.gate.name(), d_gate_up.same(gate_up, op).same(d_out, op).name());
    let pitch = pitch_of(op, "d_gate_up", d_gate_up.len, d.tokens, 2 * d.width);
    for_rows(d.tokens, |start, n| {
        let gate_up = gate_up.part(2 * start * d.width, 2 * n * d.width);
        let launch = cuda.kernel(&SWIGLU, &name).arg(gate_up);
        let launch = launch.arg(d_out.part(start * d.width, n * d.width));
        launch.arg(d_gate_up.part(start * pitch, n * pitch)).arg(d.width).arg(pitch).run(
            [d.width.div_ceil(8 * THREADS), n],
            THREADS,
            0,
        );
    });
}
