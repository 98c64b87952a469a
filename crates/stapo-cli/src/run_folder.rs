//! What commands on a run folder share.

use anyhow::{Context, Result, bail};
use stapo_rl::config::States;
use stapo_rl::model::cuda::{CudaOptions, Training};
use stapo_rl::model::{CpuOptions, Device, DeviceName};
use stapo_rl::run::Checkpoint;
use stapo_rl::train::{Trainer, base_folder};
use stapo_rl::{Config, Plan};
use std::path::Path;

/// A config as written, the built-in one where none is given, and what it means.
pub fn read_plan(config: Option<&Path>, overrides: &[String]) -> Result<(String, Plan)> {
    let text = match config {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("config {}", path.display()))?,
        None => include_str!("../../../configs/stapo.toml").to_string(),
    };
    let config = Config::from_toml(&text, overrides.iter().map(String::as_str))?;
    Ok((text, Plan::resolve(config)?))
}

/// The resolved plan of a run.
pub fn plan(run: &Path) -> Result<Plan> {
    let text = plan_text(run)?;
    Ok(Plan::resolve(Config::from_toml(&text, [])?)?)
}

/// `plan.toml` as it stands.
pub fn plan_text(run: &Path) -> Result<String> {
    std::fs::read_to_string(run.join("plan.toml"))
        .with_context(|| format!("run {}: no plan.toml, so this is no run folder", run.display()))
}

/// The newest checkpoint whose hashes are right; newer ones that were refused are named on standard error.
pub fn newest_checkpoint(run: &Path) -> Result<Checkpoint> {
    let (checkpoint, refused) = Checkpoint::newest(run)?;
    for error in refused {
        eprintln!("warning: {error}; taking the checkpoint before");
    }
    match checkpoint {
        Some(checkpoint) => Ok(checkpoint),
        None => bail!("run {}: no good checkpoint", run.display()),
    }
}

/// A trainer with the state of a checkpoint.
pub fn trainer_at(run: &Path, plan: &Plan, checkpoint: &Checkpoint) -> Result<Trainer> {
    let mut trainer =
        Trainer::new(plan, &base_folder(run, plan), &device(DeviceName::Cpu, None, Use::Training)?)?;
    trainer.restore(checkpoint)?;
    Ok(trainer)
}

/// What a device is opened for: weights that are trained take more memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    Training,
    /// With `update.states = "8bit"`.
    TrainingIn8Bits,
    Reading,
}

impl Use {
    pub fn of(plan: &Plan) -> Self {
        match plan.config.update.states {
            States::F32 => Use::Training,
            States::EightBit => Use::TrainingIn8Bits,
        }
    }
}

/// A GPU; or the CPU, with as many threads as asked for, else as the environment or the machine says.
pub fn device(name: DeviceName, threads: Option<usize>, for_use: Use) -> Result<Device> {
    match name {
        DeviceName::Cpu => {
            let mut options = CpuOptions::from_env()?;
            options.threads = threads.unwrap_or(options.threads);
            Ok(Device::cpu(options))
        }
        DeviceName::Cuda { ordinal } => {
            let training = match for_use {
                Use::Reading => Training::None,
                Use::Training => Training::F32,
                Use::TrainingIn8Bits => Training::EightBit,
            };
            Ok(Device::cuda(CudaOptions { ordinal, training, ..CudaOptions::default() })?)
        }
    }
}
