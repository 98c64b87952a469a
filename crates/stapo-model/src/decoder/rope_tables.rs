//! The tables of rotary positions, one for each kind of rope in a model.

use crate::config::{LayerSpec, ModelConfig};
use stapo_ops::rope::{Frequencies, Table};
use stapo_ops::{Device, Float, OutOfMemory};

/// The rotary tables of a model. Layers with the same rope share a table.
pub struct RopeTables<T: Float> {
    tables: Vec<(Frequencies, Table<T>)>,
    /// For each layer, the index of its table.
    table_idx: Vec<usize>,
}

impl<T: Float> RopeTables<T> {
    /// Tables without positions.
    pub fn new(device: &Device, config: &ModelConfig) -> Result<Self, OutOfMemory> {
        let mut tables = Self { tables: Vec::new(), table_idx: Vec::new() };
        for layer in &config.layers {
            let frequencies = frequencies(layer);
            let found = tables.tables.iter().position(|(kind, _)| *kind == frequencies);
            tables.table_idx.push(found.unwrap_or(tables.tables.len()));
            if found.is_none() {
                let table = Table::new(device, &frequencies, 0)?;
                tables.tables.push((frequencies, table));
            }
        }
        Ok(tables)
    }

    pub fn layer(&self, index: usize) -> &Table<T> {
        &self.tables[self.table_idx[index]].1
    }

    /// Whether these are the tables of a model of this configuration.
    pub fn fit(&self, config: &ModelConfig) -> bool {
        let kinds = self.table_idx.iter().map(|&idx| self.tables[idx].0.clone());
        kinds.eq(config.layers.iter().map(frequencies))
    }

    /// Makes room for positions below `n_positions`. True if a table was replaced.
    pub fn reserve(&mut self, device: &Device, n_positions: usize) -> Result<bool, OutOfMemory> {
        let mut moved = false;
        for (frequencies, table) in &mut self.tables {
            if table.positions() < n_positions {
                *table = Table::new(device, frequencies, n_positions.next_power_of_two())?;
                moved = true;
            }
        }
        Ok(moved)
    }
}

fn frequencies(layer: &LayerSpec) -> Frequencies {
    let attention = layer.attention();
    let rope = &attention.rope;
    Frequencies {
        head_dim: attention.heads.dim,
        rotary_dim: attention.rotary_dim,
        theta: rope.theta,
        scaling: rope.scaling.clone(),
    }
}
