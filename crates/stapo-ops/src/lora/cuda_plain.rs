//! Adapters by the products of `matmul`: GPUs before Hopper, f32, and shapes that the kernels of cuda.rs do not take.

use std::sync::Arc;

use super::cuda::{Placed, fits, module_columns};
use super::cuda_backward::Backward;
use super::{Adapter, Module};
use crate::cuda::{Cuda, MatrixProduct, Placement, Slice};
use crate::matmul::Dims;
use crate::matmul::cuda::{input_gradient, product, weight_gradient};
use crate::{Float, Write};

/// The product of a module's second factor as if it stood alone.
fn dims(tokens: usize, module: &Module) -> Dims {
    Dims { tokens, inputs: module.hidden.len, outputs: module.outputs.len }
}

/// The product of all first factors.
fn first<T: Float>(tokens: usize, adapter: &Adapter<'_, T>) -> Dims {
    Dims { tokens, inputs: adapter.inputs(), outputs: adapter.a.shape().outputs }
}

fn placed(product: &MatrixProduct, starts: [usize; 3], strides: [usize; 3]) -> MatrixProduct {
    MatrixProduct { placement: Some(Placement { strides, starts }), ..*product }
}

pub(super) fn project<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    x: Slice,
    adapter: &Adapter<'_, T>,
    hidden: Placed,
) {
    let alone = product(first(tokens, adapter), x, adapter.a.view().cuda(), hidden.slice);
    let placed = placed(&alone, [0, 0, hidden.start], [adapter.inputs(), adapter.inputs(), hidden.of]);
    cuda.product(&MatrixProduct { alpha: adapter.scale() as f32, ..placed });
}

pub(super) fn expand<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    hidden: Slice,
    y: Slice,
) {
    for (place, (module, b)) in adapter.modules.iter().zip(&adapter.b).enumerate() {
        let (rank, outputs) = (module.hidden, module.outputs);
        // The kernels of cuda.rs leave room between modules.
        let start = if fits(cuda, adapter) { place * module_columns(adapter) } else { rank.start };
        let alone = product(dims(tokens, module), hidden, b.view().cuda(), y);
        let placed = placed(&alone, [0, start, outputs.start], [rank.len, rank.of, outputs.of]);
        cuda.product(&MatrixProduct { adds: true, ..placed });
    }
}

pub(super) fn backward_hidden<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_y: Slice,
    d_hidden: Placed,
) {
    for (module, b) in adapter.modules.iter().zip(&adapter.b) {
        let (rank, outputs) = (module.hidden, module.outputs);
        let alone = input_gradient(dims(tokens, module), d_y, b.view().cuda(), Write::Set, d_hidden.slice);
        let starts = [0, outputs.start, d_hidden.start + rank.start];
        let placed = placed(&alone, starts, [rank.len, outputs.of, d_hidden.of]);
        cuda.product(&MatrixProduct { alpha: module.scale as f32, ..placed });
    }
}

pub(super) fn backward_factors<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    of: &Backward,
    to_b: &[(Slice, Write)],
    to_a: Option<(Slice, Write)>,
) {
    let Backward { x, d_y, hidden, d_hidden } = *of;
    for (module, (d_b, write)) in adapter.modules.iter().zip(to_b) {
        let (rank, outputs) = (module.hidden, module.outputs);
        let alone = weight_gradient(dims(tokens, module), hidden.slice, d_y, *write, *d_b);
        let starts = [hidden.start + rank.start, outputs.start, 0];
        cuda.product(&placed(&alone, starts, [hidden.of, outputs.of, rank.len]));
    }
    if let Some((d_a, write)) = to_a {
        let inputs = adapter.inputs();
        let alone = weight_gradient(first(tokens, adapter), x, d_hidden.slice, write, d_a);
        cuda.product(&placed(&alone, [0, d_hidden.start, 0], [inputs, d_hidden.of, inputs]));
    }
}

pub(super) fn backward_input<T: Float>(
    cuda: &Arc<Cuda>,
    tokens: usize,
    adapter: &Adapter<'_, T>,
    d_hidden: Slice,
    d_x: Slice,
) {
    let inputs = adapter.inputs();
    let alone = input_gradient(first(tokens, adapter), d_hidden, adapter.a.view().cuda(), Write::Add, d_x);
    cuda.product(&placed(&alone, [0; 3], [inputs, adapter.pitch(), inputs]));
}
