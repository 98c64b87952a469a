use super::Dims;
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, WIDTH, silu_parts};
use crate::cpu::{Cpu, Shared};

pub(crate) fn divide<E: Float>(cpu: &Cpu, d: Dims, projected: &[E], qkv: &mut [E], gate: &mut [E]) {
    let (width, n_query, dim) = (d.heads.qkv_width(), d.heads.out_width(), d.heads.dim);
    let (qkv, gate) = (Shared::new(qkv), Shared::new(gate));
    cpu.rows(d.tokens, 2 * d.projected_width(), |tokens| {
        for token in tokens {
            let row = &projected[token * d.projected_width()..(token + 1) * d.projected_width()];
            let (queries, rest) = row.split_at(2 * n_query);
            // SAFETY: each task has its own tokens.
            let (qkv, gate) = unsafe {
                (
                    qkv.range(token * width..(token + 1) * width),
                    gate.range(token * n_query..(token + 1) * n_query),
                )
            };
            let heads = qkv.chunks_exact_mut(dim).zip(gate.chunks_exact_mut(dim));
            for (pair, (query, gate)) in queries.chunks_exact(2 * dim).zip(heads) {
                query.copy_from_slice(&pair[..dim]);
                gate.copy_from_slice(&pair[dim..]);
            }
            qkv[n_query..].copy_from_slice(rest);
        }
    });
}

pub(crate) fn join<E: Float>(cpu: &Cpu, d: Dims, qkv: &[E], gate: &[E], projected: &mut [E]) {
    let (width, n_query, dim) = (d.heads.qkv_width(), d.heads.out_width(), d.heads.dim);
    let projected = Shared::new(projected);
    cpu.rows(d.tokens, 2 * d.projected_width(), |tokens| {
        for token in tokens {
            let start = token * d.projected_width();
            // SAFETY: each task has its own tokens.
            let row = unsafe { projected.range(start..start + d.projected_width()) };
            let (queries, rest) = row.split_at_mut(2 * n_query);
            let qkv = &qkv[token * width..(token + 1) * width];
            let gate = &gate[token * n_query..(token + 1) * n_query];
            let heads = qkv.chunks_exact(dim).zip(gate.chunks_exact(dim));
            for (pair, (query, gate)) in queries.chunks_exact_mut(2 * dim).zip(heads) {
                pair[..dim].copy_from_slice(query);
                pair[dim..].copy_from_slice(gate);
            }
            rest.copy_from_slice(&qkv[n_query..]);
        }
    });
}

pub(crate) fn forward<E: Float>(cpu: &Cpu, attended: &[E], gate: &[E], out: &mut [E]) {
    let out = Shared::new(out);
    cpu.rows(attended.len(), 3, |part| {
        // SAFETY: each task has its own elements.
        let out = unsafe { out.range(part.clone()) };
        cpu.dispatch(Forward { attended: &attended[part.clone()], gate: &gate[part], out });
    });
}

struct Forward<'a, E> {
    attended: &'a [E],
    gate: &'a [E],
    out: &'a mut [E],
}

impl<E: Float> Kernel<E> for Forward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        for at in (0..self.out.len()).step_by(WIDTH) {
            let (sigmoid, _) = silu_parts(l, l.get(self.gate, at, E::ZERO));
            l.put(self.out, at, l.mul(l.get(self.attended, at, E::ZERO), sigmoid));
        }
    }
}

pub(crate) fn backward<E: Float>(
    cpu: &Cpu,
    (attended, gate): (&[E], &[E]),
    d_out: &[E],
    (d_attended, d_gate): (&mut [E], &mut [E]),
) {
    let (d_attended, d_gate) = (Shared::new(d_attended), Shared::new(d_gate));
    cpu.rows(attended.len(), 5, |part| {
        // SAFETY: each task has its own elements.
        let (d_attended, d_gate) = unsafe { (d_attended.range(part.clone()), d_gate.range(part.clone())) };
        let (attended, gate, d_out) = (&attended[part.clone()], &gate[part.clone()], &d_out[part]);
        cpu.dispatch(Backward { attended, gate, d_out, d_attended, d_gate });
    });
}

struct Backward<'a, E> {
    attended: &'a [E],
    gate: &'a [E],
    d_out: &'a [E],
    d_attended: &'a mut [E],
    d_gate: &'a mut [E],
}

impl<E: Float> Kernel<E> for Backward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let zero = E::ZERO;
        for at in (0..self.d_out.len()).step_by(WIDTH) {
            let (sigmoid, _) = silu_parts(l, l.get(self.gate, at, zero));
            let d = l.mul(l.get(self.d_out, at, zero), sigmoid);
            l.put(self.d_attended, at, d);
            let slope = l.sub(l.splat(E::ONE), sigmoid);
            l.put(self.d_gate, at, l.mul(l.mul(d, l.get(self.attended, at, zero)), slope));
        }
    }
}
