//! The training system: config and plan, tasks, rollouts, updates, the loop, evaluation, records.

mod adapters;
mod best;
mod builtin;
mod canary;
mod carried;
pub mod config;
mod constants;
pub mod counterfactual;
pub mod disk;
mod error;
pub mod estimate;
pub mod evaluation;
pub mod experiment;
mod facade;
pub mod found_model;
pub mod hub_cache;
pub mod identity;
mod learner;
mod loaded_model;
pub mod memory;
pub mod meter;
pub mod model_hashes;
pub mod pretrain;
pub mod prompting;
pub mod ranks;
mod records;
pub mod restart;
pub mod rollout;
pub mod run;
mod run_memory;
mod scoring;
pub mod task;
mod teacher;
#[cfg(test)]
mod testing;
pub mod train;
pub mod unseen;
mod update;

pub use builtin::unpack as unpack_builtin;
pub use config::{Config, Plan};
pub use error::{Error, Result};
pub use facade::{device, inference, model_files, untrusted};
pub use found_model::FoundModel;
pub use learner::Learner;
pub use loaded_model::LoadedModel;
