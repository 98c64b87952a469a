//! The training system: config and plan, tasks, rollouts, updates, the loop, evaluation, records.

mod builtin;
mod canary;
pub mod config;
pub mod disk;
mod error;
pub mod estimate;
pub mod evaluation;
pub mod experiment;
mod facade;
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
pub use facade::{device, inference, model_files};
pub use learner::Learner;
pub use loaded_model::LoadedModel;
