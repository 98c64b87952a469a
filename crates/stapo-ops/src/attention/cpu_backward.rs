//! Packed sequences, backward, on the CPU. A task is one sequence and one or all key/value heads, and no other task writes
//! the gradients of their queries, keys and values. A key's gradient is one chain over the queries, token by token, within
//! a token head by head.

use std::ops::Range;

use super::cpu_forward::{
    PackedKeys, block_tokens, copy_padded, for_tasks, keys_len, pack_padded, pack_transposed,
    prefetch_columns, prefetch_head, values_len,
};
use super::cpu_rows::{
    MAX_ROWS, QueryBlock, copy, pack_rows, padded, score_rows, scores_len, weights_times_values,
};
use super::sequences::{HostSequence, HostSequences};
use super::{Dims, Saved};
use crate::Float;
use crate::cpu::simd::tile::{DEPTH, Layout, ROW_STRIDE, Start, Tile};
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH, tanh};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::heads::{Heads, ScoreRule};
use crate::rmsnorm::cpu::dot;

/// What backward reads: see [`Saved`].
#[derive(Clone, Copy)]
struct Inputs<'a, E> {
    qkv: &'a [E],
    out: &'a [E],
    lse: &'a [E],
    d_out: &'a [E],
}

pub(crate) fn backward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    saved: Saved<'_, E>,
    sequences: HostSequences<'_, E>,
    d_out: &[E],
    (d_qkv, d_keys): (&mut [E], Option<&mut [E]>),
) {
    let inputs = Inputs { qkv: saved.qkv.host(), out: saved.out.host(), lse: saved.lse.host(), d_out };
    let d_qkv = Shared::new(d_qkv);
    let d_keys = d_keys.map_or(d_qkv, Shared::new);
    for_tasks(cpu, d, |sequence, kv_heads| {
        let sequence = sequences.sequence(d.heads, inputs.qkv, sequence);
        let len = sequence.len;
        if len == 0 {
            return;
        }
        let rows = block_tokens(d.heads) * d.heads.group();
        with_scratch(BackwardScratch::<E>::len(d.heads, rows, len), |memory| {
            let scratch = BackwardScratch::split(memory, d.heads, rows, len);
            let (heads, rule) = (d.heads, d.rule);
            cpu.dispatch(BackwardTask { heads, rule, kv_heads, sequence, inputs, scratch, d_qkv, d_keys });
        });
    });
}

struct BackwardScratch<'a, E> {
    /// Keys and values transposed, in panels.
    keys_t: &'a mut [E],
    values_t: &'a mut [E],
    /// Keys and both gradients as padded rows `[len, padded]`.
    keys: &'a mut [E],
    d_keys: &'a mut [E],
    d_values: &'a mut [E],
    /// A block's rows, packed for tiles, `[dim / DEPTH, rows, ROW_STRIDE]`.
    a: &'a mut [E],
    /// A block's queries and output gradients as padded rows.
    queries: &'a mut [E],
    d_out: &'a mut [E],
    d_queries: &'a mut [E],
    weights: &'a mut [E],
    d_scores: &'a mut [E],
}

impl<'a, E> BackwardScratch<'a, E> {
    fn lens(heads: Heads, rows: usize, len: usize) -> [usize; 11] {
        let keys = keys_len(heads, len);
        let wide = values_len(heads, len);
        let block = rows * padded(heads.dim);
        let scores = scores_len(rows, len);
        [keys, keys, wide, wide, wide, scores_len(rows, heads.dim), block, block, block, scores, scores]
    }

    fn len(heads: Heads, rows: usize, len: usize) -> usize {
        Self::lens(heads, rows, len).iter().sum()
    }

    fn split(mut memory: &'a mut [E], heads: Heads, rows: usize, len: usize) -> Self {
        let parts = Self::lens(heads, rows, len).map(|n| {
            let (part, rest) = std::mem::take(&mut memory).split_at_mut(n);
            memory = rest;
            part
        });
        let [keys_t, values_t, keys, d_keys, d_values, a, queries, d_out, d_queries, weights, d_scores] =
            parts;
        BackwardScratch {
            keys_t,
            values_t,
            keys,
            d_keys,
            d_values,
            a,
            queries,
            d_out,
            d_queries,
            weights,
            d_scores,
        }
    }
}

struct BackwardTask<'a, E> {
    heads: Heads,
    rule: ScoreRule,
    kv_heads: Range<usize>,
    sequence: HostSequence<'a, E>,
    inputs: Inputs<'a, E>,
    scratch: BackwardScratch<'a, E>,
    d_qkv: Shared<'a, E>,
    /// The gradients of what holds the keys.
    d_keys: Shared<'a, E>,
}

impl<E: Float> Kernel<E> for BackwardTask<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        self.prefetch(l, self.sequence.first..self.sequence.len, self.kv_heads.start);
        for kv_head in self.kv_heads.clone() {
            self.head(l, kv_head);
        }
    }
}

impl<E: Float> BackwardTask<'_, E> {
    /// Prefetches what `kv_head` will read of these positions.
    #[inline(always)]
    fn prefetch<L: Lanes<E = E>>(&self, l: L, positions: Range<usize>, kv_head: usize) {
        let heads = self.heads;
        let inputs = self.inputs;
        let HostSequence { start, first, .. } = self.sequence;
        let rows = start + positions.start - first..start + positions.end - first;
        prefetch_head(l, heads, inputs.qkv, self.sequence, positions, kv_head);
        let width = heads.out_width();
        let group = heads.group() * heads.dim;
        for x in [inputs.out, inputs.d_out] {
            prefetch_columns(l, &x[rows.start * width..rows.end * width], width, kv_head * group, group);
        }
    }

    #[inline(always)]
    fn head<L: Lanes<E = E>>(&mut self, l: L, kv_head: usize) {
        let heads = self.heads;
        let HostSequence { start, first, key_start, len, keys: rows } = self.sequence;
        let (key_at, value_at) = rows.columns.of_head(heads, kv_head);
        pack_transposed(l, heads, rows, key_at, self.scratch.keys_t);
        pack_transposed(l, heads, rows, value_at, self.scratch.values_t);
        pack_padded(l, heads, rows, key_at, self.scratch.keys);
        self.scratch.d_keys.fill(E::ZERO);
        self.scratch.d_values.fill(E::ZERO);
        let step = block_tokens(heads);
        for position in (first..len).step_by(step) {
            let tokens = step.min(len - position);
            if kv_head + 1 < self.kv_heads.end {
                self.prefetch(l, position..position + tokens, kv_head + 1);
            }
            let token = start + position - first;
            self.block(l, QueryBlock { heads, rule: self.rule, kv_head, token, tokens, position });
        }
        for token in 0..len {
            let row = (key_start + token) * rows.columns.width;
            let from = token * padded(heads.dim)..token * padded(heads.dim) + heads.dim;
            // SAFETY: this task alone writes this sequence's columns of this head.
            let (d_key, d_value) = unsafe {
                let key = self.d_keys.range(row + key_at..row + key_at + heads.dim);
                (key, self.d_keys.range(row + value_at..row + value_at + heads.dim))
            };
            copy(l, &self.scratch.d_keys[from.clone()], d_key);
            copy(l, &self.scratch.d_values[from], d_value);
        }
    }

    #[inline(always)]
    fn block<L: Lanes<E = E>>(&mut self, l: L, block: QueryBlock) {
        let heads = self.heads;
        let rows = block.rows();
        let seen = block.first_key()..block.n_keys();
        let width = padded(heads.dim);
        let inputs = self.inputs;
        let s = &mut self.scratch;
        let query = |r: usize| {
            let (token, head) = block.row(r);
            &inputs.qkv[(block.token + token) * heads.qkv_width() + head * heads.dim..][..heads.dim]
        };
        let out_at = |r: usize| {
            let (token, head) = block.row(r);
            (block.token + token) * heads.out_width() + head * heads.dim
        };
        let d_out = |r: usize| &inputs.d_out[out_at(r)..][..heads.dim];
        for r in 0..rows {
            copy_padded(l, query(r), &mut s.queries[r * width..(r + 1) * width]);
            copy_padded(l, d_out(r), &mut s.d_out[r * width..(r + 1) * width]);
        }
        pack_rows(l, s.a, rows, heads.dim, query);
        let keys = PackedKeys { keys: s.keys_t, values: s.keys, dim: heads.dim };
        score_rows(l, rows, heads.dim, seen.clone(), s.a, &keys, s.weights);
        pack_rows(l, s.a, rows, heads.dim, d_out);
        let values = PackedKeys { keys: s.values_t, values: s.keys, dim: heads.dim };
        score_rows(l, rows, heads.dim, seen.clone(), s.a, &values, s.d_scores);
        for r in 0..rows {
            let (token, head) = block.row(r);
            let row = ScoreRow {
                rows,
                r,
                visible: block.visible(r, &seen),
                n_keys: seen.len(),
                rule: self.rule,
                lse: inputs.lse[(block.token + token) * heads.query + head],
                delta: dot(l, d_out(r), &inputs.out[out_at(r)..][..heads.dim]),
            };
            score_gradient(l, &row, s.weights, s.d_scores);
        }
        weights_times_values(l, rows, heads.dim, seen.clone(), s.d_scores, &keys, s.d_queries);
        add_transposed(l, rows, heads.dim, seen.clone(), s.d_scores, s.queries, s.d_keys);
        add_transposed(l, rows, heads.dim, seen, s.weights, s.d_out, s.d_values);
        for r in 0..rows {
            let (token, head) = block.row(r);
            let at = (block.token + token) * heads.qkv_width() + head * heads.dim;
            // SAFETY: this task alone writes this sequence's columns of this head.
            let d_query = unsafe { self.d_qkv.range(at..at + heads.dim) };
            copy(l, &self.scratch.d_queries[r * width..][..heads.dim], d_query);
        }
    }
}

/// Row `r` of `rows` rows of scores, of which the `visible` of `n_keys` keys are visible. `delta` is the sum over the
/// head's columns of d_out times out, `FlashAttention`'s D.
struct ScoreRow<E> {
    rows: usize,
    r: usize,
    visible: Range<usize>,
    n_keys: usize,
    rule: ScoreRule,
    lse: E,
    delta: E,
}

/// Scores become weights `p = exp(scale score - lse)`, d_weights become `scale p (d_weight - delta)`; both are 0 for hidden
/// keys. With a softcap c, `p = exp(c t - lse)` with `t = tanh(scale score / c)`, and `1 - t^2` multiplies the d_weights.
#[inline(always)]
fn score_gradient<L: Lanes>(l: L, row: &ScoreRow<L::E>, weights: &mut [L::E], d_scores: &mut [L::E]) {
    let zero = L::E::ZERO;
    let scale = l.splat(L::E::from_f64(row.rule.scale));
    let lse = l.splat(row.lse);
    let delta = l.splat(row.delta);
    let at = |key: usize| (key / DEPTH * row.rows + row.r) * ROW_STRIDE + key % DEPTH;
    let Range { start: first, end: n_visible } = row.visible;
    let start = first / WIDTH * WIDTH;
    for key in (0..start).step_by(WIDTH) {
        l.put(weights, at(key), l.zero());
        l.put(d_scores, at(key), l.zero());
    }
    for key in (start..n_visible).step_by(WIDTH) {
        let mut score = l.mul(l.get(weights, at(key), zero), scale);
        let mut slope = scale;
        if let Some(cap) = row.rule.softcap {
            let cap = L::E::from_f64(cap);
            let t = tanh(l, l.mul(score, l.splat(L::E::ONE / cap)));
            score = l.mul(t, l.splat(cap));
            slope = l.mul(scale, l.sub(l.splat(L::E::ONE), l.mul(t, t)));
        }
        let mut p = l.exp(l.sub(score, lse));
        let mut d = l.mul(l.mul(p, slope), l.sub(l.get(d_scores, at(key), zero), delta));
        if key + WIDTH > n_visible {
            p = l.first(p, n_visible - key, zero);
            d = l.first(d, n_visible - key, zero);
        }
        l.put(weights, at(key), p);
        l.put(d_scores, at(key), d);
    }
    for hidden in start..first {
        weights[at(hidden)] = zero;
        d_scores[at(hidden)] = zero;
    }
    for key in (n_visible.next_multiple_of(WIDTH)..row.n_keys).step_by(WIDTH) {
        l.put(weights, at(key), l.zero());
        l.put(d_scores, at(key), l.zero());
    }
}

/// `sums[key] += sum over rows of a[row, key] b[row]` for a range of keys: one chain over the rows.
#[inline(always)]
fn add_transposed<L: Lanes>(
    l: L,
    rows: usize,
    dim: usize,
    of: Range<usize>,
    a: &[L::E],
    b: &[L::E],
    sums: &mut [L::E],
) {
    let width = padded(dim);
    debug_assert!(rows <= MAX_ROWS);
    for at in (0..of.len()).step_by(DEPTH) {
        let tile = Tile {
            rows: DEPTH.min(of.len() - at),
            depth: rows,
            vectors: width / WIDTH,
            layout: Layout::RowsTransposed,
            a: a[(at / DEPTH * rows) * ROW_STRIDE..].as_ptr(),
            b: b.as_ptr(),
            b_stride: width,
            c: sums[(of.start + at) * width..].as_mut_ptr(),
            c_stride: width,
            start: Start::Continue,
        };
        // SAFETY: a holds `rows` rows of these keys, b `rows` padded rows, sums a padded row per key.
        unsafe { l.tile(&tile) };
    }
}
