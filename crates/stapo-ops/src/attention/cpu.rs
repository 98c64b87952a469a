//! Packed sequences, forward. A task is one sequence and one key/value head.

use super::core::{Block, Keys, MAX_ROWS, Scratch, forward_rows, padded};
use super::{Dims, Heads};
use crate::Float;
use crate::device::{Cpu, Shared, with_scratch};
use crate::gemm::PANEL;
use crate::simd::tile::DEPTH;
use crate::simd::{Kernel, Lanes};

pub(super) fn forward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    qkv: &[E],
    offsets: &[u32],
    out: &mut [E],
    lse: &mut [E],
) {
    let (out, lse) = (Shared::new(out), Shared::new(lse));
    cpu.tasks(d.sequences * d.heads.kv, |task| {
        let (sequence, kv_head) = (task / d.heads.kv, task % d.heads.kv);
        let (start, end) = (offsets[sequence] as usize, offsets[sequence + 1] as usize);
        let len = end - start;
        if len == 0 {
            return;
        }
        let rows = block_tokens(d.heads) * d.heads.group();
        let (keys_len, values_len) = (keys_len(d.heads, len), values_len(d.heads, len));
        let total = keys_len + values_len + Scratch::<E>::len(d.heads, rows, len);
        with_scratch(total, |memory| {
            let (keys, memory) = memory.split_at_mut(keys_len);
            let (values, memory) = memory.split_at_mut(values_len);
            let scratch = Scratch::split(memory, d.heads, rows, len);
            cpu.dispatch(Task { heads: d.heads, kv_head, start, len, qkv, keys, values, scratch, out, lse });
        });
    });
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

pub(super) fn values_len(heads: Heads, len: usize) -> usize {
    len * padded(heads.dim)
}

struct Task<'a, E> {
    heads: Heads,
    kv_head: usize,
    start: usize,
    len: usize,
    qkv: &'a [E],
    keys: &'a mut [E],
    values: &'a mut [E],
    scratch: Scratch<'a, E>,
    out: Shared<'a, E>,
    lse: Shared<'a, E>,
}

impl<E: Float> Kernel<E> for Task<'_, E> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(mut self, l: L) {
        let heads = self.heads;
        let rows = &self.qkv[self.start * heads.qkv_width()..(self.start + self.len) * heads.qkv_width()];
        let (key_at, value_at) = columns(heads, self.kv_head);
        pack_transposed(heads, rows, key_at, self.keys);
        pack_padded(heads, rows, value_at, self.values);
        let keys = PackedKeys { keys: self.keys, values: self.values, dim: heads.dim };
        let step = block_tokens(heads);
        for position in (0..self.len).step_by(step) {
            let tokens = step.min(self.len - position);
            let block =
                Block { heads, kv_head: self.kv_head, token: self.start + position, tokens, position };
            forward_rows(l, block, &keys, self.qkv, &mut self.scratch, self.out, Some(self.lse));
        }
    }
}

/// Where the key and the value of a head start in a fused row.
pub(super) fn columns(heads: Heads, kv_head: usize) -> (usize, usize) {
    ((heads.query + kv_head) * heads.dim, (heads.query + heads.kv + kv_head) * heads.dim)
}

/// The head's columns from `at` on, transposed into panels `[len / 32, head_dim, 32]`, padded with zeros.
#[inline(always)]
pub(super) fn pack_transposed<E: Float>(heads: Heads, rows: &[E], at: usize, to: &mut [E]) {
    let panels = rows.chunks(PANEL * heads.qkv_width()).zip(to.chunks_exact_mut(PANEL * heads.dim));
    for (rows, panel) in panels {
        let width = rows.len() / heads.qkv_width();
        for (j, row) in rows.chunks_exact(heads.qkv_width()).enumerate() {
            for (d, x) in row[at..at + heads.dim].iter().enumerate() {
                panel[d * PANEL + j] = *x;
            }
        }
        for d in 0..heads.dim {
            panel[d * PANEL + width..(d + 1) * PANEL].fill(E::ZERO);
        }
    }
}

/// The head's columns from `at` on, as rows padded to whole vectors.
#[inline(always)]
pub(super) fn pack_padded<E: Float>(heads: Heads, rows: &[E], at: usize, to: &mut [E]) {
    let to = to.chunks_exact_mut(padded(heads.dim));
    for (row, to) in rows.chunks_exact(heads.qkv_width()).zip(to) {
        to[..heads.dim].copy_from_slice(&row[at..at + heads.dim]);
        to[heads.dim..].fill(E::ZERO);
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
    fn key_piece(&self, key: usize, dim: usize) -> (*const E, usize, usize) {
        (self.keys[key / PANEL * PANEL * dim..].as_ptr(), PANEL, PANEL)
    }

    #[inline(always)]
    fn value_piece(&self, key: usize) -> (*const E, usize) {
        (self.values[key * padded(self.dim)..].as_ptr(), DEPTH)
    }
}
