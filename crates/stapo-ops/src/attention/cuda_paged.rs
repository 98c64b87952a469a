//! Attention over a paged cache on a GPU.

use std::sync::Arc;

use super::cache::{Cache, CacheDims, Dims, Groups, Prefill, Sequences};
use super::cuda::{
    Form, KEYS, KernelRule, Pipeline, SHORT_TOKENS, has_map, is_hopper, map, n_work_tiles, out_pitch, source,
    swizzled_bytes, tile_bytes,
};
use crate::cuda::kernels::{
    ATTENTION_HOPPER, ATTENTION_HOPPER_RULED, ATTENTION_LONG_PAIRED_PREFILL_HOPPER,
    ATTENTION_LONG_PREFILL_HOPPER, ATTENTION_LONG_PREFILL_HOPPER_RULED, ATTENTION_PAGED,
    ATTENTION_PAGED_RULED, ATTENTION_PREFILL_HOPPER, ATTENTION_PREFILL_HOPPER_RULED,
};
use crate::cuda::{Cuda, ElementType, Fields, Memory, Slice, TensorMap};
use crate::heads::Heads;
use crate::{Float, View, ViewMut};

/// The cache is keys and values `[blocks, kv_heads, block_size, head_dim]`.
pub(super) fn store(
    cuda: &Cuda,
    tokens: usize,
    heads: Heads,
    cache: CacheDims,
    qkv: Slice,
    slots: Slice,
    (keys, values): (Slice, Slice),
) {
    let name = format!("attention_store_{}", keys.same(qkv, "attention::paged::store").name());
    let launch = cuda.kernel(source(qkv.kind, heads, &ATTENTION_PAGED), &name).head_dim(heads.dim);
    let launch = launch.arg(qkv).arg(slots).arg(keys).arg(values).arg(heads.query).arg(heads.kv);
    launch.arg(cache.block_size).arg(cache.blocks * cache.block_size).run([tokens, 1], 128, 0);
}

/// What a call reads and writes besides its rows: see `paged::forward`.
pub(crate) struct PagedCall {
    pub(crate) dims: Dims,
    pub(super) sinks: Option<Slice>,
    pub(super) cache_dims: CacheDims,
    pub(super) slots: Slice,
    /// Keys and values.
    pub(super) cache: (Slice, Slice),
    pub(super) offsets: Slice,
    pub(super) contexts: Slice,
    pub(super) tables: Slice,
    pub(super) groups: Option<GroupedCall>,
    prefill: Option<Prefill>,
    pub(super) out: Slice,
}

/// [`Groups`] as slices.
#[derive(Clone, Copy)]
pub(super) struct GroupedCall {
    pub list: Slice,
    pub max_members: usize,
    pub first_partials: Slice,
    pub partials: Option<Slice>,
    pub reads_new_keys: bool,
}

impl GroupedCall {
    fn new(groups: Groups<'_>) -> Self {
        Self {
            list: groups.list.cuda(),
            max_members: groups.max_members,
            first_partials: groups.first_partials.cuda(),
            partials: groups.partials.map(|partials| partials.rows.view().cuda()),
            reads_new_keys: groups.reads_new_keys,
        }
    }
}

impl PagedCall {
    pub(crate) fn new<T: Float>(
        dims: Dims,
        sinks: Option<View<'_, T>>,
        slots: View<'_, u32>,
        cache: &Cache<T>,
        sequences: Sequences<'_>,
        out: &ViewMut<'_, T>,
    ) -> Self {
        let Sequences { offsets, contexts, tables, groups, prefill } = sequences;
        Self {
            dims,
            sinks: sinks.map(|sinks| sinks.cuda()),
            cache_dims: cache.dims(),
            slots: slots.cuda(),
            cache: (cache.keys.view().cuda(), cache.values.view().cuda()),
            offsets: offsets.cuda(),
            contexts: contexts.cuda(),
            tables: tables.cuda(),
            groups: groups.map(GroupedCall::new),
            prefill,
            out: out.cuda(),
        }
    }

    /// Whether keys that this call stores are read by other sequences of it.
    pub(crate) fn reads_new_keys(&self) -> bool {
        self.groups.is_some_and(|groups| groups.reads_new_keys)
    }

    pub(super) fn rule(&self) -> KernelRule {
        KernelRule { heads: self.dims.heads, scores: self.dims.rule, sinks: self.sinks }
    }

    /// Where keys and values go: slots, keys, values, positions in a block and slots of the cache.
    pub(crate) fn stored(&self) -> Fields {
        let (CacheDims { blocks, block_size, .. }, (keys, values)) = (self.cache_dims, self.cache);
        let fields = Fields::default().eight_bytes(self.slots).eight_bytes(keys).eight_bytes(values);
        fields.four_bytes(block_size).four_bytes(blocks * block_size)
    }

    /// Whether the TMA can read the cache.
    pub(super) fn has_cache_maps(&self) -> bool {
        let (keys, values) = self.cache;
        [keys, values].iter().all(|&cache| has_map(cache, self.dims.heads.dim))
    }

    /// Keys and values by rows of one head, in tiles of a block and of a step at most.
    pub(super) fn cache_maps(&self) -> [TensorMap; 2] {
        let (dim, block_size) = (self.dims.heads.dim, self.cache_dims.block_size);
        let (keys, values) = self.cache;
        [keys, values].map(|cache| map(cache, cache.len / dim, dim, block_size.min(KEYS)))
    }

    /// Writes the tokens' keys and values into the cache.
    pub(super) fn store(&self, cuda: &Cuda, qkv: Slice) {
        store(cuda, self.dims.tokens, self.dims.heads, self.cache_dims, qkv, self.slots, self.cache);
    }

    /// Attends with any number of tokens of each sequence, whose keys and values are in the cache.
    pub(crate) fn attend(&self, cuda: &Arc<Cuda>, qkv: Slice) {
        let Dims { tokens, sequences, heads, .. } = self.dims;
        let prefill = self.prefill.filter(|_| {
            has_map(qkv, heads.qkv_width()) && self.has_cache_maps() && is_hopper(cuda, qkv.kind, heads)
        });
        let Some(prefill) = prefill else { return self.attend_first(cuda, qkv, sequences, tokens) };
        if prefill.n_sequences_before > 0 {
            self.attend_first(cuda, qkv, prefill.n_sequences_before, prefill.n_tokens_before);
        }
        self.attend_prefill(cuda, qkv, prefill);
    }

    /// Attends with the tokens of the last sequences, by the kernel of forward_pipelined_hopper.cu.
    fn attend_prefill(&self, cuda: &Arc<Cuda>, qkv: Slice, prefill: Prefill) {
        let op = "attention::paged::forward";
        let Dims { tokens, sequences, heads, table_width, .. } = self.dims;
        // There is no form for short sequences.
        let rule = self.rule();
        let pipeline = Pipeline::new(rule, prefill.mean_keys.max(SHORT_TOKENS));
        let (plain, ruled) = match pipeline.form {
            Form::Long => (&ATTENTION_LONG_PREFILL_HOPPER, &ATTENTION_LONG_PREFILL_HOPPER_RULED),
            Form::LongPaired => (&ATTENTION_LONG_PAIRED_PREFILL_HOPPER, &ATTENTION_LONG_PREFILL_HOPPER_RULED),
            Form::Short | Form::Usual => (&ATTENTION_PREFILL_HOPPER, &ATTENTION_PREFILL_HOPPER_RULED),
        };
        let block_size = self.cache_dims.block_size;
        let of_queries = map(qkv, tokens, heads.qkv_width(), KEYS);
        let before = prefill.n_sequences_before;
        let behind = |lists: Slice, width: usize| lists.part(before * width, lists.len - before * width);
        // The log-sum-exp of rows, which only backward reads.
        let lse = Memory::scratch(cuda, tokens * heads.query, ElementType::F32);
        // `Packing` of tiles.cu without keys, then the rest of `ForwardArgs`.
        let args = Fields::default()
            .eight_bytes(behind(self.offsets, 1))
            .eight_bytes(None::<Slice>)
            .eight_bytes(None::<Slice>)
            .four_bytes(0usize)
            .four_bytes(sequences - before)
            .four_bytes(heads.query)
            .four_bytes(heads.kv)
            .eight_bytes(self.out.same(qkv, op).same(self.cache.0, op))
            .eight_bytes(lse.slice())
            .eight_bytes(cuda.signal())
            .four_bytes(out_pitch(tokens, heads, self.out))
            .four_bytes(0usize)
            .eight_bytes(behind(self.contexts, 1))
            .eight_bytes(behind(self.tables, table_width))
            .four_bytes(table_width)
            .four_bytes(block_size.ilog2() as usize);
        let launch = cuda.kernel(rule.choose(plain, ruled), "attention_forward_pipelined_hopper_bf16");
        let launch = launch.head_dim(heads.dim).tensor_map(&of_queries);
        let launch = launch.tensor_maps::<2>(&self.cache_maps()).fields(&args);
        pipeline.run(cuda, heads, rule.last_argument(launch, qkv.kind));
    }

    /// Attends with the tokens of the first sequences.
    fn attend_first(&self, cuda: &Cuda, qkv: Slice, n_sequences: usize, n_tokens: usize) {
        let op = "attention::paged::forward";
        let d = self.dims;
        let (keys, values) = self.cache;
        let heads = d.heads;
        let kind = qkv.kind;
        let is_hopper = is_hopper(cuda, kind, heads);
        let suffix = if is_hopper { "hopper_bf16" } else { self.out.same(qkv, op).same(keys, op).name() };
        let name = format!("attention_paged_{suffix}");
        let is_bf16 = kind == ElementType::Bf16;
        // The bf16 kernels take the logarithm of the block size, the f32 kernels the block size.
        let block_size = self.cache_dims.block_size;
        let shift = if is_bf16 { block_size.ilog2() as usize } else { block_size };
        let (plain, ruled) = if is_hopper {
            (&ATTENTION_HOPPER, &ATTENTION_HOPPER_RULED)
        } else {
            (&ATTENTION_PAGED, &ATTENTION_PAGED_RULED)
        };
        let source = source(kind, heads, self.rule().choose(plain, ruled));
        let launch = cuda.kernel(source, &name).head_dim(heads.dim).arg(qkv).arg(keys).arg(values);
        let launch = launch.arg(self.offsets).arg(self.contexts).arg(self.tables).arg(self.out);
        let numbers = [n_sequences, d.table_width, heads.query, heads.kv, shift];
        let pitch = is_bf16.then(|| out_pitch(d.tokens, heads, self.out));
        let shape = numbers.into_iter().chain(pitch).fold(Fields::default(), Fields::four_bytes);
        let launch = launch.fields(&shape);
        let launch = self.rule().last_argument(launch, kind);
        // Query rows of a work tile: the height of the matrix instruction.
        let height = if is_hopper { 64 } else { 16 };
        let grid = [heads.kv, n_work_tiles(n_tokens, heads.group(), n_sequences, height)];
        if !is_bf16 {
            launch.run([n_tokens, heads.query], 32, 0);
        } else if is_hopper {
            launch.run(grid, 128, swizzled_bytes(heads, height + 2 * KEYS));
        } else {
            launch.run(grid, 128, tile_bytes(heads, height + 2 * KEYS));
        }
    }
}
