use std::sync::Arc;

use super::{Dims, HeadNorm, HeadNormGrad, NormExtent, Table};
use crate::cuda::kernels::ROPE;
use crate::cuda::{Cuda, ElementType, Fields, Memory, Slice, add_column_sums, parts_for};
use crate::{Float, pitch_of};

const THREADS: usize = 256;

/// The kernels rotate whole heads and norm each head alone.
#[track_caller]
fn check_parts<T: Float>(op: &str, d: Dims, table: &Table<T>, norm: Option<HeadNorm<'_, T>>) {
    let rotary_dim = table.rotary_dim();
    assert!(
        rotary_dim == d.heads.dim,
        "{op}: {rotary_dim} rotated dimensions of heads of {} on a GPU",
        d.heads.dim
    );
    let extent = norm.map_or(NormExtent::Head, |norm| norm.extent);
    assert!(extent == NormExtent::Head, "{op}: a norm of whole projections on a GPU");
}

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
    check_parts(op, d, table, norm.as_ref().map(|(norm, _)| *norm));
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
    check_parts(op, d, table, norm.as_ref().map(|grad| grad.norm));
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
