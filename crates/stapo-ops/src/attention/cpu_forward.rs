//! Packed sequences, forward, on the CPU. A task is one sequence and one or all key/value heads.

use std::ops::Range;

use super::Dims;
use super::cpu_rows::{ForwardScratch, HostInputs, Keys, MAX_ROWS, QueryBlock, forward_rows, padded};
use super::sequences::{HostSequence, HostSequences, KeyColumns, KeyRows};
use crate::Float;
use crate::cpu::gemm::{PANEL, transpose};
use crate::cpu::simd::tile::DEPTH;
use crate::cpu::simd::{Kernel, Lanes, Real, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::heads::{Heads, ScoreRule};

pub(crate) fn forward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    inputs: HostInputs<'_, E>,
    sequences: HostSequences<'_, E>,
    out: &mut [E],
    lse: &mut [E],
) {
    let out = Shared::new(out);
    let lse = Shared::new(lse);
    for_tasks(cpu, d, |sequence, kv_heads| {
        let sequence = sequences.sequence(d.heads, inputs.qkv, sequence);
        let len = sequence.len;
        if sequence.first == len {
            return;
        }
        let rows = block_tokens(d.heads) * d.heads.group();
        let keys_len = keys_len(d.heads, len);
        let values_len = values_len(d.heads, len);
        let total = keys_len + values_len + ForwardScratch::<E>::len(d.heads, rows, len);
        with_scratch(total, |memory| {
            let (keys, memory) = memory.split_at_mut(keys_len);
            let (values, memory) = memory.split_at_mut(values_len);
            let scratch = ForwardScratch::split(memory, d.heads, rows, len);
            cpu.dispatch(ForwardTask {
                heads: d.heads,
                rule: d.rule,
                kv_heads,
                sequence,
                inputs,
                keys,
                values,
                scratch,
                out,
                lse,
            });
        });
    });
}

/// Calls `body` with every sequence and its key/value heads. Where the sequences alone keep the threads busy, a task has all
/// heads of a sequence, so that it can prefetch the next head while it computes one; else a task has one head.
pub(super) fn for_tasks(cpu: &Cpu, d: Dims, body: impl Fn(usize, Range<usize>) + Sync) {
    let at_once = if d.sequences >= 4 * cpu.threads() { d.heads.kv } else { 1 };
    let per_sequence = d.heads.kv / at_once;
    cpu.tasks(d.sequences * per_sequence, |task| {
        let first = task % per_sequence * at_once;
        body(task / per_sequence, first..first + at_once);
    });
}

/// Prefetches `len` columns from `at` on of each row.
#[inline(always)]
pub(super) fn prefetch_columns<L: Lanes>(l: L, rows: &[L::E], width: usize, at: usize, len: usize) {
    for row in rows.chunks_exact(width) {
        for line in (at..at + len).step_by(WIDTH) {
            l.prefetch(row[line..].as_ptr());
        }
    }
}

/// Prefetches the queries, keys and values of `kv_head`'s group at these positions of a sequence, which have queries.
#[inline(always)]
pub(super) fn prefetch_head<L: Lanes>(
    l: L,
    heads: Heads,
    qkv: &[L::E],
    sequence: HostSequence<'_, L::E>,
    positions: Range<usize>,
    kv_head: usize,
) {
    let width = heads.qkv_width();
    let group = heads.group() * heads.dim;
    let token = sequence.start + positions.start - sequence.first;
    let queries = &qkv[token * width..(token + positions.len()) * width];
    prefetch_columns(l, queries, width, kv_head * group, group);
    let keys = sequence.keys.range(positions);
    let (key_at, value_at) = keys.columns.of_head(heads, kv_head);
    prefetch_columns(l, keys.rows, keys.columns.width, key_at, heads.dim);
    prefetch_columns(l, keys.rows, keys.columns.width, value_at, heads.dim);
}

/// Tokens per block of query rows.
pub(super) fn block_tokens(heads: Heads) -> usize {
    assert!(
        heads.group() <= MAX_ROWS,
        "attention: {} query heads per key head, at most {MAX_ROWS}",
        heads.group()
    );
    MAX_ROWS / heads.group()
}

/// Elements of the transposed keys, in panels of 32 keys.
pub(super) fn keys_len(heads: Heads, len: usize) -> usize {
    len.next_multiple_of(PANEL) * heads.dim
}

/// Elements of the values as padded rows.
pub(super) fn values_len(heads: Heads, len: usize) -> usize {
    len * padded(heads.dim)
}

struct ForwardTask<'a, E> {
    heads: Heads,
    rule: ScoreRule,
    kv_heads: Range<usize>,
    sequence: HostSequence<'a, E>,
    inputs: HostInputs<'a, E>,
    keys: &'a mut [E],
    values: &'a mut [E],
    scratch: ForwardScratch<'a, E>,
    out: Shared<'a, E>,
    lse: Shared<'a, E>,
}

impl<E: Float> Kernel<E> for ForwardTask<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        let heads = self.heads;
        let HostSequence { start, first, len, keys: rows, .. } = self.sequence;
        self.prefetch(l, first..len, self.kv_heads.start);
        let step = block_tokens(heads);
        for kv_head in self.kv_heads.clone() {
            let (key_at, value_at) = rows.columns.of_head(heads, kv_head);
            pack_transposed(l, heads, rows, key_at, self.keys);
            pack_padded(l, heads, rows, value_at, self.values);
            let keys = PackedKeys { keys: self.keys, values: self.values, dim: heads.dim };
            for position in (first..len).step_by(step) {
                let tokens = step.min(len - position);
                if kv_head + 1 < self.kv_heads.end {
                    self.prefetch(l, position..position + tokens, kv_head + 1);
                }
                let token = start + position - first;
                let block = QueryBlock { heads, rule: self.rule, kv_head, token, tokens, position };
                forward_rows(l, block, &keys, self.inputs, &mut self.scratch, self.out, Some(self.lse));
            }
        }
    }
}

impl<E: Float> ForwardTask<'_, E> {
    /// Prefetches what `kv_head` will read of these positions.
    #[inline(always)]
    fn prefetch<L: Lanes<E = E>>(&self, l: L, positions: Range<usize>, kv_head: usize) {
        prefetch_head(l, self.heads, self.inputs.qkv, self.sequence, positions, kv_head);
    }
}

/// Where the key and the value of a head start in a fused row.
pub(super) fn columns(heads: Heads, kv_head: usize) -> (usize, usize) {
    KeyColumns::fused(heads).of_head(heads, kv_head)
}

/// The head's columns from `at` on, transposed into panels `[len / 32, head_dim, 32]`, padded with zeros.
#[inline(always)]
pub(super) fn pack_transposed<L: Lanes>(
    l: L,
    heads: Heads,
    keys: KeyRows<'_, L::E>,
    at: usize,
    to: &mut [L::E],
) {
    let width = keys.columns.width;
    let panels = keys.rows.chunks(PANEL * width).zip(to.chunks_exact_mut(PANEL * heads.dim));
    for (rows, panel) in panels {
        transpose(l, rows, width, at..at + heads.dim, panel);
    }
}

/// The head's columns from `at` on, as rows padded to whole vectors.
#[inline(always)]
pub(super) fn pack_padded<L: Lanes>(l: L, heads: Heads, keys: KeyRows<'_, L::E>, at: usize, to: &mut [L::E]) {
    let to = to.chunks_exact_mut(padded(heads.dim));
    for (row, to) in keys.rows.chunks_exact(keys.columns.width).zip(to) {
        copy_padded(l, &row[at..at + heads.dim], to);
    }
}

/// A copy followed by zeros to the end of the last vector.
#[inline(always)]
pub(super) fn copy_padded<L: Lanes>(l: L, from: &[L::E], to: &mut [L::E]) {
    for at in (0..to.len()).step_by(WIDTH) {
        l.put(to, at, l.get(from, at, L::E::ZERO));
    }
}

/// One sequence's keys in panels and values in padded rows.
pub(super) struct PackedKeys<'a, E> {
    pub keys: &'a [E],
    pub values: &'a [E],
    pub dim: usize,
}

impl<E> Keys<E> for PackedKeys<'_, E> {
    #[inline(always)]
    fn keys_at(&self, key: usize, dim: usize) -> (*const E, usize, usize) {
        (self.keys[key / PANEL * PANEL * dim..].as_ptr(), PANEL, PANEL)
    }

    #[inline(always)]
    fn values_at(&self, key: usize) -> (*const E, usize) {
        (self.values[key * padded(self.dim)..].as_ptr(), DEPTH)
    }
}
