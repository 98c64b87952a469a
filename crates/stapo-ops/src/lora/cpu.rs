use super::Module;
use crate::cpu::gemm::{A, B, Gemm, Strides};
use crate::cpu::simd::tile::Start;
use crate::cpu::{Cpu, Shared};
use crate::{Float, Shape, Weight};

pub(crate) fn project<E: Float>(
    cpu: &Cpu,
    (tokens, a): (usize, &Weight<E>),
    x: &[E],
    (scale, pitch): (f64, usize),
    hidden: &mut [E],
) {
    let Shape { outputs, inputs } = a.shape();
    if tokens == 0 {
        return;
    }
    Gemm {
        rows: tokens,
        depth: inputs,
        columns: outputs,
        a: A::Rows(x),
        b: B::Panels(a.panels().host()),
        bias: None,
        c: Shared::new(hidden),
        start: Start::Zero,
        strides: Strides { a: inputs, b: 0, c: pitch },
    }
    .run(cpu);
    multiply(cpu, tokens, pitch, (0, outputs), scale, hidden);
}

pub(crate) fn expand<E: Float>(
    cpu: &Cpu,
    (tokens, module): (usize, Module),
    hidden: &[E],
    b: &Weight<E>,
    y: &mut [E],
) {
    if tokens == 0 {
        return;
    }
    Gemm {
        rows: tokens,
        depth: module.hidden.len,
        columns: module.outputs.len,
        a: A::Rows(&hidden[module.hidden.start..]),
        b: B::Panels(b.panels().host()),
        bias: None,
        c: Shared::new(&mut y[module.outputs.start..]),
        start: Start::Continue,
        strides: Strides { a: module.hidden.of, b: 0, c: module.outputs.of },
    }
    .run(cpu);
}

pub(crate) fn backward_hidden<E: Float>(
    cpu: &Cpu,
    (tokens, module): (usize, Module),
    d_y: &[E],
    b: &Weight<E>,
    d_hidden: &mut [E],
) {
    if tokens == 0 {
        return;
    }
    Gemm {
        rows: tokens,
        depth: module.outputs.len,
        columns: module.hidden.len,
        a: A::Rows(&d_y[module.outputs.start..]),
        b: B::Rows(b.view().host()),
        bias: None,
        c: Shared::new(&mut d_hidden[module.hidden.start..]),
        start: Start::Zero,
        strides: Strides { a: module.outputs.of, b: module.hidden.len, c: module.hidden.of },
    }
    .run(cpu);
    multiply(cpu, tokens, module.hidden.of, (module.hidden.start, module.hidden.len), module.scale, d_hidden);
}

pub(crate) fn backward_b<E: Float>(
    cpu: &Cpu,
    (tokens, module): (usize, Module),
    d_y: &[E],
    hidden: &[E],
    d_b: &mut [E],
) {
    if tokens == 0 {
        return;
    }
    Gemm {
        rows: module.outputs.len,
        depth: tokens,
        columns: module.hidden.len,
        a: A::Columns(&d_y[module.outputs.start..]),
        b: B::Rows(&hidden[module.hidden.start..]),
        bias: None,
        c: Shared::new(d_b),
        start: Start::Continue,
        strides: Strides { a: module.outputs.of, b: module.hidden.of, c: module.hidden.len },
    }
    .run(cpu);
}

pub(crate) fn backward_a<E: Float>(
    cpu: &Cpu,
    (tokens, a, pitch): (usize, Shape, usize),
    x: &[E],
    d_hidden: &[E],
    d_a: &mut [E],
) {
    if tokens == 0 {
        return;
    }
    Gemm {
        rows: a.outputs,
        depth: tokens,
        columns: a.inputs,
        a: A::Columns(d_hidden),
        b: B::Rows(x),
        bias: None,
        c: Shared::new(d_a),
        start: Start::Continue,
        strides: Strides { a: pitch, b: a.inputs, c: a.inputs },
    }
    .run(cpu);
}

pub(crate) fn backward_input<E: Float>(
    cpu: &Cpu,
    (tokens, pitch): (usize, usize),
    d_hidden: &[E],
    a: &Weight<E>,
    d_x: &mut [E],
) {
    let Shape { outputs, inputs } = a.shape();
    if tokens == 0 {
        return;
    }
    Gemm {
        rows: tokens,
        depth: outputs,
        columns: inputs,
        a: A::Rows(d_hidden),
        b: B::Rows(a.view().host()),
        bias: None,
        c: Shared::new(d_x),
        start: Start::Continue,
        strides: Strides { a: pitch, b: inputs, c: inputs },
    }
    .run(cpu);
}

/// Multiplies `len` columns from `start` on of x `[rows, width]` by `factor`.
fn multiply<E: Float>(
    cpu: &Cpu,
    rows: usize,
    width: usize,
    (start, len): (usize, usize),
    factor: f64,
    x: &mut [E],
) {
    let factor = E::from_f64(factor);
    let x = Shared::new(x);
    cpu.rows(rows, len, |rows| {
        for row in rows {
            // SAFETY: each task has its own rows.
            let part = unsafe { x.range(row * width + start..row * width + start + len) };
            for x in part {
                *x = *x * factor;
            }
        }
    });
}
