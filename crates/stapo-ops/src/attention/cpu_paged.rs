//! Attention over a paged cache on the CPU.

use std::ops::Range;

use super::cache::{Cache, CacheDims, Dims};
use super::cpu_forward::{block_tokens, columns};
use super::cpu_rows::{ForwardScratch, HostInputs, Keys, QueryBlock, forward_rows, padded};
use crate::Float;
use crate::cpu::simd::tile::DEPTH;
use crate::cpu::simd::{Kernel, Lanes, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::heads::Heads;

/// [`super::paged::Sequences`] as slices.
#[derive(Clone, Copy)]
pub(crate) struct HostSequences<'a> {
    pub offsets: &'a [u32],
    pub contexts: &'a [u32],
    pub tables: &'a [u32],
}

impl HostSequences<'_> {
    #[track_caller]
    pub(super) fn check(self, op: &str, dims: Dims, cache: CacheDims) {
        for s in 0..dims.sequences {
            let asked = self.offsets[s + 1] - self.offsets[s];
            let context = self.contexts[s];
            assert!(asked <= context, "{op}: sequence {s} asks {asked} tokens of a context of {context}");
            let used = (context as usize).div_ceil(cache.block_size);
            assert!(
                used <= dims.table_width,
                "{op}: sequence {s} needs {used} blocks, table has {}",
                dims.table_width
            );
            let table = &self.tables[s * dims.table_width..][..used];
            if let Some(block) = table.iter().find(|block| **block as usize >= cache.blocks) {
                panic!("{op}: sequence {s} names block {block} of {}", cache.blocks);
            }
        }
    }

    /// Whether every sequence has one query token, whose slot is the sequence's last position, in a block that no other
    /// sequence reads.
    pub(super) fn is_decode(self, dims: Dims, cache: CacheDims, slots: &[u32]) -> bool {
        let asks_one = self.offsets.iter().enumerate().all(|(s, offset)| *offset as usize == s);
        if !asks_one || slots.len() != dims.sequences {
            return false;
        }
        let table = |s: usize| {
            let used = (self.contexts[s] as usize).div_ceil(cache.block_size);
            &self.tables[s * dims.table_width..][..used]
        };
        let mut n_readers = vec![0_u32; cache.blocks];
        (0..dims.sequences).flat_map(table).for_each(|block| n_readers[*block as usize] += 1);
        slots.iter().enumerate().all(|(s, slot)| {
            let position = (self.contexts[s] as usize - 1) % cache.block_size;
            let last = table(s).last().map_or(0, |block| *block as usize);
            n_readers[last] == 1 && *slot as usize == last * cache.block_size + position
        })
    }
}

pub(crate) fn store<E: Float>(
    cpu: &Cpu,
    heads: Heads,
    dims: CacheDims,
    qkv: &[E],
    slots: &[u32],
    keys: &mut [E],
    values: &mut [E],
) {
    let keys = Shared::new(keys);
    let values = Shared::new(values);
    let size = dims.block_size;
    let width = padded(heads.dim);
    cpu.rows(heads.kv, 8 * slots.len() * heads.dim, |kv_heads| {
        for kv_head in kv_heads {
            let (key_at, value_at) = columns(heads, kv_head);
            for (row, slot) in qkv.chunks_exact(heads.qkv_width()).zip(slots) {
                let (block, position) = (*slot as usize / size, *slot as usize % size);
                let index = block * heads.kv + kv_head;
                // SAFETY: each task has its own heads, and so its own part of every block.
                let (key, value) = unsafe {
                    let at = (index * size + position) * width;
                    let key = keys.range(index * heads.dim * size..(index + 1) * heads.dim * size);
                    (key, values.range(at..at + heads.dim))
                };
                for (column, x) in key.chunks_exact_mut(size).zip(&row[key_at..key_at + heads.dim]) {
                    column[position] = *x;
                }
                value.copy_from_slice(&row[value_at..value_at + heads.dim]);
            }
        }
    });
}

pub(crate) fn forward<E: Float>(
    cpu: &Cpu,
    d: Dims,
    inputs: HostInputs<'_, E>,
    cache: &Cache<E>,
    host: HostSequences<'_>,
    out: &mut [E],
) {
    let out = Shared::new(out);
    let step = block_tokens(d.heads);
    // One entry per block of query rows: sequence and first token within it.
    let mut blocks = Vec::with_capacity(d.sequences);
    for s in 0..d.sequences {
        let asked = (host.offsets[s + 1] - host.offsets[s]) as usize;
        blocks.extend((0..asked).step_by(step).map(|token| (s, token)));
    }
    let n_keys: usize = host.contexts.iter().map(|n| *n as usize).sum();
    let cost = n_keys / d.sequences.max(1) * 2 * d.heads.dim * d.heads.group().max(2);
    let part = |task: usize| {
        let (s, token) = blocks[task / d.heads.kv];
        let kv_head = task % d.heads.kv;
        let (start, end) = (host.offsets[s] as usize, host.offsets[s + 1] as usize);
        let tokens = step.min(end - start - token);
        let position = host.contexts[s] as usize - (end - start) + token;
        let block =
            QueryBlock { heads: d.heads, rule: d.rule, kv_head, token: start + token, tokens, position };
        let keys = PagedKeys {
            dims: cache.dims,
            kv_head,
            table: &host.tables[s * d.table_width..(s + 1) * d.table_width],
            keys: cache.keys.view().host(),
            values: cache.values.view().host(),
        };
        (block, keys)
    };
    let n_rows = step.min(d.tokens) * d.heads.group();
    let longest = host.contexts.iter().max().map_or(0, |n| *n as usize);
    cpu.rows(blocks.len() * d.heads.kv, cost, |range| {
        with_scratch(ForwardScratch::<E>::len(d.heads, n_rows, longest), |memory| {
            cpu.dispatch(PagedTasks { range, part: &part, inputs, memory, out });
        });
    });
}

/// Consecutive blocks of query rows.
struct PagedTasks<'a, E, P> {
    range: Range<usize>,
    /// A task's rows and keys.
    part: &'a P,
    inputs: HostInputs<'a, E>,
    memory: &'a mut [E],
    out: Shared<'a, E>,
}

impl<'k, E: Float, P: Fn(usize) -> (QueryBlock, PagedKeys<'k, E>)> Kernel<E> for PagedTasks<'_, E, P> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        for task in self.range.clone() {
            if task + 1 < self.range.end {
                let (block, keys) = (self.part)(task + 1);
                keys.prefetch(l, block.first_key()..block.n_keys());
            }
            let (block, keys) = (self.part)(task);
            let mut scratch =
                ForwardScratch::split(&mut *self.memory, block.heads, block.rows(), block.n_keys());
            forward_rows(l, block, &keys, self.inputs, &mut scratch, self.out, None);
        }
    }
}

/// Keys of the next task that are prefetched: attention over a long cache waits for memory.
const MAX_PREFETCHED_KEYS: usize = 128;
/// Cache lines prefetched of each block; the hardware prefetcher follows from there.
const PREFETCHED_LINES: usize = 16;

struct PagedKeys<'a, E> {
    dims: CacheDims,
    kv_head: usize,
    table: &'a [u32],
    keys: &'a [E],
    values: &'a [E],
}

impl<E: Float> PagedKeys<'_, E> {
    /// Prefetches the first of a range of keys and values.
    #[inline(always)]
    fn prefetch<L: Lanes<E = E>>(&self, l: L, of: Range<usize>) {
        let size = self.dims.block_size;
        let dim = self.dims.head_dim;
        for key in (of.start..of.end.min(of.start + MAX_PREFETCHED_KEYS)).step_by(size) {
            let (keys, _, _) = self.keys_at(key, dim);
            let (values, _) = self.values_at(key);
            for line in 0..PREFETCHED_LINES {
                l.prefetch(keys.wrapping_add(line * WIDTH));
                l.prefetch(values.wrapping_add(line * WIDTH));
            }
        }
    }

    /// The index `[block, kv_head]` of the head of the block that holds `key`.
    #[inline(always)]
    fn index(&self, key: usize) -> usize {
        self.table[key / self.dims.block_size] as usize * self.dims.kv_heads + self.kv_head
    }
}

impl<E: Float> Keys<E> for PagedKeys<'_, E> {
    #[inline(always)]
    fn keys_at(&self, key: usize, dim: usize) -> (*const E, usize, usize) {
        let size = self.dims.block_size;
        debug_assert!(key.is_multiple_of(size) && DEPTH.is_multiple_of(size));
        (self.keys[self.index(key) * dim * size..][..dim * size].as_ptr(), size, size)
    }

    #[inline(always)]
    fn values_at(&self, key: usize) -> (*const E, usize) {
        let size = self.dims.block_size;
        let width = padded(self.dims.head_dim);
        (self.values[self.index(key) * size * width..][..size * width].as_ptr(), size)
    }
}
