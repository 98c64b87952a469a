use std::sync::Arc;

use super::{Dims, HeadNorm, HeadNormGrad, NormExtent, Table};
use crate::cuda::kernels::{ROPE, ROPE_PARTS};
use crate::cuda::{Cuda, ElementType, Fields, Memory, Slice, add_column_sums, parts_for};
use crate::{Float, pitch_of};

const THREADS: usize = 256;

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
    let is_projection = norm.is_some_and(|(norm, _)| norm.extent == NormExtent::Projection);
    if let Some((norm, inv_rms)) = norm.filter(|_| is_projection) {
        norm_projections(cuda, d, norm, inv_rms.f32(op), raw, out);
        return forward(cuda, d, table, positions, None, out, out);
    }
    if table.rotary_dim() != d.heads.dim {
        assert!(norm.is_none(), "{op}: a norm per head in front of a partial rotation on a GPU");
        assert!(raw.address != out.address, "{op}: a partial rotation in place");
        return rotate_part(cuda, d, table, positions, (raw, out.same(raw, op)), 1.0);
    }
    let heads = d.heads;
    let name = format!("rope_forward_{}", out.same(raw, op).name());
    let launch =
        cuda.kernel(&ROPE, &name).head_dim(heads.dim).arg(raw).arg(out).arg(table.cos.view().cuda().f32(op));
    let launch = launch.arg(table.sin.view().cuda()).arg(positions);
    let query_weight = norm.map(|(norm, _)| norm.query_weight.cuda().same(raw, op));
    let key_weight = norm.map(|(norm, _)| norm.key_weight.cuda().same(raw, op));
    let inv_rms = norm.map(|(_, inv_rms)| inv_rms.f32(op));
    let eps = norm.map_or(0.0, |(norm, _)| norm.eps as f32);
    let launch = launch.arg(query_weight).arg(key_weight).arg(inv_rms);
    launch.arg(heads.query).arg(heads.kv).arg(eps).run([d.tokens, 1], THREADS, 0);
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
    let is_projection = norm.as_ref().is_some_and(|grad| grad.norm.extent == NormExtent::Projection);
    if is_projection {
        backward(cuda, d, table, positions, None, d_out, d_raw);
        return norm_projections_backward(cuda, d, norm, d_raw);
    }
    if table.rotary_dim() != d.heads.dim {
        assert!(norm.is_none(), "{op}: a norm per head in front of a partial rotation on a GPU");
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

/// Norms all query heads and all key heads of a token; values are copied.
fn norm_projections<T: Float>(
    cuda: &Cuda,
    d: Dims,
    norm: HeadNorm<'_, T>,
    inv_rms: Slice,
    raw: Slice,
    out: Slice,
) {
    let op = "rope::forward";
    let name = format!("projection_norm_{}", out.same(raw, op).name());
    let launch = cuda.kernel(&ROPE_PARTS, &name).arg(raw).arg(out);
    let launch = launch.arg(norm.query_weight.cuda().same(raw, op)).arg(norm.key_weight.cuda().same(raw, op));
    let launch = launch.arg(inv_rms).arg(d.heads.query).arg(d.heads.kv).arg(d.heads.dim);
    launch.arg(norm.eps as f32).run([d.tokens, 1], THREADS, 0);
}

/// Turns the gradient of the norms' outputs in `d_raw` into that of their inputs, and adds to those of their weights.
fn norm_projections_backward<T: Float>(
    cuda: &Arc<Cuda>,
    d: Dims,
    grad: Option<HeadNormGrad<'_, T>>,
    d_raw: Slice,
) {
    let op = "rope::backward";
    let Some(HeadNormGrad { norm, raw, inv_rms, to }) = grad else { return };
    let (n_query, n_key) = (d.heads.query * d.heads.dim, d.heads.kv * d.heads.dim);
    let n_parts = parts_for(cuda, d.tokens);
    let parts = Memory::scratch(cuda, n_parts * (n_query + n_key), ElementType::F32);
    let name = format!("projection_norm_backward_{}", d_raw.same(raw.cuda(), op).name());
    let launch = cuda.kernel(&ROPE_PARTS, &name).arg(raw.cuda()).arg(d_raw);
    let launch =
        launch.arg(norm.query_weight.cuda().same(d_raw, op)).arg(norm.key_weight.cuda().same(d_raw, op));
    let launch = launch.arg(inv_rms.cuda().f32(op)).arg(parts.slice()).arg(d.tokens);
    let launch = launch.arg(d.heads.query).arg(d.heads.kv).arg(d.heads.dim);
    let pitch = pitch_of(op, "d_raw", d_raw.len, d.tokens, d.heads.qkv_width());
    launch.arg(pitch).run([n_parts, 1], THREADS, 0);
    if let Some(to) = to {
        let sums_memory = Memory::scratch(cuda, n_query + n_key, ElementType::F32);
        let sums = sums_memory.slice();
        cuda.fill(sums, 0.0f32);
        add_column_sums(cuda, parts.slice(), n_parts, sums);
        let (query, key) = (to.d_query_weight.cuda().f32(op), to.d_key_weight.cuda().f32(op));
        crate::residual::cuda::add(cuda, query, sums.part(0, n_query));
        crate::residual::cuda::add(cuda, key, sums.part(n_query, n_key));
    }
}

/// Rotates the first dimensions of every query and key head; `sign` -1 rotates back. Rows of `out` may have further columns
/// behind them.
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
