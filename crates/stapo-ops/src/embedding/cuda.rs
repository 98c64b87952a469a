use super::Dims;
use crate::cuda::kernels::EMBEDDING;
use crate::cuda::{Cuda, Slice};

pub(super) fn forward(cuda: &Cuda, d: Dims, ids: Slice, table: Slice, out: Slice) {
    let name = format!("embedding_forward_{}", out.same(table, "embedding::forward").name());
    let launch = cuda.kernel(&EMBEDDING, &name).arg(ids).arg(table).arg(out).arg(d.vocab).arg(d.width);
    launch.run([d.tokens, 1], 128, 0);
}

pub(super) fn backward(cuda: &Cuda, d: Dims, ids: Slice, d_out: Slice, d_table: Slice) {
    let name = format!("embedding_backward_{}_{}", d_out.name(), d_table.name());
    let launch = cuda.kernel(&EMBEDDING, &name).arg(ids).arg(d_out).arg(d_table);
    launch.arg(d.tokens).arg(d.vocab).arg(d.width).run([d.tokens, 1], 256, 0);
}

pub(super) fn backward_apart(
    cuda: &Cuda,
    d: Dims,
    ids: Slice,
    d_out: Slice,
    (apart, d_table): (Slice, Slice),
) {
    let op = "embedding::backward_apart";
    let name = format!("embedding_backward_apart_{}", d_out.name());
    let launch = cuda.kernel(&EMBEDDING, &name).arg(ids).arg(d_out).arg(apart.f32(op)).arg(d_table.f32(op));
    launch.arg(d.tokens).arg(d.vocab).arg(d.width).run([d.tokens, 1], 256, 0);
}
