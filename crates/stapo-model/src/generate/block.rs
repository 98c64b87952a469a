//! The KV cache's memory in blocks, each holding the keys and values of a few consecutive positions in the layers of one set.

use std::collections::HashSet;

/// A block's index in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u32);

/// Where the states of a sequence lie, in every layer that keeps one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateSlot(pub u32);

/// The free blocks, and the number of holders of each other block. A block with several holders is read-only.
#[derive(Debug)]
pub struct BlockPool {
    /// Blocks that were taken and have no holder any more; the last one is taken first.
    released: Vec<Block>,
    /// The first of the blocks that were never taken, all of which come after it.
    first_fresh: u32,
    n_holders: Vec<u32>,
    /// Free slots of states; `None` for a model without states.
    states: Option<Vec<StateSlot>>,
}

impl BlockPool {
    pub fn new(n_blocks: usize, n_states: Option<usize>) -> Self {
        let states = n_states.map(|n| (0..n as u32).rev().map(StateSlot).collect());
        Self { released: Vec::new(), first_fresh: 0, n_holders: vec![0; n_blocks], states }
    }

    pub fn has_states(&self) -> bool {
        self.states.is_some()
    }

    /// Whether sequences need states and no slot is free.
    pub fn lacks_states(&self) -> bool {
        self.states.as_ref().is_some_and(Vec::is_empty)
    }

    /// A free slot; `None` when no slot is free, or the model has no states.
    pub fn take_state(&mut self) -> Option<StateSlot> {
        self.states.as_mut()?.pop()
    }

    pub fn release_state(&mut self, slot: Option<StateSlot>) {
        if let Some(states) = &mut self.states {
            states.extend(slot);
        }
    }

    pub fn n_free(&self) -> usize {
        self.released.len() + self.n_holders.len() - self.first_fresh as usize
    }

    /// A free block, which then has one holder; `None` when no block is free.
    pub fn take(&mut self) -> Option<Block> {
        let block = self.released.pop().unwrap_or(Block(self.first_fresh));
        *self.n_holders.get_mut(block.0 as usize)? = 1;
        self.first_fresh = self.first_fresh.max(block.0 + 1);
        Some(block)
    }

    /// Adds a holder.
    pub fn share(&mut self, block: Block) -> Block {
        assert!(self.n_holders[block.0 as usize] > 0, "share of free {block:?}");
        self.n_holders[block.0 as usize] += 1;
        block
    }

    pub fn is_shared(&self, block: Block) -> bool {
        self.n_holders[block.0 as usize] > 1
    }

    /// Takes one holder off each block; a block without holders is free.
    pub fn release(&mut self, blocks: impl IntoIterator<Item = Block>) {
        for block in blocks {
            let n_holders = &mut self.n_holders[block.0 as usize];
            assert!(*n_holders > 0, "release of free {block:?}");
            *n_holders -= 1;
            if *n_holders == 0 {
                self.released.push(block);
            }
        }
    }
}

/// Cuts copies, from one index to another each, into runs whose pairs can be copied in any order: no pair of a run reads or writes what
/// another pair of the run writes. A run is `[n, 2]`.
pub fn independent_runs(copies: impl Iterator<Item = [u32; 2]>) -> Vec<Vec<u32>> {
    let mut runs: Vec<Vec<u32>> = Vec::new();
    let mut read = HashSet::new();
    let mut written = HashSet::new();
    for [from, to] in copies {
        if runs.is_empty() || written.contains(&from) || written.contains(&to) || read.contains(&to) {
            runs.push(Vec::new());
            read.clear();
            written.clear();
        }
        read.insert(from);
        written.insert(to);
        runs.last_mut().into_iter().for_each(|run| run.extend([from, to]));
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_that_touch_what_another_writes_come_in_a_later_run() {
        let runs = |copies: &[[u32; 2]]| independent_runs(copies.iter().copied());
        assert_eq!(runs(&[]), Vec::<Vec<u32>>::new());
        assert_eq!(runs(&[[0, 1], [0, 2], [3, 4]]), [vec![0, 1, 0, 2, 3, 4]]);
        assert_eq!(runs(&[[0, 1], [1, 2]]), [[0, 1], [1, 2]], "the second reads what the first writes");
        assert_eq!(runs(&[[0, 1], [2, 1]]), [[0, 1], [2, 1]], "both write 1");
        assert_eq!(runs(&[[0, 1], [2, 0]]), [[0, 1], [2, 0]], "the second writes what the first reads");
    }

    #[test]
    fn the_block_released_last_is_taken_first_and_then_those_never_taken() {
        let mut pool = BlockPool::new(4, None);
        let taken: Vec<Block> = (0..3).map_while(|_| pool.take()).collect();
        assert_eq!((taken, pool.n_free()), (vec![Block(0), Block(1), Block(2)], 1));
        pool.share(Block(0));
        pool.release([Block(0), Block(1), Block(2)]);
        assert_eq!((pool.n_free(), pool.is_shared(Block(0))), (3, false), "block 0 has a holder left");
        pool.release([Block(0)]);
        let taken: Vec<Block> = (0..9).map_while(|_| pool.take()).collect();
        assert_eq!((taken, pool.n_free()), (vec![Block(0), Block(2), Block(1), Block(3)], 0));
        assert_eq!(pool.take(), None);
    }
}
