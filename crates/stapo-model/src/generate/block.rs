//! The KV cache's memory in blocks, each holding the keys and values of a few consecutive positions in every layer.

/// A block's index in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u32);

/// The free blocks, and the number of holders of each other block. A block with several holders is read-only.
#[derive(Debug)]
pub struct BlockPool {
    free: Vec<Block>,
    n_holders: Vec<u32>,
}

impl BlockPool {
    pub fn new(n_blocks: usize) -> Self {
        Self { free: (0..n_blocks as u32).rev().map(Block).collect(), n_holders: vec![0; n_blocks] }
    }

    pub fn n_free(&self) -> usize {
        self.free.len()
    }

    /// A free block, which then has one holder; `None` when no block is free.
    pub fn take(&mut self) -> Option<Block> {
        let block = self.free.pop()?;
        self.n_holders[block.0 as usize] = 1;
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
                self.free.push(block);
            }
        }
    }
}
