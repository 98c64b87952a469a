use std::sync::Arc;

use super::Dims;
use crate::cuda::kernels::RMSNORM;
use crate::cuda::{Cuda, Kind, Memory, Slice, add_column_sums, parts_for};
use crate::matmul::cuda::{for_chains, is_deep};
use crate::{Write, matmul};

/// Most threads of a row, each with eight columns; a wider row takes several turns.
const MAX_THREADS: usize = 1024;
/// Widest row whose gradient a block holds.
const MAX_WIDTH: usize = 8192;

/// What is added to x first, of which rows (`None`: all in order), and where the sum goes.
pub(super) struct Addition {
    pub delta: Delta,
    pub rows: Option<Slice>,
    pub sum: Slice,
}

pub(super) enum Delta {
    Rows(Slice),
    /// Of a deep product, `[n, T, D]` in f32: to be added up and rounded first.
    Chains(Slice),
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
            let (delta, chains) = match delta {
                Delta::Rows(delta) => (Some(delta.same(x, op)), None),
                Delta::Chains(chains) => (None, Some(chains.f32(op))),
            };
            let n_chains = chains.map_or(0, |chains| chains.len / x.len.max(1));
            let begun = cuda.kernel(&RMSNORM, &name).arg(x).arg(delta).arg(chains).arg(n_chains);
            launch = begun.arg(rows).arg(weight).arg(sum.same(x, op));
        }
    }
    // Between products of few rows, which are early too.
    let is_early = cuda.is_hopper() && d.tokens <= matmul::narrow::ROWS;
    let launch = launch.arg(out).arg(inv_rms).arg(d.width).arg(d.eps as f32);
    launch.early(is_early).run([d.tokens, 1], threads, 0);
}

/// `sum = x + factor matrix^T`, its norm, without the product in between. False: not a deep product, and nothing was done.
pub(super) fn forward_add_product(
    cuda: &Arc<Cuda>,
    d: Dims,
    x: Slice,
    (factor, matrix): (Slice, Slice),
    weight: Slice,
    (sum, out, inv_rms): (Slice, Slice, Slice),
) -> bool {
    let inputs = matrix.len / d.width.max(1);
    let product = matmul::Dims { tokens: d.tokens, inputs, outputs: d.width };
    if !is_deep(product, matrix) {
        return false;
    }
    for_chains(cuda, product, factor, matrix, |start, n, chains| {
        let rows = |slice: Slice| slice.part(start * d.width, n * d.width);
        let add = Addition { delta: Delta::Chains(chains), rows: None, sum: rows(sum) };
        let d = Dims { tokens: n, ..d };
        forward(cuda, d, rows(x), Some(add), weight, rows(out), inv_rms.part(start, n));
    });
    true
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
