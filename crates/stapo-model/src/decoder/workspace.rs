//! The memory that a pass keeps from batch to batch.

use super::arena::Arena;
use super::layout::ArenaLayout;
use super::rope_tables::RopeTables;
use crate::config::ModelConfig;
use stapo_ops::{Device, Float, OutOfMemory};

/// Memory of a pass that grows when a batch asks for more and is kept from batch to batch.
pub struct Workspace<T: Float> {
    pub arena: Arena<T>,
    pub tables: RopeTables<T>,
    /// The device that the arena's memory is asked of; it may lend memory of a region.
    memory: Device,
}

impl<T: Float> Workspace<T> {
    /// A workspace whose arena lies in the memory of `memory`, for a model on `device`.
    pub fn new(device: &Device, memory: &Device, config: &ModelConfig) -> Result<Self, OutOfMemory> {
        let tables = RopeTables::new(device, config)?;
        Ok(Self { arena: Arena::empty(memory)?, tables, memory: memory.clone() })
    }

    /// Prepares the workspace for a model of another configuration.
    pub fn adopt(&mut self, device: &Device, config: &ModelConfig) -> Result<(), OutOfMemory> {
        if !self.tables.fit(config) {
            self.tables = RopeTables::new(device, config)?;
        }
        Ok(())
    }

    /// Makes room for the activations of `layout` and for positions below `n_positions`. True if anything moved.
    pub fn reserve(
        &mut self,
        device: &Device,
        layout: &ArenaLayout,
        n_positions: usize,
    ) -> Result<bool, OutOfMemory> {
        let mut moved = false;
        let n_elements = layout.n_elements.max(self.arena.compute.len());
        let n_exact = layout.n_exact.max(self.arena.exact.len());
        if (n_elements, n_exact) != (self.arena.compute.len(), self.arena.exact.len()) {
            // The old memory is given back first, so that old and new memory never exist at the same time.
            self.arena = Arena::empty(&self.memory)?;
            self.arena.compute = self.memory.compute_zeros(n_elements)?;
            self.arena.exact = self.memory.zeros(n_exact)?;
            moved = true;
        }
        moved |= self.tables.reserve(device, n_positions)?;
        Ok(moved)
    }
}
