//! The training system: config and plan, tasks, rollouts, updates, the loop, evaluation, records.

mod builtin;
mod canary;
pub mod config;
mod error;
pub mod estimate;
pub mod evaluation;
pub mod experiment;
mod learner;
mod loaded_model;
pub mod memory;
pub mod pretrain;
mod records;
pub mod rollout;
pub mod run;
pub mod task;
pub mod train;
mod update;

pub use builtin::{unpack as unpack_builtin, weights as builtin_weights};
pub use config::{Config, Plan};
pub use error::{Error, Result};
pub use learner::Learner;
pub use loaded_model::LoadedModel;

/// The command line reaches the model through the system.
pub use stapo_model as model;
