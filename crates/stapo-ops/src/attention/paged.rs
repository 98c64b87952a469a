//! Attention over a cache of fixed-size blocks: decode and chunked prefill.
//!
//! A block holds `block_size` consecutive positions of one sequence; a sequence's table lists its blocks in order.
//! Sequences with a common prefix may list the same blocks. On the CPU keys lie transposed, so that kernels read a vector of
//! keys at a time.

pub use super::cache::{
    Cache, CacheDims, Dims, GROUPED_KEYS, GROUPED_ROWS, Groups, Partials, Prefill, SPLIT_KEYS, Sequences,
};

use super::Inputs;
use super::cpu_decode::{self, Decode};
use super::cpu_paged::HostSequences;
use super::cuda_decode::{self, InFront};
use super::cuda_paged::{self, PagedCall};
use crate::cpu::Shared;
use crate::device::Backend;
use crate::heads::Heads;
use crate::{Device, Float, View, ViewMut, check, pitch_of};

impl<T: Float> Cache<T> {
    /// Copies the keys and values of each pair's first block over those of its second. Shape: pairs `[n, 2]`; a block that
    /// one pair writes is in no other.
    pub fn copy_blocks(&mut self, device: &Device, pairs: View<'_, u32>) {
        for buffer in [&mut self.keys, &mut self.values] {
            buffer.copy_blocks(device, pairs, self.dims.blocks);
        }
    }
}

/// Writes the keys and values of tokens into the cache. Shapes: qkv `[T, qkv_width]`, positions already embedded;
/// slots `[T]`: token t goes to position `slot % block_size` of block `slot / block_size`. Of two tokens with one
/// slot, the later stays.
pub fn store<T: Float>(
    device: &Device,
    tokens: usize,
    heads: Heads,
    qkv: View<'_, T>,
    slots: View<'_, u32>,
    cache: &mut Cache<T>,
) {
    let op = "attention::paged::store";
    let dims = cache.dims;
    dims.check(op, heads);
    check(op, "qkv", qkv.len(), tokens * heads.qkv_width());
    check(op, "slots", slots.len(), tokens);
    if let Backend::Cuda(cuda) = device.backend() {
        let keys_and_values = (cache.keys.view().cuda(), cache.values.view().cuda());
        cuda_paged::store(cuda, tokens, heads, dims, qkv.cuda(), slots.cuda(), keys_and_values);
        return;
    }
    let n_slots = dims.blocks * dims.block_size;
    if let Some(slot) = slots.host().iter().find(|slot| **slot as usize >= n_slots) {
        panic!("{op}: slot {slot} of a cache of {n_slots}");
    }
    let keys = cache.keys.view_mut().into_host();
    let values = cache.values.view_mut().into_host();
    T::paged_store(device.as_cpu(), heads, dims, qkv.host(), slots.host(), keys, values);
}

/// Stores the tokens' keys and values, see [`store`], and attends. Shapes: inputs `[T, ..]`; slots `[T]`; out
/// `[T, out_width]`. Bit for bit what [`super::forward`] gives for the same sequences packed.
pub fn forward<'a, T: Float>(
    device: &Device,
    dims: Dims,
    inputs: impl Into<Inputs<'a, T>>,
    slots: View<'_, u32>,
    cache: &mut Cache<T>,
    sequences: Sequences<'_>,
    out: ViewMut<'_, T>,
) {
    let op = "attention::paged::forward";
    let inputs = inputs.into();
    let qkv = inputs.qkv;
    check_shapes(op, dims, cache, &inputs, sequences, &out);
    if let Backend::Cuda(cuda) = device.backend() {
        check(op, "slots", slots.len(), dims.tokens);
        let call = PagedCall::new(dims, inputs.sinks, slots, cache, sequences, &out);
        let is_decode = cuda_decode::fits(cuda, &call, qkv.cuda());
        if !is_decode || call.reads_new_keys() {
            call.store(cuda, qkv.cuda());
        }
        if is_decode {
            cuda_decode::run(cuda, &call, qkv.cuda(), None, InFront::Any);
        } else {
            call.attend(cuda, qkv.cuda());
        }
        return;
    }
    super::check_offsets(op, sequences.offsets, dims.sequences, dims.tokens);
    let host = HostSequences {
        offsets: sequences.offsets.host(),
        contexts: sequences.contexts.host(),
        tables: sequences.tables.host(),
    };
    host.check(op, dims, cache.dims);
    let is_plain = dims.rule.is_plain(dims.heads.dim) && inputs.sinks.is_none();
    if is_plain
        && dims.heads.group() <= cpu_decode::MAX_GROUP
        && host.is_decode(dims, cache.dims, slots.host())
    {
        let decode = Decode {
            heads: dims.heads,
            dims: cache.dims,
            qkv: qkv.host(),
            contexts: host.contexts,
            tables: host.tables,
            table_width: dims.table_width,
            keys: Shared::new(cache.keys.view_mut().into_host()),
            values: Shared::new(cache.values.view_mut().into_host()),
            out: Shared::new(out.into_host()),
        };
        T::paged_decode(device.as_cpu(), &decode);
        return;
    }
    store(device, dims.tokens, dims.heads, qkv, slots, cache);
    T::paged_forward(device.as_cpu(), dims, inputs.host(), cache, host, out.into_host());
}

#[track_caller]
pub(crate) fn check_shapes<T: Float>(
    op: &str,
    dims: Dims,
    cache: &Cache<T>,
    inputs: &Inputs<'_, T>,
    sequences: Sequences<'_>,
    out: &ViewMut<'_, T>,
) {
    cache.dims.check(op, dims.heads);
    dims.rule.check(op);
    inputs.check(op, dims.tokens, dims.heads);
    pitch_of(op, "out", out.len(), dims.tokens, dims.heads.out_width());
    check(op, "contexts", sequences.contexts.len(), dims.sequences);
    check(op, "tables", sequences.tables.len(), dims.sequences * dims.table_width);
    check(op, "offsets", sequences.offsets.len(), dims.sequences + 1);
}
