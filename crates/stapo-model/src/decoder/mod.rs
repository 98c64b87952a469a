//! Decoder language models: one stack of layers with the switches of its families (norm per head, q/k/v biases, tied
//! embeddings, kinds of rope), forward and backward side by side.
//!
//! A [`Batch`] of packed sequences goes through a [`Pass`], which gives [`Scores`] and, from the objective's two numbers
//! per token, adds to [`Gradients`]. The model never learns what the numbers are for.

mod batch;
pub(crate) mod forward;
mod gradients;
pub(crate) mod layer;
pub(crate) mod layout;
mod pass;
pub(crate) mod plan;
mod policy;
#[cfg(test)]
mod tests;

pub use batch::Batch;
pub use gradients::Gradients;
pub(crate) use pass::alternatives;
pub use pass::{Pass, Reading, Scores};
pub use plan::{Keep, Plan};
pub use policy::Policy;
