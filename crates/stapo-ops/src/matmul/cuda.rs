//! Row-major matrices are column-major ones transposed: `y = x W^T` is computed as `y^T = W x^T`.

use std::sync::Arc;

use super::{Dims, narrow};
use crate::Write;
use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Columns, Cuda, Kind, Memory, PARTS_BYTES, Product, Slice, add_column_sums, parts_for};

/// Chains that an element of a deep product is the sum of, added up in order. One chain leaves most of a GPU idle where rows
/// are few and outputs narrow; which products are deep depends on the shape alone, so that rows agree whatever their number.
const DEEP_CHAINS: usize = 4;

fn is_deep(d: Dims, weight: Slice, bias: Option<Slice>) -> bool {
    let is_whole = d.inputs.is_multiple_of(128 * DEEP_CHAINS) && d.outputs.is_multiple_of(8);
    let is_long = d.inputs >= 2048 && d.inputs >= 2 * d.outputs;
    is_whole && is_long && weight.kind == Kind::Bf16 && bias.is_none()
}

pub(crate) fn forward(cuda: &Arc<Cuda>, d: Dims, x: Slice, weight: Slice, bias: Option<Slice>, y: Slice) {
    let is_deep = is_deep(d, weight, bias);
    if bias.is_none() && narrow::product(cuda, d, x, weight, y, is_deep) {
        return;
    }
    let product = Product {
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
        parts: 1,
    };
    if !is_deep {
        return cuda.product(&product);
    }
    let at_once = PARTS_BYTES / (4 * DEEP_CHAINS * d.outputs);
    assert!(at_once > 0, "matmul::forward: {} outputs of a deep product", d.outputs);
    for start in (0..d.tokens).step_by(at_once) {
        let n = at_once.min(d.tokens - start);
        let (b, len) = (x.part(start * d.inputs, n * d.inputs), n * d.outputs);
        let c = cuda.parts(DEEP_CHAINS * len);
        cuda.product(&Product { n, b, c, parts: DEEP_CHAINS, ..product });
        let launch =
            cuda.kernel(&ELEMENTWISE, "sum_of_parts_bf16").arg(c).arg(y.part(start * d.outputs, len));
        launch.arg(len).arg(DEEP_CHAINS).run([len.div_ceil(8 * 256), 1], 256, 0);
    }
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
        parts: 1,
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
        parts: 1,
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
