use super::{Dims, Gate};
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, WIDTH, gelu_parts, silu_parts};
use crate::cpu::{Cpu, Shared};

pub(crate) fn forward<E: Float>(cpu: &Cpu, d: Dims, gate_up: &[E], out: &mut [E]) {
    let out = Shared::new(out);
    cpu.rows(d.tokens, 3 * d.width, |rows| {
        // SAFETY: each task has its own rows.
        let out = unsafe { out.range(rows.start * d.width..rows.end * d.width) };
        let gate_up = &gate_up[2 * rows.start * d.width..2 * rows.end * d.width];
        cpu.dispatch(Forward { width: d.width, gate: d.gate, gate_up, out });
    });
}

pub(crate) fn backward<E: Float>(cpu: &Cpu, d: Dims, gate_up: &[E], d_out: &[E], d_gate_up: &mut [E]) {
    let d_gate_up = Shared::new(d_gate_up);
    cpu.rows(d.tokens, 5 * d.width, |rows| {
        let wide = 2 * rows.start * d.width..2 * rows.end * d.width;
        let d_out = &d_out[rows.start * d.width..rows.end * d.width];
        // SAFETY: each task has its own rows.
        let d_gate_up = unsafe { d_gate_up.range(wide.clone()) };
        cpu.dispatch(Backward { width: d.width, gate: d.gate, gate_up: &gate_up[wide], d_out, d_gate_up });
    });
}

struct Forward<'a, E> {
    width: usize,
    gate: Gate,
    gate_up: &'a [E],
    out: &'a mut [E],
}

impl<E: Float> Kernel<E> for Forward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let rows = self.gate_up.chunks_exact(2 * self.width).zip(self.out.chunks_exact_mut(self.width));
        for (gate_up, out) in rows {
            let (gate, up) = gate_up.split_at(self.width);
            for at in (0..self.width).step_by(WIDTH) {
                // Prefetches the next row: the hardware prefetcher does not follow three streams from row to row.
                l.prefetch(gate.as_ptr().wrapping_add(2 * self.width + at));
                l.prefetch(up.as_ptr().wrapping_add(2 * self.width + at));
                let x = l.get(gate, at, E::ZERO);
                let activated = match self.gate {
                    Gate::Silu => silu_parts(l, x).1,
                    Gate::GeluTanh => gelu_parts(l, x).1,
                };
                l.put(out, at, l.mul(activated, l.get(up, at, E::ZERO)));
            }
        }
    }
}

struct Backward<'a, E> {
    width: usize,
    gate: Gate,
    gate_up: &'a [E],
    d_out: &'a [E],
    d_gate_up: &'a mut [E],
}

impl<E: Float> Kernel<E> for Backward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let one = l.splat(L::E::ONE);
        let wide = 2 * self.width;
        let rows = self.gate_up.chunks_exact(wide).zip(self.d_gate_up.chunks_exact_mut(wide));
        for ((gate_up, d_gate_up), d_out) in rows.zip(self.d_out.chunks_exact(self.width)) {
            let (gate, up) = gate_up.split_at(self.width);
            let (d_gate, d_up) = d_gate_up.split_at_mut(self.width);
            for at in (0..self.width).step_by(WIDTH) {
                l.prefetch(gate.as_ptr().wrapping_add(wide + at));
                l.prefetch(up.as_ptr().wrapping_add(wide + at));
                l.prefetch(d_out.as_ptr().wrapping_add(self.width + at));
                let g = l.get(gate, at, E::ZERO);
                let d = l.get(d_out, at, E::ZERO);
                let (slope, activated) = match self.gate {
                    Gate::Silu => {
                        let (sigmoid, silu) = silu_parts(l, g);
                        // d silu / d g = sigmoid + silu (1 - sigmoid)
                        (l.fma(silu, l.sub(one, sigmoid), sigmoid), silu)
                    }
                    Gate::GeluTanh => gelu_parts(l, g),
                };
                l.put(d_up, at, l.mul(d, activated));
                l.put(d_gate, at, l.mul(l.mul(d, l.get(up, at, E::ZERO)), slope));
            }
        }
    }
}
