//! Decode on the CPU: one query token per sequence, whose key and value go into the cache and whose queries attend to all
//! keys there.
//!
//! Every key and value is read from memory once, so decode is bound by memory. A unit of work is small (a pair of key/value
//! heads of a sequence), and while one unit is computed the next is prefetched. A unit has two heads because the chain over
//! the keys of one head is latency-bound: two independent chains keep the arithmetic units busy.

use std::ops::Range;

use super::cache::{CacheDims, SPLIT_KEYS};
use super::cpu_forward::columns;
use super::cpu_rows::{Combine, padded, scores_len, softmax_row};
use crate::Float;
use crate::cpu::simd::tile::{DEPTH, ROW_STRIDE};
use crate::cpu::simd::{Kernel, Lanes, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::heads::{Heads, ScoreRule};

/// The most query heads per key head for which decode is used: more of them fill a tile of matrix rows, which is faster.
pub(super) const MAX_GROUP: usize = 4;
/// Key/value heads of a unit.
const PAIR: usize = 2;
/// Query heads of a key head that are computed at once, at most.
const ROWS: usize = 2;
/// Factors of a split: two for each row of a pair.
const FACTORS: usize = 2 * PAIR * ROWS;
/// Vectors of keys scored at once.
const VECTORS: usize = 4;

/// A decode call. The last key of every sequence is that of its token, `table[(context - 1) / block_size]` is a block that no other
/// sequence reads, and no sequence is empty.
pub(crate) struct Decode<'a, E> {
    pub heads: Heads,
    pub dims: CacheDims,
    pub qkv: &'a [E],
    pub contexts: &'a [u32],
    pub tables: &'a [u32],
    pub table_width: usize,
    pub keys: Shared<'a, E>,
    pub values: Shared<'a, E>,
    pub out: Shared<'a, E>,
}

pub(crate) fn run<E: Float>(cpu: &Cpu, decode: &Decode<'_, E>) {
    decode.run(cpu);
}

impl<E: Float> Decode<'_, E> {
    fn run(&self, cpu: &Cpu) {
        let n_keys: usize = self.contexts.iter().map(|n| *n as usize).sum();
        let longest = self.contexts.iter().max().map_or(0, |n| *n as usize);
        let per_sequence = self.heads.kv.div_ceil(PAIR);
        let cost = n_keys / self.contexts.len().max(1) * 4 * PAIR * self.heads.dim;
        cpu.rows(self.contexts.len() * per_sequence, cost, |range| {
            let n_scores = PAIR * scores_len(self.heads.group(), longest);
            with_scratch(n_scores + longest.div_ceil(SPLIT_KEYS) * FACTORS, |memory| {
                let (scores, factors) = memory.split_at_mut(n_scores);
                cpu.dispatch(Units { call: self, range, scores, factors });
            });
        });
    }

    fn unit(&self, unit: usize) -> Unit<'_> {
        let per_sequence = self.heads.kv.div_ceil(PAIR);
        let sequence = unit / per_sequence;
        let first = unit % per_sequence * PAIR;
        Unit {
            sequence,
            kv_heads: first..(first + PAIR).min(self.heads.kv),
            n_keys: self.contexts[sequence] as usize,
            table: &self.tables[sequence * self.table_width..(sequence + 1) * self.table_width],
        }
    }

    /// Sixteen keys from `key` on: `[head_dim, block_size]` from here.
    #[inline(always)]
    fn key_vector(&self, unit: &Unit<'_>, kv_head: usize, key: usize) -> *const E {
        let size = self.dims.block_size;
        let dim = self.heads.dim;
        let index = unit.table[key / size] as usize * self.heads.kv + kv_head;
        self.keys.at(index * dim * size + key % size)
    }

    /// Values from `key` on, to the end of their block: `[_, padded head_dim]`.
    #[inline(always)]
    fn value_rows(&self, unit: &Unit<'_>, kv_head: usize, key: usize) -> *const E {
        let size = self.dims.block_size;
        let width = padded(self.heads.dim);
        let index = unit.table[key / size] as usize * self.heads.kv + kv_head;
        self.values.at((index * size + key % size) * width)
    }
}

/// A pair of key/value heads of one sequence.
struct Unit<'a> {
    sequence: usize,
    kv_heads: Range<usize>,
    n_keys: usize,
    table: &'a [u32],
}

struct Units<'a, 'c, E> {
    call: &'a Decode<'c, E>,
    range: Range<usize>,
    scores: &'a mut [E],
    /// `[splits, PAIR, ROWS, 2]`: by what the outputs before and of a split are multiplied when they are combined.
    factors: &'a mut [E],
}

impl<E: Float> Kernel<E> for Units<'_, '_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        for unit in self.range.clone() {
            let next = self.call.unit((unit + 1).min(self.range.end - 1));
            let unit = self.call.unit(unit);
            for kv_head in unit.kv_heads.clone() {
                self.store(&unit, kv_head);
            }
            for row in (0..self.call.heads.group()).step_by(ROWS) {
                if row + 1 < self.call.heads.group() {
                    self.heads::<L, 2>(l, &unit, &next, row);
                } else {
                    self.heads::<L, 1>(l, &unit, &next, row);
                }
            }
        }
    }
}

impl<E: Float> Units<'_, '_, E> {
    #[inline(always)]
    fn store(&mut self, unit: &Unit<'_>, kv_head: usize) {
        let call = self.call;
        let heads = call.heads;
        let size = call.dims.block_size;
        let row = &call.qkv[unit.sequence * heads.qkv_width()..][..heads.qkv_width()];
        let (key_at, value_at) = columns(heads, kv_head);
        let at = unit.n_keys - 1;
        let key = call.key_vector(unit, kv_head, at);
        let value = call.value_rows(unit, kv_head, at);
        // SAFETY: both addresses are inside the cache, and this unit alone touches this head in its last block.
        unsafe {
            for (d, x) in row[key_at..key_at + heads.dim].iter().enumerate() {
                *key.cast_mut().add(d * size) = *x;
            }
            for (d, x) in row[value_at..value_at + heads.dim].iter().enumerate() {
                *value.cast_mut().add(d) = *x;
            }
        }
    }

    /// `R` query heads from `row` on of each key head's group.
    #[inline(always)]
    fn heads<L: Lanes<E = E>, const R: usize>(&mut self, l: L, unit: &Unit<'_>, next: &Unit<'_>, row: usize) {
        let call = self.call;
        let heads = call.heads;
        let n = unit.kv_heads.len();
        let scale = E::from_f64(ScoreRule::plain(heads.dim).scale);
        let rows = heads.group();
        let mut sums = [[E::ONE; R]; PAIR];
        for (h, sums) in sums[..n].iter_mut().enumerate() {
            let kv_head = unit.kv_heads.start + h;
            self.score::<L, R>(l, unit, next, (h, kv_head), row);
            for (r, sum) in sums.iter_mut().enumerate() {
                let scores = &mut self.scores[h * scores_len(rows, unit.n_keys)..];
                let mut top = E::NEG_INFINITY;
                for first in (0..unit.n_keys).step_by(SPLIT_KEYS) {
                    let n = SPLIT_KEYS.min(unit.n_keys - first);
                    let scores = &mut scores[first / DEPTH * rows * ROW_STRIDE..];
                    let (split_top, split_sum) = softmax_row(l, scores, rows, row + r, 0..n, n, scale);
                    if first == 0 {
                        (top, *sum) = (split_top, split_sum);
                        continue;
                    }
                    let combine = Combine::new(l, top, split_top);
                    top = combine.top;
                    *sum = combine.sum(*sum, split_sum);
                    let at = first / SPLIT_KEYS * FACTORS + (h * ROWS + r) * 2;
                    (self.factors[at], self.factors[at + 1]) = (combine.before, combine.next);
                }
            }
        }
        let vectors = padded(heads.dim) / WIDTH;
        for v in (0..vectors).step_by(2) {
            match (n, v + 1 < vectors) {
                (PAIR, true) => self.weigh_values::<L, PAIR, R, 2>(l, unit, next, row, v, &sums),
                (PAIR, false) => self.weigh_values::<L, PAIR, R, 1>(l, unit, next, row, v, &sums),
                (_, true) => self.weigh_values::<L, 1, R, 2>(l, unit, next, row, v, &sums),
                (_, false) => self.weigh_values::<L, 1, R, 1>(l, unit, next, row, v, &sums),
            }
        }
    }

    /// Scores of one key head: a chain over the head's dimensions.
    #[inline(always)]
    fn score<L: Lanes<E = E>, const R: usize>(
        &mut self,
        l: L,
        unit: &Unit<'_>,
        next: &Unit<'_>,
        (h, kv_head): (usize, usize),
        row: usize,
    ) {
        let call = self.call;
        let heads = call.heads;
        let rows = heads.group();
        let first = kv_head * rows + row;
        let queries = &call.qkv[unit.sequence * heads.qkv_width() + first * heads.dim..][..R * heads.dim];
        let scores = &mut self.scores[h * scores_len(rows, unit.n_keys)..];
        let next_head = next.kv_heads.start + h.min(next.kv_heads.len() - 1);
        for key in (0..unit.n_keys).step_by(VECTORS * WIDTH) {
            let left = (unit.n_keys - key).div_ceil(WIDTH).min(VECTORS);
            // Vectors past the last repeat the last, and their scores are not stored.
            let vectors: [_; VECTORS] =
                std::array::from_fn(|v| call.key_vector(unit, kv_head, key + v.min(left - 1) * WIDTH));
            if row == 0 {
                for key in (key..next.n_keys.min(key + VECTORS * WIDTH)).step_by(WIDTH) {
                    let at = call.key_vector(next, next_head, key);
                    for d in 0..heads.dim {
                        l.prefetch_far(at.wrapping_add(d * call.dims.block_size));
                    }
                }
            }
            let mut put = |v: usize, r: usize, x| {
                let key = key + v * WIDTH;
                l.put(scores, (key / DEPTH * rows + row + r) * ROW_STRIDE + key % DEPTH, x);
            };
            // SAFETY: each vector has sixteen keys of every dimension.
            unsafe {
                if left > 2 {
                    let sums = dots::<L, R, VECTORS>(l, queries, heads.dim, vectors, call.dims.block_size);
                    sums.iter().enumerate().for_each(|(r, x)| (0..left).for_each(|v| put(v, r, x[v])));
                } else {
                    let sums = dots::<L, R, 2>(
                        l,
                        queries,
                        heads.dim,
                        [vectors[0], vectors[1]],
                        call.dims.block_size,
                    );
                    sums.iter().enumerate().for_each(|(r, x)| (0..left).for_each(|v| put(v, r, x[v])));
                }
            }
        }
    }

    /// `V` vectors of the output of `H` key heads: chains over the keys of each split.
    #[inline(always)]
    fn weigh_values<L: Lanes<E = E>, const H: usize, const R: usize, const V: usize>(
        &mut self,
        l: L,
        unit: &Unit<'_>,
        next: &Unit<'_>,
        row: usize,
        v: usize,
        sums: &[[E; R]; PAIR],
    ) {
        let call = self.call;
        let heads = call.heads;
        let rows = heads.group();
        let size = call.dims.block_size;
        let width = padded(heads.dim);
        let len = scores_len(rows, unit.n_keys);
        let mut acc = [[[l.zero(); V]; R]; H];
        let mut before = acc;
        for key in (0..unit.n_keys).step_by(size) {
            if key > 0 && key.is_multiple_of(SPLIT_KEYS) {
                self.combine(l, key / SPLIT_KEYS - 1, &mut before, &mut acc);
            }
            let n = size.min(unit.n_keys - key);
            if row == 0 && key < next.n_keys {
                for kv_head in next.kv_heads.clone() {
                    let at = call.value_rows(next, kv_head, key);
                    for line in 0..size.min(next.n_keys - key) * V {
                        l.prefetch_far(at.wrapping_add(line / V * width + (v + line % V) * WIDTH));
                    }
                }
            }
            let values: [_; H] = std::array::from_fn(|h| {
                call.value_rows(unit, unit.kv_heads.start + h, key).wrapping_add(v * WIDTH)
            });
            let weights: [[_; R]; H] = std::array::from_fn(|h| {
                std::array::from_fn(|r| {
                    let at = h * len + (key / DEPTH * rows + row + r) * ROW_STRIDE + key % DEPTH;
                    self.scores[at..at + n].as_ptr()
                })
            });
            // SAFETY: the weights were sliced; the values are n rows of a block.
            unsafe { add_weighted_values(l, n, weights, values, width, &mut acc) };
        }
        self.combine(l, (unit.n_keys - 1) / SPLIT_KEYS, &mut before, &mut acc);
        for h in 0..H {
            for r in 0..R {
                let head = (unit.kv_heads.start + h) * rows + row + r;
                let at = unit.sequence * heads.out_width() + head * heads.dim;
                // SAFETY: this unit alone writes its heads of this sequence.
                let to = unsafe { call.out.range(at + v * WIDTH..at + heads.dim.min((v + V) * WIDTH)) };
                let inv = l.splat(E::ONE / sums[h][r]);
                for (i, x) in before[h][r].iter().enumerate() {
                    l.put(to, i * WIDTH, l.mul(*x, inv));
                }
            }
        }
    }

    /// Adds the output of a split to that of the splits before it, and clears it.
    #[inline(always)]
    fn combine<L: Lanes<E = E>, const H: usize, const R: usize, const V: usize>(
        &self,
        l: L,
        split: usize,
        before: &mut [[[L::V; V]; R]; H],
        next: &mut [[[L::V; V]; R]; H],
    ) {
        if split == 0 {
            *before = *next;
        } else {
            for (h, r) in (0..H).flat_map(|h| (0..R).map(move |r| (h, r))) {
                let at = split * FACTORS + (h * ROWS + r) * 2;
                let combine = Combine { top: E::ZERO, before: self.factors[at], next: self.factors[at + 1] };
                for (before, next) in before[h][r].iter_mut().zip(&next[h][r]) {
                    *before = combine.vector(l, *before, *next);
                }
            }
        }
        *next = [[[l.zero(); V]; R]; H];
    }
}

/// Each of `R` queries against `N` vectors of keys.
///
/// # Safety
/// Each of `keys` points to sixteen keys of `dim` dimensions, `stride` apart.
#[inline(always)]
unsafe fn dots<L: Lanes, const R: usize, const N: usize>(
    l: L,
    queries: &[L::E],
    dim: usize,
    keys: [*const L::E; N],
    stride: usize,
) -> [[L::V; N]; R] {
    let mut sums = [[l.zero(); N]; R];
    let queries: [&[L::E]; R] = std::array::from_fn(|r| &queries[r * dim..(r + 1) * dim]);
    for d in 0..dim {
        // SAFETY: the caller vouches for dimension d.
        let keys = keys.map(|vector| unsafe { l.load_ptr(vector.add(d * stride)) });
        for (sums, query) in sums.iter_mut().zip(queries) {
            let x = l.splat(query[d]);
            for (sum, key) in sums.iter_mut().zip(keys) {
                *sum = l.fma(x, key, *sum);
            }
        }
    }
    sums
}

/// Adds `n` values times their weights.
///
/// # Safety
/// `n` weights of every row and `n` rows of `V` vectors, `width` apart, of every head are readable.
#[inline(always)]
unsafe fn add_weighted_values<L: Lanes, const H: usize, const R: usize, const V: usize>(
    l: L,
    n: usize,
    weights: [[*const L::E; R]; H],
    values: [*const L::E; H],
    width: usize,
    acc: &mut [[[L::V; V]; R]; H],
) {
    let mut sums = *acc;
    for i in 0..n {
        for h in 0..H {
            // SAFETY: passed on from the caller.
            unsafe {
                let row: [L::V; V] =
                    std::array::from_fn(|v| l.load_ptr(values[h].add(i * width + v * WIDTH)));
                for r in 0..R {
                    let x = l.splat(*weights[h][r].add(i));
                    for (sum, value) in sums[h][r].iter_mut().zip(row) {
                        *sum = l.fma(x, value, *sum);
                    }
                }
            }
        }
    }
    *acc = sums;
}
