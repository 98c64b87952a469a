use std::sync::Arc;

use super::Module;
use crate::cuda::{Cuda, MatrixProduct, Placement, Slice};
use crate::matmul::cuda::{input_gradient, product, weight_gradient};
use crate::matmul::{Dims, Weight};
use crate::{Float, Write};

/// The module's product as if it stood alone.
fn dims(tokens: usize, module: Module) -> Dims {
    Dims { tokens, inputs: module.hidden.len, outputs: module.outputs.len }
}

pub(super) fn expand<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    module: Module,
    hidden: Slice,
    b: &Weight<T>,
    y: Slice,
) {
    let (rank, outputs) = (module.hidden, module.outputs);
    let alone = product(dims(tokens, module), hidden, b.view().cuda(), y);
    let placement =
        Placement { strides: [rank.len, rank.of, outputs.of], starts: [0, rank.start, outputs.start] };
    let alpha = module.scale as f32;
    cuda.product(&MatrixProduct { adds: true, alpha, placement: Some(placement), ..alone });
}

pub(super) fn backward_hidden<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    module: Module,
    d_y: Slice,
    b: &Weight<T>,
    d_hidden: Slice,
) {
    let (rank, outputs) = (module.hidden, module.outputs);
    let alone = input_gradient(dims(tokens, module), d_y, b.view().cuda(), Write::Set, d_hidden);
    let placement =
        Placement { strides: [rank.len, outputs.of, rank.of], starts: [0, outputs.start, rank.start] };
    cuda.product(&MatrixProduct { alpha: module.scale as f32, placement: Some(placement), ..alone });
}

pub(super) fn backward_b(
    cuda: &Arc<Cuda>,
    tokens: usize,
    module: Module,
    d_y: Slice,
    hidden: Slice,
    write: Write,
    d_b: Slice,
) {
    if tokens == 0 {
        if write == Write::Set {
            cuda.fill(d_b, 0.0f32);
        }
        return;
    }
    let (rank, outputs) = (module.hidden, module.outputs);
    let alone = weight_gradient(dims(tokens, module), hidden, d_y, write, d_b);
    let placement =
        Placement { strides: [rank.of, outputs.of, rank.len], starts: [rank.start, outputs.start, 0] };
    cuda.product(&MatrixProduct { alpha: module.scale as f32, placement: Some(placement), ..alone });
}
