//! The cache of fixed-size blocks and how a call names its sequences.

use crate::cpu::simd::WIDTH;
use crate::device::Backend;
use crate::heads::{Heads, ScoreRule};
use crate::{Buffer, Device, Float, OutOfMemory, View};

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

    /// The block size to choose on this device. Larger blocks waste memory at the end of each sequence and of each shared
    /// prompt; smaller ones make attention read memory in shorter runs.
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
        self.blocks * self.kv_heads * self.head_dim.next_multiple_of(WIDTH) * self.block_size
    }

    #[track_caller]
    pub(super) fn check(self, op: &str, heads: Heads) {
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
    pub(super) dims: CacheDims,
    /// `[blocks, kv_heads, head_dim, block_size]`; on a GPU `[blocks, kv_heads, block_size, head_dim]`
    pub(super) keys: Buffer<T>,
    /// `[blocks, kv_heads, block_size, head_dim padded to 16]`
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
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dims {
    /// Query tokens of all sequences.
    pub tokens: usize,
    pub sequences: usize,
    pub heads: Heads,
    pub rule: ScoreRule,
    /// Entries per row of `tables`.
    pub table_width: usize,
}

/// The sequences of a call: their query tokens, keys and blocks.
#[derive(Debug, Clone, Copy)]
pub struct Sequences<'a> {
    /// `[sequences + 1]`, rising from 0 to T: the query tokens of sequence s are `offsets[s]..offsets[s + 1]`.
    pub offsets: View<'a, u32>,
    /// `[sequences]`: keys of each sequence. The keys of this call's tokens are the last of them.
    pub contexts: View<'a, u32>,
    /// `[sequences, table_width]`: block of each run of `block_size` positions; entries past the context are ignored.
    pub tables: View<'a, u32>,
    /// Only where each sequence has one query token. Groups change no result.
    pub groups: Option<Groups<'a>>,
    /// Where the last sequences have many query tokens, which changes no result.
    pub prefill: Option<Prefill>,
}

/// The last sequences of a call: those with many query tokens, for which a GPU has another kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Prefill {
    /// Sequences in front of them, and the query tokens of those.
    pub n_sequences_before: usize,
    pub n_tokens_before: usize,
    /// Keys of a query token's sequence, on average.
    pub mean_keys: usize,
}

impl Prefill {
    /// Whether the kernel for many query tokens is the faster one for a sequence with `n_tokens` of them and `n_keys` keys:
    /// it takes 128 or 192 of them at a time, and has work to overlap where there are many steps of keys.
    pub fn suits(n_tokens: usize, n_keys: usize) -> bool {
        n_tokens >= 128 && n_keys >= 512
    }
}

/// The work of a decode call on a GPU, cut into groups: a group is one split of the keys of consecutive sequences, whose
/// shared prefix is read once.
#[derive(Debug, Clone, Copy)]
pub struct Groups<'a> {
    /// `[n, 4]`: the first sequence, the number of sequences (0: the entry is ignored), the keys of their shared prefix
    /// divided by [`GROUPED_KEYS`], which lie in the same blocks, and the split. The first sequence has keys in the split;
    /// each split of each sequence is in one group.
    pub list: View<'a, u32>,
    /// The most sequences in one group; times the query heads per key head, at most [`GROUPED_ROWS`].
    pub max_members: usize,
    /// `[sequences]`: of a sequence of several splits, the place of its first split in `partials`; the others follow.
    pub first_partials: View<'a, u32>,
    /// Where a sequence has several splits.
    pub partials: Option<&'a Partials>,
    /// Whether a sequence reads keys that another stores in this call, as rows of one sequence do. All keys are stored
    /// before any is read then.
    pub reads_new_keys: bool,
}

/// GPU memory for the results of splits, until they are combined. A call writes what it reads.
#[derive(Debug)]
pub struct Partials {
    /// `[n, query heads, head_dim + 4]`: see decode_hopper.cu.
    pub(super) rows: Buffer<f32>,
    n: usize,
}

impl Partials {
    /// Room for `n` splits.
    pub fn new(device: &Device, heads: Heads, n: usize) -> Result<Self, OutOfMemory> {
        Ok(Self { rows: device.zeros(n * Self::split_len(heads))?, n })
    }

    /// Numbers that a split takes.
    pub fn split_len(heads: Heads) -> usize {
        heads.query * (heads.dim + 4)
    }

    /// Splits that there is room for.
    pub fn capacity(&self) -> usize {
        self.n
    }
}

/// Keys per split, by absolute position. The results of splits are combined in their order.
pub const SPLIT_KEYS: usize = 1024;
/// The keys of a group's shared prefix are counted in multiples of this many.
pub const GROUPED_KEYS: usize = 64;
/// The most query rows (sequences times query heads per key head) of a group.
pub const GROUPED_ROWS: usize = 16;
