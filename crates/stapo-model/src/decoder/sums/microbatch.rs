//! The gradient of one micro-batch while backward computes it, a few layers at a time.

use super::stages::{Blocks, Stage};
use crate::decoder::accumulate::Lookup;
use crate::decoder::gradient::Gradient;
use crate::decoder::parameter::Parameter;
use crate::decoder::policy::Policy;
use crate::decoder::weights::LayerWeights;
use stapo_ops::{Buffer, Device, OutOfMemory, View, ViewMut, Write};
use std::ops::Range;

/// Gradients of the layers that are kept, of the final norm, and of the head or later the embedding. Every gradient starts
/// from zero.
pub struct Microbatch {
    blocks: Blocks,
    layers: Vec<LayerWeights<Option<Gradient<f32>>>>,
    final_norm: Option<Gradient<f32>>,
    /// Of the head; once that is added, of the embedding as a table of inputs.
    vocabulary: Option<Buffer<f32>>,
    has_head: bool,
    has_lookup: bool,
}

impl Microbatch {
    pub fn new(policy: &Policy, memory: &Device, blocks: Blocks) -> Result<Self, OutOfMemory> {
        let mut zeros = |parameter: &Parameter<f32>| {
            let spec = &parameter.spec;
            spec.is_trained().then(|| Gradient::zeros(memory, spec)).transpose()
        };
        let weights = &policy.weights;
        let kept = weights.layers.iter().take(blocks.n_kept());
        let layers = kept.map(|layer| layer.try_map(&mut zeros)).collect::<Result<_, _>>()?;
        let final_norm = zeros(&weights.final_norm)?;
        let trained_len =
            |parameter: &Parameter<f32>| parameter.spec.is_trained().then(|| parameter.spec.n_elements());
        let (head, lookup) = (trained_len(weights.head()), trained_len(&weights.embedding));
        let vocabulary = head.max(lookup).map(|len| memory.zeros(len)).transpose()?;
        let (has_head, has_lookup) = (head.is_some(), lookup.is_some());
        Ok(Self { blocks, layers, final_norm, vocabulary, has_head, has_lookup })
    }

    /// Elements of all gradients that exist at one time.
    #[cfg(test)]
    pub fn n_elements(&self) -> usize {
        let of_layers = self.layers.iter().flat_map(LayerWeights::all).flatten();
        let all = of_layers.chain(&self.final_norm).map(|gradient| gradient.view().len());
        all.sum::<usize>() + self.vocabulary.iter().map(Buffer::len).sum::<usize>()
    }

    /// The number of the memory that holds a layer's gradient.
    fn slot(&self, layer: usize) -> usize {
        layer % self.layers.len()
    }

    fn block(&self, block: usize) -> Range<usize> {
        self.blocks.layers(block)
    }

    /// A layer's gradient, which is zero.
    pub fn layer(&mut self, index: usize) -> &mut LayerWeights<Option<Gradient<f32>>> {
        let slot = self.slot(index);
        let layer = &mut self.layers[slot];
        layer.visit_mut(&mut |gradient| gradient.iter_mut().for_each(Gradient::clear_for_layer));
        layer
    }

    /// The gradient of the final norm, which is zero.
    pub fn final_norm(&mut self) -> Option<ViewMut<'_, f32>> {
        let gradient = self.final_norm.as_mut()?;
        gradient.clear();
        Some(gradient.sum_mut())
    }

    /// The gradient of the head, which is overwritten.
    pub fn head(&mut self) -> Option<(ViewMut<'_, f32>, Write)> {
        let vocabulary = self.vocabulary.as_mut().filter(|_| self.has_head);
        vocabulary.map(|vocabulary| (vocabulary.view_mut(), Write::Set))
    }

    /// The gradient of the embedding, which is zero.
    pub fn lookup(&mut self) -> Option<Lookup<'_, f32>> {
        let d_table = zeroed(self.vocabulary.as_mut().filter(|_| self.has_lookup))?;
        Some(Lookup { d_table, apart: None })
    }

    /// Makes the gradients of a stage zero.
    pub fn clear(&mut self, stage: Stage) {
        match stage {
            Stage::Head => drop(zeroed(self.vocabulary.as_mut())),
            Stage::Layers(block) => {
                for index in self.block(block) {
                    self.layer(index);
                }
                self.settle(stage);
            }
            Stage::Rest => {
                self.final_norm();
                self.lookup();
            }
        }
    }

    /// Clears what backward has not written: every buffer of the stage then holds its gradient.
    pub fn settle(&mut self, stage: Stage) {
        if let Stage::Layers(block) = stage {
            for index in self.block(block) {
                let slot = self.slot(index);
                self.layers[slot].visit_mut(&mut |gradient| gradient.iter_mut().for_each(Gradient::settle));
            }
        }
    }

    /// The gradients of a stage, in the order of its sums.
    pub fn views(&self, stage: Stage) -> Vec<View<'_, f32>> {
        let vocabulary = self.vocabulary.iter().map(Buffer::view);
        match stage {
            Stage::Head => vocabulary.filter(|_| self.has_head).collect(),
            Stage::Layers(block) => {
                let layers = self.block(block).map(|index| &self.layers[self.slot(index)]);
                layers.flat_map(LayerWeights::all).flatten().map(Gradient::view).collect()
            }
            Stage::Rest => {
                let norm = self.final_norm.iter().map(Gradient::view);
                norm.chain(vocabulary.filter(|_| self.has_lookup)).collect()
            }
        }
    }
}

fn zeroed(buffer: Option<&mut Buffer<f32>>) -> Option<ViewMut<'_, f32>> {
    let mut view = buffer?.view_mut();
    view.fill(0.0);
    Some(view)
}
