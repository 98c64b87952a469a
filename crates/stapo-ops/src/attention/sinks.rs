//! The gradient of learned attention sinks.
//!
//! With a sink a row's sum is `exp(sink) + sum of exp(score)`, whose logarithm forward keeps. The weights of keys are then those of
//! the formula without a sink, so [`super::backward`] needs no other; the sink's weight `exp(sink - lse)` has the value 0, which
//! leaves `-exp(sink - lse) delta`, with `FlashAttention`'s delta, the sum of d_out times out.

use super::{Dims, Saved, cuda_backward};
use crate::cpu::simd::{Kernel, Lanes};
use crate::cpu::{Cpu, Shared};
use crate::device::Backend;
use crate::rmsnorm::cpu::dot;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

/// Shapes: sinks, d_sinks `[query heads]`; d_out like out. Adds to d_sinks: on the CPU one chain over the tokens.
pub fn backward<T: Float>(
    device: &Device,
    dims: Dims,
    saved: Saved<'_, T>,
    sinks: View<'_, T>,
    d_out: View<'_, T>,
    d_sinks: ViewMut<'_, T>,
) {
    let op = "attention::sinks::backward";
    dims.heads.check(op);
    pitch_of(op, "out", saved.out.len(), dims.tokens, dims.heads.out_width());
    check(op, "lse", saved.lse.len(), dims.tokens * dims.heads.query);
    check(op, "d_out", d_out.len(), dims.tokens * dims.heads.out_width());
    check(op, "sinks", sinks.len(), dims.heads.query);
    check(op, "d_sinks", d_sinks.len(), dims.heads.query);
    match device.backend() {
        Backend::Cpu(cpu) => {
            let inputs = Inputs {
                dims,
                out: saved.out.host(),
                lse: saved.lse.host(),
                sinks: sinks.host(),
                d_out: d_out.host(),
            };
            T::attention_backward_sinks(cpu, inputs, d_sinks.into_host());
        }
        Backend::Cuda(cuda) => {
            cuda_backward::backward_sinks(cuda, dims, saved, sinks.cuda(), d_out.cuda(), d_sinks.cuda());
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a, E> {
    dims: Dims,
    out: &'a [E],
    lse: &'a [E],
    sinks: &'a [E],
    d_out: &'a [E],
}

pub(crate) fn backward_cpu<E: Float>(cpu: &Cpu, inputs: Inputs<'_, E>, d_sinks: &mut [E]) {
    let d_sinks = Shared::new(d_sinks);
    let Dims { tokens, heads, .. } = inputs.dims;
    cpu.rows(heads.query, 2 * tokens * heads.dim, |range| {
        for head in range {
            // SAFETY: each task has its own heads.
            let sum = unsafe { d_sinks.range(head..head + 1) };
            cpu.dispatch(OneSink { inputs, head, sum: &mut sum[0] });
        }
    });
}

struct OneSink<'a, E> {
    inputs: Inputs<'a, E>,
    head: usize,
    sum: &'a mut E,
}

impl<E: Float> Kernel<E> for OneSink<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let Inputs { dims: Dims { tokens, heads, .. }, out, lse, sinks, d_out } = self.inputs;
        for token in 0..tokens {
            let row = token * heads.query + self.head;
            let at = row * heads.dim..(row + 1) * heads.dim;
            let delta = dot(l, &d_out[at.clone()], &out[at]);
            let weight = l.to_array(l.exp(l.splat(sinks[self.head] - lse[row])))[0];
            *self.sum = *self.sum - weight * delta;
        }
    }
}
