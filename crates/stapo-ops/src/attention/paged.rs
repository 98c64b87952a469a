//! Attention over a cache of fixed-size blocks: decode and chunked prefill.
//!
//! A block holds `block_size` consecutive positions of one sequence; a sequence's table lists its blocks in order.
//! Sequences with a common prefix may list the same blocks. Keys lie transposed, so that kernels read a vector of keys
//! at a time.

use std::ops::Range;

use super::Heads;
use super::core::{Block, Keys, Scratch, forward_rows, padded};
use super::cpu::{block_tokens, columns};
use super::{cuda, decode};
use crate::cpu::simd::tile::DEPTH;
use crate::cpu::simd::{Kernel, Lanes, WIDTH};
use crate::cpu::{Cpu, Shared, with_scratch};
use crate::device::Backend;
use crate::{Buffer, Device, Float, OutOfMemory, View, ViewMut, check, rope};

/// The shape of one layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheDims {
    pub blocks: usize,
    /// Positions per block: 16, 32, 64, 128 or 256.
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl CacheDims {
    /// Block sizes a cache may have.
    pub const BLOCK_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

    /// Positions in a block: more waste memory at the end of each sequence and of each shared prompt, fewer cut attention in
    /// small pieces.
    pub fn best_block_size(device: &Device) -> usize {
        match device.backend() {
            Backend::Cpu(_) => 16,
            Backend::Cuda(_) => 32,
        }
    }

    /// Elements of all keys.
    pub fn keys_len(self) -> usize {
        self.blocks * self.kv_heads * self.head_dim * self.block_size
    }

    /// Elements of all values.
    pub fn values_len(self) -> usize {
        self.blocks * self.kv_heads * padded(self.head_dim) * self.block_size
    }

    #[track_caller]
    fn check(self, op: &str, heads: Heads) {
        heads.check(op);
        assert!(
            Self::BLOCK_SIZES.contains(&self.block_size),
            "{op}: block_size {} is none of {:?}",
            self.block_size,
            Self::BLOCK_SIZES
        );
        assert!(
            (self.kv_heads, self.head_dim) == (heads.kv, heads.dim),
            "{op}: cache holds {} heads of {}, expected {} of {}",
            self.kv_heads,
            self.head_dim,
            heads.kv,
            heads.dim
        );
    }
}

/// Keys and values of one layer, all blocks.
#[derive(Debug)]
pub struct Cache<T: Float> {
    dims: CacheDims,
    /// `[blocks, kv_heads, head_dim, block_size]`; on a GPU `[blocks, kv_heads, block_size, head_dim]`.
    pub(super) keys: Buffer<T>,
    /// `[blocks, kv_heads, block_size, head_dim padded to 16]`.
    pub(super) values: Buffer<T>,
}

impl<T: Float> Cache<T> {
    pub fn zeros(device: &Device, dims: CacheDims) -> Result<Self, OutOfMemory> {
        let keys = device.compute_zeros(dims.keys_len())?;
        Ok(Cache { dims, keys, values: device.compute_zeros(dims.values_len())? })
    }

    pub fn dims(&self) -> CacheDims {
        self.dims
    }

    /// Copies the keys and values of each pair's first block over those of its second. Shape: pairs `[n, 2]`; a block that
    /// one pair writes is in no other.
    pub fn copy_blocks(&mut self, device: &Device, pairs: View<'_, u32>) {
        for buffer in [&mut self.keys, &mut self.values] {
            let len = buffer.len() / self.dims.blocks;
            if let Backend::Cuda(cuda) = device.backend() {
                cuda::copy_blocks(cuda, pairs.cuda(), buffer.view().cuda(), len);
                continue;
            }
            for pair in pairs.host().chunks_exact(2) {
                let places = [pair[0], pair[1]].map(|block| block as usize * len..(block as usize + 1) * len);
                let [from, mut to] = buffer.disjoint_mut(places);
                to.copy_from(from.into_view());
            }
        }
    }
}

/// Writes the keys and values of tokens into the cache. Shapes: qkv `[T, qkv_width]`, positions already embedded;
/// slots `[T]`: token t goes to position `slot % block_size` of block `slot / block_size`. Of two tokens with one slot, the later stays.
pub fn store<T: Float>(
    device: &Device,
    tokens: usize,
    heads: Heads,
    qkv: View<'_, T>,
    slots: View<'_, u32>,
    cache: &mut Cache<T>,
) {
    let (op, dims) = ("attention::paged::store", cache.dims);
    dims.check(op, heads);
    check(op, "qkv", qkv.len(), tokens * heads.qkv_width());
    check(op, "slots", slots.len(), tokens);
    if let Backend::Cuda(cuda) = device.backend() {
        let places = (cache.keys.view().cuda(), cache.values.view().cuda());
        cuda::store(cuda, tokens, heads, dims, qkv.cuda(), slots.cuda(), places);
        return;
    }
    let n_slots = dims.blocks * dims.block_size;
    if let Some(slot) = slots.host().iter().find(|slot| **slot as usize >= n_slots) {
        panic!("{op}: slot {slot} of a cache of {n_slots}");
    }
    let (keys, values) = (cache.keys.view_mut().into_host(), cache.values.view_mut().into_host());
    store_cpu(device.as_cpu(), heads, dims, qkv.host(), slots.host(), keys, values);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// Query tokens of all sequences.
    pub tokens: usize,
    pub sequences: usize,
    pub heads: Heads,
    /// Entries per row of `tables`.
    pub table_width: usize,
}

/// Where the sequences of a call lie.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    /// `[sequences + 1]`, rising from 0 to T: sequence s asks the tokens `offsets[s]..offsets[s + 1]`.
    pub offsets: View<'a, u32>,
    /// `[sequences]`: keys of the sequence, those of this call's tokens included; its tokens are the last of them.
    pub contexts: View<'a, u32>,
    /// `[sequences, table_width]`: block of each run of `block_size` positions; entries past the context are ignored.
    pub tables: View<'a, u32>,
    /// `[n, 3]`, only where each sequence asks one token: who may be taken together. First sequence, how many (0: an entry
    /// to be left out), and how many keys, divided by [`GROUPED_KEYS`], lie in the same blocks. Changes no result.
    pub groups: Option<View<'a, u32>>,
}

/// The keys that sequences have in common are counted in pieces of this many.
pub const GROUPED_KEYS: usize = 64;
/// Query rows (sequences times query heads per key head) that a group may have.
pub const GROUPED_ROWS: usize = 8;

/// Stores the tokens' keys and values, see [`store`], and attends. Shapes: qkv `[T, qkv_width]`; slots `[T]`; out
/// `[T, out_width]`. Bit for bit what [`super::forward`] gives for the same sequences packed.
pub fn forward<T: Float>(
    device: &Device,
    dims: Dims,
    qkv: View<'_, T>,
    slots: View<'_, u32>,
    cache: &mut Cache<T>,
    sequences: Sequences<'_>,
    out: ViewMut<'_, T>,
) {
    let op = "attention::paged::forward";
    check_shapes(op, dims, cache, ("qkv", qkv.len()), sequences, &out);
    if let Backend::Cuda(cuda) = device.backend() {
        check(op, "slots", slots.len(), dims.tokens);
        let call = cuda::Call::new(dims, slots, cache, sequences, &out);
        if !call.decode(cuda, qkv.cuda(), None) {
            cuda::store(cuda, dims.tokens, dims.heads, cache.dims, qkv.cuda(), call.slots, call.cache);
            call.attend(cuda, qkv.cuda());
        }
        return;
    }
    super::check_offsets(op, sequences.offsets, dims.sequences, dims.tokens);
    let host = Host {
        offsets: sequences.offsets.host(),
        contexts: sequences.contexts.host(),
        tables: sequences.tables.host(),
    };
    host.check(op, dims, cache.dims);
    if dims.heads.group() <= decode::MAX_GROUP && host.is_decode(dims, cache.dims, slots.host()) {
        decode::Decode {
            heads: dims.heads,
            dims: cache.dims,
            qkv: qkv.host(),
            contexts: host.contexts,
            tables: host.tables,
            table_width: dims.table_width,
            keys: Shared::new(cache.keys.view_mut().into_host()),
            values: Shared::new(cache.values.view_mut().into_host()),
            out: Shared::new(out.into_host()),
        }
        .run(device.as_cpu());
        return;
    }
    store(device, dims.tokens, dims.heads, qkv, slots, cache);
    forward_cpu(device.as_cpu(), dims, qkv.host(), cache, host, out.into_host());
}

/// What [`rotate_and_forward`] rotates before it attends: see [`rope::forward`].
pub struct Unrotated<'a, T: Float> {
    pub table: &'a rope::Table<T>,
    pub positions: View<'a, u32>,
    pub norm: Option<rope::HeadNorm<'a, T>>,
    /// `[T, qkv_width]`
    pub raw: View<'a, T>,
    /// `[T, qkv_width]` and, with a norm, `[T, query heads + kv heads]`: left holding anything.
    pub qkv: ViewMut<'a, T>,
    pub inv_rms: ViewMut<'a, T>,
}

/// [`rope::forward`] and [`forward`], bit for bit, for a caller who needs nothing in between.
pub fn rotate_and_forward<T: Float>(
    device: &Device,
    dims: Dims,
    given: Unrotated<'_, T>,
    slots: View<'_, u32>,
    cache: &mut Cache<T>,
    sequences: Sequences<'_>,
    out: ViewMut<'_, T>,
) {
    let op = "attention::paged::rotate_and_forward";
    let Unrotated { table, positions, norm, raw, mut qkv, inv_rms } = given;
    if let Backend::Cuda(cuda) = device.backend() {
        check_shapes(op, dims, cache, ("raw", raw.len()), sequences, &out);
        check(op, "positions", positions.len(), dims.tokens);
        check(op, "slots", slots.len(), dims.tokens);
        let call = cuda::Call::new(dims, slots, cache, sequences, &out);
        if call.decode(cuda, raw.cuda(), Some(&cuda::Rotation::new(table, positions, norm))) {
            return;
        }
    }
    let of_rope = rope::Dims { tokens: dims.tokens, heads: dims.heads };
    let norm = norm.map(|norm| (norm, inv_rms));
    rope::forward(device, of_rope, table, positions, norm, raw, qkv.reborrow());
    forward(device, dims, qkv.into_view(), slots, cache, sequences, out);
}

#[track_caller]
fn check_shapes<T: Float>(
    op: &str,
    dims: Dims,
    cache: &Cache<T>,
    (name, len): (&str, usize),
    sequences: Sequences<'_>,
    out: &ViewMut<'_, T>,
) {
    cache.dims.check(op, dims.heads);
    check(op, name, len, dims.tokens * dims.heads.qkv_width());
    check(op, "out", out.len(), dims.tokens * dims.heads.out_width());
    check(op, "contexts", sequences.contexts.len(), dims.sequences);
    check(op, "tables", sequences.tables.len(), dims.sequences * dims.table_width);
    check(op, "offsets", sequences.offsets.len(), dims.sequences + 1);
}

/// [`Sequences`] as slices.
#[derive(Clone, Copy)]
struct Host<'a> {
    offsets: &'a [u32],
    contexts: &'a [u32],
    tables: &'a [u32],
}

impl Host<'_> {
    #[track_caller]
    fn check(self, op: &str, dims: Dims, cache: CacheDims) {
        for s in 0..dims.sequences {
            let (asked, context) = (self.offsets[s + 1] - self.offsets[s], self.contexts[s]);
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

    /// Whether every sequence asks one token, whose slot is its last position, in a block that nobody else reads.
    fn is_decode(self, dims: Dims, cache: CacheDims, slots: &[u32]) -> bool {
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

fn store_cpu<E: Float>(
    cpu: &Cpu,
    heads: Heads,
    dims: CacheDims,
    qkv: &[E],
    slots: &[u32],
    keys: &mut [E],
    values: &mut [E],
) {
    let (keys, values) = (Shared::new(keys), Shared::new(values));
    let (size, width) = (dims.block_size, padded(heads.dim));
    cpu.rows(heads.kv, 8 * slots.len() * heads.dim, |kv_heads| {
        for kv_head in kv_heads {
            let (key_at, value_at) = columns(heads, kv_head);
            for (row, slot) in qkv.chunks_exact(heads.qkv_width()).zip(slots) {
                let (block, position) = (*slot as usize / size, *slot as usize % size);
                let piece = block * heads.kv + kv_head;
                // SAFETY: each task has its own heads, so its own pieces of every block.
                let (key, value) = unsafe {
                    let at = (piece * size + position) * width;
                    let key = keys.range(piece * heads.dim * size..(piece + 1) * heads.dim * size);
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

fn forward_cpu<E: Float>(cpu: &Cpu, d: Dims, qkv: &[E], cache: &Cache<E>, host: Host<'_>, out: &mut [E]) {
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
        let ((s, token), kv_head) = (blocks[task / d.heads.kv], task % d.heads.kv);
        let (start, end) = (host.offsets[s] as usize, host.offsets[s + 1] as usize);
        let tokens = step.min(end - start - token);
        let position = host.contexts[s] as usize - (end - start) + token;
        let block = Block { heads: d.heads, kv_head, token: start + token, tokens, position };
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
        with_scratch(Scratch::<E>::len(d.heads, n_rows, longest), |memory| {
            cpu.dispatch(Tasks { range, part: &part, qkv, memory, out });
        });
    });
}

/// Blocks of query rows, one after another.
struct Tasks<'a, E, P> {
    range: Range<usize>,
    /// A task's rows and keys.
    part: &'a P,
    qkv: &'a [E],
    memory: &'a mut [E],
    out: Shared<'a, E>,
}

impl<'k, E: Float, P: Fn(usize) -> (Block, PagedKeys<'k, E>)> Kernel<E> for Tasks<'_, E, P> {
    #[inline(always)]
    fn run<L: Lanes<E = E>>(self, l: L) {
        for task in self.range.clone() {
            if task + 1 < self.range.end {
                let (block, keys) = (self.part)(task + 1);
                keys.fetch(l, block.n_keys());
            }
            let (block, keys) = (self.part)(task);
            let mut scratch = Scratch::split(&mut *self.memory, block.heads, block.rows(), block.n_keys());
            forward_rows(l, block, &keys, self.qkv, &mut scratch, self.out, None);
        }
    }
}

/// Keys that are fetched ahead: a cache that is read once from memory keeps whoever decodes waiting.
const MAX_FETCHED_KEYS: usize = 128;
/// Lines fetched of a piece; from there the processor follows by itself.
const FETCHED_LINES: usize = 16;

struct PagedKeys<'a, E> {
    dims: CacheDims,
    kv_head: usize,
    table: &'a [u32],
    keys: &'a [E],
    values: &'a [E],
}

impl<E: Float> PagedKeys<'_, E> {
    /// Asks for the first of `n_keys` keys and values.
    #[inline(always)]
    fn fetch<L: Lanes<E = E>>(&self, l: L, n_keys: usize) {
        let (size, dim) = (self.dims.block_size, self.dims.head_dim);
        for key in (0..n_keys.min(MAX_FETCHED_KEYS)).step_by(size) {
            let (keys, _, _) = self.key_piece(key, dim);
            let (values, _) = self.value_piece(key);
            for line in 0..FETCHED_LINES {
                l.prefetch(keys.wrapping_add(line * WIDTH));
                l.prefetch(values.wrapping_add(line * WIDTH));
            }
        }
    }

    /// The index of the piece `[block, kv_head]` that holds `key`.
    #[inline(always)]
    fn piece(&self, key: usize) -> usize {
        self.table[key / self.dims.block_size] as usize * self.dims.kv_heads + self.kv_head
    }
}

impl<E: Float> Keys<E> for PagedKeys<'_, E> {
    #[inline(always)]
    fn key_piece(&self, key: usize, dim: usize) -> (*const E, usize, usize) {
        let size = self.dims.block_size;
        debug_assert!(key.is_multiple_of(size) && DEPTH.is_multiple_of(size));
        (self.keys[self.piece(key) * dim * size..][..dim * size].as_ptr(), size, size)
    }

    #[inline(always)]
    fn value_piece(&self, key: usize) -> (*const E, usize) {
        let (size, width) = (self.dims.block_size, padded(self.dims.head_dim));
        (self.values[self.piece(key) * size * width..][..size * width].as_ptr(), size)
    }
}
