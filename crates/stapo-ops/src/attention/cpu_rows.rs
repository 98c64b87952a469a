//! Attention of a block of query rows against all keys before them, on the CPU: packed and paged forward share it, and
//! backward uses its products.

use std::ops::Range;

use super::cache::SPLIT_KEYS;
use crate::cpu::simd::tile::{DEPTH, Layout, ROW_STRIDE, Start, Tile};
use crate::cpu::simd::{Lanes, Real, WIDTH, tanh};
use crate::heads::{Heads, ScoreRule};

/// Query rows handled together: one row per token and query head of the group, token by token.
pub(super) const MAX_ROWS: usize = 56;

/// Where keys and values of one sequence and one key/value head lie.
pub(super) trait Keys<E> {
    /// Keys from `key` on that lie together: their transpose `[head_dim, n]`, its row stride, and n, a multiple of 16 that
    /// is at most `DEPTH - key % DEPTH`.
    fn keys_at(&self, key: usize, dim: usize) -> (*const E, usize, usize);
    /// Values from `key` on that lie together: `[n, value_width]` and n, at most `DEPTH - key % DEPTH`.
    fn values_at(&self, key: usize) -> (*const E, usize);
}

/// The width of a head, padded to whole vectors.
pub(super) fn padded(dim: usize) -> usize {
    dim.next_multiple_of(WIDTH)
}

/// Elements of scores for `rows` rows and `n_keys` keys: blocks of [`DEPTH`] keys, each `[rows, ROW_STRIDE]`.
pub(super) fn scores_len(rows: usize, n_keys: usize) -> usize {
    n_keys.div_ceil(DEPTH) * rows * ROW_STRIDE
}

/// Scratch of [`forward_rows`].
pub(super) struct ForwardScratch<'a, E> {
    /// `[head_dim / DEPTH, rows, ROW_STRIDE]`
    pub queries: &'a mut [E],
    /// [`scores_len`] elements, of one split.
    pub scores: &'a mut [E],
    /// `[rows, padded(head_dim)]` each: the output of a split, and that of the splits before it.
    pub out: &'a mut [E],
    pub out_before: &'a mut [E],
}

impl<'a, E> ForwardScratch<'a, E> {
    pub(super) fn len(heads: Heads, rows: usize, n_keys: usize) -> usize {
        scores_len(rows, heads.dim) + scores_len(rows, n_keys.min(SPLIT_KEYS)) + 2 * rows * padded(heads.dim)
    }

    pub(super) fn split(memory: &'a mut [E], heads: Heads, rows: usize, n_keys: usize) -> Self {
        let (queries, memory) = memory.split_at_mut(scores_len(rows, heads.dim));
        let (scores, memory) = memory.split_at_mut(scores_len(rows, n_keys.min(SPLIT_KEYS)));
        let (out, memory) = memory.split_at_mut(rows * padded(heads.dim));
        ForwardScratch { queries, scores, out, out_before: &mut memory[..rows * padded(heads.dim)] }
    }
}

/// A block of query rows: `tokens` tokens from `token` on, each with the query heads that read `kv_head`.
#[derive(Clone, Copy)]
pub(super) struct QueryBlock {
    pub heads: Heads,
    pub rule: ScoreRule,
    pub kv_head: usize,
    /// First token, as a row of qkv and out.
    pub token: usize,
    pub tokens: usize,
    /// Position of the first token in its sequence: that token sees no key after it.
    pub position: usize,
}

impl QueryBlock {
    pub(super) fn rows(&self) -> usize {
        self.tokens * self.heads.group()
    }

    /// Keys the last token sees.
    pub(super) fn n_keys(&self) -> usize {
        self.position + self.tokens
    }

    /// A multiple of [`DEPTH`] below which no token sees a key.
    pub(super) fn first_key(&self) -> usize {
        self.rule.first_key(self.position) / DEPTH * DEPTH
    }

    /// The keys of `split` that row r sees, counted from the start of the split.
    #[inline(always)]
    pub(super) fn visible(&self, r: usize, split: &Range<usize>) -> Range<usize> {
        let position = self.position + self.row(r).0;
        let clamp = |key: usize| key.clamp(split.start, split.end) - split.start;
        clamp(self.rule.first_key(position))..clamp(position + 1)
    }

    /// Row r's token (within the block) and query head.
    #[inline(always)]
    pub(super) fn row(&self, r: usize) -> (usize, usize) {
        let group = self.heads.group();
        (r / group, self.kv_head * group + r % group)
    }
}

/// [`super::Inputs`] on the host.
#[derive(Clone, Copy)]
pub(crate) struct HostInputs<'a, E> {
    pub qkv: &'a [E],
    pub sinks: Option<&'a [E]>,
}

/// Writes the block's rows of out `[T, out_width]` and of lse `[T, query heads]`.
#[inline(always)]
pub(super) fn forward_rows<L: Lanes, K: Keys<L::E>>(
    l: L,
    block: QueryBlock,
    keys: &K,
    inputs: HostInputs<'_, L::E>,
    scratch: &mut ForwardScratch<'_, L::E>,
    out: crate::cpu::Shared<'_, L::E>,
    lse: Option<crate::cpu::Shared<'_, L::E>>,
) {
    let heads = block.heads;
    let rows = block.rows();
    let scale = L::E::from_f64(block.rule.scale);
    pack_rows(l, scratch.queries, rows, heads.dim, |r| {
        let (token, head) = block.row(r);
        &inputs.qkv[(block.token + token) * heads.qkv_width() + head * heads.dim..][..heads.dim]
    });
    let mut sums = [(L::E::NEG_INFINITY, L::E::ZERO); MAX_ROWS];
    let first_key = block.first_key();
    let mut first = first_key;
    while first < block.n_keys() {
        let split = first..block.n_keys().min((first / SPLIT_KEYS + 1) * SPLIT_KEYS);
        std::mem::swap(&mut scratch.out, &mut scratch.out_before);
        score_rows(l, rows, heads.dim, split.clone(), scratch.queries, keys, scratch.scores);
        let sums_before = sums;
        for (r, sum) in sums[..rows].iter_mut().enumerate() {
            let visible = block.visible(r, &split);
            let scale = match block.rule.softcap {
                None => scale,
                Some(cap) => {
                    cap_row(l, scratch.scores, (rows, r), split.len(), scale, L::E::from_f64(cap));
                    L::E::ONE
                }
            };
            *sum = softmax_row(l, scratch.scores, rows, r, visible, split.len(), scale);
        }
        weights_times_values(l, rows, heads.dim, split.clone(), scratch.scores, keys, scratch.out);
        if first > first_key {
            let width = padded(heads.dim);
            let outs = scratch.out_before.chunks_exact(width).zip(scratch.out.chunks_exact_mut(width));
            for (r, (before, next)) in outs.take(rows).enumerate() {
                let sees = !block.visible(r, &split).is_empty();
                let saw = !block.visible(r, &(first_key..first)).is_empty();
                // Without an earlier key, the result of this split is that of all.
                if saw {
                    sums[r] = combine_splits(l, sums_before[r], before, sees.then_some(sums[r]), next);
                }
            }
        }
        first = split.end;
    }
    for (r, &result) in sums[..rows].iter().enumerate() {
        let (token, head) = block.row(r);
        let (top, sum, shrink) = with_sink(l, result, inputs.sinks.map(|sinks| sinks[head]));
        let token = block.token + token;
        let at = token * heads.out_width() + head * heads.dim;
        // SAFETY: the block's tokens and heads belong to this task.
        let to = unsafe { out.range(at..at + heads.dim) };
        let inv = l.splat(shrink / sum);
        let from = &scratch.out[r * padded(heads.dim)..][..heads.dim];
        for at in (0..heads.dim).step_by(WIDTH) {
            l.put(to, at, l.mul(l.get(from, at, L::E::ZERO), inv));
        }
        if let Some(lse) = lse {
            let at = token * heads.query + head;
            // SAFETY: the block's tokens and heads belong to this task.
            let lse = unsafe { lse.range(at..at + 1) };
            lse[0] = top + sum.ln();
        }
    }
}

/// A row's top and sum with the head's sink in the sum, and the factor by which the output shrinks to the new top. The sink is
/// combined like a split of one key whose value is 0.
#[inline(always)]
fn with_sink<L: Lanes>(l: L, (top, sum): (L::E, L::E), sink: Option<L::E>) -> (L::E, L::E, L::E) {
    let Some(sink) = sink else { return (top, sum, L::E::ONE) };
    let combine = Combine::new(l, top, sink);
    (combine.top, combine.sum(sum, L::E::ONE), combine.before)
}

/// Copies a short row. `copy_from_slice` would call `memcpy`, which takes longer than the copy.
#[inline(always)]
pub(super) fn copy<L: Lanes>(l: L, from: &[L::E], to: &mut [L::E]) {
    for at in (0..from.len()).step_by(WIDTH) {
        l.put(to, at, l.get(from, at, L::E::ZERO));
    }
}

/// Copies rows of `width` into blocks of [`DEPTH`] columns, each `[rows, ROW_STRIDE]`.
#[inline(always)]
pub(super) fn pack_rows<'a, L: Lanes>(
    l: L,
    to: &mut [L::E],
    rows: usize,
    width: usize,
    row: impl Fn(usize) -> &'a [L::E],
) {
    for r in 0..rows {
        for (i, part) in row(r)[..width].chunks(DEPTH).enumerate() {
            copy(l, part, &mut to[(i * rows + r) * ROW_STRIDE..][..part.len()]);
        }
    }
}

/// How the result of a split is added to that of the splits before it: the largest score and the factors by which both
/// shrink to it.
#[derive(Clone, Copy)]
pub(super) struct Combine<E> {
    pub top: E,
    pub before: E,
    pub next: E,
}

impl<E: Real> Combine<E> {
    #[inline(always)]
    pub(super) fn new<L: Lanes<E = E>>(l: L, top_before: E, top_next: E) -> Self {
        let top = if top_before > top_next { top_before } else { top_next };
        let factor = |of: E| l.to_array(l.exp(l.splat(of - top)))[0];
        Self { top, before: factor(top_before), next: factor(top_next) }
    }

    /// Of two sums of exponentials.
    #[inline(always)]
    pub(super) fn sum(self, before: E, next: E) -> E {
        before.mul_add(self.before, next * self.next)
    }

    /// Of two vectors of outputs.
    #[inline(always)]
    pub(super) fn vector<L: Lanes<E = E>>(self, l: L, before: L::V, next: L::V) -> L::V {
        l.fma(before, l.splat(self.before), l.mul(next, l.splat(self.next)))
    }
}

/// Combines a row's result (top and sum, output) of the splits before with its top and sum in the next split, whose output
/// is in `out` and becomes that of all. `None`: the row sees no key of that split.
#[inline(always)]
fn combine_splits<L: Lanes>(
    l: L,
    before: (L::E, L::E),
    out_before: &[L::E],
    next: Option<(L::E, L::E)>,
    out: &mut [L::E],
) -> (L::E, L::E) {
    let Some(next) = next else {
        copy(l, out_before, out);
        return before;
    };
    let combine = Combine::new(l, before.0, next.0);
    for at in (0..out.len()).step_by(WIDTH) {
        let zero = L::E::ZERO;
        l.put(out, at, combine.vector(l, l.get(out_before, at, zero), l.get(out, at, zero)));
    }
    (combine.top, combine.sum(before.1, next.1))
}

/// `scores = a keys^T` for a range of keys that begins at a multiple of [`DEPTH`], `a` packed by [`pack_rows`]; whole
/// vectors of keys are written.
#[inline(always)]
pub(super) fn score_rows<L: Lanes, K: Keys<L::E>>(
    l: L,
    rows: usize,
    dim: usize,
    of: Range<usize>,
    a: &[L::E],
    keys: &K,
    scores: &mut [L::E],
) {
    let mut key = of.start;
    while key < of.end {
        let (b, b_stride, n) = keys.keys_at(key, dim);
        let vectors = n.min(of.end - key).div_ceil(WIDTH);
        let at = key - of.start;
        let c = scores[(at / DEPTH * rows) * ROW_STRIDE + at % DEPTH..].as_mut_ptr();
        for from in (0..dim).step_by(DEPTH) {
            let depth = DEPTH.min(dim - from);
            let a = a[from / DEPTH * rows * ROW_STRIDE..].as_ptr();
            let start = if from == 0 { Start::Zero } else { Start::Continue };
            let b = b.wrapping_add(from * b_stride);
            let tile = Tile {
                rows,
                depth,
                vectors,
                layout: Layout::Rows,
                a,
                b,
                b_stride,
                c,
                c_stride: ROW_STRIDE,
                start,
            };
            // SAFETY: a and scores are laid out for `rows` rows; the keys lie as `Keys` promises.
            unsafe { l.tile(&tile) };
        }
        key += n;
    }
}

/// Turns the first `n_keys` scores s of row r of `rows` rows into `cap tanh(scale s / cap)`.
#[inline(always)]
pub(super) fn cap_row<L: Lanes>(
    l: L,
    scores: &mut [L::E],
    (rows, r): (usize, usize),
    n_keys: usize,
    scale: L::E,
    cap: L::E,
) {
    for key in (0..n_keys).step_by(WIDTH) {
        let at = (key / DEPTH * rows + r) * ROW_STRIDE + key % DEPTH;
        let score = l.mul(l.get(scores, at, L::E::ZERO), l.splat(scale / cap));
        l.put(scores, at, l.mul(l.splat(cap), tanh(l, score)));
    }
}

/// Turns row r's scores into `exp(scale score - top)` for the `visible` keys and 0 for the others of `n_keys`; returns top,
/// the largest scaled score, and the sum.
#[inline(always)]
pub(super) fn softmax_row<L: Lanes>(
    l: L,
    scores: &mut [L::E],
    rows: usize,
    r: usize,
    visible: Range<usize>,
    n_keys: usize,
    scale: L::E,
) -> (L::E, L::E) {
    let low = L::E::NEG_INFINITY;
    let at = |key: usize| (key / DEPTH * rows + r) * ROW_STRIDE + key % DEPTH;
    // A vector that is hidden in front, vectors of keys that are visible as a whole, then the vector that is visible in part.
    let visible = if visible.is_empty() { 0..0 } else { visible };
    let start = visible.start / WIDTH * WIDTH;
    (0..start).step_by(WIDTH).for_each(|key| l.put(scores, at(key), l.zero()));
    scores[at(start)..][..visible.start - start].fill(low);
    let visible = visible.end;
    let whole = visible / WIDTH * WIDTH;
    let mut top = l.splat(low);
    for key in (start..whole).step_by(WIDTH) {
        top = l.max(top, l.get(scores, at(key), low));
    }
    if whole < visible {
        top = l.max(top, l.first(l.get(scores, at(whole), low), visible - whole, low));
    }
    let top = l.max_lane(top) * scale;
    let mut sum = l.zero();
    let wide_top = l.splat(top);
    let wide_scale = l.splat(scale);
    for key in (start..whole).step_by(WIDTH) {
        let weight = l.exp(l.sub(l.mul(l.get(scores, at(key), low), wide_scale), wide_top));
        l.put(scores, at(key), weight);
        sum = l.add(sum, weight);
    }
    if whole < visible {
        let weight = l.exp(l.sub(l.mul(l.get(scores, at(whole), low), wide_scale), wide_top));
        let weight = l.first(weight, visible - whole, L::E::ZERO);
        l.put(scores, at(whole), weight);
        sum = l.add(sum, weight);
    }
    for key in (visible.next_multiple_of(WIDTH)..n_keys).step_by(WIDTH) {
        l.put(scores, at(key), l.zero());
    }
    (top, l.sum(sum))
}

/// `out = weights values`: one chain over a range of keys that begins at a multiple of [`DEPTH`].
#[inline(always)]
pub(super) fn weights_times_values<L: Lanes, K: Keys<L::E>>(
    l: L,
    rows: usize,
    dim: usize,
    of: Range<usize>,
    weights: &[L::E],
    keys: &K,
    out: &mut [L::E],
) {
    let width = padded(dim);
    let mut key = of.start;
    while key < of.end {
        let (b, n) = keys.values_at(key);
        let at = key - of.start;
        let tile = Tile {
            rows,
            depth: n.min(of.end - key),
            vectors: width / WIDTH,
            layout: Layout::Rows,
            a: weights[(at / DEPTH * rows) * ROW_STRIDE + at % DEPTH..].as_ptr(),
            b,
            b_stride: width,
            c: out.as_mut_ptr(),
            c_stride: width,
            start: if at == 0 { Start::Zero } else { Start::Continue },
        };
        // SAFETY: weights and out are laid out for `rows` rows; the values lie as `Keys` promises.
        unsafe { l.tile(&tile) };
        key += n;
    }
}
