use super::{Dims, Out, Saved};
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH};
use crate::cpu::{Cpu, Shared};
use crate::{Float, Write};

pub(crate) fn forward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    x: &[E],
    add: Option<(&[E], &mut [E])>,
    weight: &[E],
    to: Out<'_, E>,
) {
    let normed = Shared::new(to.normed.into_host());
    let inv_rms = Shared::new(to.inv_rms.into_host());
    let add = add.map(|(addend, sum)| (addend, Shared::new(sum)));
    cpu.rows(d.tokens, 4 * d.width, |rows| {
        let wide = rows.start * d.width..rows.end * d.width;
        // SAFETY: each task has its own rows, of all outputs.
        let (normed, inv_rms, add) = unsafe {
            let add = add.map(|(addend, sum)| (&addend[wide.clone()], sum.range(wide.clone())));
            (normed.range(wide.clone()), inv_rms.range(rows.clone()), add)
        };
        cpu.dispatch(Forward { d, x: &x[wide], add, weight, normed, inv_rms });
    });
}

struct Forward<'a, E> {
    d: Dims,
    x: &'a [E],
    add: Option<(&'a [E], &'a mut [E])>,
    weight: &'a [E],
    normed: &'a mut [E],
    inv_rms: &'a mut [E],
}

impl<E: Float> Kernel<E> for Forward<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        let width = self.d.width;
        let eps = E::from_f64(self.d.eps);
        for (row, inv_rms) in self.inv_rms.iter_mut().enumerate() {
            let wide = row * width..(row + 1) * width;
            let x = &self.x[wide.clone()];
            let x = match &mut self.add {
                None => x,
                Some((addend, sum)) => {
                    let addend = &addend[wide.clone()];
                    let sum = &mut sum[wide.clone()];
                    for at in (0..width).step_by(WIDTH) {
                        l.put(sum, at, l.add(l.get(x, at, E::ZERO), l.get(addend, at, E::ZERO)));
                    }
                    sum
                }
            };
            *inv_rms = inverse_rms(l, x, eps);
            scale_row(l, x, *inv_rms, self.weight, &mut self.normed[wide]);
        }
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
pub(crate) fn inverse_rms<L: Lanes>(l: L, x: &[L::E], eps: L::E) -> L::E {
    let mean = dot(l, x, x) / L::E::from_f64(x.len() as f64);
    L::E::ONE / (mean + eps).sqrt()
}

/// `out = x * inv_rms * weight`.
#[inline(always)]
pub(crate) fn scale_row<L: Lanes>(l: L, x: &[L::E], inv_rms: L::E, weight: &[L::E], out: &mut [L::E]) {
    let inv = l.splat(inv_rms);
    for at in (0..x.len()).step_by(WIDTH) {
        let normed = l.mul(l.get(x, at, L::E::ZERO), inv);
        l.put(out, at, l.mul(normed, l.get(weight, at, L::E::ZERO)));
    }
}

/// The sum of the products, by sixteen lanes and a fixed tree.
#[inline(always)]
pub(crate) fn dot<L: Lanes>(l: L, a: &[L::E], b: &[L::E]) -> L::E {
    let mut sum = l.zero();
    for at in (0..a.len()).step_by(WIDTH) {
        sum = l.fma(l.get(a, at, L::E::ZERO), l.get(b, at, L::E::ZERO), sum);
    }
    l.sum(sum)
}

pub(crate) fn backward_input<E: Float>(
    cpu: &Cpu,
    d: Dims,
    saved: Saved<'_, E>,
    d_out: &[E],
    write: Write,
    d_x: &mut [E],
) {
    let (x, weight, inv_rms) = (saved.x.host(), saved.weight.host(), saved.inv_rms.host());
    let d_x = Shared::new(d_x);
    cpu.rows(d.tokens, 4 * d.width, |rows| {
        let wide = rows.start * d.width..rows.end * d.width;
        // SAFETY: each task has its own rows.
        let d_x = unsafe { d_x.range(wide.clone()) };
        let x = &x[wide.clone()];
        let d_out = &d_out[wide];
        cpu.dispatch(BackwardInput { width: d.width, x, weight, inv_rms: &inv_rms[rows], d_out, write, d_x });
    });
}

struct BackwardInput<'a, E> {
    width: usize,
    x: &'a [E],
    weight: &'a [E],
    inv_rms: &'a [E],
    d_out: &'a [E],
    write: Write,
    d_x: &'a mut [E],
}

impl<E: Float> Kernel<E> for BackwardInput<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let rows = self.x.chunks_exact(self.width).zip(self.d_out.chunks_exact(self.width));
        let rows = rows.zip(self.d_x.chunks_exact_mut(self.width)).zip(self.inv_rms);
        for (((x, d_out), d_x), inv_rms) in rows {
            backward_row(l, x, self.weight, *inv_rms, d_out, self.write, d_x);
        }
    }
}

/// `d_x (+)= d_out weight inv - x inv^3 sum(d_out weight x) / width`.
#[inline(always)]
fn backward_row<L: Lanes>(
    l: L,
    x: &[L::E],
    weight: &[L::E],
    inv_rms: L::E,
    d_out: &[L::E],
    write: Write,
    d_x: &mut [L::E],
) {
    let factor = l.splat(x_factor(l, x, weight, inv_rms, d_out));
    for at in (0..x.len()).step_by(WIDTH) {
        let mut d = d_x_vector(l, x, weight, inv_rms, d_out, factor, at);
        if write == Write::Add {
            d = l.add(l.get(d_x, at, L::E::ZERO), d);
        }
        l.put(d_x, at, d);
    }
}

/// [`backward_row`] in place: `d` holds d_out and becomes d_x.
#[inline(always)]
pub(crate) fn backward_row_in_place<L: Lanes>(
    l: L,
    x: &[L::E],
    weight: &[L::E],
    inv_rms: L::E,
    d: &mut [L::E],
) {
    let factor = l.splat(x_factor(l, x, weight, inv_rms, d));
    for at in (0..x.len()).step_by(WIDTH) {
        let d_x = d_x_vector(l, x, weight, inv_rms, d, factor, at);
        l.put(d, at, d_x);
    }
}

/// The factor of x in d_x: `-inv^3 sum(d_out weight x) / width`.
#[inline(always)]
fn x_factor<L: Lanes>(l: L, x: &[L::E], weight: &[L::E], inv_rms: L::E, d_out: &[L::E]) -> L::E {
    let zero = L::E::ZERO;
    let mut sum = l.zero();
    for at in (0..x.len()).step_by(WIDTH) {
        let scaled = l.mul(l.get(d_out, at, zero), l.get(weight, at, zero));
        sum = l.fma(scaled, l.get(x, at, zero), sum);
    }
    -(l.sum(sum) * inv_rms * inv_rms * inv_rms / L::E::from_f64(x.len() as f64))
}

/// Sixteen elements of `d_out weight inv + factor x`.
#[inline(always)]
fn d_x_vector<L: Lanes>(
    l: L,
    x: &[L::E],
    weight: &[L::E],
    inv_rms: L::E,
    d_out: &[L::E],
    factor: L::V,
    at: usize,
) -> L::V {
    let zero = L::E::ZERO;
    let scaled = l.mul(l.get(d_out, at, zero), l.get(weight, at, zero));
    l.fma(factor, l.get(x, at, zero), l.mul(scaled, l.splat(inv_rms)))
}

pub(crate) fn backward_weight<E: Float>(
    cpu: &Cpu,
    d: Dims,
    saved: Saved<'_, E>,
    d_out: &[E],
    d_weight: &mut [E],
) {
    let (x, inv_rms) = (saved.x.host(), saved.inv_rms.host());
    let d_weight = Shared::new(d_weight);
    cpu.rows(d.width.div_ceil(WIDTH), 2 * WIDTH * d.tokens, |vectors| {
        let start = vectors.start * WIDTH;
        // SAFETY: each task has its own columns.
        let d_weight = unsafe { d_weight.range(start..(vectors.end * WIDTH).min(d.width)) };
        cpu.dispatch(BackwardWeight { width: d.width, start, x, inv_rms, d_out, d_weight });
    });
}

struct BackwardWeight<'a, E> {
    width: usize,
    start: usize,
    x: &'a [E],
    inv_rms: &'a [E],
    d_out: &'a [E],
    d_weight: &'a mut [E],
}

impl<E: Float> Kernel<E> for BackwardWeight<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let zero = E::ZERO;
        let columns = self.start..self.start + self.d_weight.len();
        let rows = self.x.chunks_exact(self.width).zip(self.d_out.chunks_exact(self.width));
        for ((x, d_out), inv_rms) in rows.zip(self.inv_rms) {
            let (x, d_out) = (&x[columns.clone()], &d_out[columns.clone()]);
            let inv = l.splat(*inv_rms);
            for at in (0..x.len()).step_by(WIDTH) {
                let normed = l.mul(l.get(x, at, zero), inv);
                let sum = l.fma(l.get(d_out, at, zero), normed, l.get(self.d_weight, at, zero));
                l.put(self.d_weight, at, sum);
            }
        }
    }
}
