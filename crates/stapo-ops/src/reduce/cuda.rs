use std::sync::Arc;

use crate::Form;
use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Cuda, ElementType, Fields, Memory, Slice, upload_table};

/// Elements whose squares one block of threads adds.
const BLOCK: usize = 16384;

/// Waits once for all buffers.
pub(super) fn sum_squares(cuda: &Arc<Cuda>, buffers: &[Slice]) -> f64 {
    sum_parts(cuda, parts_of_squares(cuda, buffers).slice())
}

/// The sums of the blocks of every buffer. Waits once for all buffers.
pub(super) fn square_parts(cuda: &Arc<Cuda>, buffers: &[Slice]) -> Vec<Vec<f64>> {
    let memory = parts_of_squares(cuda, buffers);
    let mut all = vec![0.0; memory.len()];
    cuda.read(memory.slice(), &mut all);
    let mut rest = all.into_iter();
    buffers.iter().map(|x| rest.by_ref().take(x.len.div_ceil(BLOCK)).collect()).collect()
}

pub(super) fn fold_squares(cuda: &Arc<Cuda>, parts: &[f64]) -> f64 {
    let memory = Memory::scratch(cuda, parts.len(), ElementType::F64);
    cuda.write(parts, memory.slice());
    sum_parts(cuda, memory.slice())
}

fn parts_of_squares(cuda: &Arc<Cuda>, buffers: &[Slice]) -> Memory {
    let mut n_parts = 0;
    let mut rows = Vec::new();
    for x in buffers.iter().filter(|x| x.len > 0) {
        let row = Fields::default().eight_bytes(x.f32("reduce::sum_squares")).eight_bytes(x.len);
        rows.push(row.four_bytes(n_parts));
        n_parts += x.len.div_ceil(BLOCK);
    }
    let parts = Memory::scratch(cuda, n_parts, ElementType::F64);
    if n_parts > 0 {
        let table = upload_table(cuda, &rows);
        let launch = cuda.kernel(&ELEMENTWISE, "reduce_square_parts").arg(table.slice()).arg(rows.len());
        launch.arg(parts.slice()).run([n_parts, 1], 256, 0);
    }
    parts
}

fn sum_parts(cuda: &Arc<Cuda>, parts: Slice) -> f64 {
    let total_memory = Memory::scratch(cuda, 1, ElementType::F64);
    let total = total_memory.slice();
    cuda.kernel(&ELEMENTWISE, "reduce_sum_parts").arg(parts).arg(total).arg(parts.len).run([1, 1], 256, 0);
    let mut sum = [0.0f64];
    cuda.read(total, &mut sum);
    sum[0]
}

/// The kernel that looks for numbers that are not finite, and where it looks. A value of 8-bit moments is finite where its
/// scale is.
fn non_finite(x: Slice) -> (&'static str, Slice) {
    if let Some(scales) = x.scales {
        let len = x.len.div_ceil(Form::SCALED);
        return ("reduce_first_non_finite", Slice::plain(scales, ElementType::F32, len));
    }
    let x = x.exact_master();
    match x.kind {
        ElementType::Bf16 => ("reduce_first_non_finite_bf16", x),
        _ => ("reduce_first_non_finite", x.f32("reduce::first_non_finite")),
    }
}

/// Of 8-bit moments the first element of a block is named.
pub(super) fn first_non_finite(cuda: &Arc<Cuda>, x: Slice) -> Option<usize> {
    let (kernel, searched) = non_finite(x);
    let factor = if x.scales.is_some() { Form::SCALED } else { 1 };
    Some(factor * first_where(cuda, kernel, searched)?)
}

/// Waits once for all buffers.
pub(super) fn are_finite(cuda: &Arc<Cuda>, buffers: &[Slice]) -> bool {
    let searches: Vec<_> = buffers.iter().map(|x| non_finite(*x)).collect();
    lowest_place(cuda, &searches) == u64::MAX
}

pub(super) fn is_zero(cuda: &Arc<Cuda>, x: Slice) -> bool {
    let x = x.exact_master();
    let found = match x.kind {
        ElementType::Bf16 => first_where(cuda, "reduce_first_nonzero_bf16", x),
        _ => first_where(cuda, "reduce_first_nonzero", x.f32("reduce::is_zero")),
    };
    found.is_none()
}

/// The sums of hashes of every buffer's blocks, in order. Waits once for all buffers.
pub(super) fn fingerprints(cuda: &Arc<Cuda>, buffers: &[Slice]) -> Vec<u64> {
    let n_parts: usize = buffers.iter().map(|x| x.len.div_ceil(BLOCK)).sum();
    let parts_memory = Memory::scratch(cuda, n_parts, ElementType::F64);
    let parts = parts_memory.slice();
    let mut at = 0;
    for x in buffers.iter().map(|x| x.exact_master()) {
        let n = x.len.div_ceil(BLOCK);
        let name = format!("reduce_fingerprint_{}", x.name());
        let launch = cuda.kernel(&ELEMENTWISE, &name).arg(x);
        launch.arg(parts.part(at, n)).arg(x.len).run([n, 1], 256, 0);
        at += n;
    }
    let mut sums = vec![0.0f64; n_parts];
    cuda.read(parts, &mut sums);
    sums.into_iter().map(f64::to_bits).collect()
}

/// The lowest place that the kernel finds.
fn first_where(cuda: &Arc<Cuda>, kernel: &'static str, x: Slice) -> Option<usize> {
    usize::try_from(lowest_place(cuda, &[(kernel, x)])).ok().filter(|place| *place < x.len)
}

/// The lowest of all places that the kernels find, each in its buffer; `u64::MAX` where none finds one. Waits once.
fn lowest_place(cuda: &Arc<Cuda>, searches: &[(&'static str, Slice)]) -> u64 {
    let first_memory = Memory::scratch(cuda, 1, ElementType::F64);
    let first = first_memory.slice();
    cuda.write(&[f64::from_bits(u64::MAX)], first);
    for (kernel, x) in searches.iter().filter(|(_, x)| x.len > 0) {
        let launch = cuda.kernel(&ELEMENTWISE, kernel).arg(*x);
        launch.arg(first).arg(x.len).run([x.len.div_ceil(256), 1], 256, 0);
    }
    let mut found = [0.0f64];
    cuda.read(first, &mut found);
    found[0].to_bits()
}
