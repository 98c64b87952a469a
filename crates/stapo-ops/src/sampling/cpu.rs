use super::{Drawn, Inputs, SamplingRule, filter};
use crate::Float;
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::lm_head::{cpu::for_chunks, row};

pub(crate) fn forward<E: Float>(cpu: &Cpu, rule: SamplingRule, from: Inputs<'_, E>, drawn: Drawn<'_, E>) {
    let tokens = drawn.ids.len();
    let vocab = from.head.shape().outputs;
    let uniforms = from.uniforms.host();
    let ids = Shared::new(drawn.ids.into_host());
    let numbers = [drawn.logp, drawn.entropy].map(|x| Shared::new(x.into_host()));
    let best =
        drawn.alternatives.map(|a| (a.n, Shared::new(a.ids.into_host()), Shared::new(a.logp.into_host())));
    let kept = drawn.kept.map(|kept| (kept.n, Shared::new(kept.ids.into_host())));
    for_chunks(cpu, (tokens, from.rule), from.hidden.host(), from.head, |start, n, logits| {
        let logits = Shared::new(logits);
        cpu.rows(n, 8 * vocab, |rows| {
            with_scratch(vocab, |weights| {
                for r in rows {
                    let t = start + r;
                    // SAFETY: each task has its own tokens, of all outputs and of the logits.
                    let (logits, id, numbers, best, kept) = unsafe {
                        let best = best.map(|(n, ids, logp)| {
                            (ids.range(t * n..(t + 1) * n), logp.range(t * n..(t + 1) * n))
                        });
                        let numbers = numbers.map(|x| &mut x.range(t..t + 1)[0]);
                        (
                            &*logits.range(r * vocab..(r + 1) * vocab),
                            &mut ids.range(t..t + 1)[0],
                            numbers,
                            best,
                            kept.map(|(n, ids)| ids.range(t * n..(t + 1) * n)),
                        )
                    };
                    let uniform = uniforms[t];
                    cpu.dispatch(Draw { logits, weights, rule, uniform, id, numbers, best, kept });
                }
            });
        });
    });
}

/// Draws one token.
struct Draw<'a, E> {
    logits: &'a [E],
    /// Scratch.
    weights: &'a mut [E],
    rule: SamplingRule,
    uniform: f64,
    id: &'a mut u32,
    /// logp, entropy.
    numbers: [&'a mut E; 2],
    best: Option<(&'a mut [u32], &'a mut [E])>,
    kept: Option<&'a mut [u32]>,
}

impl<E: Float> Kernel<E> for Draw<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        let inv_temperature = E::from_f64(1.0 / self.rule.temperature());
        let stats = row::stats(l, self.logits, inv_temperature);
        if let Some((ids, logp)) = self.best {
            row::best(self.logits, &stats, inv_temperature, ids, logp);
        }
        let filtered = match self.rule {
            SamplingRule::Greedy => None,
            SamplingRule::Draw { filter, .. } => {
                filter::keep(l, self.logits, self.weights, &stats, inv_temperature, filter)
            }
        };
        let id = match (self.rule, &filtered) {
            (SamplingRule::Greedy, _) => first_largest(self.logits),
            (_, None) => draw_all(l, self.logits, &stats, inv_temperature, self.uniform),
            (_, Some(kept)) => kept.draw(self.uniform),
        };
        *self.id = id as u32;
        let [logp, entropy] = self.numbers;
        let stats = match self.kept {
            None => stats,
            Some(ids) => {
                let n = match filtered {
                    Some(kept) => kept.write_ids(ids),
                    None => filter::write_all(self.logits.len(), ids),
                };
                // The row that training makes of the same tokens.
                self.weights.copy_from_slice(self.logits);
                row::keep_only(self.weights, &ids[..n]);
                row::stats(l, self.weights, inv_temperature)
            }
        };
        *logp = stats.logp(self.logits[id], inv_temperature);
        *entropy = stats.entropy;
    }
}

fn first_largest<E: Float>(x: &[E]) -> usize {
    let mut best = 0;
    for (i, y) in x.iter().enumerate() {
        if *y > x[best] {
            best = i;
        }
    }
    best
}

/// Elements whose weights are summed before the cumulative sum continues in f64.
const BLOCK: usize = 16 * WIDTH;

/// Inverse transform over the whole vocabulary: block sums by sixteen lanes, blocks and then the chosen block's tokens
/// accumulated in f64.
#[inline(always)]
fn draw_all<L: Lanes>(
    l: L,
    logits: &[L::E],
    stats: &row::Stats<L::E>,
    inv_temperature: L::E,
    uniform: f64,
) -> usize {
    let scale = l.splat(inv_temperature);
    let top = l.splat(stats.top);
    let mut sums = Vec::with_capacity(logits.len().div_ceil(BLOCK));
    let mut total = 0.0;
    for block in logits.chunks(BLOCK) {
        let mut sum = l.zero();
        for at in (0..block.len()).step_by(WIDTH) {
            let x = l.get(block, at, L::E::NEG_INFINITY);
            sum = l.add(sum, l.exp(l.sub(l.mul(x, scale), top)));
        }
        total += l.sum(sum).to_f64();
        sums.push(total);
    }
    let goal = uniform * total;
    let chosen = sums.iter().position(|sum| goal < *sum).unwrap_or(sums.len() - 1);
    let mut seen = if chosen == 0 { 0.0 } else { sums[chosen - 1] };
    let block = &logits[chosen * BLOCK..logits.len().min((chosen + 1) * BLOCK)];
    // By rounding the goal may lie beyond the last token of the block; the last token with a positive weight is drawn
    // then.
    let mut last = chosen * BLOCK;
    for at in (0..block.len()).step_by(WIDTH) {
        let x = l.get(block, at, L::E::NEG_INFINITY);
        let weights = l.to_array(l.exp(l.sub(l.mul(x, scale), top)));
        for (i, weight) in weights.iter().enumerate().take(block.len() - at) {
            if *weight > L::E::ZERO {
                last = chosen * BLOCK + at + i;
                seen += weight.to_f64();
                if goal < seen {
                    return last;
                }
            }
        }
    }
    last
}
