//! Decoder language models: a stack of layers, each as its [`LayerSpec`](crate::config::LayerSpec) describes it, forward
//! and backward side by side.
//!
//! A [`PackedBatch`] of sequences goes through a [`Pass`], which gives [`TokenScores`] and, from the objective's two
//! numbers per token, adds to [`Gradients`]. The model never learns what the numbers are for.
//!
//! `weights` names the parameters, `layout`, `arena` and `workspace` the activations, `rope_tables` the rotary positions, `linear` computes all products, `lora` says which
//! adapters a policy has, `quantised` keeps frozen layers in the blocks of their file,
//! `attention` and `ffn` are the halves of a layer, `stack` joins the layers, `head` reads the vocabulary, `score` the score of
//! a reward model.

mod accumulate;
pub(crate) mod arena;
pub(crate) mod attention;
mod batch;
pub(crate) mod context;
mod delta_net;
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
mod rope_tables;
mod score;
pub(crate) mod stack;
pub(crate) mod sums;
#[cfg(test)]
mod tests;
pub(crate) mod weights;
pub(crate) mod workspace;

pub use accumulate::Accumulate;
pub use batch::PackedBatch;
pub use gradients::Gradients;
pub(crate) use head::alternatives;
pub use head::{HeadOptions, PendingAlternatives, PendingScores, TokenScores};
pub use layout::{ArenaLayout, BatchRows, Purpose, Recompute};
pub use lora::{HiddenLayout, LoraScale, LoraSpec, LoraTarget};
pub use pass::Pass;
pub use policy::{Policy, PolicyId, PolicySpec};
pub use quantised::QuantisedBase;
pub use sums::{Exchanged, GradientSums, SumsLayout};
pub use weights::parameter_of;
