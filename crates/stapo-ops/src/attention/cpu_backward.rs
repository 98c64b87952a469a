//! Packed sequences, backward. A task is one sequence and one or all key/value heads: it alone writes the gradients of
//! their queries, keys and values. A key's gradient is one chain over the queries, token by token, within a token head by
//! head.

use std::ops::Range;

use super::core::{Block, MAX_ROWS, copy, pack_rows, padded, score_rows, scores_len, weigh_values};
use super::cpu::{
    PackedKeys, block_tokens, columns, copy_padded, fetch_columns, fetch_head, for_tasks, keys_len,
    pack_padded, pack_transposed, values_len,
};
use super::{Dims, Heads};
use crate::Float;
use crate::cpu::simd::tile::{DEPTH, Layout, ROW_STRIDE, Start, Tile};
use crate::cpu::simd::{Kernel, Lanes, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::rmsnorm::cpu::dot;

/// What forward left.
#[derive(Clone, Copy)]
pub(super) struct Saved<'a, E> {
    pub qkv: &'a [E],
    pub out: &'a [E],
    pub lse: &'a [E],
    pub d_out: &'a [E],
}

pub(super) fn backward<E: Float>(cpu: &Cpu, d: Dims, saved: Saved<'_, E>, offsets: &[u32], d_qkv: &mut [E]) {
    let d_qkv = Shared::new(d_qkv);
    for_tasks(cpu, d, |sequence, kv_heads| {
        let (start, end) = (offsets[sequence] as usize, offsets[sequence + 1] as usize);
        let len = end - start;
        if len == 0 {
            return;
        }
        let rows = block_tokens(d.heads) * d.heads.group();
        with_scratch(Scratch::<E>::len(d.heads, rows, len), |memory| {
            let scratch = Scratch::split(memory, d.heads, rows, len);
            cpu.dispatch(Task { heads: d.heads, kv_heads, start, len, saved, scratch, d_qkv });
        });
    });
}

struct Scratch<'a, E> {
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

impl<'a, E> Scratch<'a, E> {
    fn lens(heads: Heads, rows: usize, len: usize) -> [usize; 11] {
        let (keys, wide) = (keys_len(heads, len), values_len(heads, len));
        let (block, scores) = (rows * padded(heads.dim), scores_len(rows, len));
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
        Scratch { keys_t, values_t, keys, d_keys, d_values, a, queries, d_out, d_queries, weights, d_scores }
    }
}

struct Task<'a, E> {
    heads: Heads,
    kv_heads: Range<usize>,
    start: usize,
    len: usize,
    saved: Saved<'a, E>,
    scratch: Scratch<'a, E>,
    d_qkv: Shared<'a, E>,
}

impl<E: Float> Kernel<E> for Task<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        self.fetch(l, 0..self.len, self.kv_heads.start);
        for kv_head in self.kv_heads.clone() {
            self.head(l, kv_head);
        }
    }
}

impl<E: Float> Task<'_, E> {
    /// Asks for what `kv_head` will read of these positions.
    #[inline(always)]
    fn fetch<L: Lanes<E = E>>(&self, l: L, positions: Range<usize>, kv_head: usize) {
        let (heads, saved) = (self.heads, self.saved);
        let rows = self.start + positions.start..self.start + positions.end;
        let width = heads.qkv_width();
        fetch_head(l, heads, &saved.qkv[rows.start * width..rows.end * width], kv_head);
        let (width, group) = (heads.out_width(), heads.group() * heads.dim);
        for x in [saved.out, saved.d_out] {
            fetch_columns(l, &x[rows.start * width..rows.end * width], width, kv_head * group, group);
        }
    }

    #[inline(always)]
    fn head<L: Lanes<E = E>>(&mut self, l: L, kv_head: usize) {
        let (heads, width) = (self.heads, self.heads.qkv_width());
        let rows = &self.saved.qkv[self.start * width..(self.start + self.len) * width];
        let (key_at, value_at) = columns(heads, kv_head);
        pack_transposed(l, heads, rows, key_at, self.scratch.keys_t);
        pack_transposed(l, heads, rows, value_at, self.scratch.values_t);
        pack_padded(l, heads, rows, key_at, self.scratch.keys);
        self.scratch.d_keys.fill(E::ZERO);
        self.scratch.d_values.fill(E::ZERO);
        let step = block_tokens(heads);
        for position in (0..self.len).step_by(step) {
            let tokens = step.min(self.len - position);
            if kv_head + 1 < self.kv_heads.end {
                self.fetch(l, position..position + tokens, kv_head + 1);
            }
            self.block(l, Block { heads, kv_head, token: self.start + position, tokens, position });
        }
        for token in 0..self.len {
            let row = (self.start + token) * width;
            let from = token * padded(heads.dim)..token * padded(heads.dim) + heads.dim;
            // SAFETY: this task alone writes this sequence's columns of this head.
            let (d_key, d_value) = unsafe {
                let key = self.d_qkv.range(row + key_at..row + key_at + heads.dim);
                (key, self.d_qkv.range(row + value_at..row + value_at + heads.dim))
            };
            copy(l, &self.scratch.d_keys[from.clone()], d_key);
            copy(l, &self.scratch.d_values[from], d_value);
        }
    }

    #[inline(always)]
    fn block<L: Lanes<E = E>>(&mut self, l: L, block: Block) {
        let (heads, rows, n_keys) = (self.heads, block.rows(), block.n_keys());
        let width = padded(heads.dim);
        let (saved, s) = (self.saved, &mut self.scratch);
        let query = |r: usize| {
            let (token, head) = block.row(r);
            &saved.qkv[(block.token + token) * heads.qkv_width() + head * heads.dim..][..heads.dim]
        };
        let out_at = |r: usize| {
            let (token, head) = block.row(r);
            (block.token + token) * heads.out_width() + head * heads.dim
        };
        let d_out = |r: usize| &saved.d_out[out_at(r)..][..heads.dim];
        for r in 0..rows {
            copy_padded(l, query(r), &mut s.queries[r * width..(r + 1) * width]);
            copy_padded(l, d_out(r), &mut s.d_out[r * width..(r + 1) * width]);
        }
        pack_rows(l, s.a, rows, heads.dim, query);
        let keys = PackedKeys { keys: s.keys_t, values: s.keys, dim: heads.dim };
        score_rows(l, rows, heads.dim, n_keys, s.a, &keys, s.weights);
        pack_rows(l, s.a, rows, heads.dim, d_out);
        let values = PackedKeys { keys: s.values_t, values: s.keys, dim: heads.dim };
        score_rows(l, rows, heads.dim, n_keys, s.a, &values, s.d_scores);
        for r in 0..rows {
            let (token, head) = block.row(r);
            let pull = dot(l, d_out(r), &saved.out[out_at(r)..][..heads.dim]);
            let lse = saved.lse[(block.token + token) * heads.query + head];
            score_gradient(
                l,
                s.weights,
                s.d_scores,
                (rows, r),
                (block.position + token + 1, n_keys),
                heads,
                lse,
                pull,
            );
        }
        weigh_values(l, rows, heads.dim, n_keys, s.d_scores, &keys, s.d_queries);
        add_transposed(l, rows, heads.dim, n_keys, s.d_scores, s.queries, s.d_keys);
        add_transposed(l, rows, heads.dim, n_keys, s.weights, s.d_out, s.d_values);
        for r in 0..rows {
            let (token, head) = block.row(r);
            let at = (block.token + token) * heads.qkv_width() + head * heads.dim;
            // SAFETY: this task alone writes this sequence's columns of this head.
            let d_query = unsafe { self.d_qkv.range(at..at + heads.dim) };
            copy(l, &self.scratch.d_queries[r * width..][..heads.dim], d_query);
        }
    }
}

/// Row r: scores become weights `p = exp(scale score - lse)`, d_weights become `scale p (d_weight - pull)`; both 0 from
/// the first hidden key on.
#[inline(always)]
fn score_gradient<L: Lanes>(
    l: L,
    weights: &mut [L::E],
    d_scores: &mut [L::E],
    (rows, r): (usize, usize),
    (visible, n_keys): (usize, usize),
    heads: Heads,
    lse: L::E,
    pull: L::E,
) {
    let zero = L::E::ZERO;
    let scale = l.splat(L::E::from_f64(heads.scale()));
    let (lse, pull) = (l.splat(lse), l.splat(pull));
    for key in (0..visible).step_by(WIDTH) {
        let at = (key / DEPTH * rows + r) * ROW_STRIDE + key % DEPTH;
        let mut p = l.exp(l.sub(l.mul(l.get(weights, at, zero), scale), lse));
        let mut d = l.mul(l.mul(p, scale), l.sub(l.get(d_scores, at, zero), pull));
        if key + WIDTH > visible {
            (p, d) = (l.first(p, visible - key, zero), l.first(d, visible - key, zero));
        }
        l.put(weights, at, p);
        l.put(d_scores, at, d);
    }
    for key in (visible.next_multiple_of(WIDTH)..n_keys).step_by(WIDTH) {
        let at = (key / DEPTH * rows + r) * ROW_STRIDE + key % DEPTH;
        l.put(weights, at, l.zero());
        l.put(d_scores, at, l.zero());
    }
}

/// `sums[key] += sum over rows of a[row, key] b[row]`: one chain over the rows.
#[inline(always)]
fn add_transposed<L: Lanes>(
    l: L,
    rows: usize,
    dim: usize,
    n_keys: usize,
    a: &[L::E],
    b: &[L::E],
    sums: &mut [L::E],
) {
    let width = padded(dim);
    debug_assert!(rows <= MAX_ROWS);
    for key in (0..n_keys).step_by(DEPTH) {
        let tile = Tile {
            rows: DEPTH.min(n_keys - key),
            depth: rows,
            vectors: width / WIDTH,
            layout: Layout::RowsTransposed,
            a: a[(key / DEPTH * rows) * ROW_STRIDE..].as_ptr(),
            b: b.as_ptr(),
            b_stride: width,
            c: sums[key * width..].as_mut_ptr(),
            c_stride: width,
            start: Start::Continue,
        };
        // SAFETY: a holds `rows` rows of these keys, b `rows` padded rows, sums a padded row per key.
        unsafe { l.tile(&tile) };
    }
}
