use super::{Dims, HeadNorm, HeadNormGrad, HeadNormSums, Table};
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH};
use crate::cpu::{Cpu, Shared};
use crate::rmsnorm::cpu::{backward_row_in_place, inverse_rms, scale_row};

/// The rotation of one token: cos and sin of its position, `[head_dim / 2]` each.
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
        Rotations { cos, sin, half: table.head_dim() / 2, positions }
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
                    let weight = if head < heads.query { norm.query_weight } else { norm.key_weight };
                    inv_rms[head] = inverse_rms(l, raw, E::from_f64(norm.eps));
                    scale_row(l, raw, inv_rms[head], weight.host(), out);
                    rotate_in_place(l, self.rotation, out);
                }
            }
        }
        self.out[rotated..].copy_from_slice(&self.raw[rotated..]);
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
    let (x_low, x_high) = x.split_at(x.len() / 2);
    let (low, high) = out.split_at_mut(x.len() / 2);
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
    let (low, high) = x.split_at_mut(x.len() / 2);
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
    let (low, high) = out.split_at_mut(d.len() / 2);
    for at in (0..low.len()).step_by(WIDTH) {
        let (a, b) = rotate_pair_back(l, rotation, d, at);
        l.put(low, at, a);
        l.put(high, at, b);
    }
}

#[inline(always)]
fn rotate_pair_back<L: Lanes>(l: L, rotation: Rotation<'_, L::E>, d: &[L::E], at: usize) -> (L::V, L::V) {
    let zero = L::E::ZERO;
    let (d_low, d_high) = d.split_at(d.len() / 2);
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
    if let Some(HeadNormGrad { raw, inv_rms, to: Some(to), .. }) = norm {
        backward_weight(cpu, d, rotations, (raw.host(), inv_rms.host()), to, d_out);
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
            if let Some((norm, raw, inv_rms)) = self.norm {
                let weight = if head < heads.query { norm.query_weight } else { norm.key_weight };
                let raw = &raw[head * heads.dim..(head + 1) * heads.dim];
                backward_row_in_place(l, raw, weight.host(), inv_rms[head], d_raw);
            }
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
