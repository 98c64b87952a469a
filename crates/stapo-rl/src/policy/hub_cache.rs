//! The files that were fetched from the Hugging Face hub before. The cache has the layout of Python's
//! `huggingface_hub`, so the two share files: `models--OWNER--NAME/refs/REVISION` holds a commit, and
//! `models--OWNER--NAME/snapshots/COMMIT/` the files of that commit.

use std::path::{Path, PathBuf};

/// The folder of the hub's settings and cache: `HF_HOME`, or `~/.cache/huggingface`. `None` without a home folder.
pub fn home() -> Option<PathBuf> {
    variable("HF_HOME").map(PathBuf::from).or_else(|| Some(std::env::home_dir()?.join(".cache/huggingface")))
}

/// The folder of fetched files: `HF_HUB_CACHE`, or `hub` in [`home`].
pub fn cache() -> Option<PathBuf> {
    variable("HF_HUB_CACHE").map(PathBuf::from).or_else(|| Some(home()?.join("hub")))
}

/// An environment variable that is set and not empty.
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a text has the form of a repository's name, `OWNER/NAME`. Such a text names no path outside the cache.
pub fn is_repository(id: &str) -> bool {
    let parts: Vec<&str> = id.split('/').collect();
    let is_plain = |part: &&str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    parts.len() == 2 && parts.iter().all(is_plain)
}

/// Whether a text has the form of a revision: a branch, a tag, a commit or `refs/pr/N`. A revision names a file in the
/// cache and must not leave it.
pub fn is_revision(revision: &str) -> bool {
    let is_plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.+@".contains(c))
    };
    revision.len() <= 200 && revision.split('/').all(is_plain)
}

/// Whether a text is the name of a commit.
pub fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A fetched model: its folder and the commit that it is of. `revision` is a branch, a tag or a commit. `None` for a
/// model that was not fetched.
pub fn model(id: &str, revision: &str) -> Option<(PathBuf, String)> {
    let repository = cache()?.join(format!("models--{}", id.replace('/', "--")));
    let commit = if is_commit(revision) {
        revision.to_string()
    } else {
        let text = std::fs::read_to_string(repository.join("refs").join(revision)).ok()?;
        Some(text.trim().to_string()).filter(|text| is_commit(text))?
    };
    let folder = repository.join("snapshots").join(&commit);
    folder.is_dir().then_some((folder, commit))
}

/// The name of the repository that a folder of the cache is of; `None` for a folder elsewhere.
pub fn name_of(folder: &Path) -> Option<String> {
    let repository = folder.parent().filter(|parent| parent.ends_with("snapshots"))?.parent()?;
    let name = repository.file_name()?.to_str()?.strip_prefix("models--")?.replacen("--", "/", 1);
    is_repository(&name).then_some(name)
}
