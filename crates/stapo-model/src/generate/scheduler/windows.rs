//! How many blocks sequences hold in each set of layers. Blocks in front of a window are given back, counted from the rows that are
//! cached for good: a drafted row frees none.

use super::{Capacity, Scheduler, Sequence};
use crate::config::{LayerSets, ModelConfig, READ_BEFORE_WINDOW, REWOUND_POSITIONS};
use crate::generate::table::BlockTable;

/// The windows of the sets of layers, each of which has its own blocks; see `LayerSets`.
#[derive(Clone, Debug)]
pub struct Windows {
    /// `None`: all keys.
    pub of_sets: Vec<Option<usize>>,
    /// Positions in front of a window whose keys and values attention may read too.
    pub n_before: usize,
    /// Positions by which a sequence may be cut back and find its keys and values.
    pub n_rewound: usize,
}

/// Before responses have ended, as many are taken to have had a quarter of their limit.
const ASSUMED_RESPONSES: usize = 8;
/// The part of the expected growth of running sequences that admission leaves room for. While some grow, others end; and
/// a sequence that is preempted after all has its keys and values computed again at the speed of a prompt, which costs
/// less than empty memory does.
const RESERVED_GROWTH: usize = 8;

impl Windows {
    pub fn new(config: &ModelConfig) -> Self {
        let of_sets = LayerSets::new(config).windows;
        Self { of_sets, n_before: READ_BEFORE_WINDOW, n_rewound: REWOUND_POSITIONS }
    }

    /// The first block of each set of layers that attention reads for the row after `n_cached` positions.
    fn first_blocks(&self, n_cached: usize, block_tokens: usize) -> impl Iterator<Item = usize> {
        let first = move |window: &Option<usize>| {
            window.map_or(0, |window| (n_cached + 1).saturating_sub(window + self.n_before))
        };
        self.of_sets.iter().map(move |window| first(window) / block_tokens)
    }

    /// Whether a sequence that was cut back still has the blocks that attention reads for its next row.
    pub fn are_held(&self, sequence: &Sequence, block_tokens: usize) -> bool {
        let firsts = self.first_blocks(sequence.n_cached, block_tokens);
        sequence.tables.iter().zip(firsts).all(|(table, first)| table.holds_from(first))
    }
}

impl Scheduler {
    /// The most tokens one sequence can ever hold in the cache.
    pub fn max_sequence_tokens(&self) -> usize {
        let Capacity { n_blocks, block_tokens, .. } = self.capacity;
        let fits = |n_tokens: usize| self.n_needed(n_tokens).sum::<usize>() <= n_blocks;
        let (mut low, mut high) = (0, usize::MAX / 2);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            (low, high) = if fits(middle) { (middle, high) } else { (low, middle - 1) };
        }
        low / block_tokens * block_tokens
    }

    /// The most blocks that a sequence of `n_tokens` holds in each set of layers.
    pub(super) fn n_needed(&self, n_tokens: usize) -> impl Iterator<Item = usize> {
        self.windows.of_sets.iter().map(move |window| self.n_needed_in(*window, n_tokens))
    }

    fn n_needed_in(&self, window: Option<usize>, n_tokens: usize) -> usize {
        let Capacity { block_tokens, max_rows, .. } = self.capacity;
        let all = n_tokens.div_ceil(block_tokens);
        let n_kept = self.windows.n_before + self.windows.n_rewound;
        // A window may begin and end within a block.
        let in_window = |window: usize| (window + n_kept + max_rows).div_ceil(block_tokens) + 1;
        window.map_or(all, |window| all.min(in_window(window)))
    }

    /// Free blocks that running sequences are expected to grow into, at least one each: without them a newcomer would soon
    /// be preempted. A response is expected to become as long as the mean of those that have ended, and to grow by
    /// half of that mean at least.
    pub(super) fn reserved_blocks(&self) -> usize {
        let blocks = |sequence: &Sequence| {
            let assumed = ASSUMED_RESPONSES * sequence.max_tokens / 4;
            let mean = (self.n_finished_tokens + assumed) / (self.n_finished + ASSUMED_RESPONSES);
            let left = mean.saturating_sub(sequence.n_drawn).max(mean / 2);
            let growth = (left / RESERVED_GROWTH).div_ceil(self.capacity.block_tokens).max(1);
            // After a window a block is given back for each that is taken.
            let in_set = |(set, window): (usize, &Option<usize>)| {
                let Some(window) = *window else { return growth };
                let held = sequence.tables.get(set).map_or(0, BlockTable::n_held);
                let most = self.n_needed_in(Some(window), sequence.tokens.len() + left);
                growth.min(most.saturating_sub(held).max(1))
            };
            self.windows.of_sets.iter().enumerate().map(in_set).sum::<usize>()
        };
        self.running.iter().map(blocks).sum()
    }

    /// Gives back the blocks of a running sequence that attention reads no more, wherever the sequence may be cut back to.
    pub(super) fn drop_hidden_blocks(&mut self, running_idx: usize) {
        let sequence = &mut self.running[running_idx];
        sequence.tables.resize_with(self.windows.of_sets.len(), BlockTable::default);
        let n_certain = sequence.n_cached.saturating_sub(self.windows.n_rewound);
        let firsts = self.windows.first_blocks(n_certain, self.capacity.block_tokens);
        for (table, first) in sequence.tables.iter_mut().zip(firsts) {
            table.drop_before(first, &mut self.pool);
        }
    }
}
