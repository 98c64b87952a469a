//! Laid out in ARCHITECTURE.md.

/// The command line reaches the model through the system.
pub use stapo_model as model;

pub mod task;
