//! The sequences that the rows of a batch belong to.

use crate::config::LayerSets;
use stapo_ops::attention::key_copies::Copies;
use stapo_ops::attention::paged::{self, Cache};
use stapo_ops::deltanet::States;
use stapo_ops::{Float, View};

/// What the rows of a batch read of their sequences.
#[allow(clippy::large_enum_variant, reason = "one value lives for a whole pass")]
pub enum Context<'a, T: Float> {
    Packed(Packed<'a>),
    Paged(Paged<'a, T>),
}

/// Whole sequences, one after another: each token attends to its own sequence up to itself.
#[derive(Clone, Copy)]
pub struct Packed<'a> {
    pub n_sequences: usize,
    /// `[n_sequences + 1]`
    pub offsets: View<'a, u32>,
    /// Where sequences share rows.
    pub keys: Option<CopiedKeys<'a>>,
}

/// The keys of sequences that share rows: attention reads copies of them, so that those of a sequence lie together.
#[derive(Clone, Copy)]
pub struct CopiedKeys<'a> {
    pub copies: Copies<'a>,
    /// `[n_sequences + 1]`
    pub offsets: View<'a, u32>,
}

/// New tokens of sequences whose earlier keys and values lie in a paged cache.
pub struct Paged<'a, T: Float> {
    pub n_sequences: usize,
    /// Blocks that the table of a sequence has room for.
    pub table_width: usize,
    pub layer_sets: &'a LayerSets,
    /// One for each set of layers.
    pub sets: Vec<PagedSet<'a>>,
    pub caches: &'a mut [Cache<T>],
    /// `[n_sequences]`: where the states of a sequence lie; empty if no layer has any.
    pub state_slots: View<'a, u32>,
    /// One for each layer of DeltaNet.
    pub states: &'a mut [Option<States<T>>],
}

/// Where the keys and values of one set of layers lie.
#[derive(Clone, Copy)]
pub struct PagedSet<'a> {
    /// `[T]`: where those of the new tokens are stored.
    pub slots: View<'a, u32>,
    pub sequences: paged::Sequences<'a>,
}
