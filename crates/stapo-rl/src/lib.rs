//! The system: config -> plan, rollouts, tasks, the loop, records.

mod builtin;
mod canary;
pub mod config;
mod error;
pub mod estimate;
pub mod evaluation;
pub mod experiment;
mod facade;
mod policy;
pub mod pretrain;
pub mod rollout;
pub mod run;
pub mod task;
mod telling;
pub mod train;
mod update;

pub use builtin::{unpack as unpack_builtin, weights as builtin_weights};
pub use config::{Config, Plan};
pub use error::{Error, Result};
pub use facade::{device, inference, model_files};
pub use policy::Student;
