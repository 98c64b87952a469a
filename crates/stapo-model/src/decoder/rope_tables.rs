//! The tables of rotary positions, one for each kind of rope in a model.

use crate::config::{LayerSpec, ModelConfig};
use stapo_ops::rope::{Frequencies, Table};
use stapo_ops::{Device, Float, OutOfMemory};

/// The rotary tables of a model. Layers with the same rope share a table.
pub struct RopeTables<T: Float> {
    tables: Vec<(Frequencies, Table<T>)>,
    /// For each layer with attention, the index of its table.
    table_idx: Vec<Option<usize>>,
}

impl<T: Float> RopeTables<T> {
    /// Tables without positions.
    pub fn new(device: &Device, config: &ModelConfig) -> Result<Self, OutOfMemory> {
        let mut tables = Self { tables: Vec::new(), table_idx: Vec::new() };
        for layer in &config.layers {
            let Some(frequencies) = frequencies(layer) else {
                tables.table_idx.push(None);
                continue;
            };
            let found = tables.tables.iter().position(|(kind, _)| *kind == frequencies);
            tables.table_idx.push(Some(found.unwrap_or(tables.tables.len())));
            if found.is_none() {
                let table = Table::new(device, &frequencies, 0)?;
                tables.tables.push((frequencies, table));
            }
        }
        Ok(tables)
    }

    pub fn layer(&self, index: usize) -> &Table<T> {
        &self.tables[self.table_idx[index].expect("a layer with rope has a table")].1
    }

    /// Whether these are the tables of a model of this configuration.
    pub fn fit(&self, config: &ModelConfig) -> bool {
        let kinds = self.table_idx.iter().map(|idx| idx.map(|idx| self.tables[idx].0.clone()));
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

/// `None` for a layer without attention.
fn frequencies(layer: &LayerSpec) -> Option<Frequencies> {
    let attention = layer.attention()?;
    let rope = &attention.rope;
    Some(Frequencies {
        head_dim: attention.heads.dim,
        rotary_dim: attention.rotary_dim,
        theta: rope.theta,
        scaling: rope.scaling.clone(),
    })
}
