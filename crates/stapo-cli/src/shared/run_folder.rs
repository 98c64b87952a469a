//! Reading run folders: plans, checkpoints and records; and opening devices.

use crate::shared::{clock, shipped};
use anyhow::{Context, Result, bail};
use stapo_core::ObjectiveSpec;
use stapo_core::record::{self, Record, ResponseRecord};
use stapo_core::settings::{self, SettingsError};
use stapo_rl::config::{PlanError, States};
use stapo_rl::device::cuda::{CudaOptions, Training};
use stapo_rl::device::{CpuOptions, Device, DeviceName};
use stapo_rl::run::check_tree;
use stapo_rl::untrusted::{read_lines, read_text};
use stapo_rl::{Config, Plan};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The text of a config, of the built-in config if none is given, and its resolved plan. A run folder stands for its
/// `plan.toml`, and the name of a shipped config for that config.
pub fn read_plan(config: Option<&Path>, overrides: &[String]) -> Result<(String, Plan)> {
    let text = match config {
        Some(run) if run.is_dir() => plan_text(run)?,
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
    resolved(&plan_text(run)?)
}

/// The plan of a text that is one already.
pub fn resolved(text: &str) -> Result<Plan> {
    Ok(Plan::resolve(Config::from_toml(text, [])?)?)
}

/// The text of `plan.toml`. A folder with links or pipes inside is refused.
pub fn plan_text(run: &Path) -> Result<String> {
    let remedy = "`stapo runs` lists the runs here, and `stapo train` makes one";
    if !run.is_dir() {
        bail!("run {}: no such folder\nhint: {remedy}", run.display());
    }
    check_tree(run)?;
    let path = run.join("plan.toml");
    if path.symlink_metadata().is_err() {
        bail!("run {}: no plan.toml, so this is no run folder\nhint: {remedy}", run.display());
    }
    read_text(&path).with_context(|| path.display().to_string())
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

/// The records of one part of a run (`rollouts`, `tokens`, ..) in order of its files; empty if the part is absent.
pub fn records<R: Record>(run: &Path, part: &str) -> Result<Vec<R>> {
    let mut found = Vec::new();
    for path in part_files(run, part)? {
        found.extend(records_of_file(&path)?);
    }
    Ok(found)
}

/// The JSON lines files of a part but `events.jsonl`, in order of their names.
pub fn part_files(run: &Path, part: &str) -> Result<Vec<PathBuf>> {
    let folder = run.join(part);
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(&folder).with_context(|| format!("folder {}", folder.display()))?;
    let is_lines =
        |path: &PathBuf| path.extension().is_some_and(|e| e == "jsonl") && !path.ends_with("events.jsonl");
    let mut files: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).filter(is_lines).collect();
    files.sort();
    Ok(files)
}

pub fn records_of_file<R: Record>(path: &Path) -> Result<Vec<R>> {
    let text = read_lines(path).with_context(|| format!("file {}", path.display()))?;
    Ok(record::parse_lines(&text).with_context(|| format!("file {}", path.display()))?.records)
}

/// The responses of a file of a run with that objective, with all columns checked.
pub fn responses_of_file(path: &Path, objective: &ObjectiveSpec) -> Result<Vec<ResponseRecord>> {
    let text = read_lines(path).with_context(|| format!("file {}", path.display()))?;
    let responses = record::parse_responses(&text, objective)
        .with_context(|| format!("file {}", path.display()))?
        .records;
    for (idx, response) in responses.iter().enumerate() {
        check_columns(response).with_context(|| format!("file {}: response {}", path.display(), idx + 1))?;
    }
    Ok(responses)
}

/// Checks that all columns have one length, so that every token index is valid in every column.
fn check_columns(response: &ResponseRecord) -> Result<()> {
    let tokens = &response.tokens;
    let n = tokens.id.len();
    let columns = [
        ("text", tokens.text.len()),
        ("logp", tokens.logp.len()),
        ("behavior_logp", tokens.behavior_logp.len()),
        ("entropy", tokens.entropy.len()),
        ("collision", tokens.collision.len()),
        ("ratio", tokens.ratio.len()),
        ("kept", tokens.kept.len()),
        ("silenced_by", tokens.silenced_by.len()),
        ("clipped", tokens.clipped.len()),
        ("is_candidate", tokens.is_candidate.len()),
    ];
    let optional = [("weight", tokens.weight.len()), ("alternatives", tokens.alternatives.len())];
    for (column, len) in columns.into_iter().chain(optional.into_iter().filter(|(_, len)| *len > 0)) {
        if len != n {
            bail!("column {column} has {len} entries, id has {n}");
        }
    }
    Ok(())
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
