//! Adapters of joined matrices: PEFT has one for the whole matrix, this program one for each part.
//!
//! Adapters of parts are one adapter of the whole: the A of all parts one above the other, and every B in a block of rows and
//! columns, with zeros elsewhere. A part without an adapter has zeros in its A too. An adapter of the whole without blocks is one
//! adapter for each part, all with the same A.

use super::PREFIX;
use crate::config::{ModelConfig, TensorSpec};
use crate::decoder::{LoraScale, LoraSpec, LoraTarget};
use crate::error::{Error, Result};
use crate::weights::Weights;

/// A joined matrix of every layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct JoinedModule {
    pub name: &'static str,
    /// From top to bottom.
    pub parts: &'static [LoraTarget],
}

impl JoinedModule {
    pub const ALL: [Self; 2] = [
        Self { name: "qkv_proj", parts: &[LoraTarget::Query, LoraTarget::Key, LoraTarget::Value] },
        Self { name: "gate_up_proj", parts: &[LoraTarget::Gate, LoraTarget::Up] },
    ];

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|module| module.name == name)
    }

    /// Rank and alpha of an adapter with a block for each part. Its factor is that of the parts.
    pub fn rank_and_alpha(self, spec: &LoraSpec) -> (usize, f64) {
        let n = self.parts.len();
        let alpha = match spec.scale {
            LoraScale::Plain => spec.alpha * n as f64,
            LoraScale::RankStabilised => spec.alpha * (n as f64).sqrt(),
        };
        (n * spec.rank, alpha)
    }

    /// The parts of an adapter with blocks whose rows of A are not all zero; all parts if all rows are.
    pub fn adapted(self, weights: &Weights, rank: usize) -> Result<Vec<LoraTarget>> {
        let suffix = format!(".{}.lora_A.weight", self.name);
        let mut found = vec![false; self.parts.len()];
        for name in weights.names().filter(|name| name.ends_with(&suffix)) {
            let shape = weights.stored(name)?.1.to_vec();
            let mut values = vec![0.0; shape.iter().product()];
            weights.read_f32(name, &shape, &mut values)?;
            let block = rank * shape.last().copied().unwrap_or(1).max(1);
            for (found, block) in found.iter_mut().zip(values.chunks(block)) {
                *found |= block.iter().any(|value| *value != 0.0);
            }
        }
        let is_any = found.contains(&true);
        let parts = self.parts.iter().zip(found).filter(|(_, found)| *found || !is_any);
        Ok(parts.map(|(part, _)| *part).collect())
    }
}

/// Where a factor lies in a tensor of the file.
#[derive(Debug)]
pub(super) struct Place {
    pub whole: TensorSpec,
    row: usize,
    column: usize,
}

/// Where the factors of a model's adapters lie.
pub(super) struct Places {
    /// The model's joined matrices, each with its parts.
    joined: Vec<(TensorSpec, Vec<TensorSpec>)>,
    /// The modules whose adapters have blocks.
    with_blocks: Vec<JoinedModule>,
}

impl Places {
    pub fn new(config: &ModelConfig, with_blocks: &[JoinedModule]) -> Self {
        let joins = config.family.joins_projections();
        let joined = if joins { config.joined_tensors() } else { Vec::new() };
        Self { joined, with_blocks: with_blocks.to_vec() }
    }

    pub fn find(&self, factor: &TensorSpec) -> Place {
        self.in_joined(factor).unwrap_or_else(|| {
            let whole = TensorSpec { name: format!("{PREFIX}{}", factor.name), shape: factor.shape.clone() };
            Place { whole, row: 0, column: 0 }
        })
    }

    fn in_joined(&self, factor: &TensorSpec) -> Option<Place> {
        let (module, end) = factor.name.split_once(".lora_")?;
        let weight = format!("{module}.weight");
        let position = |parts: &[TensorSpec]| parts.iter().position(|part| part.name == weight);
        let (matrix, parts, part) =
            self.joined.iter().find_map(|(matrix, parts)| Some((matrix, parts, position(parts)?)))?;
        let module = matrix.name.strip_suffix(".weight")?;
        let has_blocks = self.with_blocks.iter().any(|known| module.ends_with(known.name));
        let (n_blocks, block) = if has_blocks { (parts.len(), part) } else { (1, 0) };
        let [rows, columns] = factor.shape[..] else { return None };
        let is_first = end.starts_with('A');
        let shape = if is_first { [n_blocks * rows, columns] } else { [matrix.shape[0], n_blocks * columns] };
        let above = parts[..part].iter().map(|part| part.shape[0]).sum();
        let (row, column) = if is_first { (block * rows, 0) } else { (above, block * columns) };
        let whole = TensorSpec { name: format!("{PREFIX}{module}.lora_{end}"), shape: shape.to_vec() };
        Some(Place { whole, row, column })
    }
}

impl Place {
    /// Copies the factor from its tensor of the file. Refuses a tensor with other numbers than zeros beside the blocks.
    pub fn copy_from(
        &self,
        location: &str,
        whole: &[f32],
        shape: &[usize],
        factor: &mut [f32],
    ) -> Result<()> {
        let (rows, columns) = self.ranges(shape);
        let has_blocks = columns.len() < self.whole.shape[1];
        for (row, numbers) in whole.chunks_exact(self.whole.shape[1]).enumerate() {
            let is_inside = rows.contains(&row);
            if is_inside {
                let to = &mut factor[(row - rows.start) * columns.len()..][..columns.len()];
                to.copy_from_slice(&numbers[columns.clone()]);
            }
            let is_wrong =
                |(column, number): (usize, &f32)| columns.contains(&column) != is_inside && *number != 0.0;
            if has_blocks && numbers.iter().enumerate().any(is_wrong) {
                let problem = format!("{} has numbers between the blocks of its parts", self.whole.name);
                let hint = "merge the adapter into the model with PEFT, and use that model";
                return Err(Error::unsupported(location, problem, hint));
            }
        }
        Ok(())
    }

    /// Copies the factor to its tensor of the file.
    pub fn copy_to(&self, whole: &mut [f32], shape: &[usize], factor: &[f32]) {
        let (rows, columns) = self.ranges(shape);
        let lines = whole.chunks_exact_mut(self.whole.shape[1]).skip(rows.start);
        for (to, from) in lines.zip(factor.chunks_exact(columns.len())) {
            to[columns.clone()].copy_from_slice(from);
        }
    }

    fn ranges(&self, shape: &[usize]) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        (self.row..self.row + shape[0], self.column..self.column + shape[1])
    }
}
