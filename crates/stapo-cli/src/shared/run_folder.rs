//! Reading run folders: plans, checkpoints, records, hashes; and opening devices and models.

use anyhow::{Context, Result, bail};
use stapo_core::ObjectiveSpec;
use stapo_core::record::{self, FileHash, Record, ResponseRecord, changed_inputs};
use stapo_rl::config::{ModelSource, States};
use stapo_rl::device::cuda::{CudaOptions, Training};
use stapo_rl::device::{CpuOptions, Device, DeviceName};
use stapo_rl::run::{Checkpoint, Run, check_tree};
use stapo_rl::task::Programs;
use stapo_rl::train::Trainer;
use stapo_rl::untrusted::{read_lines, read_text};
use stapo_rl::{Config, LoadedModel, Plan, identity};
use std::path::{Path, PathBuf};

/// The text of a config, of the built-in config if none is given, and its resolved plan. A run folder stands for its
/// `plan.toml`.
pub fn read_plan(config: Option<&Path>, overrides: &[String]) -> Result<(String, Plan)> {
    let text = match config {
        Some(run) if run.is_dir() => plan_text(run)?,
        Some(path) => read_text(path).with_context(|| format!("config {}", path.display()))?,
        None => include_str!("../../../../configs/stapo.toml").to_string(),
    };
    let config = Config::from_toml(&text, overrides.iter().map(String::as_str))?;
    Ok((text, Plan::resolve(config)?))
}

/// The resolved plan of a run.
pub fn plan(run: &Path) -> Result<Plan> {
    let text = plan_text(run)?;
    Ok(Plan::resolve(Config::from_toml(&text, [])?)?)
}

/// The text of `plan.toml`. A folder with links or pipes inside is refused.
pub fn plan_text(run: &Path) -> Result<String> {
    check_tree(run)?;
    read_text(&run.join("plan.toml"))
        .with_context(|| format!("run {}: no plan.toml, so this is no run folder", run.display()))
}

/// The newest checkpoint whose hashes are right; newer checkpoints that were refused are reported on standard error.
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

/// The checkpoint of a step: a number, or `best` for the step that `best.json` names.
pub fn checkpoint_at(run: &Path, step: &str) -> Result<Checkpoint> {
    check_tree(run)?;
    let step = match step {
        "best" => match Run::read_best(run)? {
            Some(best) => best.step,
            None => bail!(
                "run {}: no best.json, so no evaluation has named a best checkpoint\nhint: name a step",
                run.display()
            ),
        },
        number => number.parse().with_context(|| format!("step {number:?}: expected a number, or best"))?,
    };
    let found = Checkpoint::of_step(run, step)?;
    found.with_context(|| {
        let steps: Vec<String> =
            Checkpoint::steps(run).unwrap_or_default().iter().map(u64::to_string).collect();
        format!(
            "run {}: no checkpoint of step {step}\nhint: there are those of {}",
            run.display(),
            steps.join(", ")
        )
    })
}

/// A trainer with the state of a checkpoint.
pub fn trainer_at(
    plan: &Plan,
    checkpoint: &Checkpoint,
    device: &Device,
    programs: Programs,
) -> Result<Trainer> {
    let mut trainer = Trainer::new(plan, device, programs)?;
    trainer.learner.restore(checkpoint)?;
    Ok(trainer)
}

/// The model of a run with the weights of a checkpoint. The run's task is not opened. A model whose tokenizer, config or
/// chat template is not that of the run is refused.
pub fn model_at(plan: &Plan, checkpoint: &Checkpoint, device: &Device) -> Result<LoadedModel> {
    if let Some(provenance) = &checkpoint.provenance {
        let found = beside_weights(identity::of_source(&plan.config.model)?);
        let mut changes = changed_inputs(&beside_weights(provenance.identity.inputs.clone()), &found);
        changes.retain(|change| identity::is_model_file(&change.name));
        if !changes.is_empty() {
            let folder = checkpoint.path.clone();
            bail!(stapo_rl::Error::ChangedModel { folder, changes });
        }
    }
    let mut model = LoadedModel::open(&plan.config.model, device)?;
    checkpoint.restore_weights(&mut model.policy)?;
    Ok(model)
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

/// A model by folder, GGUF file, run or the word `builtin`, the hashes of its files, and the training steps it has seen.
pub fn open_model(path: &Path, device: &Device) -> Result<(LoadedModel, Vec<FileHash>, Option<u64>)> {
    if path == Path::new("builtin") {
        let model = LoadedModel::open(&ModelSource::Builtin, device)?;
        return Ok((model, identity::of_source(&ModelSource::Builtin)?, None));
    }
    if is_run(path) {
        let plan = plan(path)?;
        let checkpoint = newest_checkpoint(path)?;
        let model = model_at(&plan, &checkpoint, device)?;
        let mut inputs = identity::of_model(&checkpoint.path)?;
        inputs.extend(beside_weights(identity::of_source(&plan.config.model)?));
        return Ok((model, inputs, Some(checkpoint.counters.step)));
    }
    let model = LoadedModel::open_path(path, device)?;
    Ok((model, identity::of_model(path)?, None))
}

/// The files of a model besides its weights.
fn beside_weights(files: Vec<FileHash>) -> Vec<FileHash> {
    files.into_iter().filter(|file| !file.name.starts_with("weights")).collect()
}

/// Whether the path is a run folder.
pub fn is_run(path: &Path) -> bool {
    path.join("plan.toml").symlink_metadata().is_ok()
}
