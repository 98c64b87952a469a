//! What backward adds to and the optimizer takes.

use super::layout::{LayerSlots, Layout};
use super::policy::Policy;
use crate::config::TensorSpec;
use stapo_ops::{Buffer, Device, Float, OutOfMemory, ViewMut, Write, reduce, residual};

/// Gradients of every parameter, in the slots of its policy: sums over tokens, not yet divided by anything. Each
/// element is one chain over the tokens in order, so cutting the tokens into micro-batches changes no bit.
pub struct Gradients<T: Float = f32> {
    device: Device,
    layout: Layout,
    slots: Vec<Buffer<T>>,
    /// Slots that hold something old in place of 0: matrices of layers, which the first product sets instead of adding to.
    is_blank: Vec<bool>,
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
        let is_blank = vec![false; layout.slots.len()];
        Ok(Self { device, layout, slots, is_blank, lookup })
    }

    pub fn clear(&mut self) {
        for slot in self.layout.layers.iter().flat_map(LayerSlots::matrices) {
            self.is_blank[slot] = true;
        }
        let others = self.slots.iter_mut().zip(&self.is_blank).filter(|(_, is_blank)| !**is_blank);
        for buffer in others.map(|(buffer, _)| buffer).chain(&mut self.lookup) {
            buffer.view_mut().fill(T::ZERO);
        }
    }

    /// Every gradient under the name of its tensor.
    pub fn tensors(&self) -> impl Iterator<Item = (&TensorSpec, Vec<T>)> {
        self.layout.tensors().map(|(spec, slot, range)| {
            let mut values = self.slots[slot].range(range.clone()).to_vec();
            if self.is_blank[slot] {
                values.fill(T::ZERO);
            }
            if let Some(lookup) = self.lookup.as_ref().filter(|_| slot == self.layout.embedding) {
                for (value, more) in values.iter_mut().zip(lookup.range(range).to_vec()) {
                    *value += more;
                }
            }
            (spec, values)
        })
    }

    /// Of gradients that are [finished](Self::finish).
    pub(crate) fn slot(&self, slot: usize) -> stapo_ops::View<'_, T> {
        self.slots[slot].view()
    }

    /// Where backward adds the gradient of what is no matrix of a layer.
    pub(crate) fn slot_mut(&mut self, slot: usize) -> ViewMut<'_, T> {
        assert!(!self.is_blank[slot], "a blank slot");
        self.slots[slot].view_mut()
    }

    /// Where the gradient of a layer's matrix belongs, and whether it is added to what is there.
    pub(crate) fn matrix_mut(&mut self, slot: usize) -> (ViewMut<'_, T>, Write) {
        let is_blank = std::mem::take(&mut self.is_blank[slot]);
        (self.slots[slot].view_mut(), if is_blank { Write::Set } else { Write::Add })
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

    /// Joins the two gradients of a tied embedding, and writes out what is 0.
    pub(crate) fn finish(&mut self) {
        let blank = self.slots.iter_mut().zip(&mut self.is_blank).filter(|(_, is_blank)| **is_blank);
        for (buffer, is_blank) in blank {
            buffer.view_mut().fill(T::ZERO);
            *is_blank = false;
        }
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
