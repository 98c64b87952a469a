//! Plans and checkpoints of run folders, and opening devices.

use crate::shared::{clock, shipped};
use anyhow::Result;
use stapo_core::settings::{RawConfig, SettingsError};
use stapo_rl::device::cuda::Training;
use stapo_rl::device::{Device, DeviceName};
use stapo_rl::model_files::ModelConfig;
use stapo_rl::plan::config::{ModelSource, PlanError, States};
use stapo_rl::run::{Reopening, RunKind, is_free, plan_text};
use stapo_rl::{Config, Error, Plan};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The text of a config, of the built-in config if none is given, and its resolved plan. A run folder stands for its
/// `plan.toml`, and the name of a shipped config for that config. `shape` finds the shape of the config's model, which some
/// defaults follow.
pub fn read_plan(
    config: Option<&Path>,
    overrides: &[String],
    shape: impl FnOnce(&ModelSource) -> Option<ModelConfig>,
) -> Result<(String, Plan)> {
    let text = match config {
        Some(run) if run.is_dir() => training_plan_text(run)?,
        Some(path) => shipped::read("config", path, &shipped::CONFIGS)?,
        None => shipped::DEFAULT_CONFIG.to_string(),
    };
    let file = file_name(config);
    let raw = RawConfig::new(&text, overrides.iter().map(String::as_str))
        .map_err(|error| placed(error.into(), &file, None))?;
    let given = raw.clone();
    let config = Config::for_model(raw, shape).map_err(|error| placed(error, &file, Some(&given)))?;
    Ok((text, Plan::resolve(config).map_err(|error| placed(error, &file, Some(&given)))?))
}

/// The name of a config in messages.
pub fn file_name(config: Option<&Path>) -> String {
    config.map_or("the built-in config".to_string(), |path| path.display().to_string())
}

/// An error in a config with the origin of the value: file, line and column, or `--set`.
pub fn placed(error: PlanError, file: &str, raw: Option<&RawConfig>) -> anyhow::Error {
    // The message names the override.
    if let PlanError::Settings(SettingsError::Override { .. }) = error {
        return error.into();
    }
    let origin = error.key().zip(raw).map_or(file.to_string(), |(key, raw)| raw.origin(&key, file));
    anyhow::Error::new(error).context(origin)
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
    pub fn for_plan(plan: &Plan) -> Self {
        match plan.config.update.states {
            States::F32 => Use::Training,
            States::EightBit => Use::TrainingIn8Bits,
        }
    }
}

/// Opens a GPU, or the CPU with `threads` threads; without `threads` the environment or the machine gives the number.
pub fn device(name: DeviceName, threads: Option<usize>, for_use: Use) -> Result<Device> {
    let training = match for_use {
        Use::Reading => Training::None,
        Use::Training => Training::F32,
        Use::TrainingIn8Bits => Training::EightBit,
    };
    Ok(Device::open(name, threads, training)?)
}

/// The folder of a new run: the given one, which must not exist or be empty, or `runs/<UTC time>-<name>`, with a number appended if that
/// folder exists.
pub fn new_folder(given: Option<&Path>, name: &str) -> Result<PathBuf> {
    if let Some(folder) = given {
        return if is_free(folder) { Ok(folder.to_owned()) } else { Err(Error::exists(folder).into()) };
    }
    let stem = format!("{}-{name}", clock::stamp(SystemTime::now()));
    let numbered = (2..).map(|n| Path::new("runs").join(format!("{stem}-{n}")));
    let mut folders = std::iter::once(Path::new("runs").join(&stem)).chain(numbered);
    Ok(folders.find(|folder| !folder.exists()).unwrap_or_default())
}

/// Warns of checkpoints that a run cannot continue from.
pub fn warn_of_refused(reopening: &Reopening) {
    for error in &reopening.refused {
        eprintln!("warning: {error}; going back to the checkpoint before");
    }
}
