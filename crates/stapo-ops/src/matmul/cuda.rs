//! Row-major matrices are column-major ones transposed: `y = x W^T` is computed as `y^T = W x^T`.

use std::sync::Arc;

use super::{Dims, narrow};
use crate::Write;
use crate::cuda::kernels::ELEMENTWISE;
use crate::cuda::{Columns, Cuda, Kind, Memory, PARTS_BYTES, Product, Slice, add_column_sums, parts_for};

/// Chains that an element of a deep product is the sum of, added up in order. One chain leaves most of a GPU idle where rows
/// are few and outputs narrow; which products are deep depends on the shape alone, so that rows agree whatever their number.
/// Logits, in f32, and products with a bias are one chain.
const DEEP_CHAINS: usize = 4;

pub(crate) fn is_deep(d: Dims, weight: Slice) -> bool {
    let is_whole = d.inputs.is_multiple_of(128 * DEEP_CHAINS) && d.outputs.is_multiple_of(8);
    let is_long = d.inputs >= 2048 && d.inputs >= 2 * d.outputs;
    is_whole && is_long && weight.kind == Kind::Bf16
}

pub(crate) fn forward(cuda: &Arc<Cuda>, d: Dims, x: Slice, weight: Slice, bias: Option<Slice>, y: Slice) {
    if bias.is_none() && y.kind == Kind::Bf16 && is_deep(d, weight) {
        return for_chains(cuda, d, x, weight, |start, n, chains| {
            let y = y.part(start * d.outputs, n * d.outputs);
            let launch = cuda.kernel(&ELEMENTWISE, "sum_of_parts_bf16").arg(chains).arg(y);
            launch.arg(y.len).arg(DEEP_CHAINS).run([y.len.div_ceil(8 * 256), 1], 256, 0);
        });
    }
    if bias.is_none() && narrow::product(cuda, d, x, weight, y) {
        return;
    }
    cuda.product(&Product { bias, ..product(d, x, weight, y) });
}

fn product(d: Dims, x: Slice, weight: Slice, y: Slice) -> Product {
    Product {
        m: d.outputs,
        n: d.tokens,
        k: d.inputs,
        a: weight,
        transposed_a: true,
        b: x,
        transposed_b: false,
        c: y,
        adds: false,
        bias: None,
        columns: Columns::Tokens,
        parts: 1,
    }
}

/// The chains of a deep product, some rows at a time: `each` is given the first row, how many, and their chains
/// `[DEEP_CHAINS, n, outputs]` in f32, which it must have read before the next call.
pub(crate) fn for_chains(
    cuda: &Arc<Cuda>,
    d: Dims,
    x: Slice,
    weight: Slice,
    mut each: impl FnMut(usize, usize, Slice),
) {
    let at_once = PARTS_BYTES / (4 * DEEP_CHAINS * d.outputs);
    assert!(at_once > 0, "matmul::forward: {} outputs of a deep product", d.outputs);
    for start in (0..d.tokens).step_by(at_once) {
        let n = at_once.min(d.tokens - start);
        let (d, x) = (Dims { tokens: n, ..d }, x.part(start * d.inputs, n * d.inputs));
        let parts = cuda.parts(DEEP_CHAINS * n * d.outputs);
        if !narrow::chains(cuda, d, x, weight, parts, DEEP_CHAINS) {
            cuda.product(&Product { parts: DEEP_CHAINS, ..product(d, x, weight, parts) });
        }
        each(start, n, parts);
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

pub(crate) fn backward_weight(
    cuda: &Arc<Cuda>,
    d: Dims,
    x: Slice,
    d_y: Slice,
    write: Write,
    d_weight: Slice,
) {
    if d.tokens == 0 {
        if write == Write::Set {
            cuda.fill(d_weight, 0.0f32);
        }
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
        adds: write == Write::Add,
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
