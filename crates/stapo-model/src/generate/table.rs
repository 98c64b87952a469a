//! The blocks of one sequence in one set of layers.

use super::block::{Block, BlockPool};

/// A block for each run of positions. Of a set of layers with a window, the first blocks are given back once no later token sees
/// their keys; their numbers stay in the table and are never read.
#[derive(Debug, Default)]
pub struct BlockTable {
    blocks: Vec<Block>,
    n_dropped: usize,
}

impl BlockTable {
    /// Runs of positions, those whose blocks were given back included.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that the sequence holds.
    pub fn n_held(&self) -> usize {
        self.blocks.len() - self.n_dropped
    }

    /// Whether the blocks from number `first` on are held.
    pub fn holds_from(&self, first: usize) -> bool {
        first >= self.n_dropped
    }

    /// The blocks by position.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    pub fn push(&mut self, block: Block) {
        self.blocks.push(block);
    }

    /// Puts a block in the place of a held one, which is returned.
    pub fn replace(&mut self, idx: usize, block: Block) -> Block {
        assert!(idx >= self.n_dropped, "replace of a block that was given back");
        std::mem::replace(&mut self.blocks[idx], block)
    }

    /// Gives back the blocks in front of block `first`.
    pub fn drop_before(&mut self, first: usize, pool: &mut BlockPool) {
        let end = first.min(self.blocks.len());
        if end > self.n_dropped {
            pool.release(self.blocks[self.n_dropped..end].iter().copied());
            self.n_dropped = end;
        }
    }

    /// Gives back the blocks from number `n` on.
    pub fn truncate(&mut self, n: usize, pool: &mut BlockPool) {
        let n = n.max(self.n_dropped).min(self.blocks.len());
        pool.release(self.blocks.drain(n..));
    }

    /// The first `n` runs of positions for another holder.
    pub fn share(&self, n: usize, pool: &mut BlockPool) -> Self {
        let n_dropped = self.n_dropped.min(n);
        self.blocks[n_dropped..n].iter().for_each(|block| {
            pool.share(*block);
        });
        Self { blocks: self.blocks[..n].to_vec(), n_dropped }
    }

    /// Gives all blocks back.
    pub fn release(&mut self, pool: &mut BlockPool) {
        pool.release(self.blocks.drain(..).skip(self.n_dropped));
        self.n_dropped = 0;
    }
}
