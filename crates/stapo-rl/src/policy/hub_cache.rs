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

/// The owners of published models of the supported families, by the beginning of a model's name.
const OWNERS: [(&str, &str); 5] = [
    ("Qwen", "Qwen"),
    ("Llama-", "meta-llama"),
    ("SmolLM", "HuggingFaceTB"),
    ("TinyLlama", "TinyLlama"),
    ("DeepSeek-R1-Distill", "deepseek-ai"),
];

/// The likely name on the hub of a model that is named by its last part alone, in any case: `qwen3-1.7b` is
/// `Qwen/Qwen3-1.7B`, as is `qwen3-1.7b.gguf`.
pub fn likely_name(name: &str) -> Option<String> {
    let last = name.trim_end_matches('/').rsplit('/').next()?;
    let last = last.strip_suffix(".gguf").unwrap_or(last);
    let starts = |start: &str| last.get(..start.len()).is_some_and(|given| given.eq_ignore_ascii_case(start));
    let (start, owner) = OWNERS.iter().find(|(start, _)| starts(start))?;
    // Parts of names begin with a capital, and a size ends with one: `-Base`, `-1.7B`.
    let part = |part: &str| {
        let is_size = part.starts_with(|c: char| c.is_ascii_digit()) && part.ends_with(['b', 'm']);
        let mut letters = part.chars();
        match letters.next() {
            _ if is_size => part.to_ascii_uppercase(),
            Some(first) => first.to_ascii_uppercase().to_string() + letters.as_str(),
            None => String::new(),
        }
    };
    let rest: Vec<String> = last[start.len()..].split('-').map(part).collect();
    let id = format!("{owner}/{start}{}", rest.join("-"));
    is_repository(&id).then_some(id)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_without_its_owner_is_recognised() {
        for (given, expected) in [
            ("qwen3-1.7b", "Qwen/Qwen3-1.7B"),
            ("models/Qwen3-1.7B-Base", "Qwen/Qwen3-1.7B-Base"),
            ("qwen2.5-0.5b-instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
            ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
            ("models/qwen3-1.7b.gguf", "Qwen/Qwen3-1.7B"),
        ] {
            assert_eq!(likely_name(given).as_deref(), Some(expected), "{given}");
        }
        assert_eq!(likely_name("models/none"), None);
    }

    #[test]
    fn names_and_revisions_name_no_path_outside_the_cache() {
        for id in ["Qwen/Qwen3-0.6B", "a/b", "a_b/c.d-e"] {
            assert!(is_repository(id), "{id}");
        }
        for id in ["", "a", "a/", "/a", "a/b/c", "../a", "a/..", ".a/b", "a/b c", "a/b@c", "a\\b/c"] {
            assert!(!is_repository(id), "{id}");
        }
        for revision in ["main", "refs/pr/1", "v1.0+x", &"a".repeat(200)] {
            assert!(is_revision(revision), "{revision}");
        }
        for revision in ["", "../x", "a/../b", "/a", "a//b", ".git", "a b", &"a".repeat(201)] {
            assert!(!is_revision(revision), "{revision}");
        }
        assert!(is_commit(&"0a".repeat(20)) && !is_commit(&"0a".repeat(19)) && !is_commit(&"0g".repeat(20)));
        let named = |path: &str| name_of(Path::new(path));
        assert_eq!(named("hub/models--Qwen--Qwen3--x/snapshots/abc").as_deref(), Some("Qwen/Qwen3--x"));
        assert_eq!(named("hub/models--Qwen--Qwen3/blobs/abc"), None);
        assert_eq!(named("hub/datasets--Qwen--Qwen3/snapshots/abc"), None);
    }
}
