use std::sync::Arc;

use super::{Dims, HeadNorm, HeadNormGrad, NormExtent, Table};
use crate::cuda::kernels::{ROPE, ROPE_PARTS};
use crate::cuda::{Cuda, ElementType, Fields, Memory, Slice, add_column_sums, parts_for};
use crate::heads::Heads;
use crate::matmul::small_m;
use crate::{Float, pitch_of};

const THREADS: usize = 256;
/// The width of heads that has kernels with 16 bytes a thread, as in finish.cu.
const EIGHTS_DIM: usize = 128;
/// The width of heads that have a warp each, and the warps of a block of such heads, as in parts.cu.
const WARP_DIM: usize = 256;
const WARPS: usize = 4;
/// The most threads of a block that norms, each with eight columns.
const MAX_THREADS: usize = 1024;

pub(super) fn forward<T: Float>(
    cuda: &Cuda,
    d: Dims,
    table: &Table<T>,
    positions: Slice,
    norm: Option<(HeadNorm<'_, T>, Slice)>,
    raw: Slice,
    out: Slice,
) {
    let op = "rope::forward";
    if let Some(norm) = norm.filter(|(norm, _)| is_in_parts(d, table.rotary_dim(), norm.extent)) {
        return norm_and_turn(cuda, d, table, positions, norm, raw, out);
    }
    if table.rotary_dim() != d.heads.dim {
        assert!(raw.address != out.address, "{op}: a partial rotation in place");
        return rotate_part(cuda, d, table, positions, (raw, out.same(raw, op)), 1.0);
    }
    forward_heads(cuda, d, (table, positions), norm, (raw, out), None);
}

/// Rotates whole heads, each with its own norm. `stored`: where keys and values go, as the struct `Stored` of finish.cu; `None`: to
/// `out`.
pub(crate) fn forward_heads<T: Float>(
    cuda: &Cuda,
    d: Dims,
    (table, positions): (&Table<T>, Slice),
    norm: Option<(HeadNorm<'_, T>, Slice)>,
    (raw, out): (Slice, Slice),
    stored: Option<&Fields>,
) {
    let op = "rope::forward";
    let heads = d.heads;
    let query_weight = norm.map(|(norm, _)| norm.query_weight.cuda().same(raw, op));
    let key_weight = norm.map(|(norm, _)| norm.key_weight.cuda().same(raw, op));
    let (cos, sin) = (table.cos.view().cuda().f32(op), table.sin.view().cuda());
    let rows = [raw, out, cos, sin].into_iter().chain(query_weight).chain(key_weight);
    let are_eights = out.same(raw, op).kind == ElementType::Bf16 && takes_eights(heads, rows);
    let name = if are_eights { "rope_forward_eights".into() } else { format!("rope_forward_{}", raw.name()) };
    let launch =
        cuda.kernel(&ROPE, &name).head_dim(heads.dim).arg(raw).arg(out).arg(cos).arg(sin).arg(positions);
    let inv_rms = norm.map(|(_, inv_rms)| inv_rms.f32(op));
    let eps = norm.map_or(0.0, |(norm, _)| norm.eps as f32);
    let launch = launch.arg(query_weight).arg(key_weight).arg(inv_rms);
    let launch = launch.arg(heads.query).arg(heads.kv).arg(eps);
    let launch = launch.fields(stored.unwrap_or(&nowhere()));
    launch.run([d.tokens, 1], THREADS, 0);
}

/// The struct `Stored` of finish.cu where keys and values go to the output.
fn nowhere() -> Fields {
    let fields = Fields::default().eight_bytes(0usize).eight_bytes(0usize).eight_bytes(0usize);
    fields.four_bytes(0usize).four_bytes(0usize)
}

fn takes_eights(heads: Heads, rows: impl IntoIterator<Item = Slice>) -> bool {
    heads.dim == EIGHTS_DIM && rows.into_iter().all(|slice| slice.address.is_multiple_of(16))
}

/// What `HeadProduct` of heads_large_m.cu has behind its product, to finish heads as [`forward_heads`] does; `None` where it cannot.
pub(crate) fn head_fields<T: Float>(
    heads: Heads,
    (table, positions): (&Table<T>, Slice),
    norm: Option<HeadNorm<'_, T>>,
    stored: Option<&Fields>,
) -> Option<Fields> {
    let (cos, sin) = (table.cos.view().cuda().f32("rope::head_fields"), table.sin.view().cuda());
    let weights = norm.map(|norm| [norm.query_weight.cuda(), norm.key_weight.cuda()]);
    let are_bf16 = weights.iter().flatten().all(|weight| weight.kind == ElementType::Bf16);
    if !are_bf16 || !takes_eights(heads, [cos, sin].into_iter().chain(weights.into_iter().flatten())) {
        return None;
    }
    let fields = Fields::default().eight_bytes(cos).eight_bytes(sin).eight_bytes(positions);
    let fields = fields.eight_bytes(weights.map(|[query, _]| query)).eight_bytes(weights.map(|[_, key]| key));
    let fields = fields.four_bytes(heads.query).four_bytes(heads.kv);
    let fields = fields.four_bytes(norm.map_or(0.0, |norm| norm.eps as f32));
    Some(fields.join(stored.unwrap_or(&nowhere())))
}

pub(super) fn backward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    table: &Table<T>,
    positions: Slice,
    norm: Option<HeadNormGrad<'_, T>>,
    d_out: Slice,
    d_raw: Slice,
) {
    let op = "rope::backward";
    let is_here = |grad: &HeadNormGrad<'_, T>| !is_in_parts(d, table.rotary_dim(), grad.norm.extent);
    let norm = match norm {
        Some(grad) if !is_here(&grad) => {
            return norm_and_turn_backward(cuda, d, table, positions, grad, d_out, d_raw);
        }
        other => other,
    };
    if table.rotary_dim() != d.heads.dim {
        return rotate_part(cuda, d, table, positions, (d_out, d_raw.same(d_out, op)), -1.0);
    }
    let heads = d.heads;
    let n_parts = parts_for(cuda, d.tokens);
    let parts = norm.is_some().then(|| Memory::scratch(cuda, n_parts * 2 * heads.dim, ElementType::F32));
    let name = format!("rope_backward_{}", d_raw.same(d_out, op).name());
    let launch = cuda
        .kernel(&ROPE, &name)
        .head_dim(heads.dim)
        .arg(d_out)
        .arg(d_raw)
        .arg(table.cos.view().cuda().f32(op));
    let launch = launch.arg(table.sin.view().cuda()).arg(positions);
    let launch = launch
        .arg(norm.as_ref().map(|n| n.raw.cuda().same(d_out, op)))
        .arg(norm.as_ref().map(|n| n.norm.query_weight.cuda().same(d_out, op)))
        .arg(norm.as_ref().map(|n| n.norm.key_weight.cuda().same(d_out, op)))
        .arg(norm.as_ref().map(|n| n.inv_rms.cuda().f32(op)))
        .arg(parts.as_ref().map(Memory::slice));
    let pitch = pitch_of(op, "d_raw", d_raw.len, d.tokens, heads.qkv_width());
    let shape = Fields::default().four_bytes(d.tokens).four_bytes(heads.query).four_bytes(heads.kv);
    let shape = shape.four_bytes(pitch);
    launch.fields(&shape).run([n_parts, 1], THREADS, THREADS / 32 * 2 * heads.dim * 4);
    if let Some((to, parts)) = norm.and_then(|norm| norm.to).zip(parts) {
        let sums_memory = Memory::scratch(cuda, 2 * heads.dim, ElementType::F32);
        let sums = sums_memory.slice();
        cuda.fill(sums, 0.0f32);
        add_column_sums(cuda, parts.slice(), n_parts, sums);
        let (query, key) = (to.d_query_weight.cuda().f32(op), to.d_key_weight.cuda().f32(op));
        crate::residual::cuda::add(cuda, query, sums.part(0, heads.dim));
        crate::residual::cuda::add(cuda, key, sums.part(heads.dim, heads.dim));
    }
}

/// Which heads a block of threads norms together: see Units in parts.cu.
struct Units {
    heads: Heads,
    extent: NormExtent,
}

impl Units {
    /// Units of queries, keys and values.
    fn n(&self) -> usize {
        match self.extent {
            NormExtent::Head => self.heads.query + 2 * self.heads.kv,
            NormExtent::Projection => 3,
        }
    }

    /// Columns of the widest unit.
    fn width(&self) -> usize {
        match self.extent {
            NormExtent::Head => self.heads.dim,
            NormExtent::Projection => self.heads.query * self.heads.dim,
        }
    }

    /// Threads of a block, each with eight columns.
    fn threads(&self) -> usize {
        let threads = self.width().div_ceil(8).next_multiple_of(32);
        assert!(threads <= MAX_THREADS, "rope: a norm of {} columns on a GPU", self.width());
        threads
    }

    /// Whether the kernels with a warp for each head take the rows, of which one begins `pitch` after another.
    fn fit_warps<T: Float>(&self, table: &Table<T>, pitch: usize, rows: &[Slice]) -> bool {
        let is_aligned = |slice: &Slice| slice.address.is_multiple_of(16);
        let angles = [&table.cos, &table.sin].map(|angles| angles.view().cuda());
        self.extent == NormExtent::Head
            && self.heads.dim == WARP_DIM
            && table.rotary_dim().is_multiple_of(16)
            && pitch.is_multiple_of(8)
            && rows.iter().all(|slice| slice.kind == ElementType::Bf16)
            && rows.iter().chain(&angles).all(is_aligned)
    }

    fn fields(&self) -> Fields {
        let Heads { query, kv, dim } = self.heads;
        let is_whole_kind = usize::from(self.extent == NormExtent::Projection);
        let fields = Fields::default().four_bytes(query).four_bytes(kv).four_bytes(dim);
        fields.four_bytes(is_whole_kind)
    }
}

/// Whether the kernels of parts.cu norm and rotate: those of rope.cu have norms per head and rotate whole heads.
fn is_in_parts(d: Dims, rotary_dim: usize, extent: NormExtent) -> bool {
    extent == NormExtent::Projection || rotary_dim != d.heads.dim
}

fn norm_and_turn<T: Float>(
    cuda: &Cuda,
    d: Dims,
    table: &Table<T>,
    positions: Slice,
    (norm, inv_rms): (HeadNorm<'_, T>, Slice),
    raw: Slice,
    out: Slice,
) {
    let op = "rope::forward";
    let units = Units { heads: d.heads, extent: norm.extent };
    let args = Fields::default()
        .eight_bytes(raw)
        .eight_bytes(out.same(raw, op))
        .eight_bytes(norm.query_weight.cuda().same(raw, op))
        .eight_bytes(norm.key_weight.cuda().same(raw, op))
        .eight_bytes(inv_rms.f32(op))
        .eight_bytes(table.cos.view().cuda().f32(op))
        .eight_bytes(table.sin.view().cuda())
        .eight_bytes(positions)
        .join(&units.fields())
        .four_bytes(table.rotary_dim())
        .four_bytes(norm.eps as f32);
    if units.fit_warps(
        table,
        units.heads.qkv_width(),
        &[raw, out, norm.query_weight.cuda(), norm.key_weight.cuda()],
    ) {
        let launch = cuda.kernel(&ROPE_PARTS, "norm_and_turn_by_warps").fields(&args).arg(d.tokens);
        let launch = launch.programmatic_launch(cuda.is_hopper() && d.tokens <= small_m::MAX_ROWS);
        return launch.run([(d.tokens * units.n()).div_ceil(2 * WARPS), 1], 32 * WARPS, 0);
    }
    let name = format!("norm_and_turn_{}", raw.name());
    let launch = cuda.kernel(&ROPE_PARTS, &name).fields(&args);
    launch.run([d.tokens, units.n()], units.threads(), 4 * units.width());
}

fn norm_and_turn_backward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    table: &Table<T>,
    positions: Slice,
    grad: HeadNormGrad<'_, T>,
    d_out: Slice,
    d_raw: Slice,
) {
    let op = "rope::backward";
    let HeadNormGrad { norm, raw, inv_rms, to } = grad;
    let Heads { query, kv, dim } = d.heads;
    let units = Units { heads: d.heads, extent: norm.extent };
    let n_parts = parts_for(cuda, d.tokens);
    let pitch = pitch_of(op, "d_raw", d_raw.len, d.tokens, d.heads.qkv_width());
    let parts_memory = Memory::scratch(cuda, n_parts * (query + kv) * dim, ElementType::F32);
    let parts = parts_memory.slice();
    let args = Fields::default()
        .eight_bytes(d_out)
        .eight_bytes(raw.cuda().same(d_out, op))
        .eight_bytes(d_raw.same(d_out, op))
        .eight_bytes(norm.query_weight.cuda().same(d_out, op))
        .eight_bytes(norm.key_weight.cuda().same(d_out, op))
        .eight_bytes(inv_rms.cuda().f32(op))
        .eight_bytes(table.cos.view().cuda().f32(op))
        .eight_bytes(table.sin.view().cuda())
        .eight_bytes(positions)
        .eight_bytes(parts)
        .join(&units.fields())
        .four_bytes(table.rotary_dim())
        .four_bytes(d.tokens)
        .four_bytes(pitch);
    if units.fit_warps(
        table,
        pitch,
        &[d_out, d_raw, raw.cuda(), norm.query_weight.cuda(), norm.key_weight.cuda()],
    ) {
        let launch = cuda.kernel(&ROPE_PARTS, "norm_and_turn_backward_by_warps").fields(&args);
        launch.run([n_parts, units.n().div_ceil(WARPS)], 32 * WARPS, 0);
    } else {
        let name = format!("norm_and_turn_backward_{}", d_out.name());
        let launch = cuda.kernel(&ROPE_PARTS, &name).fields(&args);
        launch.run([n_parts, units.n()], units.threads(), 4 * units.width());
    }
    let Some(to) = to else { return };
    let (of_queries, of_keys) = (n_parts * query * dim, n_parts * kv * dim);
    let (d_query, d_key) = (to.d_query_weight.cuda().f32(op), to.d_key_weight.cuda().f32(op));
    add_column_sums(cuda, parts.part(0, of_queries), of_queries / d_query.len, d_query);
    add_column_sums(cuda, parts.part(of_queries, of_keys), of_keys / d_key.len, d_key);
}

/// Rotates the first dimensions of every query and key head; `sign` -1 rotates back. Rows of `out` may have further columns
/// after them.
fn rotate_part<T: Float>(
    cuda: &Cuda,
    d: Dims,
    table: &Table<T>,
    positions: Slice,
    (raw, out): (Slice, Slice),
    sign: f32,
) {
    let op = "rope";
    let name = format!("rotate_part_{}", out.name());
    let launch = cuda.kernel(&ROPE_PARTS, &name).arg(raw).arg(out);
    let launch = launch.arg(table.cos.view().cuda().f32(op)).arg(table.sin.view().cuda()).arg(positions);
    let launch = launch.arg(d.heads.query).arg(d.heads.kv).arg(d.heads.dim).arg(table.rotary_dim());
    let pitch = pitch_of(op, "out", out.len, d.tokens, d.heads.qkv_width());
    launch.arg(pitch).arg(sign).run([d.tokens, 1], THREADS, 0);
}
