//! Decoder language models: one stack of layers with the switches of its families (norm per head, q/k/v biases, tied
//! embeddings, kinds of rope), forward and backward side by side.
//!
//! A [`PackedBatch`] of sequences goes through a [`Pass`], which gives [`TokenScores`] and, from the objective's two
//! numbers per token, adds to [`Gradients`]. The model never learns what the numbers are for.
//!
//! `weights` names the parameters, `layout` and `arena` the activations, `linear` is the one door for products, `lora` says which
//! adapters a policy has, `quantised` keeps frozen layers in the blocks of their file,
//! `attention` and `ffn` are the halves of a layer, `stack` joins the layers, `head` reads the vocabulary.

mod accumulate;
pub(crate) mod arena;
pub(crate) mod attention;
mod batch;
mod ffn;
mod gradient;
mod gradients;
mod head;
pub(crate) mod layer;
mod layout;
mod linear;
mod lora;
pub(crate) mod parameter;
mod pass;
mod policy;
mod quantised;
pub(crate) mod stack;
pub(crate) mod sums;
#[cfg(test)]
mod tests;
pub(crate) mod weights;

pub use accumulate::Accumulate;
pub use batch::PackedBatch;
pub use gradients::Gradients;
pub(crate) use head::alternatives;
pub use head::{HeadOptions, PendingAlternatives, PendingScores, TokenScores};
pub use layout::{ArenaLayout, Purpose, Recompute};
pub use lora::{HiddenLayout, LoraScale, LoraSpec, LoraTarget};
pub use pass::Pass;
pub use policy::{Policy, PolicyId, PolicySpec};
pub use quantised::QuantisedBase;
pub use sums::{Exchanged, GradientSums, SumsLayout};
