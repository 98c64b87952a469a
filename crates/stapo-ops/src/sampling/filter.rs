use super::Filter;
use crate::Float;
use crate::lm_head::row::Stats;
use crate::simd::Lanes;

/// The tokens that may be drawn, in the order of their ids, with their weights.
pub(super) struct Kept {
    tokens: Vec<(usize, f64)>,
}

impl Kept {
    /// Inverse transform; returns the id and its logit.
    pub(super) fn draw<E: Float>(&self, logits: &[E], uniform: f64) -> (usize, E) {
        let total: f64 = self.tokens.iter().map(|(_, weight)| weight).sum();
        let goal = uniform * total;
        let mut seen = 0.0;
        let chosen = self.tokens.iter().find(|(_, weight)| {
            seen += weight;
            goal < seen
        });
        // Rounding can leave the goal beyond the last token: then the last is meant.
        let id = chosen.or(self.tokens.last()).map_or(0, |(id, _)| *id);
        (id, logits[id])
    }
}

/// `None` when the filter keeps every token.
#[inline(always)]
pub(super) fn keep<L: Lanes>(
    l: L,
    logits: &[L::E],
    stats: &Stats<L::E>,
    inv_temperature: L::E,
    filter: Filter,
) -> Option<Kept> {
    let top_k = filter.top_k.filter(|k| *k < logits.len());
    if top_k.is_none() && filter.top_p >= 1.0 && filter.min_p <= 0.0 {
        return None;
    }
    let (scale, top) = (l.splat(inv_temperature), l.splat(stats.top));
    let mut tokens: Vec<(usize, f64)> = Vec::with_capacity(logits.len());
    for at in (0..logits.len()).step_by(crate::simd::WIDTH) {
        let x = l.get(logits, at, L::E::NEG_INFINITY);
        let weights = l.to_array(l.exp(l.sub(l.mul(x, scale), top)));
        let n = crate::simd::WIDTH.min(logits.len() - at);
        tokens.extend(weights[..n].iter().enumerate().map(|(i, weight)| (at + i, weight.to_f64())));
    }
    Some(apply(tokens, top_k, filter))
}

fn apply(mut tokens: Vec<(usize, f64)>, top_k: Option<usize>, filter: Filter) -> Kept {
    tokens.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    tokens.truncate(top_k.unwrap_or(usize::MAX).max(1));
    if filter.top_p < 1.0 {
        let goal = filter.top_p * tokens.iter().map(|(_, weight)| weight).sum::<f64>();
        let mut seen = 0.0;
        let n = tokens.iter().take_while(|(_, weight)| {
            let needed = seen < goal;
            seen += weight;
            needed
        });
        let n = n.count();
        tokens.truncate(n.max(1));
    }
    let floor = filter.min_p * tokens.first().map_or(0.0, |(_, weight)| *weight);
    let n = tokens.iter().take_while(|(_, weight)| *weight >= floor).count();
    tokens.truncate(n.max(1));
    tokens.sort_unstable_by_key(|(id, _)| *id);
    Kept { tokens }
}
