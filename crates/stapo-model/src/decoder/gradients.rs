//! What backward adds to and the optimizer takes.

use super::layout::Layout;
use super::policy::Policy;
use crate::config::TensorSpec;
use stapo_ops::{Buffer, Device, Float, OutOfMemory, ViewMut, reduce, residual};

/// Gradients of every parameter, in the slots of its policy: sums over tokens, not yet divided by anything. Each
/// element is one chain over the tokens in order, so cutting the tokens into micro-batches changes no bit.
pub struct Gradients<T: Float = f32> {
    device: Device,
    layout: Layout,
    slots: Vec<Buffer<T>>,
    /// Of a tied embedding as a table of inputs; its slot holds that of the head. One chain each, joined at the end.
    lookup: Option<Buffer<T>>,
}

impl<T: Float> Gradients<T> {
    pub fn zeros(policy: &Policy<T>) -> Result<Self, OutOfMemory> {
        let (device, layout) = (policy.device.clone(), policy.layout.clone());
        let slots =
            layout.slots.iter().map(|slot| device.zeros(slot.n_elements())).collect::<Result<_, _>>()?;
        let n_embedding = layout.slots[layout.embedding].n_elements();
        let lookup = if layout.is_tied() { Some(device.zeros(n_embedding)?) } else { None };
        Ok(Self { device, layout, slots, lookup })
    }

    pub fn clear(&mut self) {
        for buffer in self.slots.iter_mut().chain(&mut self.lookup) {
            buffer.view_mut().fill(T::ZERO);
        }
    }

    /// Every gradient under the name of its tensor.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, Vec<T>)> {
        self.layout.tensors().map(|(spec, slot, range)| {
            let mut values = self.slots[slot].range(range.clone()).to_vec();
            if let Some(lookup) = self.lookup.as_ref().filter(|_| slot == self.layout.embedding) {
                for (value, more) in values.iter_mut().zip(lookup.range(range).to_vec()) {
                    *value += more;
                }
            }
            (spec, values)
        })
    }

    pub(crate) fn slot(&self, slot: usize) -> stapo_ops::View<'_, T> {
        self.slots[slot].view()
    }

    pub(crate) fn slot_mut(&mut self, slot: usize) -> ViewMut<'_, T> {
        self.slots[slot].view_mut()
    }

    pub(crate) fn two_slots_mut(&mut self, first: usize, second: usize) -> [ViewMut<'_, T>; 2] {
        let both = self.slots.get_disjoint_mut([first, second]).expect("two different slots");
        both.map(Buffer::view_mut)
    }

    /// Where backward adds the gradient of the embedding as a table of inputs.
    pub(crate) fn lookup_mut(&mut self) -> ViewMut<'_, T> {
        match &mut self.lookup {
            Some(lookup) => lookup.view_mut(),
            None => self.slots[self.layout.embedding].view_mut(),
        }
    }

    /// Joins the two gradients of a tied embedding.
    pub(crate) fn join_tied(&mut self) {
        if let Some(lookup) = &mut self.lookup {
            residual::add(&self.device, self.slots[self.layout.embedding].view_mut(), lookup.view());
            lookup.view_mut().fill(T::ZERO);
        }
    }

    /// The tensor and place of the first gradient that is not a finite number.
    pub(crate) fn first_non_finite(&self) -> Option<(&TensorSpec, usize)> {
        self.layout.tensors().find_map(|(spec, slot, range)| {
            reduce::first_non_finite(&self.device, self.slots[slot].range(range)).map(|place| (spec, place))
        })
    }

    /// The squared norm of all gradients together.
    pub(crate) fn sum_squares(&self) -> f64 {
        reduce::sum_squares(&self.device, self.slots.iter().map(Buffer::view))
    }
}
