use std::sync::Arc;

use super::{Dims, Saved};
use crate::cuda::kernels::{RMSNORM, RMSNORM_FLOAT, RMSNORM_WARPS, Source};
use crate::cuda::{Cuda, ElementType, Fields, Memory, Slice, add_column_sums, parts_for};
use crate::{Float, Write, pitch_of};

/// The most threads of a row, each with eight columns; the threads of a wider row loop.
const MAX_THREADS: usize = 1024;
/// Rows from which on each has a warp: fewer leave multiprocessors without one.
const MANY_ROWS: usize = 1024;
/// Warps of a block that takes a row with each.
const WARPS: usize = 8;
/// The widest row whose gradient a block of threads holds in registers.
const MAX_WIDTH: usize = 8192;

/// What is added to x before the norm.
pub(crate) struct Addition {
    pub addend: Addend,
    /// Row numbers of x and of the addend, `[T]`; `None`: all rows in order.
    pub rows: Option<Slice>,
    /// Where the sum goes, `[T, D]`.
    pub sum: Slice,
}

pub(crate) enum Addend {
    Rows(Slice),
    /// The partial sums of a split-K product, `[n, T, D]` in f32. The kernel adds them up and rounds the result first.
    SplitK(Slice),
}

pub(crate) fn forward(
    cuda: &Cuda,
    d: Dims,
    x: Slice,
    add: Option<Addition>,
    weight: Slice,
    normed: Slice,
    inv_rms: Slice,
) {
    let op = "rmsnorm::forward";
    let kind = normed.same(x, op).same(weight, op).name();
    let threads = d.width.div_ceil(8).next_multiple_of(32).min(MAX_THREADS);
    let (name, launch);
    match add {
        Some(Addition { addend: Addend::Rows(addend), rows: None, sum })
            if kind == ElementType::Bf16.name() && fits_warps(d) =>
        {
            let addend = addend.same(x, op);
            return forward_add_by_warps(cuda, d, (x, addend), weight, sum.same(x, op), (normed, inv_rms));
        }
        None => {
            name = format!("rmsnorm_forward_{kind}");
            launch = cuda.kernel(source(x), &name).arg(x).arg(weight);
        }
        Some(Addition { addend, rows, sum }) => {
            name = format!("rmsnorm_forward_add_{kind}");
            let (addend, partials) = match addend {
                Addend::Rows(addend) => (Some(addend.same(x, op)), None),
                Addend::SplitK(partials) => (None, Some(partials.f32(op))),
            };
            let n_splits = partials.map_or(0, |partials| partials.len / x.len.max(1));
            let begun = cuda.kernel(source(x), &name).arg(x).arg(addend).arg(partials).arg(n_splits);
            launch = begun.arg(rows).arg(weight).arg(sum.same(x, op));
        }
    }
    let pitch = pitch_of(op, "normed", normed.len, d.tokens, d.width);
    let launch = launch.arg(normed).arg(pitch).arg(inv_rms.f32(op)).arg(d.width).arg(d.eps as f32);
    launch.programmatic_launch(cuda.launches_ahead(d.tokens)).run([d.tokens, 1], threads, 0);
}

/// The kernels for rows that are stored as x is.
fn source(x: Slice) -> &'static Source {
    if x.kind == ElementType::F32 { &RMSNORM_FLOAT } else { &RMSNORM }
}

/// Whether rows are so many that each has a warp, and so wide as the warps' kernels take them.
fn fits_warps(d: Dims) -> bool {
    let is_wide = d.width.is_multiple_of(256) && (256..=4096).contains(&d.width);
    is_wide && d.tokens >= MANY_ROWS
}

fn forward_add_by_warps(
    cuda: &Cuda,
    d: Dims,
    (x, addend): (Slice, Slice),
    weight: Slice,
    sum: Slice,
    (normed, inv_rms): (Slice, Slice),
) {
    let op = "rmsnorm::forward";
    let name =
        if d.width <= 2048 { "rmsnorm_forward_add_by_warps_8" } else { "rmsnorm_forward_add_by_warps_16" };
    let pitch = pitch_of(op, "normed", normed.len, d.tokens, d.width);
    let launch =
        cuda.kernel(&RMSNORM_WARPS, name).arg(x).arg(addend).arg(weight).arg(sum).arg(normed).arg(pitch);
    let launch = launch.arg(inv_rms.f32(op)).arg(d.tokens).arg(d.width).arg(d.eps as f32);
    launch.run([d.tokens.div_ceil(WARPS), 1], 32 * WARPS, 0);
}

/// See `fused::matmul_rmsnorm_add`. Shapes: product, stream, sum `[T, D]`; normed `[T, D]`, or rows that have further columns
/// after these.
pub(crate) struct NormedResult {
    /// Overwritten where there are partial sums.
    pub product: Slice,
    /// The partial sums of a split-K product, `[n, T, D]` in f32.
    pub partials: Option<Slice>,
    pub weight: Slice,
    pub inv_rms: Slice,
    pub stream: Slice,
    pub sum: Slice,
    pub next_weight: Option<Slice>,
    pub normed: Slice,
    pub next_inv_rms: Slice,
}

/// Whether rows of this width fit [`forward_result`].
pub(crate) fn fits_result(width: usize) -> bool {
    width <= 8 * MAX_THREADS
}

pub(crate) fn forward_result(cuda: &Cuda, d: Dims, result: &NormedResult) {
    let op = "rmsnorm::forward_result";
    let product = result
        .product
        .same(result.weight, op)
        .same(result.stream, op)
        .same(result.sum, op)
        .same(result.normed, op);
    let n_parts = result.partials.map_or(0, |partials| partials.len / product.len.max(1));
    let args = Fields::default()
        .eight_bytes(product)
        .eight_bytes(result.partials.map(|partials| partials.f32(op)))
        .eight_bytes(result.weight)
        .eight_bytes(result.stream)
        .eight_bytes(result.next_weight.map(|weight| weight.same(product, op)))
        .eight_bytes(result.sum)
        .eight_bytes(result.normed)
        .eight_bytes(result.inv_rms.f32(op))
        .eight_bytes(result.next_inv_rms.f32(op))
        .four_bytes(n_parts)
        .four_bytes(d.width)
        .four_bytes(pitch_of(op, "normed", result.normed.len, d.tokens, d.width))
        .four_bytes(d.eps as f32);
    let is_programmatic = cuda.launches_ahead(d.tokens);
    let name = format!("rmsnorm_forward_result_{}", product.name());
    let launch = cuda.kernel(source(product), &name).fields(&args).programmatic_launch(is_programmatic);
    launch.run([d.tokens, 1], d.width.div_ceil(8).next_multiple_of(32), 0);
}

pub(super) fn backward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    saved: Saved<'_, T>,
    d_out: Slice,
    write: Write,
    d_x: Slice,
    d_weight: Option<Slice>,
) {
    let op = "rmsnorm::backward";
    let (x, weight, inv_rms) = (saved.x.cuda(), saved.weight.cuda(), saved.inv_rms.cuda());
    let kind = d_x.same(x, op).same(weight, op).same(d_out, op).name();
    let pass = if write == Write::Add { "add" } else { "set" };
    assert!(d.width <= MAX_WIDTH, "{op}: rows of {}, at most {MAX_WIDTH} on a GPU", d.width);
    let n_parts = parts_for(cuda, d.tokens);
    let parts = Memory::scratch(cuda, n_parts * d.width, ElementType::F32);
    let name = format!("rmsnorm_backward_{pass}_{kind}");
    let launch = cuda.kernel(source(x), &name).arg(x).arg(weight).arg(inv_rms.f32(op)).arg(d_out).arg(d_x);
    let launch = launch.arg(parts.slice()).arg(d.tokens).arg(d.width);
    launch.run([n_parts, 1], d.width.div_ceil(8).next_multiple_of(32), 0);
    if let Some(d_weight) = d_weight {
        add_column_sums(cuda, parts.slice(), n_parts, d_weight.f32(op));
    }
}
