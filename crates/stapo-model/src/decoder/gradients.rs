//! The sums that backward adds to and the optimizer takes.

use super::accumulate::{Accumulate, Lookup};
use super::gradient::Gradient;
use super::policy::Policy;
use super::weights::{DecoderWeights, LayerWeights};
use crate::config::TensorSpec;
use stapo_ops::{Buffer, Device, Float, OutOfMemory, View, ViewMut, Write, reduce, residual};
use std::ops::Range;

/// Gradients of every trained parameter of a policy: sums over tokens, not yet divided by anything. On the CPU each element is
/// one chain over the tokens in order, so cutting the tokens into micro-batches changes no bit.
pub struct Gradients<T: Float = f32> {
    device: Device,
    /// `None` for a frozen parameter.
    pub(super) tree: DecoderWeights<Option<Gradient<T>>>,
    /// The gradient of a tied embedding as a table of inputs; the tree holds that of the same matrix as the head. Each
    /// of the two is one chain, and [`Gradients::join`] adds them.
    lookup: Option<Buffer<T>>,
    /// Where the gradient of the head, and later that of the embedding, is summed from zero within a micro-batch before the
    /// sum of all micro-batches takes it in. `None` if their sums continue from one micro-batch to the next.
    apart: Option<Buffer<T>>,
    /// The head's gradient of the micro-batch lies apart.
    is_head_apart: bool,
}

impl<T: Float> Gradients<T> {
    pub fn zeros(policy: &Policy<T>) -> Result<Self, OutOfMemory> {
        Self::zeros_in(policy, policy.device())
    }

    /// As [`Gradients::zeros`], in the memory of `memory`. Where that is a region, [`Gradients::clear`] comes first in
    /// every turn.
    pub fn zeros_in(policy: &Policy<T>, memory: &Device) -> Result<Self, OutOfMemory> {
        let tree = policy.weights.try_map(&mut |parameter| {
            let spec = &parameter.spec;
            spec.is_trained().then(|| Gradient::zeros(memory, spec)).transpose()
        })?;
        let lookup = match (&tree.head, &tree.embedding) {
            (None, Some(embedding)) => Some(memory.zeros(embedding.spec.n_elements())?),
            _ => None,
        };
        Ok(Self { device: policy.device().clone(), tree, lookup, apart: None, is_head_apart: false })
    }

    /// As [`Gradients::zeros_in`], with every micro-batch summed from zero and then added, the head and the embedding
    /// included. A GPU's products of layers do so by themselves.
    pub fn by_microbatch_in(policy: &Policy<T>, memory: &Device) -> Result<Self, OutOfMemory> {
        let mut gradients = Self::zeros_in(policy, memory)?;
        let of_vocabulary = gradients.tree.embedding.iter().chain(gradients.tree.head.iter().flatten());
        let longest = of_vocabulary.map(|gradient| gradient.sum.len()).max();
        gradients.apart = longest.map(|len| memory.zeros(len)).transpose()?;
        Ok(gradients)
    }

    /// Sets all gradients to zero. Matrices of layers, and the head where each micro-batch is summed from zero, are only
    /// marked, since the first micro-batch overwrites them.
    pub fn clear(&mut self) {
        let is_by_microbatch = self.apart.is_some();
        if let Some(head) = self.tree.head_mut().as_mut().filter(|_| is_by_microbatch) {
            head.is_stale = true;
        }
        let DecoderWeights { embedding, final_norm, head, layers } = &mut self.tree;
        let of_stack = [embedding, final_norm].into_iter().chain(head).flatten();
        of_stack.filter(|gradient| !gradient.is_stale).for_each(Gradient::clear);
        for layer in layers {
            layer.visit_mut(&mut |gradient| gradient.iter_mut().for_each(Gradient::clear_for_layer));
        }
        self.lookup.iter_mut().for_each(|lookup| lookup.view_mut().fill(T::ZERO));
    }

    /// Every gradient under the name of its tensor.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, Vec<T>)> {
        self.all().flat_map(move |gradient| {
            gradient.spec.tensors().map(move |(spec, range)| {
                let mut values = vec![T::ZERO; range.len()];
                self.read(gradient, range, &mut values);
                (spec, values)
            })
        })
    }

    /// All gradients, one after the other, in the order of [`Gradients::tensors`].
    pub fn in_a_row(&self) -> Vec<T> {
        let ranges = self.all().flat_map(|gradient| gradient.spec.tensors().map(|(_, range)| range.len()));
        let mut all = vec![T::ZERO; ranges.sum()];
        let mut rest = &mut all[..];
        for gradient in self.all() {
            for (_, range) in gradient.spec.tensors() {
                let (values, later) = rest.split_at_mut(range.len());
                self.read(gradient, range, values);
                rest = later;
            }
        }
        all
    }

    /// Reads a range of one of the tree's gradients; of a tied embedding the sum of both.
    fn read(&self, gradient: &Gradient<T>, range: Range<usize>, to: &mut [T]) {
        if gradient.is_stale {
            to.fill(T::ZERO);
        } else {
            gradient.sum.range(range.clone()).read(to);
        }
        let is_embedding = self.tree.embedding.as_ref().is_some_and(|own| std::ptr::eq(gradient, own));
        if let Some(lookup) = self.lookup.as_ref().filter(|_| is_embedding) {
            for (value, more) in to.iter_mut().zip(lookup.range(range).to_vec()) {
                *value += more;
            }
        }
    }

    /// The tensors whose gradient is 0 everywhere though the forward pass of `policy` depends on them; of a tied embedding,
    /// both of its gradients. An adapter's first factor has no gradient while the second is zero, as before the first step.
    pub fn zero_tensors(&self, policy: &Policy<T>) -> Vec<&TensorSpec> {
        let mut found = Vec::new();
        for gradient in self.all() {
            let is_zero = |(_, range): &(&TensorSpec, Range<usize>)| {
                gradient.is_stale || reduce::is_zero(&self.device, gradient.sum.range(range.clone()))
            };
            found.extend(gradient.spec.tensors().filter(is_zero).map(|(spec, _)| spec));
        }
        let idle = policy.idle_factors();
        found.retain(|spec| !idle.contains(&spec.name));
        if let Some(lookup) = &self.lookup
            && !reduce::is_zero(&self.device, lookup.view())
            && let Some(embedding) = &self.tree.embedding
        {
            found.retain(|spec| spec.name != embedding.spec.parts[0].name);
        }
        found
    }

    /// The gradients as backward left them: those of the tree, and that of a tied embedding as a table of inputs last.
    #[cfg(test)]
    pub(super) fn parts(&self) -> impl Iterator<Item = View<'_, T>> {
        self.sums().chain(self.lookup.iter().map(Buffer::view))
    }

    /// Adds the two gradients of a tied embedding and clears what is stale: the tree then holds every gradient.
    pub(crate) fn join(&mut self) {
        self.tree.visit_mut(&mut |gradient| gradient.iter_mut().for_each(Gradient::settle));
        if let Some((lookup, embedding)) = self.lookup.as_mut().zip(self.tree.embedding.as_mut()) {
            residual::add(&self.device, embedding.sum_mut(), lookup.view());
            lookup.view_mut().fill(T::ZERO);
        }
    }

    /// Every gradient, in the order of the policy's trained weights.
    pub(super) fn all(&self) -> impl Iterator<Item = &Gradient<T>> {
        self.tree.all().into_iter().flatten()
    }

    /// The gradient of every parameter after [`Gradients::join`], in the order of the policy's trained weights.
    pub(crate) fn sums(&self) -> impl Iterator<Item = View<'_, T>> {
        self.all().map(|gradient| gradient.sum.view())
    }

    /// The tensor and the place in it of the first gradient that is not a finite number.
    pub(crate) fn first_non_finite(&self) -> Option<(&TensorSpec, usize)> {
        self.all().find_map(|gradient| {
            gradient.spec.tensors().find_map(|(spec, range)| {
                let idx = reduce::first_non_finite(&self.device, gradient.sum.range(range))?;
                Some((spec, idx))
            })
        })
    }

    /// The squared norm of the gradient of the head alone, for gradients that were not yet taken by an optimizer step. Of
    /// a tied embedding the part as a table of inputs is left out. 0 for a frozen head.
    pub fn head_sum_squares(&self) -> f64 {
        let head = self.tree.head().iter().filter(|head| !head.is_stale).map(|head| head.sum.view());
        reduce::sum_squares(&self.device, head)
    }

    /// The squared norm of all gradients together.
    pub(crate) fn sum_squares(&self) -> f64 {
        reduce::sum_squares(&self.device, self.sums())
    }
}

impl<T: Float> Accumulate<T> for Gradients<T> {
    fn head(&mut self) -> Option<(ViewMut<'_, T>, Write)> {
        let Self { tree, apart, is_head_apart, .. } = self;
        let head = tree.head_mut().as_mut()?;
        // The first micro-batch is its own sum.
        *is_head_apart = apart.is_some() && !head.is_stale;
        match apart {
            Some(apart) if *is_head_apart => Some((apart.view_mut(), Write::Set)),
            _ => Some(head.writable()),
        }
    }

    /// Ends the micro-batch's sum of the head.
    fn head_done(&mut self) {
        let Self { device, tree, apart, is_head_apart, .. } = self;
        if let Some((apart, head)) = apart.as_ref().zip(tree.head_mut().as_mut()).filter(|_| *is_head_apart) {
            residual::add(device, head.sum_mut(), apart.view());
        }
    }

    fn final_norm(&mut self) -> Option<ViewMut<'_, T>> {
        self.tree.final_norm.as_mut().map(Gradient::sum_mut)
    }

    fn layer(&mut self, index: usize) -> &mut LayerWeights<Option<Gradient<T>>> {
        &mut self.tree.layers[index]
    }

    fn layer_done(&mut self, _index: usize) {}

    fn lookup(&mut self) -> Option<Lookup<'_, T>> {
        let Self { tree, lookup, apart, .. } = self;
        let d_table = match lookup {
            Some(lookup) => lookup.view_mut(),
            None => tree.embedding.as_mut()?.sum_mut(),
        };
        Some(Lookup { d_table, apart: apart.as_mut().map(Buffer::view_mut) })
    }

    fn lookup_done(&mut self) {}
}
