//! Plans and checkpoints of run folders, and opening devices.

use crate::shared::{clock, shipped};
use anyhow::Result;
use stapo_core::settings::{self, SettingsError};
use stapo_rl::device::cuda::{CudaOptions, Training};
use stapo_rl::device::{CpuOptions, Device, DeviceName};
use stapo_rl::plan::config::{PlanError, States};
use stapo_rl::run::{RunKind, plan_text};
use stapo_rl::{Config, Plan};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The text of a config, of the built-in config if none is given, and its resolved plan. A run folder stands for its
/// `plan.toml`, and the name of a shipped config for that config.
pub fn read_plan(config: Option<&Path>, overrides: &[String]) -> Result<(String, Plan)> {
    let text = match config {
        Some(run) if run.is_dir() => training_plan_text(run)?,
        Some(path) => shipped::read("config", path, &shipped::CONFIGS)?,
        None => shipped::DEFAULT_CONFIG.to_string(),
    };
    let resolved = Config::from_toml(&text, overrides.iter().map(String::as_str)).map_err(PlanError::from);
    let plan = resolved.and_then(Plan::resolve).map_err(|error| placed(error, config, &text, overrides))?;
    Ok((text, plan))
}

/// An error in a config with its place: file, line and column, or the `--set` that gave the value.
pub fn placed(error: PlanError, config: Option<&Path>, text: &str, overrides: &[String]) -> anyhow::Error {
    let file = config.map_or("the built-in config".to_string(), |path| path.display().to_string());
    let place = match (error.key(), &error) {
        (Some(key), _) => settings::place(&key, &file, text, overrides.iter().map(String::as_str)),
        // The message names the override.
        (None, PlanError::Settings(SettingsError::Override { .. })) => return error.into(),
        (None, _) => file,
    };
    anyhow::Error::new(error).context(place)
}

/// The resolved plan of a run.
pub fn plan(run: &Path) -> Result<Plan> {
    resolved(&training_plan_text(run)?)
}

/// The plan of a run of `stapo train`.
fn training_plan_text(run: &Path) -> Result<String> {
    let text = plan_text(run)?;
    RunKind::Training.check(run)?;
    Ok(text)
}

/// The plan of a text that is one already.
pub fn resolved(text: &str) -> Result<Plan> {
    Ok(Plan::resolve(Config::from_toml(text, [])?)?)
}

/// The purpose a device is opened for: trained weights need gradients and optimizer states besides.
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

/// Opens a GPU, or the CPU with `threads` threads; without `threads` the environment or the machine gives the number.
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

/// `runs/<UTC time>-<name>`, with a number appended if that folder exists.
pub fn new_folder(name: &str) -> PathBuf {
    let stem = format!("{}-{name}", clock::stamp(SystemTime::now()));
    let numbered = (2..).map(|n| Path::new("runs").join(format!("{stem}-{n}")));
    std::iter::once(Path::new("runs").join(&stem))
        .chain(numbered)
        .find(|folder| !folder.exists())
        .unwrap_or_default()
}
