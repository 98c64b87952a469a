use std::ops::Range;

use super::cpu::{ConvInputs, GateInputs, Gates, query_scale, transposed};
use super::recurrence::{Backward, HeadColumns, RowGradients, SequenceRows};
use super::{Dims, ParameterSums, Parameters, Saved};
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH, silu_parts};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::rmsnorm::cpu::{backward_row_in_place, dot};

/// Where gradients go.
pub(crate) struct Gradients<'a, E: Float> {
    pub d_mixed: &'a mut [E],
    pub d_raw: &'a mut [E],
    pub sums: Option<ParameterSums<'a, E>>,
}

pub(crate) fn backward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    (parameters, saved): (Parameters<'_, E>, Saved<'_, E>),
    offsets: &[u32],
    d_out: &[E],
    to: Gradients<'_, E>,
) {
    let heads = d.heads;
    let n_mixed = d.tokens * heads.mixed_width();
    let (mixed, outputs) = saved.mixed.host().split_at(n_mixed);
    let (raw, inv_norms) = (saved.raw.host(), saved.inv_norms.host());
    let (d_mixed, d_outputs) = to.d_mixed.split_at_mut(n_mixed);
    let rows = NormRows { d, weight: parameters.norm.host(), raw, outputs, inv_norms, d_out };
    norm_backward(cpu, rows, d_outputs, to.d_raw);
    recur_backward(cpu, d, mixed, offsets, d_outputs, d_mixed);
    let inputs = ConvInputs::new(d, raw, offsets, |_| None);
    let conv = &transposed(parameters.conv.host(), d.kernel);
    if let Some(ParameterSums { d_conv, d_a_log, d_dt_bias, d_norm }) = to.sums {
        norm_weight_backward(cpu, rows, d_norm.into_host());
        let (d_a_log, d_dt_bias) = (d_a_log.into_host(), d_dt_bias.into_host());
        cpu.dispatch(GateSums { d, parameters, raw, d_mixed, d_a_log, d_dt_bias });
        mix_backward(cpu, d, (parameters, inv_norms), (&inputs, conv), (d_mixed, to.d_raw));
        conv_weight_backward(cpu, d, &inputs, d_mixed, d_conv.into_host());
    } else {
        mix_backward(cpu, d, (parameters, inv_norms), (&inputs, conv), (d_mixed, to.d_raw));
    }
    conv_backward(cpu, d, (conv, offsets), d_mixed, to.d_raw);
}

/// The derivative of SiLU.
#[inline(always)]
fn silu_slope<L: Lanes>(l: L, x: L::V) -> L::V {
    let (sigmoid, silu) = silu_parts(l, x);
    l.fma(silu, l.sub(l.splat(L::E::ONE), sigmoid), sigmoid)
}

/// What the gated norm on the outputs takes in.
#[derive(Clone, Copy)]
struct NormRows<'a, E> {
    d: Dims,
    weight: &'a [E],
    raw: &'a [E],
    outputs: &'a [E],
    inv_norms: &'a [E],
    d_out: &'a [E],
}

/// One head of one token of [`NormRows`].
struct NormHead<'a, E> {
    gate: &'a [E],
    x: &'a [E],
    inv: E,
    d_out: &'a [E],
}

impl<'a, E: Float> NormRows<'a, E> {
    #[inline(always)]
    fn head(self, token: usize, head: usize) -> NormHead<'a, E> {
        let heads = self.d.heads;
        let dim = heads.value_dim;
        let at = (token * heads.value + head) * dim;
        NormHead {
            gate: &self.raw[token * heads.input_width() + heads.conv_width() + head * dim..][..dim],
            x: &self.outputs[at..at + dim],
            inv: self.inv_norms[token * heads.n_norms() + 2 * heads.key + head],
            d_out: &self.d_out[at..at + dim],
        }
    }
}

/// The gradients of the outputs of the recurrence and of z.
fn norm_backward<E: Float>(cpu: &Cpu, rows: NormRows<'_, E>, d_outputs: &mut [E], d_raw: &mut [E]) {
    let heads = rows.d.heads;
    let (d_outputs, d_raw) = (Shared::new(d_outputs), Shared::new(d_raw));
    cpu.rows(rows.d.tokens, 8 * heads.value_width(), |tokens| {
        let (wide, raw) = (heads.value_width(), heads.input_width());
        // SAFETY: each task has its own tokens.
        let (d_outputs, d_raw) = unsafe {
            (
                d_outputs.range(tokens.start * wide..tokens.end * wide),
                d_raw.range(tokens.start * raw..tokens.end * raw),
            )
        };
        cpu.dispatch(NormBackward { rows, tokens, d_outputs, d_raw });
    });
}

struct NormBackward<'a, E> {
    rows: NormRows<'a, E>,
    tokens: Range<usize>,
    d_outputs: &'a mut [E],
    d_raw: &'a mut [E],
}

impl<E: Float> Kernel<E> for NormBackward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let (heads, zero) = (self.rows.d.heads, E::ZERO);
        let dim = heads.value_dim;
        for (idx, d_x) in self.d_outputs.chunks_exact_mut(dim).enumerate() {
            let (row, head) = (idx / heads.value, idx % heads.value);
            let NormHead { gate, x, inv, d_out } = self.rows.head(self.tokens.start + row, head);
            let d_gate =
                &mut self.d_raw[row * heads.input_width() + heads.conv_width() + head * dim..][..dim];
            for at in (0..dim).step_by(WIDTH) {
                let (z, d) = (l.get(gate, at, zero), l.get(d_out, at, zero));
                let normed =
                    l.mul(l.mul(l.get(x, at, zero), l.splat(inv)), l.get(self.rows.weight, at, zero));
                l.put(d_gate, at, l.mul(l.mul(d, normed), silu_slope(l, z)));
                l.put(d_x, at, l.mul(d, silu_parts(l, z).1));
            }
            backward_row_in_place(l, x, self.rows.weight, inv, d_x);
        }
    }
}

/// Adds to the gradient of the norm's weight, over tokens and their heads in order. A task has sixteen columns.
fn norm_weight_backward<E: Float>(cpu: &Cpu, rows: NormRows<'_, E>, d_weight: &mut [E]) {
    let dim = rows.d.heads.value_dim;
    let d_weight = Shared::new(d_weight);
    cpu.tasks(dim.div_ceil(WIDTH), |task| {
        let start = task * WIDTH;
        // SAFETY: each task has its own columns.
        let d_weight = unsafe { d_weight.range(start..(start + WIDTH).min(dim)) };
        cpu.dispatch(NormWeight { rows, start, d_weight });
    });
}

struct NormWeight<'a, E> {
    rows: NormRows<'a, E>,
    start: usize,
    d_weight: &'a mut [E],
}

impl<E: Float> Kernel<E> for NormWeight<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let (d, zero) = (self.rows.d, E::ZERO);
        let mut sum = l.get(self.d_weight, 0, zero);
        for idx in 0..d.tokens * d.heads.value {
            let head = self.rows.head(idx / d.heads.value, idx % d.heads.value);
            let gated = l.mul(
                l.get(head.d_out, self.start, zero),
                silu_parts(l, l.get(head.gate, self.start, zero)).1,
            );
            sum = l.fma(gated, l.mul(l.get(head.x, self.start, zero), l.splat(head.inv)), sum);
        }
        l.put(self.d_weight, 0, sum);
    }
}

/// The gradients of what the recurrence took in. A task has a key head of a sequence, and its value heads in order.
fn recur_backward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    mixed: &[E],
    offsets: &[u32],
    d_outputs: &[E],
    d_mixed: &mut [E],
) {
    let heads = d.heads;
    let width = heads.mixed_width();
    let d_mixed = Shared::new(d_mixed);
    cpu.tasks(d.sequences * heads.key, |task| {
        let (sequence, key_head) = (task / heads.key, task % heads.key);
        let tokens = offsets[sequence] as usize..offsets[sequence + 1] as usize;
        let rows = SequenceRows { heads, mixed: &mixed[tokens.start * width..tokens.end * width] };
        // SAFETY: each task has its own sequence, and the columns of its key head and of its value heads.
        let range = |idx: usize, columns: &Range<usize>| unsafe {
            let start = (tokens.start + idx) * width;
            d_mixed.range(start + columns.start..start + columns.end)
        };
        let shared = HeadColumns::new(heads, key_head * heads.group());
        for idx in 0..rows.len() {
            range(idx, &shared.query).fill(E::ZERO);
            range(idx, &shared.key).fill(E::ZERO);
        }
        for value_head in key_head * heads.group()..(key_head + 1) * heads.group() {
            let columns = HeadColumns::new(heads, value_head);
            let d_out = |idx: usize| {
                let start = (tokens.start + idx) * heads.value_width() + value_head * heads.value_dim;
                &d_outputs[start..start + heads.value_dim]
            };
            let to = |idx: usize| RowGradients {
                query: range(idx, &columns.query),
                key: range(idx, &columns.key),
                value: range(idx, &columns.value),
                beta: &mut range(idx, &(columns.beta..columns.beta + 1))[0],
                decay: &mut range(idx, &(columns.decay..columns.decay + 1))[0],
            };
            with_scratch(Backward::<E>::memory_len(heads, rows.len()), |memory| {
                cpu.dispatch(Backward { rows, value_head, d_out: &d_out, to: &to, memory });
            });
        }
    });
}

/// Adds to the gradients of a_log and dt_bias, over tokens in order.
struct GateSums<'a, E: Float> {
    d: Dims,
    parameters: Parameters<'a, E>,
    raw: &'a [E],
    d_mixed: &'a [E],
    d_a_log: &'a mut [E],
    d_dt_bias: &'a mut [E],
}

impl<E: Float> Kernel<E> for GateSums<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let (heads, zero) = (self.d.heads, E::ZERO);
        let rows = self.raw.chunks_exact(heads.input_width());
        for (raw, d_mixed) in rows.zip(self.d_mixed.chunks_exact(heads.mixed_width())) {
            let inputs = GateInputs::new(heads, raw, self.parameters);
            for at in (0..heads.value).step_by(WIDTH) {
                let gates = Gates::new(l, inputs, at);
                let d_decay = l.get(&d_mixed[heads.conv_width() + heads.value..], at, zero);
                let d_log_decay = l.mul(d_decay, gates.decay);
                let sum = l.fma(d_log_decay, gates.log_decay, l.get(self.d_a_log, at, zero));
                l.put(self.d_a_log, at, sum);
                let d_step = d_step(l, &gates, d_log_decay);
                l.put(self.d_dt_bias, at, l.add(l.get(self.d_dt_bias, at, zero), d_step));
            }
        }
    }
}

/// The gradient of `a + dt_bias` from that of the log decay.
#[inline(always)]
fn d_step<L: Lanes>(l: L, gates: &Gates<L::V>, d_log_decay: L::V) -> L::V {
    l.sub(l.zero(), l.mul(l.mul(d_log_decay, gates.rate), gates.slope))
}

/// The gradients of b and a, and, in `d_mixed`, of the convolution in front of SiLU.
fn mix_backward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    (parameters, inv_norms): (Parameters<'_, E>, &[E]),
    (inputs, conv): (&ConvInputs<'_, E>, &[E]),
    (d_mixed, d_raw): (&mut [E], &mut [E]),
) {
    let heads = d.heads;
    let (d_mixed, d_raw) = (Shared::new(d_mixed), Shared::new(d_raw));
    cpu.rows(d.tokens, (d.kernel + 8) * heads.conv_width(), |tokens| {
        let (mixed, raw) = (heads.mixed_width(), heads.input_width());
        // SAFETY: each task has its own tokens.
        let (d_mixed, d_raw) = unsafe {
            (
                d_mixed.range(tokens.start * mixed..tokens.end * mixed),
                d_raw.range(tokens.start * raw..tokens.end * raw),
            )
        };
        with_scratch(2 * heads.conv_width(), |memory| {
            cpu.dispatch(MixBackward { parameters, inv_norms, inputs, conv, tokens, d_mixed, d_raw, memory });
        });
    });
}

struct MixBackward<'a, E: Float> {
    parameters: Parameters<'a, E>,
    inv_norms: &'a [E],
    inputs: &'a ConvInputs<'a, E>,
    conv: &'a [E],
    tokens: Range<usize>,
    d_mixed: &'a mut [E],
    d_raw: &'a mut [E],
    /// `[2, conv_width]`: a row in front of SiLU and after it.
    memory: &'a mut [E],
}

impl<E: Float> Kernel<E> for MixBackward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let (heads, zero) = (self.inputs.heads, E::ZERO);
        let width = heads.conv_width();
        let (sums, activated) = self.memory.split_at_mut(width);
        let rows = self.d_mixed.chunks_exact_mut(heads.mixed_width());
        let rows = rows.zip(self.d_raw.chunks_exact_mut(heads.input_width()));
        for (token, (d_mixed, d_raw)) in self.tokens.zip(rows) {
            let (d_convolved, d_gates) = d_mixed.split_at_mut(width);
            for at in (0..width).step_by(WIDTH) {
                let sum = self.inputs.convolve(l, self.conv, token, at);
                l.put(sums, at, sum);
                l.put(activated, at, silu_parts(l, sum).1);
            }
            let keyed = d_convolved[..2 * heads.key_width()].chunks_exact_mut(heads.key_dim);
            for (idx, (d, x)) in keyed.zip(activated.chunks_exact(heads.key_dim)).enumerate() {
                let inv = self.inv_norms[token * heads.n_norms() + idx];
                let scale = if idx < heads.key { inv * query_scale(heads) } else { inv };
                let along = l.splat(-(dot(l, d, x) * inv * inv));
                for at in (0..d.len()).step_by(WIDTH) {
                    let d_x = l.fma(along, l.get(x, at, zero), l.get(d, at, zero));
                    l.put(d, at, l.mul(d_x, l.splat(scale)));
                }
            }
            for at in (0..width).step_by(WIDTH) {
                let slope = silu_slope(l, l.get(sums, at, zero));
                l.put(d_convolved, at, l.mul(l.get(d_convolved, at, zero), slope));
            }
            let raw = &self.inputs.raw[token * heads.input_width()..][..heads.input_width()];
            let inputs = GateInputs::new(heads, raw, self.parameters);
            let (d_beta, d_decay) = d_gates.split_at(heads.value);
            let (d_b, d_a) = d_raw[width + heads.value_width()..].split_at_mut(heads.value);
            for at in (0..heads.value).step_by(WIDTH) {
                let gates = Gates::new(l, inputs, at);
                let slope = l.mul(gates.beta, l.sub(l.splat(E::ONE), gates.beta));
                l.put(d_b, at, l.mul(l.get(d_beta, at, zero), slope));
                let d_log_decay = l.mul(l.get(d_decay, at, zero), gates.decay);
                l.put(d_a, at, d_step(l, &gates, d_log_decay));
            }
        }
    }
}

/// Adds to the gradient of the convolution's weight, over tokens in order. A task has sixteen columns.
fn conv_weight_backward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    inputs: &ConvInputs<'_, E>,
    d_mixed: &[E],
    d_conv: &mut [E],
) {
    let width = d.heads.conv_width();
    let d_conv = Shared::new(d_conv);
    cpu.tasks(width.div_ceil(WIDTH), |task| {
        let columns = task * WIDTH..((task + 1) * WIDTH).min(width);
        // SAFETY: each task has its own columns.
        let d_conv = unsafe { d_conv.range(columns.start * d.kernel..columns.end * d.kernel) };
        cpu.dispatch(ConvWeight { d, inputs, columns, d_mixed, d_conv });
    });
}

struct ConvWeight<'a, E: Float> {
    d: Dims,
    inputs: &'a ConvInputs<'a, E>,
    columns: Range<usize>,
    d_mixed: &'a [E],
    d_conv: &'a mut [E],
}

impl<E: Float> Kernel<E> for ConvWeight<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let (d, zero) = (self.d, E::ZERO);
        for idx in 0..d.kernel {
            let mut of_columns = [zero; WIDTH];
            let old = self.d_conv.iter().skip(idx).step_by(d.kernel);
            of_columns.iter_mut().zip(old).for_each(|(to, old)| *to = *old);
            let mut sum = l.load(&of_columns);
            for (token, d_mixed) in self.d_mixed.chunks_exact(d.heads.mixed_width()).enumerate() {
                if let Some(row) = self.inputs.row(token, d.kernel - 1 - idx) {
                    let x = l.get(&row[..self.columns.end], self.columns.start, zero);
                    sum = l.fma(l.get(&d_mixed[..self.columns.end], self.columns.start, zero), x, sum);
                }
            }
            let sums = l.to_array(sum);
            for (to, sum) in self.d_conv.iter_mut().skip(idx).step_by(d.kernel).zip(sums) {
                *to = sum;
            }
        }
    }
}

/// The gradient of queries, keys and values in front of the convolution. `conv` is `[kernel, conv_width]`.
fn conv_backward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    (conv, offsets): (&[E], &[u32]),
    d_mixed: &[E],
    d_raw: &mut [E],
) {
    let heads = d.heads;
    let ends: Vec<usize> = offsets
        .windows(2)
        .flat_map(|ends| std::iter::repeat_n(ends[1] as usize, (ends[1] - ends[0]) as usize))
        .collect();
    let d_raw = Shared::new(d_raw);
    cpu.rows(d.tokens, (d.kernel + 1) * heads.conv_width(), |tokens| {
        for token in tokens {
            let start = token * heads.input_width();
            // SAFETY: each task has its own tokens.
            let d_row = unsafe { d_raw.range(start..start + heads.conv_width()) };
            let behind = &d_mixed[token * heads.mixed_width()..ends[token] * heads.mixed_width()];
            cpu.dispatch(ConvBackward { d, conv, behind, d_row });
        }
    });
}

struct ConvBackward<'a, E> {
    d: Dims,
    conv: &'a [E],
    /// The rows of the sequence from the token on.
    behind: &'a [E],
    d_row: &'a mut [E],
}

impl<E: Float> Kernel<E> for ConvBackward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let width = self.d.heads.conv_width();
        for at in (0..width).step_by(WIDTH) {
            let mut sum = l.zero();
            let rows = self.behind.chunks_exact(self.d.heads.mixed_width());
            for (conv, d) in self.conv.chunks_exact(width).rev().zip(rows) {
                sum = l.fma(l.get(conv, at, E::ZERO), l.get(&d[..width], at, E::ZERO), sum);
            }
            l.put(self.d_row, at, sum);
        }
    }
}
