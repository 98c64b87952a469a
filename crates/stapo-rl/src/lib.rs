//! The training system. A step passes through the rooms in the order of the list here: a task asks, the policy
//! samples, rewards judge, the policy learns, and the run directory keeps what happened.

/// Problems and how a model is asked: generated tasks, files, templates, prompts.
pub mod tasks;

/// The model that is trained or evaluated: where it is found, how it is loaded, what its files hash to.
pub mod policy {
    mod adapters;
    pub mod builtin;
    pub mod found;
    pub mod hashes;
    pub mod hub_cache;
    pub mod identity;
    pub mod loaded;
}

pub mod rollout;

/// Verdicts and rewards: rules, and programs of the user, behind a permission and a launcher.
pub mod reward;

/// What follows a rollout batch: constants of its responses, thresholds, gradients, optimizer steps.
pub mod learn {
    pub(crate) mod canary;
    pub(crate) mod carried;
    pub(crate) mod constants;
    pub mod learner;
    pub(crate) mod memory;
    pub mod pretrain;
    pub(crate) mod scoring;
    pub(crate) mod teacher;
    pub(crate) mod update;
}

/// The training loop.
pub mod train;

pub mod run;

pub mod ranks;

/// Settings and what follows from them before a run starts: the plan, its memory, its time.
pub mod plan {
    pub mod config;
    pub mod disk;
    pub mod estimate;
    pub mod host;
    pub mod memory;
}

/// What looks at models and runs: evaluations, experiments, counterfactuals.
pub mod lab {
    pub mod counterfactual;
    pub mod evaluation;
    pub mod experiment;
    pub mod panel;
}

mod error;
mod facade;
#[cfg(test)]
mod testing;

pub use error::{Error, Result};
pub use facade::{device, inference, model_files, untrusted};
pub use learn::learner::Learner;
pub use plan::config::{Config, Plan};
pub use policy::builtin::unpack as unpack_builtin;
pub use policy::found::FoundModel;
pub use policy::loaded::LoadedModel;
