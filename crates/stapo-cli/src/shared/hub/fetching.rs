//! Fetching the files of a repository, with a bar that shows the progress.

use super::{Hub, Listing, Repo, RepoKind};
use crate::shared::terminal::{is_quiet, plain};
use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;

/// Fetches weights, config and tokenizer of a model, or the given files; returns the folder or GGUF file to open.
pub fn fetch_model(id: &str, revision: &str, files: &[String]) -> Result<PathBuf> {
    let repo = Repo::new(RepoKind::Model, id, revision)?;
    let paths = fetch_repository(&Hub::from_env()?, &repo, files, is_model_file)?;
    to_open(&paths).context("nothing was fetched")
}

/// The folder of a model, or the first file of one without a config.
fn to_open(paths: &[PathBuf]) -> Option<PathBuf> {
    let config = paths.iter().find(|path| path.ends_with("config.json"));
    config.and_then(|path| path.parent().map(PathBuf::from)).or(paths.first().cloned())
}

/// Whether a file holds rows of a data set.
pub fn is_rows(file: &str) -> bool {
    let ends = [".jsonl", ".parquet", ".csv", ".tsv", ".jsonl.gz", ".jsonl.zst"];
    ends.iter().any(|end| file.ends_with(end))
}

/// Weights, config and tokenizer files, and those of a multimodal model's processors, which an export needs. Pickles and Python
/// files are left out, since loading them would execute code.
fn is_model_file(file: &str) -> bool {
    let names = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "model.safetensors.index.json",
    ];
    let ends = [".safetensors", "processor_config.json"];
    names.contains(&file) || (ends.iter().any(|end| file.ends_with(end)) && !file.contains('/'))
}

/// Fetches the given files of a repository, or those that are wanted where none is given.
pub fn fetch_repository(
    hub: &Hub,
    repo: &Repo,
    files: &[String],
    is_wanted: fn(&str) -> bool,
) -> Result<Vec<PathBuf>> {
    let listing = hub.list(repo)?;
    let wanted: Vec<String> = if files.is_empty() {
        listing.files.iter().filter(|file| is_wanted(file)).cloned().collect()
    } else {
        files.to_vec()
    };
    if let Some(file) = wanted.iter().find(|file| !listing.files.contains(file)) {
        bail!("{} {file}: not in the repository\nhint: it holds {}", repo.id, listing.files.join(", "));
    }
    if wanted.is_empty() {
        bail!(
            "{}: holds nothing this program reads\nhint: name files with --file; it holds {}",
            repo.id,
            listing.files.join(", ")
        );
    }
    wanted.iter().map(|file| fetch_file(hub, repo, &listing, file)).collect()
}

/// Fetches one file of a repository.
pub fn fetch_file(hub: &Hub, repo: &Repo, listing: &Listing, file: &str) -> Result<PathBuf> {
    let bar = if is_quiet() { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let template = "{wide_msg} {bar:15} {bytes}/{total_bytes} {bytes_per_sec} {eta} left";
    bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_message(plain(file));
    let path = hub.fetch(repo, &listing.commit, file, &|have, size| {
        bar.set_length(size);
        bar.set_position(have);
    });
    bar.finish_and_clear();
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_settings_and_rows_are_fetched_and_code_is_not() {
        let wanted =
            ["config.json", "tokenizer.json", "model.safetensors", "model-00001-of-00002.safetensors"];
        assert!(wanted.into_iter().all(is_model_file));
        let others =
            ["original/model.safetensors", "pytorch_model.bin", "modeling.py", "config.json.bak", "x"];
        assert!(!others.into_iter().any(is_model_file));
        assert!(["a.jsonl", "b/c.parquet", "d.jsonl.zst"].into_iter().all(is_rows));
        assert!(!["README.md", "a.json.py"].into_iter().any(is_rows));
    }

    #[test]
    fn a_folder_is_opened_or_the_first_file() {
        let paths = |names: &[&str]| names.iter().map(PathBuf::from).collect::<Vec<_>>();
        let folder = to_open(&paths(&["s/model.safetensors", "s/config.json"]));
        assert_eq!(folder, Some(PathBuf::from("s")));
        assert_eq!(to_open(&paths(&["s/a.gguf", "s/b.gguf"])), Some(PathBuf::from("s/a.gguf")));
        assert_eq!(to_open(&[]), None);
    }
}
