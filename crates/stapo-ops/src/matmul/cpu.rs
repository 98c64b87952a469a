use super::Dims;
use crate::cpu::gemm::{A, B, Gemm, Strides};
use crate::cpu::simd::tile::Start;
use crate::cpu::{Cpu, Shared};
use crate::{Float, Write};

pub(crate) fn forward<E: Float>(cpu: &Cpu, d: Dims, x: &[E], panels: &[E], bias: Option<&[E]>, y: &mut [E]) {
    Gemm {
        rows: d.tokens,
        depth: d.inputs,
        columns: d.outputs,
        a: A::Rows(x),
        b: B::Panels(panels),
        bias,
        c: Shared::new(y),
        start: Start::Zero,
        strides: Strides { a: d.inputs, b: 0, c: d.outputs },
    }
    .run(cpu);
}

pub(crate) fn backward_input<E: Float>(cpu: &Cpu, d: Dims, d_y: &[E], w: &[E], write: Write, d_x: &mut [E]) {
    Gemm {
        rows: d.tokens,
        depth: d.outputs,
        columns: d.inputs,
        a: A::Rows(d_y),
        b: B::Rows(w),
        bias: None,
        c: Shared::new(d_x),
        start: if write == Write::Add { Start::Continue } else { Start::Zero },
        strides: Strides { a: d.outputs, b: d.inputs, c: d.inputs },
    }
    .run(cpu);
}

pub(crate) fn backward_weight<E: Float>(cpu: &Cpu, d: Dims, x: &[E], d_y: &[E], d_weight: &mut [E]) {
    Gemm {
        rows: d.outputs,
        depth: d.tokens,
        columns: d.inputs,
        a: A::Columns(d_y),
        b: B::Rows(x),
        bias: None,
        c: Shared::new(d_weight),
        start: Start::Continue,
        strides: Strides { a: d.outputs, b: d.inputs, c: d.inputs },
    }
    .run(cpu);
}

pub(crate) fn backward_bias<E: Float>(cpu: &Cpu, outputs: usize, d_y: &[E], d_bias: &mut [E]) {
    let tokens = d_y.len() / outputs.max(1);
    let d_bias = Shared::new(d_bias);
    cpu.rows(outputs, tokens, |columns| {
        // SAFETY: each task has its own columns.
        let sums = unsafe { d_bias.range(columns.clone()) };
        for row in d_y.chunks_exact(outputs) {
            for (sum, x) in sums.iter_mut().zip(&row[columns.clone()]) {
                *sum += *x;
            }
        }
    });
}
