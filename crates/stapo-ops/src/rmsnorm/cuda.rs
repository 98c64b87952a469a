use std::sync::Arc;

use super::Dims;
use crate::Write;
use crate::cuda::kernels::RMSNORM;
use crate::cuda::{Cuda, Kind, Memory, Slice, add_column_sums, parts_for};

/// Most threads of a row, each with eight columns; a wider row takes several turns.
const MAX_THREADS: usize = 1024;
/// So few rows leave room for the next kernel to begin.
const FEW_ROWS: usize = 64;
/// Widest row whose gradient a block holds.
const MAX_WIDTH: usize = 8192;

/// What is added to x first, of which rows (`None`: all in order), and where the sum goes.
pub(super) struct Addition {
    pub delta: Slice,
    pub rows: Option<Slice>,
    pub sum: Slice,
}

pub(super) fn forward(
    cuda: &Cuda,
    d: Dims,
    x: Slice,
    add: Option<Addition>,
    weight: Slice,
    out: Slice,
    inv_rms: Slice,
) {
    let op = "rmsnorm::forward";
    let (kind, inv_rms) = (out.same(x, op).same(weight, op).name(), inv_rms.f32(op));
    let threads = d.width.div_ceil(8).next_multiple_of(32).min(MAX_THREADS);
    let (name, launch);
    match add {
        None => {
            name = format!("rmsnorm_forward_{kind}");
            launch = cuda.kernel(&RMSNORM, &name).arg(x).arg(weight);
        }
        Some(Addition { delta, rows, sum }) => {
            name = format!("rmsnorm_forward_add_{kind}");
            let (delta, sum) = (delta.same(x, op), sum.same(x, op));
            launch = cuda.kernel(&RMSNORM, &name).arg(x).arg(delta).arg(rows).arg(weight).arg(sum);
        }
    }
    let is_early = cuda.is_hopper() && d.tokens <= FEW_ROWS;
    launch.arg(out).arg(inv_rms).arg(d.width).arg(d.eps as f32).early(is_early).run(
        [d.tokens, 1],
        threads,
        0,
    );
}

pub(super) fn backward(
    cuda: &Arc<Cuda>,
    d: Dims,
    (x, weight, inv_rms): (Slice, Slice, Slice),
    d_out: Slice,
    write: Write,
    d_x: Slice,
    d_weight: Slice,
) {
    let op = "rmsnorm::backward";
    let kind = d_x.same(x, op).same(weight, op).same(d_out, op).name();
    let pass = if write == Write::Add { "add" } else { "set" };
    assert!(d.width <= MAX_WIDTH, "{op}: rows of {}, at most {MAX_WIDTH} on a GPU", d.width);
    let n_parts = parts_for(cuda, d.tokens);
    let parts = Memory::scratch(cuda, n_parts * d.width, Kind::F32);
    let name = format!("rmsnorm_backward_{pass}_{kind}");
    let launch = cuda.kernel(&RMSNORM, &name).arg(x).arg(weight).arg(inv_rms.f32(op)).arg(d_out).arg(d_x);
    let launch = launch.arg(parts.slice()).arg(d.tokens).arg(d.width);
    launch.run([n_parts, 1], d.width.div_ceil(8).next_multiple_of(32), 0);
    add_column_sums(cuda, parts.slice(), n_parts, d_weight.f32(op));
}
