use super::{Alternatives, Dims, HeadGrads, HeadScores, LogitRule, ScoreGrads, Targets, row};
use crate::cpu::simd::{Kernel, Lanes};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::{Float, ViewMut, Weight, Write, matmul};

/// Elements of logits that a chunk holds, within the limits [`MIN_CHUNK`] and [`MAX_CHUNK`].
const CHUNK_ELEMENTS: usize = 8 << 20;
/// The fewest tokens of a chunk: enough for the matrix product to use a panel of weights often.
const MIN_CHUNK: usize = 64;
/// The most tokens of a chunk: the rows that share a packed block in the matrix product.
const MAX_CHUNK: usize = 504;

/// Computes the logits chunk by chunk and calls `body(first token, number of tokens, logits)` for each.
pub(crate) fn for_chunks<E: Float>(
    cpu: &Cpu,
    (tokens, rule): (usize, LogitRule),
    hidden: &[E],
    weight: &Weight<E>,
    mut body: impl FnMut(usize, usize, &mut [E]),
) {
    let (vocab, width) = (weight.shape().outputs, weight.shape().inputs);
    let chunk = (CHUNK_ELEMENTS / vocab.max(1)).clamp(MIN_CHUNK, MAX_CHUNK).min(tokens);
    with_scratch(chunk * vocab, |scratch| {
        for start in (0..tokens).step_by(chunk.max(1)) {
            let n = chunk.min(tokens - start);
            let logits = &mut scratch[..n * vocab];
            let dims = matmul::Dims { tokens: n, inputs: width, outputs: vocab };
            let rows = &hidden[start * width..(start + n) * width];
            matmul::cpu::forward(cpu, dims, rows, weight.panels().host(), None, logits);
            if !rule.is_plain() {
                let shared = Shared::new(&mut *logits);
                cpu.rows(n, 4 * vocab, |rows| {
                    // SAFETY: each task has its own rows.
                    let logits = unsafe { shared.range(rows.start * vocab..rows.end * vocab) };
                    cpu.dispatch(Rule { rule, logits });
                });
            }
            body(start, n, logits);
        }
    });
}

pub(crate) fn forward<E: Float>(
    cpu: &Cpu,
    dims: Dims,
    hidden: &[E],
    weight: &Weight<E>,
    targets: Targets<'_>,
    scores: HeadScores<'_, E>,
    alternatives: Option<Alternatives<'_, E>>,
) {
    let (vocab, width) = (weight.shape().outputs, weight.shape().inputs);
    let inv_temperature = E::from_f64(1.0 / dims.temperature);
    let (ids, kept) = (targets.ids.host(), targets.kept);
    let HeadScores { logp, entropy, collision, lse, slopes } = scores;
    let scores = [logp, entropy, collision, lse].map(|x| Shared::new(x.into_host()));
    let mut slopes = slopes.map(ViewMut::into_host);
    let has_slopes = slopes.is_some();
    let best = alternatives.map(|a| (a.n, Shared::new(a.ids.into_host()), Shared::new(a.logp.into_host())));
    for_chunks(cpu, (dims.tokens, dims.rule), hidden, weight, |start, n, logits| {
        let shared = Shared::new(logits);
        cpu.rows(n, 4 * vocab, |rows| {
            for r in rows {
                let t = start + r;
                // SAFETY: each task has its own rows.
                let logits = unsafe { shared.range(r * vocab..(r + 1) * vocab) };
                // SAFETY: each task has its own tokens, of all outputs.
                let (numbers, best) = unsafe {
                    let best = best.map(|(n, ids, logp)| {
                        (ids.range(t * n..(t + 1) * n), logp.range(t * n..(t + 1) * n))
                    });
                    (scores.map(|x| &mut x.range(t..t + 1)[0]), best)
                };
                let [logp, entropy, collision, lse] = numbers;
                let target = ids[t] as usize;
                let kept = kept.map(|kept| kept.row(t));
                if let Some(kept) = kept {
                    row::keep_only(logits, kept);
                }
                let numbers = [logp, &mut *entropy, collision, &mut *lse];
                cpu.dispatch(Score { logits, inv_temperature, target, numbers, best });
                if has_slopes {
                    let (saved, d) = ((*lse, *entropy), (E::from_f64(1.0), E::ZERO));
                    let scaling = (dims.rule, inv_temperature);
                    cpu.dispatch(Gradient { logits, scaling, target, kept, saved, d });
                }
            }
        });
        if let Some(slopes) = &mut slopes {
            let chunk = matmul::Dims { tokens: n, inputs: width, outputs: vocab };
            let to = &mut slopes[start * width..(start + n) * width];
            matmul::cpu::backward_input(cpu, chunk, logits, weight.view().host(), Write::Set, to);
        }
    });
}

/// Rows times a number each.
pub(crate) fn scale_rows<E: Float>(cpu: &Cpu, by: &[E], rows: &mut [E]) {
    let width = rows.len() / by.len().max(1);
    let shared = Shared::new(rows);
    cpu.rows(by.len(), width, |tokens| {
        for t in tokens {
            // SAFETY: each task has its own rows.
            let row = unsafe { shared.range(t * width..(t + 1) * width) };
            for x in row {
                *x = *x * by[t];
            }
        }
    });
}

/// Turns products into logits.
struct Rule<'a, E> {
    rule: LogitRule,
    logits: &'a mut [E],
}

impl<E: Float> Kernel<E> for Rule<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        row::apply(l, self.logits, self.rule);
    }
}

/// Computes the numbers of one token.
struct Score<'a, E> {
    logits: &'a [E],
    inv_temperature: E,
    target: usize,
    /// logp, entropy, collision, lse.
    numbers: [&'a mut E; 4],
    best: Option<(&'a mut [u32], &'a mut [E])>,
}

impl<E: Float> Kernel<E> for Score<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let stats = row::stats(l, self.logits, self.inv_temperature);
        let [logp, entropy, collision, lse] = self.numbers;
        *logp = stats.logp(self.logits[self.target], self.inv_temperature);
        (*entropy, *collision, *lse) = (stats.entropy, stats.collision, stats.lse());
        if let Some((ids, logp)) = self.best {
            row::best(self.logits, &stats, self.inv_temperature, ids, logp);
        }
    }
}

pub(crate) fn backward<E: Float>(
    cpu: &Cpu,
    dims: Dims,
    hidden: &[E],
    weight: &Weight<E>,
    grads: ScoreGrads<'_, E>,
    to: HeadGrads<'_, E>,
) {
    let d_hidden = to.d_hidden.into_host();
    let mut d_weight = to.d_weight.map(|(mut d_weight, write)| {
        if write == Write::Set {
            d_weight.fill(E::ZERO);
        }
        d_weight.into_host()
    });
    let (vocab, width) = (weight.shape().outputs, weight.shape().inputs);
    let inv_temperature = E::from_f64(1.0 / dims.temperature);
    let (targets, kept) = (grads.targets.ids.host(), grads.targets.kept);
    let (lse, entropy) = (grads.lse.host(), grads.entropy.host());
    let (d_logp, d_entropy) = (grads.d_logp.host(), grads.d_entropy.host());
    for_chunks(cpu, (dims.tokens, dims.rule), hidden, weight, |start, n, logits| {
        let shared = Shared::new(logits);
        cpu.rows(n, 4 * vocab, |rows| {
            for r in rows {
                let t = start + r;
                // SAFETY: each task has its own rows.
                let logits = unsafe { shared.range(r * vocab..(r + 1) * vocab) };
                let (saved, d) = ((lse[t], entropy[t]), (d_logp[t], d_entropy[t]));
                let (scaling, target) = ((dims.rule, inv_temperature), targets[t] as usize);
                let kept = kept.map(|kept| kept.row(t));
                if let Some(kept) = kept {
                    row::keep_only(logits, kept);
                }
                cpu.dispatch(Gradient { logits, scaling, target, kept, saved, d });
            }
        });
        let rows = start * width..(start + n) * width;
        let chunk = matmul::Dims { tokens: n, inputs: width, outputs: vocab };
        let d_chunk = &mut d_hidden[rows.clone()];
        matmul::cpu::backward_input(cpu, chunk, logits, weight.view().host(), Write::Set, d_chunk);
        if let Some(d_weight) = &mut d_weight {
            matmul::cpu::backward_weight(cpu, chunk, &hidden[rows], logits, d_weight);
        }
    });
}

/// Turns the logits of one token into the gradient of the products that they were made from.
struct Gradient<'a, E> {
    logits: &'a mut [E],
    /// The rule and the inverse of the temperature.
    scaling: (LogitRule, E),
    target: usize,
    /// Tokens outside of which the logits are minus infinity.
    kept: Option<&'a [u32]>,
    /// lse, entropy.
    saved: (E, E),
    /// d_logp, d_entropy.
    d: (E, E),
}

impl<E: Float> Kernel<E> for Gradient<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        row::gradient(l, self.logits, self.scaling, self.target, self.saved, self.d);
        // The slope of a capped logit of minus infinity is not finite.
        if let Some(kept) = self.kept.filter(|_| !self.scaling.0.is_plain()) {
            row::fill_others(self.logits, kept, E::ZERO);
        }
    }
}
