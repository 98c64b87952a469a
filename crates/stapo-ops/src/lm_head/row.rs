//! What training and sampling compute from one row of logits.

use std::cmp::Ordering;

use super::LogitRule;
use crate::cpu::simd::{Lanes, Real, WIDTH, tanh};

/// In place of `ln 0` where the logarithm is multiplied by a probability of 0: 0 times minus infinity would be NaN.
const FLOOR: f64 = -1e30;

/// Statistics of `softmax(logits * inv_temperature)`.
#[derive(Clone, Copy)]
pub(crate) struct Stats<E> {
    /// The largest scaled logit.
    pub top: E,
    /// `ln sum exp(scaled - top)`.
    pub ln_sum: E,
    pub entropy: E,
    pub collision: E,
}

impl<E: Real> Stats<E> {
    pub(crate) fn lse(&self) -> E {
        self.top + self.ln_sum
    }

    #[inline(always)]
    pub(crate) fn logp(&self, logit: E, inv_temperature: E) -> E {
        logit * inv_temperature - self.top - self.ln_sum
    }
}

#[inline(always)]
pub(crate) fn stats<L: Lanes>(l: L, logits: &[L::E], inv_temperature: L::E) -> Stats<L::E> {
    let low = L::E::NEG_INFINITY;
    let mut top = l.splat(low);
    for at in (0..logits.len()).step_by(WIDTH) {
        top = l.max(top, l.get(logits, at, low));
    }
    let top = l.max_lane(top) * inv_temperature;
    let (wide_top, scale) = (l.splat(top), l.splat(inv_temperature));
    let floor = l.splat(L::E::from_f64(FLOOR));
    let (mut sum, mut weighted, mut squares) = (l.zero(), l.zero(), l.zero());
    for at in (0..logits.len()).step_by(WIDTH) {
        // A logit of minus infinity has weight 0, and 0 times minus infinity would be NaN, so the logarithm is bounded.
        // NaN stays NaN.
        let below = l.max(floor, l.sub(l.mul(l.get(logits, at, low), scale), wide_top));
        let e = l.exp(below);
        sum = l.add(sum, e);
        weighted = l.fma(e, below, weighted);
        squares = l.fma(e, e, squares);
    }
    let (sum, weighted, squares) = (l.sum(sum), l.sum(weighted), l.sum(squares));
    let ln_sum = sum.ln();
    Stats { top, ln_sum, entropy: ln_sum - weighted / sum, collision: squares / (sum * sum) }
}

/// Fills `ids` and `logp` with the most probable tokens, best first.
pub(crate) fn best<E: Real>(
    logits: &[E],
    stats: &Stats<E>,
    inv_temperature: E,
    ids: &mut [u32],
    logp: &mut [E],
) {
    ids.fill(u32::MAX);
    logp.fill(E::NEG_INFINITY);
    let n = ids.len();
    if n == 0 {
        return;
    }
    // `logp` holds logits until the last loop.
    let mut filled = 0;
    for (id, x) in logits.iter().enumerate() {
        if *x == E::NEG_INFINITY || filled == n && x.partial_cmp(&logp[n - 1]) != Some(Ordering::Greater) {
            continue;
        }
        let rank = logp[..filled].partition_point(|y| *y >= *x);
        if rank == n {
            continue;
        }
        filled = (filled + 1).min(n);
        logp.copy_within(rank..filled - 1, rank + 1);
        ids.copy_within(rank..filled - 1, rank + 1);
        logp[rank] = *x;
        ids[rank] = id as u32;
    }
    for x in &mut logp[..filled] {
        *x = stats.logp(*x, inv_temperature);
    }
}

/// Sets the logits of all tokens but these, in ascending order, to minus infinity.
pub(crate) fn keep_only<E: Real>(logits: &mut [E], kept: &[u32]) {
    fill_others(logits, kept, E::NEG_INFINITY);
}

/// Sets all entries but these, in ascending order, to a value.
pub(crate) fn fill_others<E: Real>(row: &mut [E], kept: &[u32], value: E) {
    let mut start = 0;
    for id in kept {
        row[start..*id as usize].fill(value);
        start = *id as usize + 1;
    }
    row[start..].fill(value);
}

/// Turns products into logits.
#[inline(always)]
pub(crate) fn apply<L: Lanes>(l: L, logits: &mut [L::E], rule: LogitRule) {
    let factor = l.splat(L::E::from_f64(1.0 / rule.divisor));
    let cap = rule.softcap.map(|cap| (l.splat(L::E::from_f64(cap)), l.splat(L::E::from_f64(1.0 / cap))));
    for at in (0..logits.len()).step_by(WIDTH) {
        let mut x = l.mul(l.get(logits, at, L::E::ZERO), factor);
        if let Some((cap, inverse)) = cap {
            x = l.mul(cap, tanh(l, l.mul(x, inverse)));
        }
        l.put(logits, at, x);
    }
}

/// The slopes of logits by the products that they were made from.
#[inline(always)]
fn rule_slope<L: Lanes>(l: L, logits: L::V, rule: LogitRule) -> L::V {
    let factor = l.splat(L::E::from_f64(1.0 / rule.divisor));
    let Some(cap) = rule.softcap else { return factor };
    let share = l.mul(logits, l.splat(L::E::from_f64(1.0 / cap)));
    l.mul(factor, l.sub(l.splat(L::E::ONE), l.mul(share, share)))
}

/// Turns logits into the gradient of the products that they were made from: that of the logits, times the rule's slope, is with `p` the probabilities and `H` the entropy,
/// `d = (d_logp (1[v = target] - p) - d_entropy p (ln p + H)) / temperature`.
#[inline(always)]
pub(crate) fn gradient<L: Lanes>(
    l: L,
    logits: &mut [L::E],
    (rule, inv_temperature): (LogitRule, L::E),
    target: usize,
    (lse, entropy): (L::E, L::E),
    (d_logp, d_entropy): (L::E, L::E),
) {
    let target_slope =
        if rule.is_plain() { L::E::ONE } else { l.to_array(rule_slope(l, l.splat(logits[target]), rule))[0] };
    let floor = l.splat(L::E::from_f64(FLOOR));
    let (scale, wide_lse) = (l.splat(inv_temperature), l.splat(lse));
    // -p (d_logp + d_entropy H + d_entropy ln p) / temperature
    let constant = l.splat(-(d_entropy.mul_add(entropy, d_logp) * inv_temperature));
    let slope = l.splat(-(d_entropy * inv_temperature));
    for at in (0..logits.len()).step_by(WIDTH) {
        let logp = l.sub(l.mul(l.get(logits, at, L::E::ZERO), scale), wide_lse);
        let p = l.exp(logp);
        let mut d = l.mul(p, l.fma(slope, l.max(floor, logp), constant));
        if !rule.is_plain() {
            d = l.mul(d, rule_slope(l, l.get(logits, at, L::E::ZERO), rule));
        }
        l.put(logits, at, d);
    }
    logits[target] += d_logp * inv_temperature * target_slope;
}
