//! What commands on a run folder share.

use anyhow::{Context, Result, bail};
use stapo_core::record::{self, Record};
use stapo_rl::model::{CpuOptions, Device};
use stapo_rl::run::Checkpoint;
use stapo_rl::train::{Trainer, base_folder};
use stapo_rl::{Config, Plan};
use std::path::{Path, PathBuf};

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
    let mut trainer = Trainer::new(plan, &base_folder(run, plan), &device(None)?)?;
    trainer.restore(checkpoint)?;
    Ok(trainer)
}

/// The CPU, with as many threads as asked for, else as the environment or the machine says.
pub fn device(threads: Option<usize>) -> Result<Device> {
    let mut options = CpuOptions::from_env()?;
    options.threads = threads.unwrap_or(options.threads);
    Ok(Device::cpu(options))
}

/// The records of one part of a run (`rollouts`, `tokens`, ..), file by file; none where the part is absent.
pub fn records<R: Record>(run: &Path, part: &str) -> Result<Vec<R>> {
    let mut found = Vec::new();
    for path in part_files(run, part)? {
        found.extend(records_of_file(&path)?);
    }
    Ok(found)
}

/// The files of a part, in order of their names.
pub fn part_files(run: &Path, part: &str) -> Result<Vec<PathBuf>> {
    let folder = run.join(part);
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let entries = std::fs::read_dir(&folder).with_context(|| format!("folder {}", folder.display()))?;
    let is_lines = |path: &PathBuf| path.extension().is_some_and(|e| e == "jsonl");
    let mut files: Vec<PathBuf> = entries.filter_map(|e| e.ok().map(|e| e.path())).filter(is_lines).collect();
    files.sort();
    Ok(files)
}

pub fn records_of_file<R: Record>(path: &Path) -> Result<Vec<R>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("file {}", path.display()))?;
    Ok(record::parse_lines(&text).with_context(|| format!("file {}", path.display()))?.records)
}
