//! Row-major matrices are column-major ones transposed: `y = x W^T` is computed as `y^T = W x^T`.

use std::sync::Arc;

use super::Dims;
use crate::Write;
use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Columns, Cuda, Kind, Memory, Product, Slice, add_column_sums, parts_for};

pub(crate) fn forward(cuda: &Arc<Cuda>, d: Dims, x: Slice, weight: Slice, bias: Option<Slice>, y: Slice) {
    cuda.product(&Product {
        m: d.outputs,
        n: d.tokens,
        k: d.inputs,
        a: weight,
        transposed_a: true,
        b: x,
        transposed_b: false,
        c: y,
        adds: false,
        bias,
        columns: Columns::Tokens,
    });
}

pub(crate) fn backward_input(cuda: &Arc<Cuda>, d: Dims, d_y: Slice, weight: Slice, write: Write, d_x: Slice) {
    cuda.product(&Product {
        m: d.inputs,
        n: d.tokens,
        k: d.outputs,
        a: weight,
        transposed_a: false,
        b: d_y,
        transposed_b: false,
        c: d_x,
        adds: write == Write::Add,
        bias: None,
        columns: Columns::Tokens,
    });
}

pub(crate) fn backward_weight(cuda: &Arc<Cuda>, d: Dims, x: Slice, d_y: Slice, d_weight: Slice) {
    if d.tokens == 0 {
        return;
    }
    cuda.product(&Product {
        m: d.inputs,
        n: d.outputs,
        k: d.tokens,
        a: x,
        transposed_a: false,
        b: d_y,
        transposed_b: true,
        c: d_weight,
        adds: true,
        bias: None,
        columns: Columns::Width,
    });
}

pub(super) fn backward_bias(cuda: &Arc<Cuda>, tokens: usize, outputs: usize, d_y: Slice, d_bias: Slice) {
    let n_parts = parts_for(cuda, tokens).min(64);
    let parts_memory = Memory::scratch(cuda, n_parts * outputs, Kind::F32);
    let parts = parts_memory.slice();
    let name = format!("column_parts_{}", d_y.name());
    let launch = cuda.kernel(&ELEMENTWISE, &name).arg(d_y).arg(parts).arg(tokens).arg(outputs);
    launch.run([outputs.div_ceil(256), n_parts], 256, 0);
    add_column_sums(cuda, parts, n_parts, d_bias.f32("matmul::backward_bias"));
}
