//! Which sums a rank holds, and what it needs besides them.

use super::stages::{Blocks, Piece, Stage, Stages};
use crate::config::ModelConfig;
use crate::decoder::lora::LoraSpec;
use crate::decoder::weights::{DecoderWeights, LayerWeights, ParameterSpec};
use crate::ranks::Share;
use std::ops::Range;

/// The sums of several ranks, counted before any memory is taken.
pub struct SumsLayout {
    /// Of every trained parameter in the order of the policy's weights; that of a tied embedding as a table of inputs last.
    pub(super) sums: Vec<(ParameterSpec, Share)>,
    pub(super) sum_indices: SumIndices,
    pub(super) stages: Stages,
    world: usize,
}

/// The numbers of sums that have a role.
#[derive(Debug, Default)]
pub(super) struct SumIndices {
    /// That of the head: a tied embedding's is both.
    pub head: Option<usize>,
    pub embedding: Option<usize>,
    pub final_norm: Option<usize>,
    pub layers: Vec<Range<usize>>,
    /// Of a tied embedding as a table of inputs, until it is added to that of the head.
    pub lookup: Option<usize>,
}

impl SumIndices {
    /// The sums of a stage, in the order in which backward leaves their gradients.
    fn in_stage(&self, stage: Stage, blocks: Blocks) -> Vec<usize> {
        match stage {
            Stage::Head => self.head.into_iter().collect(),
            Stage::Layers(block) => self.layers[blocks.layers(block)].iter().cloned().flatten().collect(),
            Stage::Rest => self.final_norm.into_iter().chain(self.lookup.or(self.embedding)).collect(),
        }
    }
}

impl SumsLayout {
    /// For a model of this configuration, with the adapters of `lora` trained in its place.
    pub fn new(config: &ModelConfig, lora: Option<&LoraSpec>, world: usize) -> Self {
        Self::from_specs(&DecoderWeights::specs(config, lora), world)
    }

    pub(super) fn from_specs(specs: &DecoderWeights<ParameterSpec>, world: usize) -> Self {
        let (mut sums, mut sum_indices) = (Vec::new(), SumIndices::default());
        let mut add = |spec: &ParameterSpec| {
            let share = Share { len: spec.n_elements(), parameter_idx: sums.len(), world };
            spec.is_trained().then(|| {
                sums.push((spec.clone(), share));
                sums.len() - 1
            })
        };
        sum_indices.embedding = add(&specs.embedding);
        for layer in &specs.layers {
            let trained: Vec<usize> = layer.all().into_iter().filter_map(&mut add).collect();
            let first = trained.first().copied().unwrap_or(0);
            sum_indices.layers.push(first..first + trained.len());
        }
        sum_indices.final_norm = add(&specs.final_norm);
        sum_indices.head = match &specs.head {
            Some(head) => add(head),
            None => sum_indices.embedding,
        };
        if let Some(embedding) = sum_indices.embedding.filter(|_| specs.head.is_none()) {
            sum_indices.lookup = Some(sums.len());
            sums.push(sums[embedding].clone());
        }
        let n_of_layer = |layer: &Range<usize>| layer.clone().map(|number| sums[number].1.len).sum();
        let largest = sum_indices.layers.iter().map(n_of_layer).max().unwrap_or(0);
        let shapes = |layer: &LayerWeights<ParameterSpec>| {
            layer.all().into_iter().map(|spec| (spec.kind, spec.role)).collect::<Vec<_>>()
        };
        let are_alike = specs.layers.windows(2).all(|pair| shapes(&pair[0]) == shapes(&pair[1]));
        let blocks = Blocks::new(specs.layers.len(), largest, are_alike);
        let of_stage = |stage| {
            let numbers = sum_indices.in_stage(stage, blocks).into_iter();
            numbers.map(|number| (number, sums[number].1.len)).collect()
        };
        let stages = Stages::new(blocks, of_stage);
        Self { sums, sum_indices, stages, world }
    }

    /// Elements that the other ranks send a rank for one exchange, at most.
    pub(super) fn n_received(&self, rank: usize) -> usize {
        let n_owned = |pieces: &Vec<Piece>| {
            pieces.iter().map(|piece| piece.owned_by(self.sums[piece.sum].1, rank).len()).sum::<usize>()
        };
        self.stages.all().map(n_owned).max().unwrap_or(0) * (self.world - 1)
    }

    /// The elements of the rank that holds most.
    pub fn most_elements(&self) -> usize {
        (0..self.world).map(|rank| self.n_elements(rank)).max().unwrap_or(0)
    }

    /// All elements that a rank holds: its sums, the gradients of a micro-batch that exist at one time, and what it
    /// receives.
    fn n_elements(&self, rank: usize) -> usize {
        let len = |number: usize| self.sums[number].1.len;
        let owned: usize = self.sums.iter().map(|(_, share)| share.owned_by(rank).len()).sum();
        let kept = self.sum_indices.layers.iter().take(self.stages.blocks.n_kept()).cloned().flatten();
        let vocabulary = self.sum_indices.head.max(self.sum_indices.embedding).map_or(0, len);
        let microbatch = kept.chain(self.sum_indices.final_norm).map(len).sum::<usize>() + vocabulary;
        owned + microbatch + self.n_received(rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Family;
    use crate::decoder::{GradientSums, Policy};
    use crate::ranks::Solo;
    use crate::testing::tiny_config;
    use stapo_ops::{CpuOptions, Device};

    #[test]
    fn what_is_counted_is_what_is_taken() {
        for tied_embeddings in [false, true] {
            let mut config = ModelConfig { tied_embeddings, ..tiny_config(Family::Qwen3) };
            if tied_embeddings {
                config.layers[1] = tiny_config(Family::Llama).layers[0].clone();
            }
            let device = Device::cpu(CpuOptions { threads: 1, ..CpuOptions::default() });
            let policy = Policy::random(&device, &config, 7, 0.1).unwrap();
            let sums = GradientSums::new(&policy, &device, &Solo::ranks()).unwrap();
            assert_eq!(SumsLayout::new(&config, None, 1).most_elements(), sums.n_elements());
        }
    }

    #[test]
    fn all_ranks_together_own_every_element_once() {
        let config = tiny_config(Family::Qwen3);
        let owned = |world: usize| -> usize {
            let of_rank = |rank| {
                let layout = SumsLayout::new(&config, None, world);
                layout.sums.iter().map(|(_, share)| share.owned_by(rank).len()).sum::<usize>()
            };
            (0..world).map(of_rank).sum()
        };
        assert!(owned(1) >= config.n_parameters() as usize);
        assert!([2, 3, 8].iter().all(|&world| owned(world) == owned(1)));
    }
}
