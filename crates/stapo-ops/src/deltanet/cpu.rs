use std::ops::Range;

use super::recurrence::{self, SequenceRows};
use super::{Dims, Heads, Out, Parameters};
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH, silu_parts};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::rmsnorm::cpu::{dot, inverse_rms};

/// Added to the square of a length before its root.
pub(super) const LENGTH_EPS: f64 = 1e-6;

/// [`super::Sequences`] in memory.
pub(crate) struct HostSequences<'a, E> {
    pub offsets: &'a [u32],
    pub carried: Option<HostCarried<'a, E>>,
}

pub(crate) struct HostCarried<'a, E> {
    pub contexts: &'a [u32],
    pub slots: &'a [u32],
    pub recurrent: &'a mut [E],
    pub rows: &'a mut [E],
}

/// For each token, the rows of the convolution: those of its sequence in the call and those that were carried.
pub(super) struct ConvInputs<'a, E> {
    pub heads: Heads,
    pub kernel: usize,
    /// `[T, input_width]`
    pub raw: &'a [E],
    /// The first token of each token's sequence in the call.
    pub first: Vec<usize>,
    /// `[kernel - 1, conv_width]` of each token's sequence; `None` if no row comes before the call.
    pub carried: Vec<Option<&'a [E]>>,
}

impl<'a, E: Float> ConvInputs<'a, E> {
    pub fn new(d: Dims, raw: &'a [E], offsets: &[u32], carried: impl Fn(usize) -> Option<&'a [E]>) -> Self {
        let mut inputs = Self { heads: d.heads, kernel: d.kernel, raw, first: vec![], carried: vec![] };
        for (sequence, ends) in offsets.windows(2).enumerate() {
            let n = (ends[1] - ends[0]) as usize;
            inputs.first.extend(std::iter::repeat_n(ends[0] as usize, n));
            inputs.carried.extend(std::iter::repeat_n(carried(sequence), n));
        }
        inputs
    }

    /// The row `lag` rows in front of `token`; `None` in front of the sequence.
    #[inline(always)]
    pub fn row(&self, token: usize, lag: usize) -> Option<&'a [E]> {
        let width = self.heads.conv_width();
        let done = token - self.first[token];
        if lag <= done {
            return Some(&self.raw[(token - lag) * self.heads.input_width()..][..width]);
        }
        let carried = self.carried[token]?;
        Some(&carried[(self.kernel - 1 + done - lag) * width..][..width])
    }

    /// Sixteen columns of the convolution, from `at` on, in front of SiLU. `conv` is `[kernel, conv_width]`.
    #[inline(always)]
    pub fn convolve<L: Lanes<E = E>>(&self, l: L, conv: &[E], token: usize, at: usize) -> L::V {
        let width = self.heads.conv_width();
        let mut sum = l.zero();
        for (idx, conv) in conv.chunks_exact(width).enumerate() {
            if let Some(row) = self.row(token, self.kernel - 1 - idx) {
                sum = l.fma(l.get(conv, at, E::ZERO), l.get(row, at, E::ZERO), sum);
            }
        }
        sum
    }
}

/// `[conv_width, kernel]` as `[kernel, conv_width]`.
pub(super) fn transposed<E: Float>(conv: &[E], kernel: usize) -> Vec<E> {
    (0..kernel).flat_map(|idx| conv.iter().skip(idx).step_by(kernel).copied()).collect()
}

pub(crate) fn forward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    parameters: Parameters<'_, E>,
    raw: &[E],
    sequences: HostSequences<'_, E>,
    to: Out<'_, E>,
) {
    let heads = d.heads;
    let HostSequences { offsets, mut carried } = sequences;
    let (mixed, outputs) = to.mixed.into_host().split_at_mut(d.tokens * heads.mixed_width());
    let inv_norms = to.inv_norms.into_host();
    let rows_len = (d.kernel - 1) * heads.conv_width();
    {
        let carried = carried.as_ref();
        let rows = |sequence: usize| {
            let carried = carried?;
            let slot = carried.slots[sequence] as usize;
            carried.is_begun(offsets, sequence).then(|| &carried.rows[slot * rows_len..][..rows_len])
        };
        let inputs = ConvInputs::new(d, raw, offsets, rows);
        mix(cpu, d, parameters, &inputs, (&mut *mixed, &mut *inv_norms));
    }
    recur(cpu, d, mixed, offsets, carried.as_mut(), outputs);
    norm(cpu, d, parameters.norm.host(), raw, (outputs, inv_norms, to.out.into_host()));
    if let Some(carried) = &mut carried {
        carried.keep_rows(d, offsets, raw);
    }
}

impl<E: Float> HostCarried<'_, E> {
    /// Whether rows of the sequence come before the call.
    fn is_begun(&self, offsets: &[u32], sequence: usize) -> bool {
        self.contexts[sequence] > offsets[sequence + 1] - offsets[sequence]
    }

    /// Replaces the carried rows by the last ones of each sequence.
    fn keep_rows(&mut self, d: Dims, offsets: &[u32], raw: &[E]) {
        let width = d.heads.conv_width();
        let n_kept = d.kernel - 1;
        for (sequence, ends) in offsets.windows(2).enumerate() {
            let is_begun = self.is_begun(offsets, sequence);
            let rows = &mut self.rows[self.slots[sequence] as usize * n_kept * width..][..n_kept * width];
            if !is_begun {
                rows.fill(E::ZERO);
            }
            let n_new = (ends[1] - ends[0]) as usize;
            let n_old = n_kept.saturating_sub(n_new);
            rows.copy_within((n_kept - n_old) * width.., 0);
            for (idx, row) in rows.chunks_exact_mut(width.max(1)).enumerate().skip(n_old) {
                let token = ends[1] as usize + idx - n_kept;
                row.copy_from_slice(&raw[token * d.heads.input_width()..][..width]);
            }
        }
    }
}

/// From the input to the rows that the recurrence takes in.
fn mix<E: Float>(
    cpu: &Cpu,
    d: Dims,
    parameters: Parameters<'_, E>,
    inputs: &ConvInputs<'_, E>,
    (mixed, inv_norms): (&mut [E], &mut [E]),
) {
    let (width, n_norms) = (d.heads.mixed_width(), d.heads.n_norms());
    let conv = &transposed(parameters.conv.host(), d.kernel);
    let (mixed, inv_norms) = (Shared::new(mixed), Shared::new(inv_norms));
    cpu.rows(d.tokens, (d.kernel + 4) * width, |tokens| {
        // SAFETY: each task has its own tokens.
        let (mixed, inv_norms) = unsafe {
            (
                mixed.range(tokens.start * width..tokens.end * width),
                inv_norms.range(tokens.start * n_norms..tokens.end * n_norms),
            )
        };
        cpu.dispatch(Mix { parameters, inputs, conv, tokens, mixed, inv_norms });
    });
}

struct Mix<'a, E: Float> {
    parameters: Parameters<'a, E>,
    inputs: &'a ConvInputs<'a, E>,
    conv: &'a [E],
    tokens: Range<usize>,
    mixed: &'a mut [E],
    inv_norms: &'a mut [E],
}

impl<E: Float> Kernel<E> for Mix<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let heads = self.inputs.heads;
        let rows = self.mixed.chunks_exact_mut(heads.mixed_width());
        let rows = rows.zip(self.inv_norms.chunks_exact_mut(heads.n_norms()));
        for (token, (mixed, inv_norms)) in self.tokens.zip(rows) {
            let (convolved, gates) = mixed.split_at_mut(heads.conv_width());
            for at in (0..convolved.len()).step_by(WIDTH) {
                let sum = self.inputs.convolve(l, self.conv, token, at);
                l.put(convolved, at, silu_parts(l, sum).1);
            }
            let keyed = convolved[..2 * heads.key_width()].chunks_exact_mut(heads.key_dim);
            for (idx, (row, inv)) in keyed.zip(inv_norms.iter_mut()).enumerate() {
                *inv = E::ONE / (dot(l, row, row) + E::from_f64(LENGTH_EPS)).sqrt();
                let factor = l.splat(if idx < heads.key { *inv * query_scale(heads) } else { *inv });
                for at in (0..row.len()).step_by(WIDTH) {
                    l.put(row, at, l.mul(l.get(row, at, E::ZERO), factor));
                }
            }
            let raw = &self.inputs.raw[token * heads.input_width()..][..heads.input_width()];
            let (beta, decay) = gates.split_at_mut(heads.value);
            let inputs = GateInputs::new(heads, raw, self.parameters);
            for at in (0..heads.value).step_by(WIDTH) {
                let gates = Gates::new(l, inputs, at);
                l.put(beta, at, gates.beta);
                l.put(decay, at, gates.decay);
            }
        }
    }
}

/// `1 / sqrt(key_dim)`.
#[inline(always)]
pub(super) fn query_scale<E: Real>(heads: Heads) -> E {
    E::from_f64(1.0 / (heads.key_dim as f64).sqrt())
}

/// What the gates of a row are made of, each `[value heads]`.
#[derive(Clone, Copy)]
pub(super) struct GateInputs<'a, E> {
    b: &'a [E],
    a: &'a [E],
    a_log: &'a [E],
    dt_bias: &'a [E],
}

impl<'a, E: Float> GateInputs<'a, E> {
    #[inline(always)]
    pub fn new(heads: Heads, raw: &'a [E], parameters: Parameters<'a, E>) -> Self {
        let (b, a) = raw[heads.conv_width() + heads.value_width()..].split_at(heads.value);
        Self { b, a, a_log: parameters.a_log.host(), dt_bias: parameters.dt_bias.host() }
    }
}

/// The gates of sixteen value heads.
pub(super) struct Gates<V> {
    pub beta: V,
    /// `exp(a_log)`
    pub rate: V,
    /// `g = -rate softplus(a + dt_bias)` and its exponential.
    pub log_decay: V,
    pub decay: V,
    /// The derivative of softplus.
    pub slope: V,
}

impl<V: Copy> Gates<V> {
    #[inline(always)]
    pub fn new<L: Lanes<V = V>>(l: L, inputs: GateInputs<'_, L::E>, at: usize) -> Self {
        let zero = L::E::ZERO;
        let step = l.add(l.get(inputs.a, at, zero), l.get(inputs.dt_bias, at, zero));
        let rate = l.exp(l.get(inputs.a_log, at, zero));
        let log_decay = l.sub(l.zero(), l.mul(rate, softplus(l, step)));
        Self {
            beta: silu_parts(l, l.get(inputs.b, at, zero)).0,
            rate,
            log_decay,
            decay: l.exp(log_decay),
            slope: silu_parts(l, step).0,
        }
    }
}

/// `ln(1 + exp(x))`, as `max(x, 0) + ln(1 + y)` with `y = exp(-|x|)`. The quotient makes up for the rounding of `1 + y`.
#[inline(always)]
fn softplus<L: Lanes>(l: L, x: L::V) -> L::V {
    let (zero, one) = (L::E::ZERO, L::E::ONE);
    let small = l.to_array(l.exp(l.min(x, l.sub(l.zero(), x))));
    let x = l.to_array(x);
    let values = std::array::from_fn(|i| {
        let sum = one + small[i];
        let log = if sum == one { small[i] } else { sum.ln() * small[i] / (sum - one) };
        if x[i] > zero { x[i] + log } else { log }
    });
    l.load(&values)
}

/// Runs the recurrence of every value head of every sequence.
fn recur<E: Float>(
    cpu: &Cpu,
    d: Dims,
    mixed: &[E],
    offsets: &[u32],
    carried: Option<&mut HostCarried<'_, E>>,
    outputs: &mut [E],
) {
    let heads = d.heads;
    let state_len = heads.key_dim * heads.value_dim;
    let outputs = Shared::new(outputs);
    let carried = carried.map(|carried| {
        let begun: Vec<bool> = (0..d.sequences).map(|idx| carried.is_begun(offsets, idx)).collect();
        (begun, carried.slots, Shared::new(&mut *carried.recurrent))
    });
    cpu.tasks(d.sequences * heads.value, |task| {
        let (sequence, value_head) = (task / heads.value, task % heads.value);
        let tokens = offsets[sequence] as usize..offsets[sequence + 1] as usize;
        let width = heads.mixed_width();
        let rows = SequenceRows { heads, mixed: &mixed[tokens.start * width..tokens.end * width] };
        let out = |idx: usize| {
            let start = (tokens.start + idx) * heads.value_width() + value_head * heads.value_dim;
            // SAFETY: each task has its own sequence and columns.
            unsafe { outputs.range(start..start + heads.value_dim) }
        };
        let run = |state: &mut [E]| {
            cpu.dispatch(recurrence::Forward { rows, value_head, state, out: &out });
        };
        match &carried {
            Some((begun, slots, states)) => {
                let start = slots[sequence] as usize * heads.state_len() + value_head * state_len;
                // SAFETY: sequences have different slots, and each task has its own head.
                let state = unsafe { states.range(start..start + state_len) };
                if !begun[sequence] {
                    state.fill(E::ZERO);
                }
                run(state);
            }
            None => with_scratch(state_len, |state: &mut [E]| {
                state.fill(E::ZERO);
                run(state);
            }),
        }
    });
}

/// From the outputs of the recurrence to the rows of the output projection.
fn norm<E: Float>(
    cpu: &Cpu,
    d: Dims,
    weight: &[E],
    raw: &[E],
    (outputs, inv_norms, out): (&[E], &mut [E], &mut [E]),
) {
    let (width, n_norms) = (d.heads.value_width(), d.heads.n_norms());
    let (inv_norms, out) = (Shared::new(inv_norms), Shared::new(out));
    cpu.rows(d.tokens, 4 * width, |tokens| {
        // SAFETY: each task has its own tokens.
        let (inv_norms, out) = unsafe {
            (
                inv_norms.range(tokens.start * n_norms..tokens.end * n_norms),
                out.range(tokens.start * width..tokens.end * width),
            )
        };
        let raw = &raw[tokens.start * d.heads.input_width()..tokens.end * d.heads.input_width()];
        let outputs = &outputs[tokens.start * width..tokens.end * width];
        cpu.dispatch(Norm { d, weight, raw, outputs, inv_norms, out });
    });
}

struct Norm<'a, E> {
    d: Dims,
    weight: &'a [E],
    raw: &'a [E],
    outputs: &'a [E],
    inv_norms: &'a mut [E],
    out: &'a mut [E],
}

impl<E: Float> Kernel<E> for Norm<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let (heads, zero) = (self.d.heads, E::ZERO);
        let dim = heads.value_dim;
        for (idx, out) in self.out.chunks_exact_mut(dim).enumerate() {
            let (token, head) = (idx / heads.value, idx % heads.value);
            let gate = &self.raw[token * heads.input_width() + heads.conv_width() + head * dim..][..dim];
            let x = &self.outputs[idx * dim..(idx + 1) * dim];
            let inv = inverse_rms(l, x, E::from_f64(self.d.eps));
            self.inv_norms[token * heads.n_norms() + 2 * heads.key + head] = inv;
            let inv = l.splat(inv);
            for at in (0..dim).step_by(WIDTH) {
                let normed = l.mul(l.mul(l.get(x, at, zero), inv), l.get(self.weight, at, zero));
                l.put(out, at, l.mul(normed, silu_parts(l, l.get(gate, at, zero)).1));
            }
        }
    }
}
