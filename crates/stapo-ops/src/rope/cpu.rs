use super::{Dims, HeadNorm, HeadNormGrad, HeadNormSums, NormExtent, Table};
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::rmsnorm::cpu::{backward_row_in_place, inverse_rms, scale_row};

/// The rotation of one token: cos and sin of its position, `[rotary_dim / 2]` each.
#[derive(Clone, Copy)]
struct Rotation<'a, E> {
    cos: &'a [E],
    sin: &'a [E],
}

/// The rotations of all tokens.
#[derive(Clone, Copy)]
struct Rotations<'a, E> {
    cos: &'a [E],
    sin: &'a [E],
    half: usize,
    positions: &'a [u32],
}

impl<'a, E: Float> Rotations<'a, E> {
    fn new(table: &'a Table<E>, positions: &'a [u32]) -> Self {
        let (cos, sin) = (table.cos.view().host(), table.sin.view().host());
        Rotations { cos, sin, half: table.rotary_dim() / 2, positions }
    }

    #[inline(always)]
    fn at(&self, token: usize) -> Rotation<'a, E> {
        let at = self.positions[token] as usize * self.half;
        Rotation { cos: &self.cos[at..at + self.half], sin: &self.sin[at..at + self.half] }
    }
}

pub(crate) fn forward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    table: &Table<E>,
    positions: &[u32],
    norm: Option<(HeadNorm<'_, E>, &mut [E])>,
    raw: &[E],
    out: &mut [E],
) {
    let rotations = Rotations::new(table, positions);
    let width = d.heads.qkv_width();
    let normed_heads = d.heads.query + d.heads.kv;
    let out = Shared::new(out);
    let norm = norm.map(|(norm, inv_rms)| (norm, Shared::new(inv_rms)));
    cpu.rows(d.tokens, 4 * width, |tokens| {
        for token in tokens {
            let row = token * width..(token + 1) * width;
            // SAFETY: each task has its own tokens, of both outputs.
            let (out, norm) = unsafe {
                let heads = token * normed_heads..(token + 1) * normed_heads;
                let norm = norm.map(|(norm, inv_rms)| (norm, inv_rms.range(heads)));
                (out.range(row.clone()), norm)
            };
            cpu.dispatch(Forward { d, rotation: rotations.at(token), norm, raw: &raw[row], out });
        }
    });
}

/// Rotates one token.
struct Forward<'a, E: Float> {
    d: Dims,
    rotation: Rotation<'a, E>,
    norm: Option<(HeadNorm<'a, E>, &'a mut [E])>,
    raw: &'a [E],
    out: &'a mut [E],
}

impl<E: Float> Kernel<E> for Forward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        let heads = self.d.heads;
        let rotated = (heads.query + heads.kv) * heads.dim;
        let rows = self.raw[..rotated].chunks_exact(heads.dim).zip(self.out.chunks_exact_mut(heads.dim));
        for (head, (raw, out)) in rows.enumerate() {
            match &mut self.norm {
                None => rotate(l, self.rotation, raw, out),
                Some((norm, inv_rms)) => {
                    let is_shared =
                        norm.extent == NormExtent::Projection && ![0, heads.query].contains(&head);
                    inv_rms[head] = if is_shared {
                        inv_rms[head - 1]
                    } else {
                        inverse_rms(l, mean_of(self.d, *norm, self.raw, head), E::from_f64(norm.eps))
                    };
                    scale_row(l, raw, inv_rms[head], weight_of(self.d, *norm, head), out);
                    rotate_in_place(l, self.rotation, out);
                }
            }
        }
        self.out[rotated..].copy_from_slice(&self.raw[rotated..]);
    }
}

/// The part of a raw row whose mean of squares norms the head.
#[inline(always)]
fn mean_of<'a, E: Float>(d: Dims, norm: HeadNorm<'_, E>, raw: &'a [E], head: usize) -> &'a [E] {
    let n_query = d.heads.query * d.heads.dim;
    match norm.extent {
        NormExtent::Head => &raw[head * d.heads.dim..][..d.heads.dim],
        NormExtent::Projection if head < d.heads.query => &raw[..n_query],
        NormExtent::Projection => &raw[n_query..][..d.heads.kv * d.heads.dim],
    }
}

/// The norm's weight of a head, `[head_dim]`.
#[inline(always)]
fn weight_of<E: Float>(d: Dims, norm: HeadNorm<'_, E>, head: usize) -> &[E] {
    let (weight, idx) = if head < d.heads.query {
        (norm.query_weight.host(), head)
    } else {
        (norm.key_weight.host(), head - d.heads.query)
    };
    match norm.extent {
        NormExtent::Head => weight,
        NormExtent::Projection => &weight[idx * d.heads.dim..][..d.heads.dim],
    }
}

/// `(a cos - b sin, b cos + a sin)`.
#[inline(always)]
fn rotate_pair<L: Lanes>(l: L, cos: L::V, sin: L::V, a: L::V, b: L::V) -> (L::V, L::V) {
    (l.sub(l.mul(a, cos), l.mul(b, sin)), l.add(l.mul(b, cos), l.mul(a, sin)))
}

#[inline(always)]
fn rotate<L: Lanes>(l: L, rotation: Rotation<'_, L::E>, x: &[L::E], out: &mut [L::E]) {
    let zero = L::E::ZERO;
    let rotary_dim = 2 * rotation.cos.len();
    out[rotary_dim..].copy_from_slice(&x[rotary_dim..]);
    let (x_low, x_high) = x[..rotary_dim].split_at(rotary_dim / 2);
    let (low, high) = out[..rotary_dim].split_at_mut(rotary_dim / 2);
    for at in (0..low.len()).step_by(WIDTH) {
        let (cos, sin) = (l.get(rotation.cos, at, zero), l.get(rotation.sin, at, zero));
        let (a, b) = rotate_pair(l, cos, sin, l.get(x_low, at, zero), l.get(x_high, at, zero));
        l.put(low, at, a);
        l.put(high, at, b);
    }
}

#[inline(always)]
fn rotate_in_place<L: Lanes>(l: L, rotation: Rotation<'_, L::E>, x: &mut [L::E]) {
    let zero = L::E::ZERO;
    let (low, high) = x[..2 * rotation.cos.len()].split_at_mut(rotation.cos.len());
    for at in (0..low.len()).step_by(WIDTH) {
        let (cos, sin) = (l.get(rotation.cos, at, zero), l.get(rotation.sin, at, zero));
        let (a, b) = rotate_pair(l, cos, sin, l.get(low, at, zero), l.get(high, at, zero));
        l.put(low, at, a);
        l.put(high, at, b);
    }
}

/// The transpose of [`rotate`]: the rotation by the negative angle.
#[inline(always)]
fn rotate_back<L: Lanes>(l: L, rotation: Rotation<'_, L::E>, d: &[L::E], out: &mut [L::E]) {
    let rotary_dim = 2 * rotation.cos.len();
    out[rotary_dim..].copy_from_slice(&d[rotary_dim..]);
    let (low, high) = out[..rotary_dim].split_at_mut(rotary_dim / 2);
    for at in (0..low.len()).step_by(WIDTH) {
        let (a, b) = rotate_pair_back(l, rotation, d, at);
        l.put(low, at, a);
        l.put(high, at, b);
    }
}

#[inline(always)]
fn rotate_pair_back<L: Lanes>(l: L, rotation: Rotation<'_, L::E>, d: &[L::E], at: usize) -> (L::V, L::V) {
    let zero = L::E::ZERO;
    let (d_low, d_high) = d[..2 * rotation.cos.len()].split_at(rotation.cos.len());
    let cos = l.get(rotation.cos, at, zero);
    let sin = l.sub(l.zero(), l.get(rotation.sin, at, zero));
    rotate_pair(l, cos, sin, l.get(d_low, at, zero), l.get(d_high, at, zero))
}

pub(crate) fn backward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    table: &Table<E>,
    positions: &[u32],
    norm: Option<HeadNormGrad<'_, E>>,
    d_out: &[E],
    d_raw: &mut [E],
) {
    let rotations = Rotations::new(table, positions);
    let width = d.heads.qkv_width();
    let normed_heads = d.heads.query + d.heads.kv;
    let saved = norm.as_ref().map(|grad| (grad.norm, grad.raw.host(), grad.inv_rms.host()));
    let d_raw = Shared::new(d_raw);
    cpu.rows(d.tokens, 4 * width, |tokens| {
        for token in tokens {
            let row = token * width..(token + 1) * width;
            let norm = saved.map(|(norm, raw, inv_rms)| {
                (norm, &raw[row.clone()], &inv_rms[token * normed_heads..(token + 1) * normed_heads])
            });
            // SAFETY: each task has its own tokens.
            let d_raw = unsafe { d_raw.range(row.clone()) };
            cpu.dispatch(Backward { d, rotation: rotations.at(token), norm, d_out: &d_out[row], d_raw });
        }
    });
    if let Some(HeadNormGrad { raw, inv_rms, to: Some(to), norm }) = norm {
        let saved = (raw.host(), inv_rms.host());
        if norm.extent == NormExtent::Head && 2 * rotations.half == d.heads.dim {
            backward_weight(cpu, d, rotations, saved, to, d_out);
        } else {
            backward_weight_by_head(cpu, d, rotations, (saved, norm.extent), to, d_out);
        }
    }
}

/// The gradient of one token.
struct Backward<'a, E: Float> {
    d: Dims,
    rotation: Rotation<'a, E>,
    /// Weights, raw row, inv_rms row.
    norm: Option<(HeadNorm<'a, E>, &'a [E], &'a [E])>,
    d_out: &'a [E],
    d_raw: &'a mut [E],
}

impl<E: Float> Kernel<E> for Backward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let heads = self.d.heads;
        let rotated = (heads.query + heads.kv) * heads.dim;
        let rows = self.d_out[..rotated].chunks_exact(heads.dim).zip(self.d_raw.chunks_exact_mut(heads.dim));
        for (head, (d_out, d_raw)) in rows.enumerate() {
            rotate_back(l, self.rotation, d_out, d_raw);
            if let Some((norm, raw, inv_rms)) = self.norm.filter(|(norm, ..)| norm.extent == NormExtent::Head)
            {
                let raw = &raw[head * heads.dim..(head + 1) * heads.dim];
                backward_row_in_place(l, raw, weight_of(self.d, norm, head), inv_rms[head], d_raw);
            }
        }
        if let Some((norm, raw, inv_rms)) = self.norm.filter(|(norm, ..)| norm.extent != NormExtent::Head) {
            let (query, key) = self.d_raw[..rotated].split_at_mut(heads.query * heads.dim);
            let (raw_query, raw_key) = raw[..rotated].split_at(query.len());
            backward_row_in_place(l, raw_query, norm.query_weight.host(), inv_rms[0], query);
            backward_row_in_place(l, raw_key, norm.key_weight.host(), inv_rms[heads.query], key);
        }
        self.d_raw[rotated..].copy_from_slice(&self.d_out[rotated..]);
    }
}

/// The gradient of the norm's weights. A task has sixteen columns of the lower half of a head and the sixteen that they
/// are rotated with, of all query heads or of all key heads.
fn backward_weight<E: Float>(
    cpu: &Cpu,
    d: Dims,
    rotations: Rotations<'_, E>,
    (raw, inv_rms): (&[E], &[E]),
    to: HeadNormSums<'_, E>,
    d_out: &[E],
) {
    let half = d.heads.dim / 2;
    let vectors = half.div_ceil(WIDTH);
    let d_weights = [Shared::new(to.d_query_weight.into_host()), Shared::new(to.d_key_weight.into_host())];
    cpu.tasks(2 * vectors, |task| {
        let is_key = task / vectors;
        let at = task % vectors * WIDTH;
        let end = (at + WIDTH).min(half);
        // SAFETY: each task has its own columns.
        let (low, high) =
            unsafe { (d_weights[is_key].range(at..end), d_weights[is_key].range(half + at..half + end)) };
        let heads = if is_key == 0 { 0..d.heads.query } else { d.heads.query..d.heads.query + d.heads.kv };
        cpu.dispatch(BackwardWeight { d, rotations, heads, at, raw, inv_rms, d_out, low, high });
    });
}

/// The same by whole heads: a task has the heads that share a weight.
fn backward_weight_by_head<E: Float>(
    cpu: &Cpu,
    d: Dims,
    rotations: Rotations<'_, E>,
    ((raw, inv_rms), extent): ((&[E], &[E]), NormExtent),
    to: HeadNormSums<'_, E>,
    d_out: &[E],
) {
    let dim = d.heads.dim;
    let (d_query, d_key) = (to.d_query_weight.into_host(), to.d_key_weight.into_host());
    let d_weights = [Shared::new(d_query), Shared::new(d_key)];
    let n_tasks = d_weights.len()
        * match extent {
            NormExtent::Head => 1,
            NormExtent::Projection => d.heads.query.max(d.heads.kv),
        };
    cpu.tasks(n_tasks, |task| {
        let (is_key, idx) = (task % 2, task / 2);
        let (first, n_heads) = if is_key == 0 { (0, d.heads.query) } else { (d.heads.query, d.heads.kv) };
        let heads = match extent {
            NormExtent::Head => first..first + n_heads,
            NormExtent::Projection if idx < n_heads => first + idx..first + idx + 1,
            NormExtent::Projection => return,
        };
        // SAFETY: each task has its own weight.
        let sums = unsafe { d_weights[is_key].range(idx * dim..(idx + 1) * dim) };
        with_scratch(dim, |memory| {
            cpu.dispatch(BackwardWeightByHead { d, rotations, heads, raw, inv_rms, d_out, sums, memory });
        });
    });
}

struct BackwardWeightByHead<'a, E> {
    d: Dims,
    rotations: Rotations<'a, E>,
    heads: std::ops::Range<usize>,
    raw: &'a [E],
    inv_rms: &'a [E],
    d_out: &'a [E],
    sums: &'a mut [E],
    /// `[head_dim]`
    memory: &'a mut [E],
}

impl<E: Float> Kernel<E> for BackwardWeightByHead<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let Dims { tokens, heads } = self.d;
        let zero = E::ZERO;
        for (token, head) in (0..tokens).flat_map(|token| self.heads.clone().map(move |head| (token, head))) {
            let start = token * heads.qkv_width() + head * heads.dim;
            let (d_out, x) = (&self.d_out[start..start + heads.dim], &self.raw[start..start + heads.dim]);
            rotate_back(l, self.rotations.at(token), d_out, self.memory);
            let inv = l.splat(self.inv_rms[token * (heads.query + heads.kv) + head]);
            for at in (0..heads.dim).step_by(WIDTH) {
                let normed = l.mul(l.get(x, at, zero), inv);
                l.put(self.sums, at, l.fma(l.get(self.memory, at, zero), normed, l.get(self.sums, at, zero)));
            }
        }
    }
}

struct BackwardWeight<'a, E> {
    d: Dims,
    rotations: Rotations<'a, E>,
    heads: std::ops::Range<usize>,
    /// First column, counted within the lower half of the head.
    at: usize,
    raw: &'a [E],
    inv_rms: &'a [E],
    d_out: &'a [E],
    low: &'a mut [E],
    high: &'a mut [E],
}

impl<E: Float> Kernel<E> for BackwardWeight<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let heads = self.d.heads;
        let zero = E::ZERO;
        let (mut low, mut high) = (l.get(self.low, 0, zero), l.get(self.high, 0, zero));
        for token in 0..self.d.tokens {
            let rotation = self.rotations.at(token);
            for head in self.heads.clone() {
                let start = token * heads.qkv_width() + head * heads.dim;
                let (d_low, d_high) =
                    rotate_pair_back(l, rotation, &self.d_out[start..start + heads.dim], self.at);
                let (x_low, x_high) = self.raw[start..start + heads.dim].split_at(heads.dim / 2);
                let inv = l.splat(self.inv_rms[token * (heads.query + heads.kv) + head]);
                low = l.fma(d_low, l.mul(l.get(x_low, self.at, zero), inv), low);
                high = l.fma(d_high, l.mul(l.get(x_high, self.at, zero), inv), high);
            }
        }
        l.put(self.low, 0, low);
        l.put(self.high, 0, high);
    }
}
