//! The hashes of a model's files.

use crate::error::{Error, Result};
use crate::plan::config::ModelSource;
use crate::policy::found::{BaseModel, FoundModel};
use crate::run::{hash_bytes, hash_file};
use stapo_core::record::FileHash;
use stapo_model::peft;
use std::path::{Path, PathBuf};

/// The files next to the weights of a Hugging Face folder that change what a model reads or writes, with their names in
/// an identity.
const MODEL_FILES: [(&str, &str); 5] = [
    ("config.json", "model config"),
    ("generation_config.json", "generation config"),
    ("tokenizer.json", "tokenizer"),
    ("tokenizer_config.json", "tokenizer config"),
    ("chat_template.jinja", "chat template"),
];

/// The hashes of a config's model.
pub fn of_source(source: &ModelSource) -> Result<Vec<FileHash>> {
    of_found(&source.find()?)
}

/// The hashes of a model's files. A run's checkpoint has the weights, its base model the files next to them.
pub fn of_found(model: &FoundModel) -> Result<Vec<FileHash>> {
    let Some(checkpoint) = &model.checkpoint else { return of_base(model) };
    let mut inputs = Vec::from_iter(checkpoint.weights_hash());
    if model.lora.is_some() {
        let below = of_frozen(model)?.into_iter().filter(|input| !is_model_file(&input.name));
        inputs.extend(below.map(|input| FileHash { name: format!("base {}", input.name), ..input }));
    }
    inputs.extend(of_files_beside(model)?);
    Ok(inputs)
}

/// The hashes of the files of a model, or of those from which the run of its checkpoint started.
pub(crate) fn of_base(model: &FoundModel) -> Result<Vec<FileHash>> {
    match &model.base {
        BaseModel::Files(path) => of_model(path),
        BaseModel::Random { shape, seed } => {
            Ok(vec![hash_bytes("weights", format!("random {shape} {seed}").as_bytes())])
        }
        BaseModel::Builtin(model) => {
            let files = model.files().iter();
            Ok(files.map(|(file, bytes)| hash_bytes(name_of(file), bytes)).collect())
        }
    }
}

/// As [`of_base`], of the files next to the weights: those of the weights are not read.
pub(crate) fn of_files_beside(model: &FoundModel) -> Result<Vec<FileHash>> {
    match &model.base {
        BaseModel::Files(path) => files_beside_weights(path, &weight_files(path)?),
        BaseModel::Builtin(_) | BaseModel::Random { .. } => Ok(beside_weights(of_base(model)?)),
    }
}

/// The hashes of the model below the adapters of a run.
pub(crate) fn of_frozen(model: &FoundModel) -> Result<Vec<FileHash>> {
    let below = FoundModel {
        pinned: model.pinned.clone(),
        refused: Vec::new(),
        base: model.base.clone(),
        checkpoint: model.frozen.clone(),
        lora: None,
        base_storage: model.base_storage,
        frozen: None,
        start: None,
        longest: None,
    };
    of_found(&below)
}

/// The hashes of an adapter's files; none if there is no adapter.
pub fn of_adapter(folder: Option<&Path>) -> Result<Vec<FileHash>> {
    let Some(folder) = folder else { return Ok(Vec::new()) };
    let files = [("adapter", peft::WEIGHTS), ("adapter config", peft::CONFIG)];
    files.into_iter().map(|(name, file)| hash_file(name, &folder.join(file))).collect()
}

/// Of the inputs of a run that trained adapters, those of the model below them.
pub(crate) fn below_adapters(inputs: Vec<FileHash>) -> Vec<FileHash> {
    // A run that went on with another run's adapters has these as weights, and the model below them as base weights.
    let has_base = inputs.iter().any(|input| input.name.starts_with("base weights"));
    let prefix = if has_base { "base weights" } else { "weights" };
    let below =
        inputs.into_iter().filter(|input| input.name.starts_with(prefix) || is_model_file(&input.name));
    below
        .map(|input| FileHash { name: input.name.trim_start_matches("base ").to_string(), ..input })
        .collect()
}

/// Of the inputs of a run, those of the model that it started from.
pub(crate) fn of_start(inputs: Vec<FileHash>) -> Vec<FileHash> {
    let is_weights = |name: &str| name.trim_start_matches("base ").starts_with("weights");
    inputs.into_iter().filter(|input| is_weights(&input.name) || is_model_file(&input.name)).collect()
}

/// The files of a model besides its weights.
pub(crate) fn beside_weights(mut files: Vec<FileHash>) -> Vec<FileHash> {
    files.retain(|file| is_model_file(&file.name));
    files
}

/// The hashes of a model's weight files and of the files next to these. A GGUF file holds all of them.
pub fn of_model(model: &Path) -> Result<Vec<FileHash>> {
    let weights = weight_files(model)?;
    let is_single = weights.len() == 1;
    let mut inputs = Vec::new();
    for path in &weights {
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let name = if is_single { "weights".to_string() } else { format!("weights {file}") };
        inputs.push(hash_file(&name, path)?);
    }
    inputs.extend(files_beside_weights(model, &weights)?);
    Ok(inputs)
}

/// The hashes of the files next to a model's weights.
fn files_beside_weights(model: &Path, weights: &[PathBuf]) -> Result<Vec<FileHash>> {
    let mut inputs = Vec::new();
    let folder = if model.is_dir() { Some(model) } else { model.parent() };
    let is_gguf = weights.iter().any(|path| path.extension().is_some_and(|e| e == "gguf"));
    for (file, name) in MODEL_FILES.iter().filter(|_| !is_gguf) {
        let path = folder.map(|folder| folder.join(file)).filter(|path| path.exists());
        inputs.extend(path.map(|path| hash_file(name, &path)).transpose()?);
    }
    Ok(inputs)
}

/// Whether an input of that name is a file next to a model's weights.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(names: &[&str]) -> Vec<FileHash> {
        let hash =
            |name: &&str| FileHash { name: (*name).to_string(), n_bytes: 1, sha256: (*name).to_string() };
        names.iter().map(hash).collect()
    }

    fn names(inputs: &[FileHash]) -> Vec<&str> {
        inputs.iter().map(|input| input.name.as_str()).collect()
    }

    #[test]
    fn a_runs_inputs_are_told_apart_by_the_model_that_they_are_of() {
        let other = ["adapter", "reference weights", "data", "verifier"];
        let first = inputs(&[&["weights", "model config", "tokenizer"], &other[..]].concat());
        assert_eq!(names(&below_adapters(first.clone())), ["weights", "model config", "tokenizer"]);
        assert_eq!(names(&of_start(first.clone())), ["weights", "model config", "tokenizer"]);
        assert_eq!(names(&beside_weights(first)), ["model config", "tokenizer"]);
        // A run that went on with another run's adapters: these are its weights, and the base lies below them.
        let second = inputs(&[&["weights", "base weights", "chat template"], &other[..]].concat());
        let below = below_adapters(second.clone());
        assert_eq!(names(&below), ["weights", "chat template"]);
        assert_eq!(below[0].sha256, "base weights", "the base goes by the name that it has in its own run");
        assert_eq!(names(&of_start(second)), ["weights", "base weights", "chat template"]);
    }

    #[test]
    fn every_file_of_a_model_that_changes_what_it_reads_or_writes_is_hashed() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(folder.path().join(name), name).unwrap();
        let weights = ["model-2.safetensors", "model-1.safetensors", "model.safetensors.index.json"];
        let next_to_them = MODEL_FILES.iter().map(|(file, _)| *file);
        for name in weights.into_iter().chain(next_to_them).chain(["README.md", "optimizer.pt"]) {
            write(name);
        }
        let found = of_model(folder.path()).unwrap();
        let expected = [
            "weights model-1.safetensors",
            "weights model-2.safetensors",
            "weights model.safetensors.index.json",
            "model config",
            "generation config",
            "tokenizer",
            "tokenizer config",
            "chat template",
        ];
        assert_eq!(names(&found), expected);
        let alone = of_model(&folder.path().join("model-1.safetensors")).unwrap();
        assert_eq!(names(&alone)[..2], ["weights", "model config"]);
        write("model.gguf");
        assert_eq!(names(&of_model(&folder.path().join("model.gguf")).unwrap()), ["weights"]);
    }
}
