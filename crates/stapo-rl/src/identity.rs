//! The identity of a run: hashes of every file that its bits depend on.

use crate::builtin;
use crate::config::{ModelSource, Plan, RolloutSource, TeacherSource};
use crate::error::{Error, Result};
use crate::found_model::{BaseModel, FoundModel};
use crate::pretrain::{PretrainConfig, TextsSpec};
use crate::run::{hash_bytes, hash_file};
use crate::task::{TaskSpec, VerifierSpec, fingerprint};
use stapo_core::record::{FileHash, Identity};
use stapo_model::DeviceName;
use std::path::{Path, PathBuf};

/// The files beside the weights of a Hugging Face folder that change what a model reads or writes, with their names in
/// an identity.
const MODEL_FILES: [(&str, &str); 5] = [
    ("config.json", "model config"),
    ("generation_config.json", "generation config"),
    ("tokenizer.json", "tokenizer"),
    ("tokenizer_config.json", "tokenizer config"),
    ("chat_template.jinja", "chat template"),
];

/// The identity of a training run.
pub fn of_plan(plan: &Plan, program: &str) -> Result<Identity> {
    let mut inputs = of_source(&plan.config.model)?;
    let teacher = plan.config.teacher.as_ref().and_then(TeacherSource::model);
    for (role, source) in [("reference", plan.config.reference.as_ref()), ("teacher", teacher.as_ref())] {
        let hashes = source.map_or(Ok(Vec::new()), of_source)?.into_iter();
        inputs.extend(hashes.map(|input| FileHash { name: format!("{role} {}", input.name), ..input }));
    }
    inputs.extend(of_task(&plan.task)?);
    for reward in plan.rewards.iter().skip(1) {
        inputs.extend(of_verifier(&format!("verifier of {}", reward.name), &reward.verifier)?);
    }
    if let Some(RolloutSource::Jsonl { path, .. }) = &plan.config.rollout.source {
        inputs.push(hash_file("rollouts", path)?);
    }
    Ok(Identity { program: program.to_string(), device: String::new(), inputs })
}

/// The identity of a supervised run.
pub fn of_pretraining(config: &PretrainConfig, program: &str) -> Result<Identity> {
    let mut inputs = config.model.source().map_or(Ok(Vec::new()), |source| of_source(&source))?;
    inputs.extend(of_texts("data", &config.data)?);
    Ok(Identity { program: program.to_string(), device: device_kind(config.device()), inputs })
}

/// `cpu` or `cuda`: the number of a GPU changes no bit.
pub fn device_kind(device: DeviceName) -> String {
    match device {
        DeviceName::Cpu => "cpu".to_string(),
        DeviceName::Cuda { .. } => "cuda".to_string(),
    }
}

fn of_texts(name: &str, texts: &TextsSpec) -> Result<Vec<FileHash>> {
    match texts {
        TextsSpec::Solutions { task, .. } => {
            let task = TaskSpec::read("data.task", task.clone()).map_err(crate::config::PlanError::from)?;
            of_task(&task)
        }
        TextsSpec::Jsonl(file) | TextsSpec::Parquet(file) => Ok(vec![hash_file(name, &file.path)?]),
        TextsSpec::Mixture { parts } => {
            let parts = parts.iter().enumerate();
            let hashes = parts.map(|(idx, part)| of_texts(&format!("{name} {}", idx + 1), &part.texts));
            Ok(hashes.collect::<Result<Vec<_>>>()?.concat())
        }
    }
}

/// The hashes of a task's data and of its verifier's program.
pub fn of_task(task: &TaskSpec) -> Result<Vec<FileHash>> {
    let mut inputs = Vec::new();
    if let TaskSpec::Jsonl(rows) | TaskSpec::Parquet(rows) = task {
        inputs.push(hash_file("data", &rows.path)?);
    }
    inputs.extend(of_verifier("verifier", task.verifier())?);
    Ok(inputs)
}

/// The hash of a verifier's program; `None` for a verifier that is none.
fn of_verifier(name: &str, verifier: &VerifierSpec) -> Result<Option<FileHash>> {
    let VerifierSpec::Command(command) = verifier else { return Ok(None) };
    let sha256 = fingerprint(command).map_err(|e| Error::io(&command.program, e))?;
    Ok(Some(FileHash { name: name.to_string(), n_bytes: 0, sha256 }))
}

/// The hashes of a config's model.
pub fn of_source(source: &ModelSource) -> Result<Vec<FileHash>> {
    of_found(&source.find()?)
}

/// The hashes of a model's files. A run's checkpoint has the weights, its base model the files beside them.
pub fn of_found(model: &FoundModel) -> Result<Vec<FileHash>> {
    let base = match &model.base {
        BaseModel::Files(path) => of_model(path)?,
        BaseModel::Builtin => {
            let files = builtin::files().iter();
            files.map(|(file, bytes)| hash_bytes(name_of(file), bytes)).collect()
        }
    };
    let Some(checkpoint) = &model.checkpoint else { return Ok(base) };
    let mut inputs = of_model(&checkpoint.path)?;
    inputs.extend(beside_weights(base));
    Ok(inputs)
}

/// The files of a model besides its weights.
pub(crate) fn beside_weights(mut files: Vec<FileHash>) -> Vec<FileHash> {
    files.retain(|file| is_model_file(&file.name));
    files
}

/// The hashes of a model's weight files and of the files beside these. A GGUF file holds all of them.
pub fn of_model(model: &Path) -> Result<Vec<FileHash>> {
    let weights = weight_files(model)?;
    let is_single = weights.len() == 1;
    let mut inputs = Vec::new();
    for path in &weights {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let name = if is_single { "weights".to_string() } else { format!("weights {file}") };
        inputs.push(hash_file(&name, path)?);
    }
    let folder = if model.is_dir() { Some(model) } else { model.parent() };
    let is_gguf = weights.iter().any(|path| path.extension().is_some_and(|e| e == "gguf"));
    for (file, name) in MODEL_FILES.iter().filter(|_| !is_gguf) {
        let path = folder.map(|folder| folder.join(file)).filter(|path| path.exists());
        inputs.extend(path.map(|path| hash_file(name, &path)).transpose()?);
    }
    Ok(inputs)
}

/// Whether an input of that name is a file beside a model's weights.
fn is_model_file(name: &str) -> bool {
    MODEL_FILES.iter().any(|(_, known)| *known == name)
}

/// The name in an identity of a file of a model's folder.
fn name_of(file: &str) -> &str {
    MODEL_FILES.iter().find(|(known, _)| *known == file).map_or("weights", |(_, name)| name)
}

/// The path itself if it is a file, else the weight files of the folder and the index of their shards, by name.
fn weight_files(path: &Path) -> Result<Vec<PathBuf>> {
    if path.is_file() {
        return Ok(vec![path.to_owned()]);
    }
    let entries = std::fs::read_dir(path).map_err(|e| Error::io(path, e))?;
    let is_weights = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        [".safetensors", ".gguf", ".safetensors.index.json"].iter().any(|end| name.ends_with(end))
    };
    let mut files: Vec<PathBuf> =
        entries.filter_map(|e| e.ok().map(|e| e.path())).filter(is_weights).collect();
    files.sort();
    Ok(files)
}
