//! Which tokens may be drawn.
//!
//! The filters need the most probable tokens in order, seldom all tokens. Weights lie in (0, 1], so a larger weight has
//! a larger bit pattern: one pass counts tokens and sums weights by the leading bits, and only the tokens above the cut
//! are sorted.

use super::Filter;
use crate::cpu::simd::{Lanes, Real, WIDTH};
use crate::lm_head::row::Stats;

/// The tokens that may be drawn, in the order of their ids, with their weights.
pub(super) struct Kept {
    tokens: Vec<(u32, f64)>,
}

impl Kept {
    /// Writes the ids. Returns their number.
    pub(super) fn write_ids(&self, ids: &mut [u32]) -> usize {
        let n = self.tokens.len();
        assert!(n <= ids.len(), "sampling::forward: room for {} kept tokens, {n} were kept", ids.len());
        ids.fill(u32::MAX);
        ids.iter_mut().zip(&self.tokens).for_each(|(to, (id, _))| *to = *id);
        n
    }

    /// Draws by inverse transform.
    pub(super) fn draw(&self, uniform: f64) -> usize {
        let total: f64 = self.tokens.iter().map(|(_, weight)| weight).sum();
        let goal = uniform * total;
        let mut seen = 0.0;
        let chosen = self.tokens.iter().find(|(_, weight)| {
            seen += weight;
            goal < seen
        });
        // By rounding the goal may lie beyond the last token, which is drawn then.
        chosen.or(self.tokens.last()).map_or(0, |(id, _)| *id as usize)
    }
}

/// Writes the ids of all `n` tokens. Returns their number.
pub(super) fn write_all(n: usize, ids: &mut [u32]) -> usize {
    assert!(n <= ids.len(), "sampling::forward: room for {} kept tokens, {n} were kept", ids.len());
    ids.fill(u32::MAX);
    ids.iter_mut().zip(0..n as u32).for_each(|(to, id)| *to = id);
    n
}

/// `None` when the filter keeps every token. Fills `weights` with `exp(logit / temperature - top)`.
#[inline(always)]
pub(super) fn keep<L: Lanes>(
    l: L,
    logits: &[L::E],
    weights: &mut [L::E],
    stats: &Stats<L::E>,
    inv_temperature: L::E,
    filter: Filter,
) -> Option<Kept> {
    let top_k = filter.top_k.filter(|k| *k < logits.len()).unwrap_or(logits.len()).max(1);
    if top_k == logits.len() && filter.top_p >= 1.0 && filter.min_p <= 0.0 {
        return None;
    }
    let scale = l.splat(inv_temperature);
    let top = l.splat(stats.top);
    for at in (0..logits.len()).step_by(WIDTH) {
        let x = l.get(logits, at, L::E::NEG_INFINITY);
        l.put(weights, at, l.exp(l.sub(l.mul(x, scale), top)));
    }
    Some(apply(weights, top_k, filter))
}

/// Bits of an f32 weight that choose its bin: the exponent and three bits of the mantissa.
const BIN_SHIFT: u32 = 20;
/// The bin of weight 1, the largest weight. All weights below 2^-126 share bin 0.
const TOP_BIN: usize = (0x3f80_0000u32 >> BIN_SHIFT) as usize;

fn bin<E: Real>(weight: E) -> usize {
    (((weight.to_f64() as f32).to_bits() >> BIN_SHIFT) as usize).min(TOP_BIN)
}

fn apply<E: Real>(weights: &[E], top_k: usize, filter: Filter) -> Kept {
    let mut bins = [(0usize, 0f64); TOP_BIN + 1];
    let mut total = 0.0;
    for weight in weights {
        let (count, mass) = &mut bins[bin(*weight)];
        *count += 1;
        *mass += weight.to_f64();
        total += weight.to_f64();
    }
    // `cut` is the lowest bin that the filters can reach. After top-k, top-p is a share of the tokens that top-k
    // leaves, so all of these are needed. The goal has a margin, because sums in another order differ in the last
    // digits.
    let has_top_p = filter.top_p < 1.0;
    let is_share_of_all = has_top_p && top_k == weights.len();
    let goal = if is_share_of_all { filter.top_p * total * (1.0 + 1e-9) } else { f64::INFINITY };
    let lowest = if has_top_p { 0 } else { bin(filter.min_p) };
    let mut cut = TOP_BIN + 1;
    let mut count = 0;
    let mut mass = 0.0;
    while cut > 0 && (count == 0 || (cut > lowest && count < top_k && mass < goal)) {
        cut -= 1;
        count += bins[cut].0;
        mass += bins[cut].1;
    }
    let above = weights.iter().enumerate().filter(|(_, weight)| bin(**weight) >= cut);
    let tokens = above.map(|(id, weight)| (id as u32, weight.to_f64())).collect();
    cut_down(tokens, is_share_of_all.then_some(total), top_k, filter)
}

/// Applies the filters to `tokens`, which hold every token that the filters can keep. top-p is a share of `total`, or
/// of the tokens that top-k leaves.
fn cut_down(mut tokens: Vec<(u32, f64)>, total: Option<f64>, top_k: usize, filter: Filter) -> Kept {
    tokens.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    tokens.truncate(top_k);
    if filter.top_p < 1.0 {
        let goal = filter.top_p * total.unwrap_or_else(|| tokens.iter().map(|(_, weight)| weight).sum());
        let mut seen = 0.0;
        let needed = tokens.iter().take_while(|(_, weight)| {
            let short = seen < goal;
            seen += weight;
            short
        });
        let n = needed.count();
        tokens.truncate(n.max(1));
    }
    let floor = filter.min_p * tokens.first().map_or(0.0, |(_, weight)| *weight);
    let n = tokens.iter().take_while(|(_, weight)| *weight >= floor).count();
    tokens.truncate(n.max(1));
    tokens.sort_unstable_by_key(|(id, _)| *id);
    Kept { tokens }
}
